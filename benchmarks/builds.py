"""Compares two builds of infinitybatch, side by side. Results go to benchmarks/results.

    python benchmarks/builds.py OLDER/build/release/python NEWER/build/release/python

Each build has a process of its own, and as many more as `--processes` says, for luck in where
memory lies lasts for a process; in each round both run the same workload, one after the other, in
an order that changes.
"""

import argparse
import dataclasses
import datetime
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LIMIT = 1.02
TITLE = "Two builds side by side"
EXPLANATION = (
    "The same workloads by an older and a newer build, each in a process of its own, or in several, one "
    "pair after the other; a round is one run of each, in an order that changes. Ratios are newer over "
    "older: medians of all rounds' ratios with 95 % bootstrap intervals, and the lowest and highest "
    "median of a pair of processes; CPU is the process's time over all threads. Peaks are what tensors "
    "occupied at once, above what was there before the step."
)


@dataclasses.dataclass(frozen=True)
class Timed:
    run: Callable[[], object]
    peak: Callable[[], int] | None  #: bytes above what was there before
    repeats: int  #: runs in one sample


def workloads() -> dict[str, Callable[[], Timed]]:
    """What makes each, by name."""
    import infinitybatch as ib
    import torch
    from contestants import Contestant, Ours
    from suites import coupled, loop_cost
    from workloads import Encoder, for_coupled, for_one_sample, for_time, for_whole_batch, tiny_mlp

    class Wrapped(Contestant):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args)
            self.wrapped = ib.wrap(self.model, **options)

        def backward(self) -> object:
            return coupled.contrast(self.wrapped(self.inputs)).backward()

    def of(kind: type[Contestant], workload: Any, **options: object) -> Callable[[], Timed]:
        def make() -> Timed:
            found = kind(workload.model(), *workload.tensors(workload.batch_size), **options)
            return Timed(found, found.peak_bytes, repeats=1)

        return make

    def recording() -> Timed:
        torch.manual_seed(0)
        model, inputs = Encoder(16, 2, 4), torch.randn(1, 4, 16)
        return Timed(lambda: ib.tape.record(model, (inputs,)), None, repeats=20)

    def loop(count: int, repeats: int) -> Callable[[], Timed]:
        def make() -> Timed:
            torch.manual_seed(0)
            size = loop_cost.SIZE
            inputs, targets = torch.randn(size * count, 64), torch.randint(10, (size * count,))
            found = Ours(tiny_mlp(), inputs, targets, micro_batch_size=size)
            return Timed(found, found.peak_bytes, repeats)

        return make

    convnet, encoder, _ = for_time(toy=False)
    pairs, part = {each.name: (each, size) for each, size in for_coupled(toy=False)}["encoder"]
    residual, slices = for_whole_batch(toy=False)[0]
    deep = for_one_sample(toy=False)[0]
    return {
        "stream, convnet": of(Ours, convnet, micro_batch_size=32),
        "stream, encoder": of(Ours, encoder, micro_batch_size=32),
        "coupled, none retained": of(coupled.Ours, pairs, micro_batch_size=part),
        "coupled, all retained": of(
            coupled.Ours, pairs, micro_batch_size=part, retained_micro_batches=pairs.batch_size
        ),
        "BatchNorm, none retained": of(Ours, residual, micro_batch_size=slices),
        "BatchNorm, all retained": of(
            Ours, residual, micro_batch_size=slices, retained_micro_batches=residual.batch_size
        ),
        "one sample, 8 segments": of(Ours, deep, micro_batch_size=1, checkpoint_segments=8),
        "wrap": of(Wrapped, pairs, micro_batch_size=part),
        "recording": recording,
        "loop around 8 tiny micro-batches": loop(8, repeats=40),
        "loop around 64 tiny micro-batches": loop(64, repeats=8),
    }


def serve(threads: int) -> None:
    """A build's process: a name on each line of standard input, its figures on standard output."""
    import gc

    import torch
    from harness.clock import measure

    torch.set_num_threads(threads)
    gc.disable()  # a collection would hit one run of many
    makers = workloads()
    print(json.dumps(list(makers)), flush=True)
    made: dict[str, Timed] = {}
    for line in sys.stdin:
        name, wish = json.loads(line)
        if name not in made:
            made.clear()  # one workload's tensors at a time
            gc.collect()
            made[name] = makers[name]()
        timed = made[name]
        if wish == "peak":
            answer: Any = timed.peak() if timed.peak else None
        else:
            answer = dataclasses.asdict(
                measure(lambda timed=timed: [timed.run() for _ in range(timed.repeats)])
            )
        print(json.dumps(answer), flush=True)


