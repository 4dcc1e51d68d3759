"""What an exact coupled loss costs: two passes over the micro-batches, with and without graphs kept."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import infinitybatch as ib
import torch
from contestants import Contestant, check_agreement
from harness.clock import Sample, interleave
from harness.ratios import median, ratio_of
from harness.results import Findings, Goal, Table
from harness.settings import Settings
from peers.gradient_caches import GradCache, SentenceTransformers, installed
from peers.tuning import fastest_that_fits
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from workloads import Workload, for_coupled

TITLE = "Coupled losses: time and peak beside native, gradient caching and checkpointing"
ROOM = 1.25
SETTLED = 16  # steps of ours before rounds begin
EXPLANATION = (
    "InfoNCE over the whole batch, whose first half are the anchors and whose second half their "
    "partners, encoded by one model in micro-batches that are equally large on all sides.\n\nThe accumulated pass is the same loop with the outputs' gradient given: forward "
    "and backward once, which no coupled loss can do with less. A second forward is needed for the "
    "share 1 - r of micro-batches that keep no graph, so the bound is "
    "1 + (1 - r) F / (F + B) times the accumulated pass, with F / (F + B) measured in the same run.\n\n"
    "Gradient caching by hand is a forward without grad, the loss on all outputs, and a second "
    "forward with grad; GradCache and sentence-transformers' CachedMultipleNegativesRankingLoss do "
    "the same and are used themselves (sentence-transformers computes its loss in micro-batches "
    "too). Checkpointing is torch.utils.checkpoint, not re-entrant, of each micro-batch.\n\n"
    '"Tuned" caches take the fastest of five micro-batch sizes, from a quarter to twice the given '
    "one, that needs no more than the largest peak of the caches at the given one; "
    '"infinitybatch, at the peak of" one of them is given that one\'s peak as its memory '
    "budget and plans by itself: which micro-batch size, how many graphs are retained; "
    f'"infinitybatch, where it fits" has {ROOM:.2f} of native\'s peak and plans by itself too.\n\nWith '
    "all graphs retained in micro-batches of the given size the accumulated pass is the least that "
    "there is, so where that takes longer than native (each micro-batch adds its gradients of the "
    "weights to the sums, which the whole batch writes once) ours does as well.\n\n"
    f"Ours have had {SETTLED} steps before, so that looks at rows (steps 2, 4, 8, 16) are not among "
    "those that are timed. Contestants run in "
    "turn, in a new order each round; CPU is the process's time over all threads; ratios are medians "
    "of the rounds' ratios with 95 % bootstrap intervals."
)
SLACK = 1.05
SECONDS = 20  # of rounds for each workload
SCALE = 10.0  # of similarities
NATIVE, PASS, FORWARD, CHECKPOINT, CACHING = (
    "native whole batch",
    "accumulated pass",
    "forward alone",
    "checkpointing",
    "gradient caching by hand",
)
CACHES = (CACHING, "GradCache", "sentence-transformers")
NONE = "infinitybatch, none retained"
FITS = "infinitybatch, where it fits"


def tuned(name: str) -> str:
    return f"{name}, tuned"


def at_peak_of(name: str) -> str:
    return f"infinitybatch, at the peak of {name}"


def info_nce(anchors: torch.Tensor, partners: torch.Tensor) -> torch.Tensor:
    a, b = functional.normalize(anchors, dim=-1), functional.normalize(partners, dim=-1)
    return functional.cross_entropy(SCALE * a @ b.T, torch.arange(len(a)))


def contrast(outputs: torch.Tensor) -> torch.Tensor:
    return info_nce(*outputs.chunk(2))


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


class Checkpointed(Forward):
    def backward(self) -> None:
        parts = self.inputs.split(self.size)
        outputs = [checkpoint(self.model, part, use_reentrant=False) for part in parts]
        contrast(torch.cat(outputs)).backward()


class Ours(Contestant):
    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args)
        self.batch = ib.VirtualBatch(self.model, ib.losses.coupled(contrast), **options)

    def allow(self, budget: int) -> None:
        """From now on a budget, of which all that is live is a part."""
        self.batch = ib.VirtualBatch(self.model, ib.losses.coupled(contrast), memory_budget=budget)
        self()  # the planner's rehearsal

    def backward(self) -> ib.StepReport:
        return self.batch.backward(self.inputs)


def caches_of(*batch: Any) -> dict[str, Callable[[int], Contestant]]:
    """Gradient caches by name, to be made with a size of micro-batches."""
    found: dict[str, Callable[[int], Contestant]] = {
        CACHING: lambda size: Caching(*batch, size=size)
    }
    if installed()["GradCache"]:
        found["GradCache"] = lambda size: GradCache(*batch, size=size, loss=info_nce)
    if installed()["sentence-transformers"]:
        found["sentence-transformers"] = lambda size: SentenceTransformers(
            *batch, size=size, scale=SCALE
        )
    return found


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
    makers = caches_of(model, inputs, targets)
    caches = {name: make(size) for name, make in makers.items()}
    for contestant in caches.values():
        contestant()
    # The size that was given is among those tried, for each of them.
    room = max(contestant.peak_bytes() for contestant in caches.values())
    caches |= {tuned(name): fastest_that_fits(make, size, room) for name, make in makers.items()}
    return (
        {
            NATIVE: Whole(model, inputs, targets),
            PASS: Accumulated(model, inputs, targets, size=size),
            FORWARD: Forward(model, inputs, targets, size=size),
            CHECKPOINT: Checkpointed(model, inputs, targets, size=size),
        }
        | caches
        | ours,
        {f"infinitybatch, {name} retained": kept / count for name, kept in shares.items()},
    )


def ours_at_peaks(contestants: dict[str, Contestant], size: int) -> dict[str, Ours]:
    """Ours once for each gradient cache, allowed no more than that one takes, and once with room for
    the whole batch. What is too little for any plan is left out.
    """
    native = contestants[NATIVE]
    caches = [tuned(name) for name in CACHES if name in contestants]
    peaks = {at_peak_of(name): contestants[name].peak_bytes() for name in caches}
    peaks[FITS] = int(ROOM * native.peak_bytes())
    batch = (native.model, native.inputs, native.targets)
    ours = {name: Ours(*batch, micro_batch_size=size) for name in peaks}
    for contestant in (*contestants.values(), *ours.values()):
        contestant()  # so that all gradients are there, as between rounds
    gc.collect()  # models of sizes that were tried would count as live, and be room later
    for name in list(ours):
        contestant = ours[name]
        contestant.model.zero_grad(set_to_none=True)
        try:
            contestant.allow(ib.memory.stats().live + peaks[name])
        except ib.BudgetExceeded:
            del ours[name]
    return ours


def run(settings: Settings, save: Callable[[Findings], None]) -> Findings:
    findings = Findings()
    findings.notes += [
        f"Not installed, so not measured: {name}."
        for name, is_there in installed().items()
        if not is_there
    ]
    for workload, size in for_coupled(settings.toy):
        measure(workload, size, settings, findings)
        save(findings)
    return findings


def measure(workload: Workload, size: int, settings: Settings, findings: Findings) -> None:
    """A function of its own: no model of the workload before is live when budgets are set."""
    contestants, shares = contestants_of(workload, size)
    contestants |= ours_at_peaks(contestants, size)
    check_agreement({n: c for n, c in contestants.items() if n != FORWARD})
    for contestant in contestants.values():
        for _ in range(SETTLED if isinstance(contestant, Ours) and not settings.toy else 0):
            contestant()
    samples = interleave(contestants, settings.rounds, warm_up=1, at_most=SECONDS)
    peaks = {name: contestant.peak_bytes() for name, contestant in contestants.items()}
    forward = median(samples[FORWARD], "cpu") / median(samples[PASS], "cpu")
    findings.tables.append(table_of(workload, size, samples, peaks, forward))
    findings.tables.append(beside_peers(workload, samples, peaks))
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
    findings.goals += goals_of(workload, samples, shares, peaks, forward)


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


def beside_peers(
    workload: Workload, samples: dict[str, list[Sample]], peaks: dict[str, int]
) -> Table:
    table = Table(
        f"**{workload.name}**: infinitybatch ÷ peers, CPU",
        [
            "peer",
            "same micro-batches, none retained",
            "each tuned, at their peak",
            "their peak MiB",
            "ours MiB",
        ],
    )
    for name in (*CACHES, CHECKPOINT):
        if name not in samples:
            continue
        best = tuned(name) if name in CACHES else name
        ours = at_peak_of(best)
        there = ours in samples
        table.rows.append(
            [
                name,
                str(ratio_of(samples[NONE], samples[name], "cpu")),
                str(ratio_of(samples[ours], samples[best], "cpu")) if there else "-",
                f"{peaks[best] / 2**20:.2f}",
                f"{peaks[ours] / 2**20:.2f}" if there else "-",
            ]
        )
    return table


def goals_of(
    workload: Workload,
    samples: dict[str, list[Sample]],
    shares: dict[str, float],
    peaks: dict[str, int],
    forward: float,
) -> list[Goal]:
    goals = []
    for name, share in shares.items():
        bound = SLACK * (1 + (1 - share) * forward)
        ratio = ratio_of(samples[name], samples[PASS], "cpu")
        promise = f"{workload.name}, {name}: CPU over the accumulated pass at most {bound:.3f}"
        goals.append(Goal(promise, str(ratio), ratio.median <= bound))
    for name in CACHES:
        if name not in samples:
            continue
        best = tuned(name)
        promise = f"{workload.name}: faster than {best}, at no more than its peak"
        ours = at_peak_of(best)
        if ours not in samples:
            goals.append(Goal(promise, "its peak is too little for any plan", False))
            continue
        ratio = ratio_of(samples[ours], samples[best], "cpu")
        measured = f"{ratio} at {peaks[ours] / peaks[best]:.3f} of its peak"
        goals.append(Goal(promise, measured, ratio.median < 1 and peaks[ours] <= peaks[best]))
    for name in ("infinitybatch, all retained", FITS):
        if name not in samples:
            continue
        ratio = ratio_of(samples[name], samples[NATIVE], "cpu")
        promise = f"{workload.name}, {name}: at most native's CPU time"
        goals.append(Goal(promise, str(ratio), ratio.median <= 1))
    return goals
