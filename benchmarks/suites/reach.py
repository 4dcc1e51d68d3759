"""How large a batch may become: the peak of a step, native and within a budget."""

from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import torch
from harness.results import Findings, Goal, Table
from harness.settings import Settings
from torch import nn
from torch.nn import functional
from workloads import Workload, for_budget

TITLE = "Reach: the peak of a step against the size of its batch"
EXPLANATION = (
    "One step of a small convolutional network. Native is given the batch as tensors and an "
    "allocator that raises torch's out-of-memory error beyond the device's size; its peak is what "
    "was live at once, the batch included. Ours is given the same rows by a BatchSource, made when "
    "they are asked for, and a memory budget. Nothing here is a time: peaks are the same on a busy "
    "machine."
)
TIMED = False  # peaks are the same on a busy machine
DEVICE, BUDGET = 2**30, 16 * 2**20
SIZES = tuple(4**power for power in range(3, 11))  # 64 to 1,048,576
TOY_SIZES = SIZES[:2]


def rows(workload: Workload, begin: int, end: int) -> torch.Tensor:
    """The same values for the same rows, whichever are asked for together."""
    count = torch.Size(workload.sample_shape).numel()
    places = torch.arange(begin * count, end * count, dtype=torch.float32)
    return places.mul_(0.37).sin_().view(-1, *workload.sample_shape)


def labels(workload: Workload, begin: int, end: int) -> torch.Tensor:
    return torch.arange(begin, end) % workload.classes


def peak_of(step: Callable[[], object]) -> int | None:
    """Bytes above what was live before; None where the device's memory ran out."""
    before = ib.memory.stats().live
    try:
        with ib.memory.limit(before + DEVICE), ib.memory.peak() as scope:
            step()
    except torch.OutOfMemoryError:
        return None
    return scope.peak - before


def native(workload: Workload, model: nn.Module, size: int) -> int | None:
    def step() -> None:
        inputs, targets = rows(workload, 0, size), labels(workload, 0, size)
        functional.cross_entropy(model(inputs), targets).backward()

    return peak_of(step)


def ours(workload: Workload, model: nn.Module, size: int) -> int | None:
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), memory_budget=BUDGET)
    inputs = ib.BatchSource(size, lambda begin, end: rows(workload, begin, end))
    targets = ib.BatchSource(size, lambda begin, end: labels(workload, begin, end))
    return peak_of(lambda: batch.backward(inputs, targets))


def run(settings: Settings, save: Callable[[Findings], None]) -> Findings:
    workload = for_budget(settings.toy)[0]
    table = Table(
        f"**{workload.name}**, device of {DEVICE // 2**20:,} MiB, budget of {BUDGET // 2**20} MiB",
        ["batch size", "native peak, MiB", "ours, MiB"],
    )
    findings = Findings([table])
    peaks: list[int | None] = []
    for size in TOY_SIZES if settings.toy else SIZES:
        found: dict[str, Any] = {"workload": workload.name, "batch size": size}
        for name, way in (("native", native), ("infinitybatch", ours)):
            model = workload.model()
            peak = way(workload, model, size)
            findings.figures.append(found | {"contestant": name, "peak bytes": peak})
        peaks.append(peak)
        both = [figure["peak bytes"] for figure in findings.figures[-2:]]
        table.rows.append(
            [f"{size:,}"] + ["out of memory" if p is None else f"{p / 2**20:,.1f}" for p in both]
        )
        within = all(p is not None and p <= BUDGET for p in peaks)
        shown = [p for p in peaks if p is not None]
        findings.goals = [
            Goal(
                "every batch inside the budget",
                f"at most {max(shown, default=0) / BUDGET:.3f} of it, up to {size:,} samples",
                within,
            )
        ]
        save(findings)
    return findings
