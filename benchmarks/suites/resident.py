"""What the process takes beside its tensors, with as many as 128 micro-batches."""

import ctypes
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import infinitybatch as ib
import torch
from harness.apart import apart
from harness.machine import status
from harness.results import Findings, Goal, Table
from harness.settings import Settings
from workloads import for_coupled

from suites.coupled import Caching, contrast

TITLE = "Beside the model: what the process holds beyond its tensors"
EXPLANATION = (
    "Steps of an encoder with InfoNCE over the whole batch, each contestant in a process of its own, "
    "which has run a smaller batch before. Resident memory is the most that the process had in real "
    "memory (`VmHWM`, begun anew after that batch) above what it had before, without pages of files, "
    "which are code that is read for the first time; tensors are the most that they occupied. malloc "
    "has the small blocks alone; with `MALLOC_MMAP_THRESHOLD_` and `MALLOC_TRIM_THRESHOLD_` of 64 KiB "
    "it gives back what it can, which costs page faults; the malloc of the setting below is that of the process that starts them. Nothing here is a time: it is the same on a busy machine, but for the sizes "
    "that a budget settles on."
)
TIMED = False
STEPS = 12
FEW = 16  # samples of the batch that runs before
MOST, SHARE = 8 * 2**20, 0.05  # beyond the tensors: bytes, or of the budget
MALLOCS: dict[str, dict[str, str]] = {
    "64 KiB": {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"},
    "default": {},
}
BY_HAND = "by hand, forward twice"
#: Who, and its size of micro-batches or the MiB of its budget.
CASES: tuple[tuple[str, str, int], ...] = (
    (BY_HAND, "size", 2),
    ("VirtualBatch", "size", 2),
    ("wrap", "size", 2),
    ("wrap", "budget", 4),
    (BY_HAND, "size", 16),
    ("VirtualBatch", "size", 16),
    ("VirtualBatch", "budget", 52),
    ("wrap", "budget", 52),
)
TOY_CASES = CASES[:2]


class MallocInfo(ctypes.Structure):
    """glibc's `struct mallinfo2`."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()
    ]


def stepper(
    who: str, model: torch.nn.Module, options: dict[str, int]
) -> Callable[[Any], list[int]]:
    """Runs a step on what it is given, and says the sizes of its micro-batches."""
    if who == BY_HAND:
        caching = Caching(model, None, None, size=options["micro_batch_size"])

        def step(inputs: torch.Tensor) -> list[int]:
            caching.model, caching.inputs = model, inputs  # no copy of its own
            caching.backward()
            return [len(part) for part in inputs.split(caching.size)]

    elif who == "wrap":
        wrapped = ib.wrap(model, **options)

        def step(inputs: torch.Tensor) -> list[int]:
            contrast(wrapped(inputs)).backward()
            return list(wrapped.last_report.micro_batch_sizes)

    else:
        batch = ib.VirtualBatch(model, ib.losses.coupled(contrast), **options)

        def step(inputs: torch.Tensor) -> list[int]:
            return list(batch.backward(inputs).micro_batch_sizes)

    return step


def measure(who: str, kind: str, number: int, toy: bool) -> dict[str, Any]:
    """In a process of its own."""
    libc = ctypes.CDLL(None)
    libc.mallinfo2.restype = MallocInfo
    workload = for_coupled(toy)[0 if toy else 1][0]
    model, inputs = workload.model(), workload.tensors(workload.batch_size)[0]
    stepper(who, model, {"micro_batch_size": FEW // 2})(inputs[:FEW])
    gc.collect()
    ib.memory.empty_cache()
    libc.malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
    before, files = status("VmRSS"), status("RssFile")
    live, heap = ib.memory.stats().live, libc.mallinfo2()
    given = number if kind == "size" else live + number * 2**20
    options = {"size": "micro_batch_size", "budget": "memory_budget"}
    step = stepper(who, model, {options[kind]: given})
    sizes: list[int] = []
    with ib.memory.peak() as scope:
        for _ in range(STEPS):
            sizes = step(inputs)
    after = libc.mallinfo2()
    return {
        "workload": workload.name,
        "micro-batches": len(sizes),
        "largest": max(sizes),
        "tensors": scope.peak - live,
        "resident": status("VmHWM") - before - (status("RssFile") - files),
        "malloc in use": after.uordblks + after.hblkhd - heap.uordblks - heap.hblkhd,
        "malloc free": after.fordblks - heap.fordblks,
    }


def run(settings: Settings, save: Callable[[Findings], None]) -> Findings:
    findings = Findings()
    for malloc in MALLOCS:
        table = Table(
            f"**malloc: {malloc}**",
            ["contestant", "given", "micro-batches", "tensors, MiB", "resident, MiB", "beyond, MiB"]
            + ["malloc's own at the end: in use, free, MiB"],
        )
        findings.tables.append(table)
        for case in TOY_CASES if settings.toy else CASES:
            arguments = [*case, settings.toy]
            found = apart("suites.resident", arguments, MALLOCS[malloc], threads=1)
            add(findings, table, case, malloc, found)
            save(findings)
    return findings


def add(
    findings: Findings,
    table: Table,
    case: tuple[str, str, int],
    malloc: str,
    found: dict[str, Any],
) -> None:
    who, kind, number = case
    given = f"micro-batches of {number}" if kind == "size" else f"a budget of {number} MiB"
    beyond = found["resident"] - found["tensors"]
    shown = [
        found[name] / 2**20 for name in ("tensors", "resident", "malloc in use", "malloc free")
    ]
    table.rows.append(
        [who, given, f"{found['micro-batches']} of up to {found['largest']}"]
        + [f"{shown[0]:.1f}", f"{shown[1]:.1f}", f"{beyond / 2**20:.1f}"]
        + [f"{shown[2]:.1f}, {shown[3]:.1f}"]
    )
    findings.figures.append(
        found | {"contestant": who, "given": given, "malloc": malloc, "beyond": beyond}
    )
    if who == BY_HAND:
        return
    most = max(MOST, SHARE * number * 2**20 if kind == "budget" else 0)
    findings.goals.append(
        Goal(
            f"{who}, {given}, malloc: {malloc}: at most {most / 2**20:.0f} MiB beyond its tensors",
            f"{beyond / 2**20:.1f} MiB",
            beyond <= most,
        )
    )


if __name__ == "__main__":
    torch.set_num_threads(1)
    who, kind, number, toy = json.loads(sys.argv[1])
    print(json.dumps(measure(who, kind, number, toy)))
