"""How much native itself moves where its inputs move in their last bits."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from .case import Case
from .oracle import State, differences
from .side import Side, drive, seeded


@contextmanager
def _nudged_statistics(nudge: float) -> Iterator[None]:
    """Those of values that are nearly alike, 1 and a little, are made of last bits that no parameter
    moves."""
    draws = torch.Generator().manual_seed(0)

    def nudged(module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> Any:
        if nudge == 0 or not isinstance(module, nn.modules.batchnorm._BatchNorm):
            return None
        noise = torch.rand(inputs[0].shape, generator=draws, dtype=torch.float64, device="cpu")
        return inputs[0] * (1 + nudge * noise.to(inputs[0].device)), *inputs[1:]

    handle = register_module_forward_pre_hook(nudged)
    try:
        yield
    finally:
        handle.remove()


def _states(case: Case, last: int, nudge: float) -> State:
    with _nudged_statistics(nudge):
        return _run(case, last, nudge)


def _run(case: Case, last: int, nudge: float) -> State:
    side = Side(case)
    with torch.no_grad():
        for parameter in side.model.parameters():
            parameter.mul_(1 + nudge * torch.rand_like(parameter.abs()))
    for step, rows in enumerate(case.rows[: last + 1]):
        if not case.accumulate:
            side.optimizer.zero_grad()
        seeded(case.seed + step)
        state = drive(side, side.model, step, rows, lambda _, run: run())
        if case.evaluate:
            state |= side.look(side.model, side.batch(step, rows)[0])
        side.step()
    return state


def moved(case: Case, step: int) -> dict[str, float]:
    """Of each value that `step` leaves, relative."""
    still = _states(case, step, 0.0)
    kinds = tuple({name.split(" ")[0] for name in still} - {"generator"})
    moves: dict[str, float] = {}
    for nudge in (1e-15, -3e-15):
        for name, error in differences(_states(case, step, nudge), still, kinds).items():
            moves[name] = max(moves.get(name, 0.0), error)
    return moves
