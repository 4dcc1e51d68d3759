"""Two builds of infinitybatch side by side: what a change costs. Results go to benchmarks/results.

    python benchmarks/builds.py OLDER/build/release/python NEWER/build/release/python

Each build lives in a process of its own, all through the measurement; in each round both do the same
work one after the other, in an order that changes.
"""

import argparse
import datetime
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
LIMIT = 1.02
TITLE = "Two builds beside each other"
EXPLANATION = (
    "The same work by an older and a newer build, each in a process of its own that stays; a round is "
    "one run of each, in an order that changes. Ratios are newer over older: medians of the rounds' "
    "ratios with 95 % bootstrap intervals; CPU is the process's time over all threads. Peaks are what "
    "tensors occupied at once, above what was there before the step."
)


def works() -> dict[str, Callable[[], tuple[Callable[[], object], Callable[[], int] | None, int]]]:
    """By name: makes what is run, what tells its peak, and how many runs make one sample."""
    import infinitybatch as ib
    import torch
    from contestants import Contestant, Ours
    from suites import coupled, loop_cost
    from workloads import Encoder, for_coupled, for_one_sample, for_time, for_whole_batch, tiny_mlp

    def of(workload: Any, repeats: int = 1, **options: object) -> Any:
        def make() -> Any:
            ours = Ours(workload.model(), *workload.tensors(workload.batch_size), **options)
            return ours, ours.peak_bytes, repeats

        return make

    class Wrapped(Contestant):
        def __init__(self, *args: object, **options: object) -> None:
            super().__init__(*args)
            self.wrapped = ib.wrap(self.model, **options)

        def backward(self) -> object:
            return coupled.contrast(self.wrapped(self.inputs)).backward()

    def contrast(kind: type[Contestant], workload: Any, **options: object) -> Any:
        def make() -> Any:
            found = kind(workload.model(), *workload.tensors(workload.batch_size), **options)
            return found, found.peak_bytes, 1

        return make

    def recording() -> Any:
        torch.manual_seed(0)
        model, inputs = Encoder(16, 2, 4), torch.randn(1, 4, 16)
        return (lambda: ib.tape.record(model, (inputs,))), None, 20

    def loop(count: int, repeats: int) -> Any:
        def make() -> Any:
            torch.manual_seed(0)
            size = loop_cost.SIZE
            inputs, targets = torch.randn(size * count, 64), torch.randint(10, (size * count,))
            ours = Ours(tiny_mlp(), inputs, targets, micro_batch_size=size)
            return ours, ours.peak_bytes, repeats

        return make

    convnet, encoder, _ = for_time(toy=False)
    pairs = {workload.name: (workload, size) for workload, size in for_coupled(toy=False)}
    residual, slices = for_whole_batch(toy=False)[0]
    deep = for_one_sample(toy=False)[0]
    both, part = pairs["encoder"]
    return {
        "stream, convnet": of(convnet, micro_batch_size=32),
        "stream, encoder": of(encoder, micro_batch_size=32),
        "coupled, none retained": contrast(coupled.Ours, both, micro_batch_size=part),
        "coupled, all retained": contrast(
            coupled.Ours, both, micro_batch_size=part, retained_micro_batches=both.batch_size
        ),
        "BatchNorm, none retained": of(residual, micro_batch_size=slices),
        "BatchNorm, all retained": of(
            residual, micro_batch_size=slices, retained_micro_batches=residual.batch_size
        ),
        "one sample, 8 segments": of(deep, micro_batch_size=1, checkpoint_segments=8),
        "wrap": contrast(Wrapped, both, micro_batch_size=part),
        "recording": recording,
        "loop around 8 tiny micro-batches": loop(8, 40),
        "loop around 64 tiny micro-batches": loop(64, 8),
    }


def serve(threads: int) -> None:
    """A build's process: a name on each line of standard input, its figures on standard output."""
    import gc

    import torch
    from harness.clock import measure

    torch.set_num_threads(threads)
    gc.disable()  # a collection would hit one run of many
    makers, made = works(), {}
    print(json.dumps(list(makers)), flush=True)
    for line in sys.stdin:
        name, wish = json.loads(line)
        if name not in made:
            gc.collect()
            made.clear()  # one work's tensors at a time
            made[name] = makers[name]()
        run, peak, repeats = made[name]
        if wish == "peak":
            answer: Any = peak() if peak else None
        else:
            sample = measure(lambda run=run, repeats=repeats: [run() for _ in range(repeats)])
            answer = [sample.wall, sample.cpu]
        print(json.dumps(answer), flush=True)


