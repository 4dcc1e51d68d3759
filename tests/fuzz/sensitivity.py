"""How much native itself moves where its inputs move in their last bits."""

import torch

from .case import Case
from .oracle import State, differences
from .side import Side, drive, seeded


def _states(case: Case, last: int, nudge: float) -> State:
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
