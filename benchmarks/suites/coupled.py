"""What an exact coupled loss costs: two passes over the micro-batches, with and without graphs kept."""

from collections.abc import Callable
from functools import partial

import infinitybatch as ib
import torch
from contestants import Contestant, check_agreement
from harness.clock import Sample, interleave
from harness.ratios import median, ratio_of
from harness.results import Findings, Goal, Table
from harness.settings import Settings
from torch.nn import functional
from workloads import Workload, for_coupled

TITLE = "Coupled losses: time and peak beside native and gradient caching"
EXPLANATION = (
    "A contrastive loss (cross entropy of all pairwise similarities) over the whole batch, in "
    "micro-batches. The accumulated pass is the same loop with the outputs' gradient given: forward "
    "and backward once, which no coupled loss can do with less. A second forward is needed for the "
    "share 1 - r of micro-batches that keep no graph, so the bound is "
    "1 + (1 - r) F / (F + B) times the accumulated pass, with F / (F + B) measured in the same run. "
    "Gradient caching by hand is what GradCache and sentence-transformers' cached losses do: a "
    "forward without grad, the loss on all outputs, a second forward with grad. Contestants run in "
    "turn, in a new order each round; CPU is the process's time over all threads; ratios are medians "
    "of the rounds' ratios with 95 % bootstrap intervals."
)
SLACK = 1.05
SECONDS = 40  # of rounds for each workload
NATIVE, PASS, FORWARD, CACHING = (
    "native whole batch",
    "accumulated pass",
    "forward alone",
    "gradient caching by hand",
)


def contrast(outputs: torch.Tensor) -> torch.Tensor:
    z = functional.normalize(outputs, dim=-1)
    return functional.cross_entropy(10 * z @ z.T, torch.arange(len(z)).roll(1))


class Whole(Contestant):
    def backward(self) -> None:
        contrast(self.model(self.inputs)).backward()


class Forward(Contestant):
    """The forward of each micro-batch, in grad mode; its graph is dropped."""

    def __init__(self, *args: object, size: int) -> None:
        super().__init__(*args)
        self.size = size

    def backward(self) -> None:
        for part in self.inputs.split(self.size):
            self.model(part)


class Accumulated(Forward):
    """Forward and backward of each micro-batch from a gradient of its outputs that is given."""

    def __init__(self, *args: object, size: int) -> None:
        super().__init__(*args, size=size)
        with torch.no_grad():
            outputs = self.model(self.inputs)
        leaf = outputs.detach().requires_grad_()
        contrast(leaf).backward()
        self.given = leaf.grad

    def backward(self) -> None:
        for part, gradient in zip(
            self.inputs.split(self.size), self.given.split(self.size), strict=True
        ):
            self.model(part).backward(gradient)


class Caching(Forward):
    def backward(self) -> None:
        parts = self.inputs.split(self.size)
        with torch.no_grad():
            outputs = torch.cat([self.model(part) for part in parts])
        leaf = outputs.requires_grad_()
        contrast(leaf).backward()
        for part, gradient in zip(parts, leaf.grad.split(self.size), strict=True):
            self.model(part).backward(gradient)


class Ours(Contestant):
    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args)
        self.batch = ib.VirtualBatch(self.model, ib.losses.coupled(contrast), **options)

    def backward(self) -> ib.StepReport:
        return self.batch.backward(self.inputs)


def contestants_of(workload: Workload, size: int) -> tuple[dict[str, Contestant], dict[str, float]]:
    """Contestants, and the share of retained micro-batches of ours."""
    model = workload.model()
    inputs, targets = workload.tensors(workload.batch_size)
    count = len(inputs) // size
    make = partial(Ours, model, inputs, targets, micro_batch_size=size)
    shares = {"none": 0, "half": count // 2, "all": count}
    ours = {
        f"infinitybatch, {name} retained": make(retained_micro_batches=retained)
        for name, retained in shares.items()
    }
    return (
        {
            NATIVE: Whole(model, inputs, targets),
            PASS: Accumulated(model, inputs, targets, size=size),
            FORWARD: Forward(model, inputs, targets, size=size),
            CACHING: Caching(model, inputs, targets, size=size),
        }
        | ours,
        {f"infinitybatch, {name} retained": kept / count for name, kept in shares.items()},
    )


def run(settings: Settings, save: Callable[[Findings], None]) -> Findings:
    findings = Findings()
    for workload, size in for_coupled(settings.toy):
        contestants, shares = contestants_of(workload, size)
        check_agreement({n: c for n, c in contestants.items() if n != FORWARD})
        samples = interleave(contestants, settings.rounds, at_most=SECONDS)
        peaks = {name: contestant.peak_bytes() for name, contestant in contestants.items()}
        forward = median(samples[FORWARD], "cpu") / median(samples[PASS], "cpu")
        findings.tables.append(table_of(workload, size, samples, peaks, forward))
        for name, taken in samples.items():
            findings.figures.append(
                {
                    "workload": workload.name,
                    "contestant": name,
                    "peak bytes": peaks[name],
                    "CPU over accumulated pass": ratio_of(taken, samples[PASS], "cpu"),
                    "CPU over native": ratio_of(taken, samples[NATIVE], "cpu"),
                    "F/(F+B)": forward,
                    "samples": taken,
                }
            )
        findings.goals += goals_of(workload, samples, shares, forward)
        save(findings)
    return findings


def table_of(
    workload: Workload,
    size: int,
    samples: dict[str, list[Sample]],
    peaks: dict[str, int],
    forward: float,
) -> Table:
    table = Table(
        f"**{workload.name}**, {workload.batch_size:,} samples in micro-batches of {size}; "
        f"F / (F + B) = {forward:.3f}",
        ["contestant", "CPU ÷ accumulated pass", "CPU ÷ native", "wall ÷ native", "peak MiB"],
    )
    for name, taken in samples.items():
        table.rows.append(
            [
                name,
                str(ratio_of(taken, samples[PASS], "cpu")),
                str(ratio_of(taken, samples[NATIVE], "cpu")),
                str(ratio_of(taken, samples[NATIVE], "wall")),
                f"{peaks[name] / 2**20:.1f}",
            ]
        )
    return table


def goals_of(
    workload: Workload,
    samples: dict[str, list[Sample]],
    shares: dict[str, float],
    forward: float,
) -> list[Goal]:
    goals = []
    for name, share in shares.items():
        bound = SLACK * (1 + (1 - share) * forward)
        ratio = ratio_of(samples[name], samples[PASS], "cpu")
        promise = f"{workload.name}, {name}: CPU over the accumulated pass at most {bound:.3f}"
        goals.append(Goal(promise, str(ratio), ratio.median <= bound))
    none, everything = (f"infinitybatch, {kept} retained" for kept in ("none", "all"))
    ratio = ratio_of(samples[none], samples[CACHING], "cpu")
    promise = f"{workload.name}: faster than gradient caching by hand"
    goals.append(Goal(promise, str(ratio), ratio.median < 1))
    ratio = ratio_of(samples[everything], samples[NATIVE], "cpu")
    promise = f"{workload.name}, all retained: at most native's CPU time"
    goals.append(Goal(promise, str(ratio), ratio.median <= 1))
    return goals