class Build:
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

    def _answer(self, work: str) -> Any:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a build's process ended in: {work}")
        return json.loads(line)


def compare(name: str, builds: list[Build], rounds: int, warm_up: int, table: Any) -> Any:
    from harness.ratios import paired

    shuffle = random.Random(0).shuffle
    samples: list[list[Any]] = [[], []]
    order = [0, 1]
    for turn in range(-warm_up, rounds):
        shuffle(order)
        for which in order:
            sample = builds[which].ask(name)
            if turn >= 0:
                samples[which].append(sample)
    peaks = [build.ask(name, "peak") for build in builds]
    old, new = samples
    wall, cpu = (
        paired([each[clock] for each in new], [each[clock] for each in old]) for clock in (0, 1)
    )
    shown = ["-" if peak is None else f"{peak / 2**20:.2f}" for peak in peaks]
    table.rows.append([name, str(cpu), str(wall), *shown])
    return {"work": name, "CPU": cpu, "wall": wall, "peak bytes": peaks, "samples": samples}


def revision(package: Path) -> str:
    ask = ["git", "-C", str(package), "describe", "--always", "--abbrev=12", "--dirty"]
    done = subprocess.run(ask, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("packages", nargs="*", type=Path, help="PYTHONPATH of the older, the newer")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", nargs="+", help="names of works, or how they begin")
    parser.add_argument("--output", type=Path, default=HERE / "results", metavar="FOLDER")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.threads)
        return 0
    if len(options.packages) != 2:
        parser.error("give the folders of two Python packages: the older one, the newer one")
    from harness.machine import TUNED_MALLOC, Bystanders, describe
    from harness.results import Findings, Goal, Table, write

    began = datetime.datetime.now()
    bystanders = Bystanders()
    builds = [Build(package.resolve(), options.threads) for package in options.packages]
    old, new = (revision(package) for package in options.packages)
    findings = Findings(notes=[f"older: {old}; newer: {new}"])
    columns = ["work", "CPU, newer ÷ older", "wall, newer ÷ older"]
    table = Table(f"{options.rounds} rounds", [*columns, "peak MiB, older", "peak MiB, newer"])
    findings.tables.append(table)
    for name in builds[1].names:
        if options.only and not name.startswith(tuple(options.only)):
            continue
        figure = compare(name, builds, options.rounds, 4, table)
        findings.figures.append(figure)
        promise = f"{name}: CPU, upper bound at most {LIMIT}"
        met = figure["CPU"].high <= LIMIT
        findings.goals.append(Goal(promise, str(figure["CPU"]), met))
        if figure["peak bytes"][0] is not None:
            before, after = figure["peak bytes"]
            promise = f"{name}: peak equal or lower"
            measured = f"{after / 2**20:.2f} MiB, was {before / 2**20:.2f}"
            findings.goals.append(Goal(promise, measured, after <= before))
        print(*table.rows[-1], sep="  ", flush=True)
    for build in builds:
        build.process.stdin.close()
        build.process.wait()
    others = bystanders.share()
    run = {
        "setting": f"{options.threads} thread{'s' if options.threads > 1 else ''}, tuned malloc",
        "failed": False,
        "quiet": others is not None and others <= 0.1,
        "others": others,
        "seconds": round((datetime.datetime.now() - began).total_seconds()),
        "findings": findings,
    }
    report = {
        "title": TITLE,
        "explanation": EXPLANATION,
        "date": began.date().isoformat(),
        "time": began.isoformat(timespec="seconds"),
        "commit": new,
        "command": "python benchmarks/builds.py OLDER NEWER"
        + (f" --threads {options.threads}" if options.threads > 1 else ""),
        "machine": describe(),
        "tuned malloc": " ".join(f"{key}={value}" for key, value in TUNED_MALLOC.items()),
        "runs": [run],
    }
    for path in write(report, options.output, f"{began:%Y-%m-%d-%H%M%S}-builds"):
        print(os.path.relpath(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