class Build:
    """The process of one build."""

    def __init__(self, package: Path, threads: int) -> None:
        from harness.machine import environment

        command = [sys.executable, str(HERE / "builds.py"), "--serve", "--threads", str(threads)]
        self.process = subprocess.Popen(
            command,
            env=environment("tuned") | {"PYTHONPATH": str(package)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.names: list[str] = self._answer("its imports")

    def ask(self, name: str, wish: str = "run") -> Any:
        assert self.process.stdin
        self.process.stdin.write(json.dumps([name, wish]) + "\n")
        self.process.stdin.flush()
        return self._answer(name)

    def end(self) -> None:
        assert self.process.stdin
        self.process.stdin.close()
        self.process.wait()

    def _answer(self, what: str) -> Any:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a build's process ended in {what}")
        return json.loads(line)


def compare(name: str, pairs: list[tuple[Build, Build]], rounds: int, findings: Any) -> None:
    from harness.clock import Sample, interleave
    from harness.ratios import ratio_of
    from harness.results import Goal

    samples: dict[str, list[Sample]] = {"older": [], "newer": []}
    of_pairs = []
    for older, newer in pairs:
        found = interleave(
            {"older": lambda o=older: o.ask(name), "newer": lambda n=newer: n.ask(name)},
            rounds,
            warm_up=4,
            measure=lambda ask: Sample(**ask()),
        )
        of_pairs.append(ratio_of(found["newer"], found["older"], "cpu").median)
        for build, rows in found.items():
            samples[build] += rows
    cpu, wall = (ratio_of(samples["newer"], samples["older"], clock) for clock in ("cpu", "wall"))
    before, after = peaks = [build.ask(name, "peak") for build in pairs[0]]
    shown = ["-" if peak is None else f"{peak / 2**20:.2f}" for peak in peaks]
    spread = f"{min(of_pairs):.3f} to {max(of_pairs):.3f}"
    findings.tables[0].rows.append([name, str(cpu), spread, str(wall), *shown])
    findings.figures.append(
        {
            "workload": name,
            "CPU": cpu,
            "CPU of each pair": of_pairs,
            "wall": wall,
            "peak bytes": peaks,
            "samples": samples,
        }
    )
    promise = f"{name}: CPU, upper bound at most {LIMIT}"
    findings.goals.append(Goal(promise, str(cpu), cpu.high <= LIMIT))
    if before is not None:
        measured = f"{shown[1]} MiB, was {shown[0]}"
        findings.goals.append(Goal(f"{name}: peak equal or lower", measured, after <= before))
    print(name, cpu, spread, wall, *shown, sep="  ", flush=True)


def revision(package: Path) -> str:
    ask = ["git", "-C", str(package), "describe", "--always", "--abbrev=12", "--dirty"]
    done = subprocess.run(ask, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("packages", nargs="*", type=Path, help="PYTHONPATH of the older, the newer")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40, help="of each pair of processes")
    parser.add_argument("--processes", type=int, default=1, help="of each build")
    parser.add_argument("--only", nargs="+", default=[""], help="workloads whose names begin so")
    parser.add_argument("--output", type=Path, default=HERE / "results", metavar="FOLDER")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.serve and len(options.packages) != 2:
        parser.error("give the folders of two Python packages: the older one, the newer one")
    return options


def main() -> int:
    options = parse()
    if options.serve:
        serve(options.threads)
        return 0
    from harness.machine import BUSY, Bystanders
    from harness.results import Findings, Table, begin_report, write
    from harness.settings import Settings

    began = datetime.datetime.now()
    bystanders = Bystanders()
    older, newer = options.packages
    pairs = [
        (Build(older.resolve(), options.threads), Build(newer.resolve(), options.threads))
        for _ in range(options.processes)
    ]
    columns = ["workload", "CPU, newer ÷ older", "of one pair", "wall, newer ÷ older"]
    columns += ["peak MiB, older", "peak MiB, newer"]
    findings = Findings([Table(f"{options.rounds} rounds, {options.processes} pairs", columns)])
    findings.notes.append("older: {}; newer: {}".format(*map(revision, options.packages)))
    for name in pairs[0][1].names:
        if name.startswith(tuple(options.only)):
            compare(name, pairs, options.rounds, findings)
    for build in [build for pair in pairs for build in pair]:
        build.end()
    others = bystanders.share()
    command = f"python benchmarks/builds.py OLDER NEWER --threads {options.threads}"
    command += f" --rounds {options.rounds} --processes {options.processes}"
    if any(options.only):
        command += f" --only {shlex.join(options.only)}"
    report = begin_report(TITLE, EXPLANATION, began, command)
    report["runs"].append(
        {
            "setting": str(Settings(options.threads)),
            "failed": False,
            "quiet": others is not None and others <= BUSY,
            "others": others,
            "seconds": round((datetime.datetime.now() - began).total_seconds()),
            "findings": findings,
        }
    )
    for path in write(report, options.output, f"{began:%Y-%m-%d-%H%M%S}-builds"):
        print(os.path.relpath(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
