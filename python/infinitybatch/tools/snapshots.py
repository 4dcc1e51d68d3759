"""What tensors occupy on a device at one moment, and lists of such moments."""

import torch

from .. import _checks, memory
from ..errors import InvalidArgument, InvalidType, Unsupported
from ..memory import Device


class MemorySnapShot:
    """Bytes on one device at the moment when it was made. Attributes are read-only.

    Args:
        device: "cpu", or an accelerator that keeps memory statistics.
        synchronize: wait for the accelerator's work first.

    Raises:
        InvalidArgument: a device that this machine lacks or that keeps no statistics.
    """

    __slots__ = ("_device", "_statistics")

    def __init__(self, device: Device = "cpu", synchronize: bool = True) -> None:
        self._device = _checks.device("device", device)
        if _checks.truth("synchronize", synchronize) and self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        self._statistics = memory.stats(self._device)

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def allocated(self) -> int:
        """Bytes that tensors occupy. On the CPU: of what was allocated since infinitybatch was
        imported."""
        return self._statistics.live

    @property
    def reserved(self) -> int:
        """Bytes that the allocator holds, its cache included."""
        return self._statistics.reserved

    @property
    def peak(self) -> int:
        """The most bytes that were allocated since `infinitybatch.memory.reset_peak`."""
        return self._statistics.peak

    @property
    def total(self) -> int:
        """Bytes of memory that the device has."""
        return self._statistics.total

    @property
    def free_cache(self) -> int:
        """Bytes of the cache that no tensor occupies: `reserved - allocated`."""
        return self.reserved - self.allocated

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({str(self._device)!r}: allocated={self.allocated:,}, "
            f"reserved={self.reserved:,}, total={self.total:,})"
        )


class CudaMemorySnapShot(MemorySnapShot):
    """A `MemorySnapShot` of a CUDA device.

    Args:
        device_id: an index, "cuda:1", a torch.device; None for the current one.
        synchronize: wait for its work first.

    Raises:
        Unsupported: torch finds no CUDA here.
        InvalidArgument: another kind of device.
    """

    __slots__ = ()

    def __init__(self, device_id: Device | None = None, synchronize: bool = True) -> None:
        if not torch.cuda.is_available():
            raise Unsupported(
                "CudaMemorySnapShot needs CUDA, and torch finds none here. For the CPU's memory: "
                'infinitybatch.tools.MemorySnapShot("cpu")'
            )
        if device_id is None or isinstance(device_id, int) and not isinstance(device_id, bool):
            index = torch.cuda.current_device() if device_id is None else device_id
            if not 0 <= index < torch.cuda.device_count():
                raise InvalidArgument(
                    f"device_id is {index}; this machine has {torch.cuda.device_count()} CUDA devices"
                )
            device_id = torch.device("cuda", index)
        device = _checks.device("device_id", device_id)
        if device.type != "cuda":
            raise InvalidArgument(
                f"device_id is '{device}', which is no CUDA device: "
                f'infinitybatch.tools.MemorySnapShot("{device}")'
            )
        super().__init__(device, synchronize)


class MemoryHistory(list[tuple[str, MemorySnapShot]]):
    """A list of pairs (name, snapshot) that prints itself as a table of bytes.

    Example:
        history = MemoryHistory()
        history.append("model", "cpu")
        print(history)
    """

    def __init__(self) -> None:
        super().__init__()

    def append(  # type: ignore[override]
        self, name: str, device: Device | None = None, synchronize: bool = True
    ) -> None:
        """Takes a snapshot of `device` and adds it under `name`. Raises what `MemorySnapShot` does."""
        if not isinstance(name, str):
            raise InvalidType(
                f'name must be a string, not {type(name).__name__}: append("after forward")'
            )
        super().append((name, self._take(device, synchronize)))

    def _take(self, device: Device | None, synchronize: bool) -> MemorySnapShot:
        return MemorySnapShot("cpu" if device is None else device, synchronize)

    def __str__(self) -> str:
        if not self:
            return f"{type(self).__name__} is empty."
        heads = ("Name", "Device", "Total", "Reserved", "Allocated")
        rows = [
            (name, str(one.device), *(f"{n:,}" for n in (one.total, one.reserved, one.allocated)))
            for name, one in self
        ]
        widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]

        def line(cells: tuple[str, ...]) -> str:
            words = (c.ljust(w) for c, w in zip(cells[:2], widths[:2], strict=True))
            numbers = (c.rjust(w) for c, w in zip(cells[2:], widths[2:], strict=True))
            return "| " + " | ".join((*words, *numbers)) + " |"

        rule = "+" + "+".join("-" * (width + 2) for width in widths) + "+"
        return "\n".join((f"{type(self).__name__} (bytes):", line(heads), rule, *map(line, rows)))


class CudaHistory(MemoryHistory):
    """A `MemoryHistory` of CUDA devices: `append(name, device_id=None, synchronize=True)`.

    Raises:
        Unsupported: torch finds no CUDA here; MemoryHistory serves every device.
    """

    def append(  # type: ignore[override]
        self, name: str, device_id: Device | None = None, synchronize: bool = True
    ) -> None:
        """Takes a `CudaMemorySnapShot` of the device, by default the current one."""
        super().append(name, device_id, synchronize)

    def _take(self, device: Device | None, synchronize: bool) -> MemorySnapShot:
        return CudaMemorySnapShot(device, synchronize)
