"""What importing infinitybatch does to native training on the CPU, whose large tensors it gives pages to."""

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from harness.apart import apart
from harness.clock import Sample, Stopwatch
from harness.machine import TUNED_MALLOC, status
from harness.ratios import ratio_of
from harness.results import Findings, Goal, Table
from harness.settings import Settings
from torch.nn import functional
from workloads import for_time

TITLE = "The allocator of the CPU beside torch's own: native training"
EXPLANATION = (
    "Native steps (forward, cross entropy, backward) with torch alone, whose blocks are malloc's, and "
    "after `import infinitybatch`, whose large blocks are pages that it keeps for the next ones. Each "
    "sample is a process of its own: its median step, the page faults of that step, and the most that "
    "the process held in real memory above what it held before the first step. In a round each "
    "contestant has one process, with malloc as it is by default or tuned as below, in an order that "
    "changes. Ratios are medians of the rounds' ratios with 95 % bootstrap intervals."
)
WARM_UP, STEPS = 3, 5
TORCH, OURS = "torch", "after import infinitybatch"
PART = 32  # samples in a micro-batch of a loop by hand
SLACK = 1.03
Contestant = tuple[str, str]  # whose allocator, which malloc
MALLOCS: dict[str, dict[str, str]] = {"default": {}, "tuned": TUNED_MALLOC}
CONTESTANTS: tuple[Contestant, ...] = tuple(
    (who, malloc) for malloc in MALLOCS for who in (TORCH, OURS)
)


def measure(who: str, index: int, part: int, toy: bool) -> dict[str, Any]:
    """In a process of its own."""
    if who == OURS:
        import infinitybatch  # noqa: F401
    workload = for_time(toy)[index]
    model = workload.model()
    inputs, targets = workload.tensors(workload.batch_size)

    def step() -> Sample:
        watch = Stopwatch()
        for x, y in zip(inputs.split(part), targets.split(part), strict=True):
            (functional.cross_entropy(model(x), y, reduction="sum") / len(inputs)).backward()
        model.zero_grad()
        return watch.read()

    before = status("VmRSS")
    for _ in range(WARM_UP):
        step()
    samples = sorted((step() for _ in range(STEPS)), key=lambda sample: sample.cpu)
    median = samples[STEPS // 2]
    return {
        "sample": [median.wall, median.cpu, median.page_faults],
        "resident": status("VmHWM") - before,
    }


def run(settings: Settings, save: Callable[[Findings], None]) -> Findings:
    findings = Findings()
    for index, workload in enumerate(for_time(settings.toy)):
        for part in (workload.batch_size, PART):
            found: dict[Contestant, list[dict[str, Any]]] = {each: [] for each in CONTESTANTS}
            for turn in range(1 if settings.toy else settings.rounds):
                first = turn % len(CONTESTANTS)
                for each in CONTESTANTS[first:] + CONTESTANTS[:first]:
                    who, malloc = each
                    arguments = [who, index, part, settings.toy, settings.threads]
                    found[each].append(
                        apart("suites.allocator", arguments, MALLOCS[malloc], settings.threads)
                    )
            add(findings, workload.name, f"{workload.batch_size} samples, {part} at once", found)
            save(findings)
    return findings


def add(
    findings: Findings,
    name: str,
    how: str,
    found: dict[Contestant, list[dict[str, Any]]],
) -> None:
    samples = {each: [Sample(*run["sample"]) for run in runs] for each, runs in found.items()}
    resident = {
        each: sorted(run["resident"] for run in runs)[len(runs) // 2]
        for each, runs in found.items()
    }
    table = Table(
        f"**{name}**, {how}",
        ["contestant", "malloc", "CPU ÷ torch, default", "CPU ÷ torch, tuned"]
        + ["page faults of a step", "resident, MiB"],
    )
    findings.tables.append(table)
    for each, taken in samples.items():
        ratios = {malloc: ratio_of(taken, samples[TORCH, malloc], "cpu") for malloc in MALLOCS}
        faults = sorted(sample.page_faults for sample in taken)[len(taken) // 2]
        table.rows.append(
            [*each, *map(str, ratios.values()), f"{faults:,}", f"{resident[each] / 2**20:.1f}"]
        )
        findings.figures.append(
            {
                "workload": f"{name}, {how}",
                "contestant": ", malloc: ".join(each),
                "CPU over torch, default malloc": ratios["default"],
                "CPU over torch, tuned malloc": ratios["tuned"],
                "page faults": faults,
                "resident": resident[each],
                "samples": taken,
            }
        )
        if each == (OURS, "default"):
            for malloc, ratio in ratios.items():
                findings.goals.append(
                    Goal(
                        f"{name}, {how}: CPU after the import, default malloc, over torch with "
                        f"{malloc} malloc at most {SLACK}",
                        str(ratio),
                        ratio.median <= SLACK,
                    )
                )
    findings.goals.append(
        Goal(
            f"{name}, {how}: resident memory after the import at most torch's, default malloc",
            f"{resident[OURS, 'default'] / resident[TORCH, 'default']:.2f}",
            resident[OURS, "default"] <= resident[TORCH, "default"],
        )
    )


if __name__ == "__main__":
    who, index, part, toy, threads = json.loads(sys.argv[1])
    torch.set_num_threads(threads)
    print(json.dumps(measure(who, index, part, toy)))
