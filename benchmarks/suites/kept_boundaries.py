"""BatchNorm on the device: time against peak, from all boundary activations kept to as few as go."""

from collections.abc import Callable
from typing import Any

import infinitybatch as ib
from contestants import Contestant, Native, Ours, check_agreement
from harness.clock import interleave
from harness.ratios import median, ratio_of
from harness.results import Findings, Goal, Table
from harness.settings import Settings
from workloads import Workload, for_kept_boundaries

from suites.whole_batch import Accumulated, Forward

TITLE = "BatchNorm on the device: what computing boundary activations again costs and saves"
EXPLANATION = (
    "Residual and dense nets with BatchNorm in training mode, nothing offloaded. Accumulation "
    "has each micro-batch as a batch of its own: another gradient, and what no exact way can beat. "
    "torch.utils.checkpoint (not re-entrant) computes each layer of the whole batch again in "
    "backward: the same gradient, and statistics that move twice. Ours keeps all boundary "
    "activations, or as many as budgets of ever smaller shares of native's peak allow. With F for a "
    "forward and B for a backward, all kept is 3 F + B (recording, advance, resume), and what is "
    "computed again adds F at most. Contestants run in turn, in a new order each round; CPU is the "
    "process's time over all threads; ratios are medians of the rounds' ratios with 95 % bootstrap "
    "intervals. Peaks are above what was live before the step."
)
SECONDS = 60  # of rounds for each workload
NATIVE, PASS, FORWARD = "native whole batch", "accumulation", "forward alone"
CHECKPOINT, ALL = "torch.utils.checkpoint, each layer", "infinitybatch, all kept"
SHARES = (0.6, 0.5, 0.4, 0.35, 0.3, 0.25)
GOAL, SLACK = 0.35, 1.15


class Checkpointed(Native):
    """Each layer is computed again for its backward."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.model.again = True


def within(peak: int, size: int, *args: Any) -> dict[str, Contestant]:
    """One for each share of native's peak that goes.

    A budget counts what the others have: their gradients once they have run, and models that are yet
    to be made."""
    own = sum(each.nbytes for each in (*args[0].parameters(), *args[0].buffers()))
    made: dict[str, Contestant] = {}
    for index, share in enumerate(SHARES):
        others = 2 * own * (len(SHARES) - index)
        budget = ib.memory.stats().live + int(share * peak) + others
        options = {"micro_batch_size": size, "memory_budget": budget, "offload": "never"}
        contestant = made[f"infinitybatch, within {share:.0%} of native"] = Ours(*args, **options)
        fits(contestant)
    return {name: contestant for name, contestant in made.items() if fits(contestant)}


def fits(contestant: Contestant) -> bool:
    try:
        contestant()
    except ib.BudgetExceeded:
        return False
    return True


def run(settings: Settings, save: Callable[[Findings], None]) -> Findings:
    findings = Findings()
    for workload, size in for_kept_boundaries(settings.toy):
        measure(workload, size, settings, findings)
        save(findings)
    return findings


def measure(workload: Workload, size: int, settings: Settings, findings: Findings) -> None:
    args = (workload.model(), *workload.tensors(workload.batch_size))
    native = Native(*args)
    whole = native.peak_bytes()
    contestants: dict[str, Contestant] = {
        NATIVE: native,
        PASS: Accumulated(*args, size=size),
        FORWARD: Forward(*args, size=size),
        CHECKPOINT: Checkpointed(*args),
        ALL: Ours(*args, micro_batch_size=size),
    }
    for contestant in contestants.values():
        contestant()
    budgets = within(whole, size, *args)
    contestants |= budgets
    check_agreement({n: c for n, c in contestants.items() if n not in (FORWARD, PASS)})
    samples = interleave(contestants, settings.rounds, warm_up=2, at_most=SECONDS)
    peaks = {name: contestant.peak_bytes() for name, contestant in contestants.items()}
    forward = median(samples[FORWARD], "cpu") / median(samples[PASS], "cpu")
    table = Table(
        f"**{workload.name}** in micro-batches of {size}; F / (F + B) = {forward:.3f}",
        ["contestant", "peak ÷ native", "CPU ÷ accumulation", "CPU ÷ native", "wall ÷ native"],
    )
    for name, taken in samples.items():
        over_pass = ratio_of(taken, samples[PASS], "cpu")
        over_native = ratio_of(taken, samples[NATIVE], "cpu")
        table.rows.append(
            [
                name,
                f"{peaks[name] / whole:.2f}",
                str(over_pass),
                str(over_native),
                str(ratio_of(taken, samples[NATIVE], "wall")),
            ]
        )
        findings.figures.append(
            {
                "workload": workload.name,
                "contestant": name,
                "peak bytes": peaks[name],
                "peak over native": peaks[name] / whole,
                "CPU over accumulation": over_pass,
                "CPU over native": over_native,
                "F/(F+B)": forward,
                "samples": taken,
            }
        )
    findings.tables.append(table)
    bound = SLACK * (1 + 3 * forward)
    fit = [name for name in budgets if peaks[name] <= GOAL * whole]
    best = min((ratio_of(samples[n], samples[PASS], "cpu").median for n in fit), default=None)
    promise = (
        f"{workload.name}: within {GOAL:.0%} of native's peak at most {bound:.2f} of accumulation"
    )
    said = "no budget as small" if best is None else f"{best:.2f}"
    findings.goals.append(Goal(promise, said, best is not None and best <= bound))
    curve = [peaks[name] / whole for name in (ALL, *budgets)]
    said = " ".join(f"{peak:.2f}" for peak in curve)
    promise = f"{workload.name}: peaks fall with budgets"
    findings.goals.append(Goal(promise, said, curve == sorted(curve, reverse=True)))
