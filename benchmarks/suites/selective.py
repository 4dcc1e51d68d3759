"""A coupled loss at shares of native's peak, beside selective checkpoints."""

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
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from workloads import Workload, for_selective

from suites.coupled import Whole, contrast

TITLE = "Which graphs to keep: budgets of shares of native's peak, beside selective checkpoints"
EXPLANATION = (
    "InfoNCE over the whole batch, as in the suite `coupled`, at budgets of shares of native's peak. "
    "Ours plans by itself: graphs of as many samples as fit are kept, the others are replayed; "
    "it has had 16 steps before, so that looks at rows (steps 2, 4, 8, 16) are not among those that "
    "are timed. torch.utils.checkpoint's selective policy (not re-entrant) keeps results of products, "
    "convolutions and attention and computes everything else again, or keeps every second of them, "
    "or nothing; parts of the batch are checkpointed so, as few as fit, the others keep all. Of all "
    "sizes of parts and policies it is the fastest within the budget.\n\n"
    "Contestants run in turn, in a new order each round; CPU is the process's time over all threads; "
    "ratios are medians of the rounds' ratios with 95 % bootstrap intervals. Peaks are above what was "
    "live before the step."
)
SHARES = (0.25, 0.4, 0.6, 0.8)
SECONDS = 75  # of rounds for each workload
STEPS = 17  # in which a plan settles; the next look at rows comes in step 32
NOISE = 1.03
NATIVE = "native whole batch"
OURS, SELECTIVE = "infinitybatch", "selective checkpoints"
PARTS = (8, 16)
aten = torch.ops.aten
DEAR = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
}
#: Of results of these ops, one is kept of so many; nothing: none.
POLICIES: dict[str, int | None] = {"all": 1, "every second": 2, "none": None}


