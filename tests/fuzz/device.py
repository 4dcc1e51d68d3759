"""What a case asks of the device on which its tensors are made: torch's default one."""

from typing import Any

import infinitybatch as ib
import torch
from torch.utils import _pytree


def device() -> torch.device:
    return torch.get_default_device()


def on_host() -> bool:
    return device().type == "cpu"


def adds_in_any_order() -> bool:
    """Some kernels of real accelerators do."""
    return device().type not in ("cpu", "sim")


def moved_there(values: Any) -> Any:
    """Values drawn on the host, whose numbers are the same for every device."""
    if on_host():
        return values
    return _pytree.tree_map_only(torch.Tensor, lambda value: value.to(device()), values)


def generator_state() -> torch.Tensor | None:
    return None if on_host() else torch.get_device_module(device()).get_rng_state()


def live() -> int:
    return ib.memory.stats(device()).live


def peak() -> ib.memory.PeakScope:
    return ib.memory.peak(device())
