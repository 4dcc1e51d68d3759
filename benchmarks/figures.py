"""Writes README's figures from the committed results, between its markers.

    python benchmarks/figures.py           # tells whether README says what the results say
    python benchmarks/figures.py --write   # makes it say so

A figure is of the latest run that can be trusted: finished, on a quiet machine, at full size. Where
there is none, the figure cannot be quoted and the command says which run is missing.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
README = HERE.parent / "README.md"
RESULTS = HERE / "results"
FAMILIES = HERE.parent / "tests" / "families"
MIB = 2**20
NATIVE_NAMES = ("native", "native whole batch")


class NotToBeQuoted(ValueError):
    """There is no run whose figures may stand in README."""


def doubts(report: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """Why a run cannot be quoted; empty where it can."""
    if run.get("failed", True):
        return "it failed or was not finished"
    if "toy" in run["setting"]:
        return "its sizes only try the harness"
    if run["others"] is None:
        return "nobody knows whether the machine was quiet"
    if not run.get("quiet", True) or any("do not trust" in n for n in run["findings"]["notes"]):
        return f"others used {run['others']:.2f} cores meanwhile"
    if report.get("commit", "").endswith("-dirty"):
        return f"its commit is {report['commit']}: nobody else has that code"
    return ""


@dataclass(frozen=True)
class Quoted:
    """The processes of one run, and where their figures come from."""

    source: str
    runs: list[Mapping[str, Any]]

    @property
    def run(self) -> Mapping[str, Any]:
        return self.runs[0]

    def figures(self, process: int = 0, **wanted: Any) -> list[dict[str, Any]]:
        return [
            figure
            for figure in self.runs[process]["findings"]["figures"]
            if all(figure.get(key) == value for key, value in wanted.items())
        ]

    def figure(self, **wanted: Any) -> dict[str, Any]:
        found = self.figures(**wanted)
        if not found:
            raise NotToBeQuoted(f"{self.source} has no figure of {wanted}")
        return found[0]

    def ratio(self, key: str = "CPU over native", **wanted: Any) -> float:
        """The median of the processes' medians."""
        self.figure(**wanted)
        found = []
        for process in range(len(self.runs)):
            for figure in self.figures(process, **wanted)[:1]:
                if key == "CPU over native" and "ratios to native" in figure:
                    found.append(figure["ratios to native"]["cpu"]["median"])
                else:
                    found.append(figure[key]["median"])
        return median(found)

    def mib(self, **wanted: Any) -> str:
        return f"{self.figure(**wanted)['peak bytes'] / MIB:,.0f}"

    def native_mib(self, workload: str) -> str:
        for figure in self.figures(workload=workload):
            if figure["contestant"] in NATIVE_NAMES:
                return f"{figure['peak bytes'] / MIB:,.0f}"
        raise NotToBeQuoted(f"{self.source} has no native {workload}")


def when(report: Mapping[str, Any]) -> str:
    return report.get("time", report["date"])


def latest(suite: str, threads: int = 1, folder: Path = RESULTS) -> Quoted:
    """The latest run of a suite, with malloc tuned, that can be quoted.

    Raises:
        NotToBeQuoted: where there is none, with what is wrong with those that there are.
    """
    setting = "one thread" if threads == 1 else f"{threads} threads"
    reasons: list[str] = []
    found: list[tuple[str, str, Quoted]] = []
    for path in sorted(folder.glob("*.json")):
        if not re.search(rf"(^|-){suite}(-|$)", path.stem):
            continue
        report = json.loads(path.read_text())
        runs = [r for r in report["runs"] if r["setting"].startswith(f"{setting}, tuned malloc")]
        if not runs:
            continue
        if why := next((why for run in runs if (why := doubts(report, run))), ""):
            reasons.append(f"{path.name}: {why}")
        else:
            found.append((when(report), path.name, Quoted(path.name, runs)))
    if not found:
        raise NotToBeQuoted(
            f"no run of {suite} with {setting} can be quoted"
            + "".join(f"; {reason}" for reason in reasons)
            + f"; leave the machine alone and run: bash scripts/bench.sh {suite} --threads {threads}"
        )
    return max(found)[2]