def contexts(every: int) -> Any:
    seen = {False: 0, True: 0}  # so that forward and what is computed again choose alike

    def policy(context: Any, op: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        if op not in DEAR:
            return CheckpointPolicy.PREFER_RECOMPUTE
        seen[context.is_recompute] += 1
        keeps = seen[context.is_recompute] % every == 0
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


class Selective(Contestant):
    """The first `again` of equal parts of the batch are checkpointed by a policy."""

    def __init__(self, *args: object, parts: int, again: int, every: int | None) -> None:
        super().__init__(*args)
        self.parts, self.again = parts, again
        self.options: dict[str, Any] = {"use_reentrant": False}
        if every is not None:
            self.options["context_fn"] = partial(contexts, every)

    def backward(self) -> None:
        outputs = [
            checkpoint(self.model, part, **self.options) if index < self.again else self.model(part)
            for index, part in enumerate(self.inputs.chunk(self.parts))
        ]
        contrast(torch.cat(outputs)).backward()


class Selections:
    """Ways to checkpoint parts of one batch, and what was measured of them."""

    def __init__(self, *args: Any) -> None:
        self.args = args
        self.peaks: dict[tuple[int, int, int | None], int] = {}

    def peak(self, parts: int, again: int, every: int | None) -> int:
        key = parts, again, every
        if key not in self.peaks:
            self.peaks[key] = self.made(*key).peak_bytes()
        return self.peaks[key]

    def made(self, parts: int, again: int, every: int | None) -> Selective:
        return Selective(*self.args, parts=parts, again=again, every=every)

    def fewest(self, room: int, parts: int, every: int | None) -> int | None:
        """As few checkpoints as fit into so many bytes above what is live."""
        low, high = -1, parts + 1
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (low, middle) if self.peak(parts, middle, every) <= room else (middle, high)
        return high if high <= parts else None

    def fastest(self, room: int) -> Contestant | None:
        tried: dict[str, Contestant] = {}
        for parts in PARTS:
            for name, every in POLICIES.items():
                again = self.fewest(room, parts, every)
                if again is not None:
                    tried[f"{parts} {name}"] = self.made(parts, again, every)
        if len(tried) < 2:
            return next(iter(tried.values()), None)
        samples = interleave(tried, rounds=2, warm_up=0)
        return tried[min(samples, key=lambda name: median(samples[name], "cpu"))]


class Ours(Contestant):
    def settle(self, room: int) -> None:
        """Takes so many bytes above what is live as its budget.

        Raises:
            BudgetExceeded: where no plan fits.
        """
        self.model.zero_grad(set_to_none=True)
        self.batch = ib.VirtualBatch(
            self.model,
            ib.losses.coupled(contrast),
            memory_budget=ib.memory.stats().live + room,
            offload="never",
        )
        for _ in range(STEPS):
            self()

    def backward(self) -> ib.StepReport:
        return self.batch.backward(self.inputs)

    def plan(self) -> Any:
        self.model.zero_grad(set_to_none=True)
        return self.batch.plan(self.inputs)


def run(settings: Settings, save: Callable[[Findings], None]) -> Findings:
    findings = Findings()
    for workload in for_selective(settings.toy):
        measure(workload, settings, findings)
        save(findings)
    return findings


def name_of(contestant: str, share: float) -> str:
    return f"{contestant}, within {share:.0%}"


def measure(workload: Workload, settings: Settings, findings: Findings) -> None:
    args = (workload.model(), *workload.tensors(workload.batch_size))
    native = Whole(*args)
    native()
    whole = native.peak_bytes()
    contestants: dict[str, Contestant] = {NATIVE: native}
    selections = Selections(*args)
    for share in SHARES:
        if (peer := selections.fastest(int(share * whole))) is not None:
            contestants[name_of(SELECTIVE, share)] = peer
    for contestant in contestants.values():
        contestant()  # so that all gradients are there, as between rounds
    for share in SHARES:
        ours = Ours(*args)
        try:
            ours.settle(int(share * whole))
        except ib.BudgetExceeded:
            continue
        contestants[name_of(OURS, share)] = ours
    check_agreement(contestants)
    samples = interleave(contestants, settings.rounds, warm_up=1, at_most=SECONDS)
    peaks = {name: contestant.peak_bytes() for name, contestant in contestants.items()}
    table = Table(
        f"**{workload.name}**, {workload.batch_size:,} samples",
        ["contestant", "how", "peak ÷ native", "CPU ÷ native", "wall ÷ native"],
    )
    for name, taken in samples.items():
        over_native = ratio_of(taken, samples[NATIVE], "cpu")
        how = said_of(contestants[name])
        wall = str(ratio_of(taken, samples[NATIVE], "wall"))
        table.rows.append([name, how, f"{peaks[name] / whole:.2f}", str(over_native), wall])
        findings.figures.append(
            {
                "workload": workload.name,
                "contestant": name,
                "how": how,
                "peak bytes": peaks[name],
                "peak over native": peaks[name] / whole,
                "CPU over native": over_native,
                "samples": taken,
            }
        )
    findings.tables.append(table)
    for share in SHARES:
        findings.goals += goals_of(workload, share, samples, peaks, whole)


def said_of(contestant: Contestant) -> str:
    if isinstance(contestant, Selective):
        every = contestant.options.get("context_fn")
        kept = f"1 of {every.args[0]} products kept" if every is not None else "nothing kept"
        return f"{contestant.again} of {contestant.parts} parts checkpointed, {kept}"
    if isinstance(contestant, Ours):
        plan = contestant.plan()
        sizes = plan.micro_batch_sizes
        kept = sum(sizes[len(sizes) - plan.retained :])
        return f"graphs of {kept} of {sum(sizes)} samples kept, sizes up to {max(sizes)}"
    return "-"


def goals_of(
    workload: Workload,
    share: float,
    samples: dict[str, list[Sample]],
    peaks: dict[str, int],
    whole: int,
) -> list[Goal]:
    ours = name_of(OURS, share)
    peer = name_of(SELECTIVE, share)
    if ours not in samples:
        promise = f"{workload.name}: there is a plan within {share:.0%} of native's peak"
        return [
            Goal(promise, "none" + ", and one of a peer" * (peer in samples), peer not in samples)
        ]
    goals = [
        Goal(
            f"{workload.name}: {ours} of native's peak",
            f"{peaks[ours] / whole:.3f}",
            peaks[ours] <= share * whole,
        )
    ]
    promise = f"{workload.name}: {ours}: CPU over {peer} at most {NOISE}"
    if peer not in samples:
        return [*goals, Goal(promise, "the other has no plan that fits", True)]
    ratio = ratio_of(samples[ours], samples[peer], "cpu")
    return [*goals, Goal(promise, str(ratio), ratio.median <= NOISE)]
