"""Failures made on purpose: of memory, or of the user's own forward, in a first try of a step."""

from collections.abc import Callable

import torch

from .device import on_host
from .oracle import State
from .side import Side

#: State that a forward changes, and that a failure of a wrapped model's backward leaves.
STAYS = {"number_state", "first_call", "carried", "samples_in_state", "noted"}


def tried(side: Side, step_of: Callable[[int, int], State]) -> State | None:
    """What the first step leaves, if it gets over the fault; else the model is as before."""
    case = side.case
    assert case.fault is not None
    kind, count = case.fault
    if case.way.api == "wrap" and not STAYS.isdisjoint(case.tags):
        return None
    if kind == "memory" and not on_host():
        return None  # an allocator of the CPU alone fails where it is told to
    before = {name: value.clone() for name, value in side.model.state_dict().items()}
    try:
        if kind == "raise":
            side.space["FUSE"][0] = count
            return step_of(0, case.rows[0])
        side.fails = count
        return step_of(0, case.rows[0])
    except (side.space["Bomb"], torch.OutOfMemoryError):
        if case.way.api == "wrap":
            side.model.load_state_dict(before)
            side.model.zero_grad()
        side.space["FIRED"].clear()
        return None
    finally:
        side.space["FUSE"][0] = 0
        side.fails = None