def table(folder: Path) -> list[tuple[str, str, str]]:
    """What is in a row, time ÷ native, peaks."""
    rows = []
    time = latest("time", folder=folder)
    for workload, name in (
        ("convnet", "convnet, 512 images, a budget"),
        ("encoder", "transformer encoder, 256 sequences, a budget"),
        ("wide MLP", "wide MLP, 1,024 samples, a budget (its weights are its memory)"),
    ):
        ours = {"workload": workload, "contestant": "ours, budget"}
        peaks = f"{time.native_mib(workload)} ➝ {time.mib(**ours)} MiB"
        rows.append((name, f"{time.ratio(**ours):.2f}", peaks))

    coupled = latest("coupled", folder=folder)
    for workload in ("convnet", "encoder", "wide MLP"):
        ways = [
            {"workload": workload, "contestant": f"infinitybatch, {way}"}
            for way in ("none retained", "all retained")
        ]
        ratios = "; ".join(f"{coupled.ratio(**way):.2f}" for way in ways)
        if workload == "wide MLP":
            by_hand = coupled.ratio(workload=workload, contestant="accumulated pass")
            fits = coupled.ratio(workload=workload, contestant="infinitybatch, where it fits")
            ratios += f", where one pass over the same micro-batches by hand takes {by_hand:.2f}"
            ratios += f"; {fits:.2f} with a budget in which the whole batch fits"
        peaks = "; ".join(coupled.mib(**way) for way in ways)
        name = f"{workload}, contrastive loss, no graph kept; all kept"
        rows.append((name, ratios, f"{coupled.native_mib(workload)} ➝ {peaks} MiB"))

    losses = latest("losses", folder=folder)
    pairs = "4,096 pairs"
    ways = [
        {"workload": pairs, "contestant": who} for who in ("infinitybatch", "sentence-transformers")
    ]
    rows.append(
        (
            "4,096 pairs, small encoder, `losses.info_nce`; sentence-transformers' cached loss",
            "; ".join(f"{losses.ratio(**way):.2f}" for way in ways),
            f"{losses.native_mib(pairs)} ➝ {'; '.join(losses.mib(**way) for way in ways)} MiB",
        )
    )

    heads = latest("heads", folder=folder)
    head = {"contestant": "infinitybatch, VirtualBatch"}
    rows.append(
        (
            "language model's head, 40,000 words, 8,000 tokens, `losses.linear_cross_entropy`",
            f"{heads.ratio(**head):.2f}",
            f"{heads.native_mib(heads.figure(**head)['workload'])} ➝ {heads.mib(**head)} MiB",
        )
    )

    sample = latest("sample", folder=folder)
    for workload, name in (
        (
            "transformer",
            "one sample of a transformer, `checkpoint_segments`; `torch.utils.checkpoint` around "
            "each block",
        ),
        ("residual net", "one sample of a residual net, the same"),
    ):
        names = [figure["contestant"] for figure in sample.figures(workload=workload)]
        ours = next(name for name in names if name.startswith("infinitybatch, checkpoint"))
        theirs = next(name for name in names if name.startswith("torch.utils.checkpoint"))
        ways = [{"workload": workload, "contestant": who} for who in (ours, theirs)]
        ratios = "; ".join(f"{sample.ratio(**way):.2f}" for way in ways)
        peaks = "; ".join(sample.mib(**way) for way in ways)
        rows.append((name, ratios, f"{sample.native_mib(workload)} ➝ {peaks} MiB"))

    norm = latest("batchnorm", folder=folder)
    ways = [
        {"workload": "residual net", "contestant": f"infinitybatch, {way}"}
        for way in ("none retained", "static graph, all retained")
    ]
    rows.append(
        (
            "residual net with BatchNorm, 256 images, micro-batches of 32: nothing kept; static "
            "graph, all kept",
            "; ".join(f"{norm.ratio(**way):.2f}" for way in ways),
            f"{norm.native_mib('residual net')} ➝ {'; '.join(norm.mib(**w) for w in ways)} MiB",
        )
    )
    return rows


