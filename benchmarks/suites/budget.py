"""What a memory budget promises: the peak, its prediction, no restarts, and the fastest size."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import infinitybatch as ib
import torch
from contestants import Loop, Ours
from harness.results import Findings, Goal, Table
from harness.settings import Settings
from workloads import Workload, for_budget

from .sweep import Sweep, sweep

TITLE = "The memory budget"
EXPLANATION = (
    "The budget is what was live before the first step plus what a loop by hand needs with "
    "micro-batches of 96. "
    "The largest logical batches are NumPy bytes of which a BatchSource makes tensors when rows are "
    "asked for; the others are tensors, live themselves. Prediction errors are (predicted - "
    "measured) ÷ measured of the settled steps, of the whole peak and of what the step adds to what "
    "was live before it. The sweep tries every micro-batch size that splits 256 samples evenly in "
    "another way, and for larger batches, on a stretch of them, a grid with the largest size that "
    "fits; sizes more than 1.5 times slower than the best in two first rounds are dropped. Which "
    "size is the fastest is found in even rounds, and the ratio of the chosen one to it is measured "
    "in odd ones, so that luck cannot choose and count at once."
)
ROOM_SAMPLES = 96
SIZES = (256, 4096, 65536)
TOY_SIZES = (256, 1024)
LARGEST_TENSORS = 4096
LARGEST_TOY_TENSORS = 256
SETTLED_STEPS = {256: 10, 4096: 3, 65536: 1}
PREDICTION_LIMITS = {1: 0.01, 2: 0.02}  # by threads
CHOICE_LIMIT = 1.05
MOST_STEPS = 200


class Step(NamedTuple):
    """What is kept of a report."""

    predicted: int | None
    peak: int
    restarts: int
    size: int


def ours_step(ours: Ours) -> Step:
    report = ours()
    size = max(report.micro_batch_sizes)
    return Step(report.predicted_peak_bytes, report.peak_bytes, report.restarts, size)


@dataclass
class Case:
    """One workload at one batch size, as measured."""

    workload: str
    batch_size: int
    budget: int
    baseline: int
    steps_to_settle: int
    restarts: int  # of all steps
    restarts_settled: int
    largest_peak: int  # of all steps
    predicted: int
    peaks: list[int]  # of the settled steps that have a prediction
    withheld: int  # settled steps without one: a look at rows took more than the plan
    chosen: int
    sweep: Sweep
    seconds: float = 0  # that measuring took

    @property
    def name(self) -> str:
        return f"{self.workload} {self.batch_size:,}"

    def error(self, above: int) -> float:
        """The largest relative error of the prediction; `above` is taken off both."""
        errors = [(self.predicted - peak) / (peak - above) for peak in self.peaks]
        return max(errors, key=abs)


def batch_of(workload: Workload, size: int, toy: bool) -> tuple[Any, Any]:
    """Tensors, or sources that make them of the host's bytes."""
    if size <= (LARGEST_TOY_TENSORS if toy else LARGEST_TENSORS):
        return workload.tensors(size)
    images, labels = workload.on_host(size)

    def inputs(begin: int, end: int) -> torch.Tensor:
        return torch.from_numpy(images[begin:end]).float().div_(255)

    def targets(begin: int, end: int) -> torch.Tensor:
        return torch.tensor(labels[begin:end])  # a copy, which counts as the device's

    return ib.BatchSource(size, inputs), ib.BatchSource(size, targets)


def run(settings: Settings, save: Callable[[Findings], None]) -> Findings:
    cases: list[Case] = []
    findings = Findings()
    for workload in for_budget(settings.toy):
        for size in TOY_SIZES if settings.toy else SIZES:
            start = time.monotonic()
            cases.append(measure(workload, size, settings))
            findings = findings_of(cases, settings)
            cases[-1].seconds = time.monotonic() - start
            save(findings)
    return findings


def findings_of(cases: list[Case], settings: Settings) -> Findings:
    return Findings(
        [budget_table(cases), choice_table(cases)],
        goals_of(cases, settings),
        figures=[{"case": case} for case in cases],
    )


