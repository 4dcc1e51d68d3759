"""Time of a step's backward part: ours against the native whole batch and a hand-written loop."""

from collections.abc import Callable
from typing import Any

import infinitybatch as ib
from contestants import Contestant, Loop, Native, Ours, check_agreement
from harness.clock import interleave
from harness.ratios import median, ratio_of
from harness.results import Findings, Goal, Table
from harness.settings import Settings
from workloads import Workload, for_time

TITLE = "Time against the native whole batch"
EXPLANATION = (
    "Every contestant computes the gradient of the same logical batch on a model of its own; before "
    "anything is timed their gradients are compared. They run in turn, in a new order each round. "
    "Ratios are medians of the rounds' ratios with 95 % bootstrap intervals; CPU is the process's "
    "time over all threads. Peaks are what tensors occupied at once, above what was there before "
    "the step (parameters, inputs). The budget is what was there and what the loop by hand needs "
    "with micro-batches of a quarter of the batch."
)
FIXED_SIZE = 32
PARTS = 4
TUNED_SECONDS, UNTUNED_SECONDS = 75.0, 20.0  # of rounds, for each workload
GOAL, UPPER_BOUND = 1.00, 1.03
WITH_GOAL = ("convnet", "encoder")
CLOCKS = {"cpu": "CPU", "wall": "wall"}


def contestants_of(workload: Workload) -> tuple[dict[str, Contestant], str]:
    """The contestants, ready to be timed, and a line on what the budget led to."""
    batch = (workload.model(), *workload.tensors(workload.batch_size))
    native = Native(*batch)
    fixed_size = min(FIXED_SIZE, workload.batch_size // 2)
    fixed = Ours(*batch, micro_batch_size=fixed_size)
    loop = Loop(*batch, micro_batch_size=fixed_size)
    same_loop = Loop(*batch, micro_batch_size=fixed_size)
    planned = Ours(*batch, memory_budget="auto")
    # A budget covers whatever is live, so all that will be live while it counts must be there now.
    for contestant in (native, fixed, loop, same_loop, planned):
        contestant()
    loop.size = workload.batch_size // PARTS
    room = loop.peak_bytes()
    loop.size = fixed_size
    planned.model.zero_grad(set_to_none=True)
    budget = ib.memory.stats().live + room
    planned.batch = ib.VirtualBatch(planned.model, planned.loss, memory_budget=budget)
    report, steps = planned.settle()
    same_loop.size = max(report.micro_batch_sizes)
    found = {
        "native": native,
        "ours, budget": planned,
        f"ours, micro-batch {fixed_size}": fixed,
        f"loop, micro-batch {fixed_size}": loop,
        f"loop, micro-batch {same_loop.size} (the budget's)": same_loop,
    }
    return found, (
        f"{workload.name}: the plan settled in step {steps} on micro-batches of {same_loop.size}."
    )


def run(settings: Settings, save: Callable[[Findings], None]) -> Findings:
    findings = Findings()
    for workload in for_time(settings.toy):
        measure(workload, settings, findings)
        save(findings)
    return findings


def measure(workload: Workload, settings: Settings, findings: Findings) -> None:
    contestants, note = contestants_of(workload)
    check_agreement(contestants)
    tuned = settings.malloc == "tuned"
    samples = interleave(
        contestants, settings.rounds, 2 if tuned else 1, TUNED_SECONDS if tuned else UNTUNED_SECONDS
    )
    rounds = len(samples["native"])
    peaks = {name: contestant.peak_bytes() for name, contestant in contestants.items()}
    findings.notes.append(note)
    table = Table(
        f"**{workload.name}**, {workload.batch_size} samples, {rounds} rounds",
        [
            "contestant",
            "CPU ÷ native",
            "wall ÷ native",
            "CPU ms",
            "wall ms",
            "peak MiB",
            "page faults",
        ],
    )
    for name, taken in samples.items():
        ratios = {clock: ratio_of(taken, samples["native"], clock) for clock in CLOCKS}
        row = [name, str(ratios["cpu"]), str(ratios["wall"])]
        row += [f"{1e3 * median(taken, clock):.1f}" for clock in CLOCKS]
        row += [f"{peaks[name] / 2**20:.1f}", f"{median(taken, 'page_faults'):.0f}"]
        table.rows.append(row)
        findings.figures.append(
            {
                "workload": workload.name,
                "contestant": name,
                "ratios to native": ratios,
                "peak bytes": peaks[name],
                "samples": taken,
            }
        )
        judged = tuned and workload.name in WITH_GOAL
        if judged and name.startswith("ours"):
            findings.goals += [judge(workload, name, clock, ratios[clock]) for clock in CLOCKS]
    findings.tables.append(table)


def judge(workload: Workload, name: str, clock: str, ratio: Any) -> Goal:
    promise = (
        f"{workload.name}, {name}: {CLOCKS[clock]} ÷ native at most {GOAL:.2f}, "
        f"upper bound at most {UPPER_BOUND:.2f}"
    )
    return Goal(promise, str(ratio), ratio.median <= GOAL and ratio.high <= UPPER_BOUND)