def sentences(folder: Path) -> list[str]:
    found = ["With BatchNorm what every layer is given waits for the whole batch, so that the peak "
             "falls less."]  # fmt: skip
    two = latest("time", threads=2, folder=folder)
    budget, loop = (
        [
            next(
                two.ratio(workload=workload, contestant=figure["contestant"])
                for figure in two.figures(workload=workload)
                if matches(figure["contestant"])
            )
            for workload in ("convnet", "encoder")
        ]
        for matches in (lambda c: c == "ours, budget", lambda c: c.endswith("(the budget's)"))
    )
    found.append(
        "With two threads small micro-batches share the cores worse than a whole batch does: convnet "
        f"and encoder under a budget took {budget[0]:.2f} and {budget[1]:.2f} of native's time, "
        f"where the loop written by hand took {loop[0]:.2f} and {loop[1]:.2f}."
    )
    goals = latest("budget", folder=folder).run["findings"]["goals"]
    predicted = next(goal["measured"] for goal in goals if goal["promise"].startswith("predicted"))
    chosen = next(goal["measured"] for goal in goals if goal["promise"].startswith("chosen"))
    found.append(
        "Predicted peaks of convnet, encoder and MLP at 256, 4,096 and 65,536 samples are off by "
        f"{predicted.split(' (')[0]} at most, and the chosen micro-batch takes "
        f"{float(chosen.split()[0]):.2f} of the time of the fastest that fits at most."
    )
    cost = latest("loop", folder=folder)
    ratios = {
        count: [
            f"{100 * (figure['CPU ratio']['median'] - 1):.0f} %"
            for figure in cost.figures(contestant="infinitybatch", **{"micro-batches": count})
        ]
        for count in (8, 64, 512)
    }
    cold = f" ({ratios[8][1]} where each step begins with cold caches)" if ratios[8][1:] else ""
    found.append(
        f"The loop around tiny micro-batches costs {ratios[8][0]} over one written by hand at 8 of "
        f"them a step{cold}, {ratios[64][0]} at 64 and {ratios[512][0]} at 512."
    )
    try:
        found.append(data_set(latest("mnist", folder=folder)))
    except NotToBeQuoted:
        pass  # a sentence that nobody misses; a row would be
    found.append(beside_peers(latest("coupled", folder=folder)))
    return found


def data_set(mnist: Quoted) -> str:
    rows = {row[0]: row for each in mnist.run["findings"]["tables"] for row in each["rows"]
            if "command line" in each["caption"]}  # fmt: skip
    small, large = rows["MNIST"], rows["MNIST, 1,000,000 samples"]
    return (
        "`infinitybatch train` took all 60,000 images of MNIST as one batch within 32 MiB "
        f"({small[7]} held-out accuracy after {small[2]} steps), and 1,000,000 images within 256 MiB "
        f"at {large[8]} µs of CPU a sample; native runs out of memory in both."
    )


def beside_peers(coupled: Quoted) -> str:
    """Of their time at their peak, and at the same micro-batches."""
    peers = ("gradient caching by hand", "GradCache", "sentence-transformers")
    at_peak, alike = [], []
    for workload in ("convnet", "encoder", "wide MLP"):
        for peer in peers:
            key = {"workload": workload}
            if not coupled.figures(**key, contestant=peer):
                continue
            theirs = coupled.ratio(**key, contestant=peer)
            for best in (peer, f"{peer}, tuned"):  # results of before peers were tuned have none
                at = f"infinitybatch, at the peak of {best}"
                if coupled.figures(**key, contestant=at):
                    ours = coupled.ratio(**key, contestant=at)
                    at_peak.append(ours / coupled.ratio(**key, contestant=best))
            alike.append(coupled.ratio(**key, contestant="infinitybatch, none retained") / theirs)
    return (
        "Within the peak of gradient caching (GradCache, sentence-transformers' cached loss and, "
        "where it was run so, by hand) contrastive steps took "
        f"{min(at_peak):.2f} to {max(at_peak):.2f} of its time on convnet, encoder and wide MLP; in "
        f"micro-batches of the same size, with no graph kept, {min(alike):.2f} to {max(alike):.2f}."
    )