def measure(workload: Workload, size: int, settings: Settings) -> Case:
    inputs, targets = batch_of(workload, size, settings.toy)
    model = workload.model()
    loop = Loop(model, *workload.tensors(2 * ROOM_SAMPLES), micro_batch_size=ROOM_SAMPLES)
    loop()  # some kernels take memory for good when they first run
    room = loop.peak_bytes()
    del loop
    ours = Ours(model, inputs, targets, micro_batch_size=ROOM_SAMPLES)
    model.zero_grad(set_to_none=True)
    budget = ib.memory.stats().live + room
    ours.batch = ib.VirtualBatch(ours.model, ours.loss, memory_budget=budget)
    # The reports themselves are dropped: each holds its loss, which would be live.
    steps = [ours_step(ours)]
    while steps[-1].predicted is None or steps[-1].restarts:
        if len(steps) == MOST_STEPS:
            raise RuntimeError(f"{workload.name}: no settled plan after {MOST_STEPS} steps")
        steps.append(ours_step(ours))
    settled = [steps[-1]] + [ours_step(ours) for _ in range(SETTLED_STEPS.get(size, 1))]
    steps += settled[1:]
    ours.model.zero_grad(set_to_none=True)
    return Case(
        workload=workload.name,
        batch_size=size,
        budget=budget,
        baseline=ib.memory.stats().live,
        steps_to_settle=len(steps) - len(settled) + 1,
        restarts=sum(step.restarts for step in steps),
        restarts_settled=sum(step.restarts for step in settled),
        largest_peak=max(step.peak for step in steps),
        predicted=settled[-1].predicted,
        peaks=[step.peak for step in settled if step.predicted is not None],
        withheld=sum(step.predicted is None for step in settled),
        chosen=settled[-1].size,
        sweep=sweep(ours, budget, settled[-1].size, settings.rounds),
    )


def mib(count: int) -> str:
    return f"{count / 2**20:.2f}"


def budget_table(cases: list[Case]) -> Table:
    table = Table(
        "**Budget and prediction** (MiB)",
        [
            "case",
            "live before",
            "budget",
            "largest peak",
            "predicted",
            "error",
            "error above live",
            "steps to settle",
            "restarts (settled)",
            "without a prediction",
        ],
    )
    for case in cases:
        row = [case.name, mib(case.baseline), mib(case.budget), mib(case.largest_peak)]
        row += [mib(case.predicted), f"{case.error(0):+.3%}", f"{case.error(case.baseline):+.3%}"]
        row += [str(case.steps_to_settle), f"{case.restarts} ({case.restarts_settled})"]
        row.append(str(case.withheld))
        table.rows.append(row)
    return table


def choice_table(cases: list[Case]) -> Table:
    table = Table(
        "**Choice of the micro-batch size**",
        [
            "case",
            "chosen",
            "fastest",
            "largest",
            "chosen ÷ fastest, wall",
            "CPU",
            "sizes tried",
            "chosen µs per sample",
        ],
    )
    for case in cases:
        found = case.sweep
        row = [case.name, str(case.chosen), str(found.fastest), str(found.largest)]
        row += [str(found.wall), str(found.cpu), str(len(found.tried))]
        table.rows.append([*row, f"{1e6 * found.seconds_per_sample[case.chosen]:.1f}"])
    return table


def goals_of(cases: list[Case], settings: Settings) -> list[Goal]:
    fullest = max(cases, key=lambda case: case.largest_peak / case.budget)
    worst = max(cases, key=lambda case: abs(case.error(0)))
    slowest = max(cases, key=lambda case: case.sweep.wall.median)
    share = fullest.largest_peak / fullest.budget
    restarts = sum(case.restarts_settled for case in cases)
    limit = PREDICTION_LIMITS.get(settings.threads, 0.02)
    found = slowest.sweep.wall
    return [
        Goal(
            "peak inside the budget, every step",
            f"at most {share:.3f} ({fullest.name})",
            share <= 1,
        ),
        Goal("no restarts once settled", str(restarts), restarts == 0),
        Goal(
            f"predicted within {limit:.0%} of the measured peak",
            f"{worst.error(0):+.3%} ({worst.name})",
            abs(worst.error(0)) <= limit,
        ),
        Goal(
            f"chosen size at most {CHOICE_LIMIT - 1:.0%} slower than the fastest that fits",
            f"{found} ({slowest.name})",
            found.median <= CHOICE_LIMIT,
        ),
    ]
