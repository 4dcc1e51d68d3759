"""What tensors occupy on a device, and limits on it.

On the CPU this counts what torch's allocator gave since infinitybatch was imported; NumPy's memory
and mapped files are not the device's. On accelerators torch's own statistics are asked.
"""

import torch

from . import _checks
from ._C.memory import FailAllocation, Limit, PeakScope, Statistics, describe_cpu_allocator
from ._C.memory import available as _available
from ._C.memory import empty_cache as _empty_cache
from ._C.memory import reset_peak as _reset_peak
from ._C.memory import stats as _stats

__all__ = [
    "FailAllocation",
    "Limit",
    "PeakScope",
    "Statistics",
    "available",
    "describe_cpu_allocator",
    "empty_cache",
    "fail_allocation",
    "limit",
    "peak",
    "reset_peak",
    "stats",
]


def __dir__() -> list[str]:
    """Public names alone, for completion."""
    return __all__


Device = torch.device | str | int


def stats(device: Device = "cpu") -> Statistics:
    """Bytes that tensors occupy on `device` now, at most since `reset_peak`, and more.

    Raises:
        InvalidArgument: where torch has no memory statistics for `device`.
    """
    return _stats(_checks.device("device", device))


def reset_peak(device: Device = "cpu") -> None:
    """Lets `stats(device).peak` start anew at what is live now."""
    _reset_peak(_checks.device("device", device))


def empty_cache() -> None:
    """Gives the memory that the CPU's allocator keeps for the next tensors back to the system.

    For a process that trains no longer: without this call it is looked at when a large tensor comes
    or goes. Accelerators have `torch.accelerator.empty_cache`.
    """
    _empty_cache()


def available(device: Device = "cpu") -> int:
    """Bytes that tensors on `device` could still be given now."""
    return _available(_checks.device("device", device))


def limit(bytes: int | float | str) -> Limit:
    """A context in which CPU allocations of this thread beyond `bytes` raise torch.OutOfMemoryError.

    Args:
        bytes: what may be live at once: a number of bytes, "512MiB", or a fraction of the machine's
            memory (0.8). Nested limits: the smaller one counts. What other threads hold counts, but
            they are not limited.

    Example:
        with ib.memory.limit("24MiB"):
            model(images)
    """
    return Limit(bytes)


def peak(device: Device = "cpu") -> PeakScope:
    """A context whose `peak` is the most bytes that were live on `device` within it."""
    return PeakScope(_checks.device("device", device))


def fail_allocation(n: int | None = None) -> FailAllocation:
    """For tests: a context in which the n-th CPU allocation of this thread, counted from 1, raises
    torch.OutOfMemoryError. Without n nothing fails; `seen` counts allocations all the same.
    """
    return FailAllocation(n)