def costs(folder: Path = RESULTS) -> str:
    """The table of what it costs, and the sentences behind it."""
    lines = ["", "| | time ÷ native | peak of native ➝ ours |", "|---|---|---|"]
    lines += [f"| {' | '.join(row)} |" for row in table(folder)]
    return "\n" + "\n".join([*lines, "", " ".join(sentences(folder)), "", ""])


def of_list(name: str, what: str) -> str:
    """How many networks of a list are exact in every way, and what the others are.

    Raises:
        NotToBeQuoted: where one is wrong.
    """
    listed = json.loads((FAMILIES / name).read_text())["networks"]
    tried = {n: each for n, each in listed.items() if "left out" not in each}
    ways = [[each["streaming"], each["wrap"]] for each in tried.values()]
    if wrong := [n for n, each in tried.items() if "WRONG" in str(each)]:
        raise NotToBeQuoted(f"{name}: {', '.join(wrong)}: WRONG")
    exact = sum(all(way == "exact" for way in both) for both in ways)
    others = []
    for begin, words in (
        ("as native rounds", "within what native moves in other orders and scales"),
        ("native ", "not run natively in fp64"),
    ):
        if count := sum(any(way.startswith(begin) for way in both) for both in ways):
            others.append(f"{count} {words}")
    refused = [each for each in tried.values() if "refused: " in each["streaming"] + each["wrap"]]
    # In micro-batches of another size, or by the other way, it is exact.
    at_times = sum("exact" in str(each) for each in refused)
    if at_times:
        others.append(f"{at_times} refused by a typed error in some sizes of micro-batches")
    if len(refused) > at_times:
        others.append(f"{len(refused) - at_times} in all")
    if len(listed) > len(tried):
        others.append(f"{len(listed) - len(tried)} more are too large for the list")
    others.append(f"`tests/families/{name}`")
    return f"{exact} of {len(tried)} {what} are exact ({', '.join(others)})"


def families() -> str:
    hugging_face = json.loads((FAMILIES / "results.json").read_text())["networks"].values()
    replay = sum(each["tape"] == "replays" for each in hugging_face)
    lists = [
        of_list("results.json", "tiny Hugging Face families"),
        of_list("images.json", "modules of timm, each by its smallest model,"),
        of_list("foreign.json", "small networks of other packages"),
    ]
    return (
        f"In fp64 beside the native whole batch, by streaming and by `wrap`: {'; '.join(lists)}. Of "
        f"the Hugging Face ones {replay} replay, the others run twice"
    )


#: Of README, by the name in its markers.
PARTS: dict[str, Callable[[], str]] = {"costs": costs, "families": families}


def replaced(readme: str, parts: Mapping[str, Callable[[], str]] = PARTS) -> str:
    """`readme` with the figures between its markers.

    Raises:
        ValueError: unless each marker stands there once.
        NotToBeQuoted: where there is no result that may be quoted.
    """
    for name, part in parts.items():
        begin = f"<!-- {name}: made by benchmarks/figures.py -->"
        end = f"<!-- end of {name} -->"
        if readme.count(begin) != 1 or readme.count(end) != 1:
            raise ValueError(f"README.md needs {begin} and {end} once each")
        before, rest = readme.split(begin)
        readme = before + begin + part() + end + rest.split(end)[1]
    return readme


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    try:
        wanted = replaced(README.read_text())
    except NotToBeQuoted as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if options.write:
        README.write_text(wanted)
    elif wanted != README.read_text():
        print("README.md says other figures than the results: make figures", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
