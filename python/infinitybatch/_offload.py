"""What leaves the device while it waits, when, and where to."""

import os
from dataclasses import dataclass
from typing import Any, Literal

from . import _checks

When = Literal["auto", "always", "never"]

#: Arguments of before, and what takes their place.
OLD_NAMES = {
    "park": 'offload="auto" | "always" | "never"',
    "host_budget": "offload=ib.Offload(host_budget=...)",
    "park_on_disk": "offload=ib.Offload(disk=...)",
    "park_directory": "offload=ib.Offload(directory=...)",
    "host_bandwidth": "offload=ib.Offload(host_bandwidth=...)",
}


@dataclass(frozen=True, slots=True)
class Offload:
    """What leaves the device while it waits, when, and where to.

        offload = ib.Offload("always", host_budget="16GiB", disk=False)
        batch = ib.VirtualBatch(model, loss, memory_budget="8GiB", offload=offload)

    Args:
        when: "auto" (where no plan fits otherwise), "always" or "never".
        host_budget: what offloaded tensors may take of the host's memory, as `memory_budget`; beyond
            it they go to disk. By default half of what is available, and on the CPU, where the host
            is the device, nothing.
        disk: whether offloaded tensors may go to disk: into a file without a name, which is gone
            with the process however that ends.
        directory: where that file lies; $TMPDIR, else /var/tmp, by default.
        host_bandwidth: on the CPU, to find out what a link to a device would cost: copies to and
            from the host's arena take at least their bytes divided by this, in bytes per second.

    Raises:
        InvalidType, InvalidArgument: for values of another type or out of range.
    """

    when: When = "auto"
    host_budget: int | float | str | None = None
    disk: bool = True
    directory: str | os.PathLike[str] = ""
    host_bandwidth: float = 0.0

    def __post_init__(self) -> None:
        _checks.one_of("offload", self.when, "auto", "always", "never")
        checked = {
            "disk": _checks.truth("disk", self.disk),
            "directory": _checks.path("directory", self.directory),
            "host_bandwidth": _checks.bandwidth("host_bandwidth", self.host_bandwidth),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)


def resolve(offload: Any) -> Offload:
    """The argument `offload` as users write it: its "when", or all of it."""
    return offload if isinstance(offload, Offload) else Offload(offload)
