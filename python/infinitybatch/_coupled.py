"""Losses that see the outputs of the whole logical batch."""

import inspect
import math
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch

from . import _checks
from ._C.losses import CoupledLoss
from ._C.losses import coupled as _coupled
from .errors import CoupledLossNotice, InvalidArgument

_told: set[str] = set()


def make(value: Callable[..., torch.Tensor], device: torch.device | None = None) -> CoupledLoss:
    """`value(outputs, targets)` as a loss; `value(outputs)` where it takes one argument only, or
    needs only one and there are no targets: parameters with defaults are the user's options."""
    needed, taken = _positional(value)
    if taken != 1:
        _checks.called_with("the loss", value, "outputs", "targets")

    def call(outputs: Any, targets: Any) -> torch.Tensor:
        alone = taken == 1 or (targets is None and needed < 2)
        return value(outputs) if alone else value(outputs, targets)

    return _coupled(call, device, _name(value))


def make_criterion(
    criterion: Callable[..., torch.Tensor], needs_targets: bool = False
) -> CoupledLoss:
    """Called as torch.nn's criteria are: criterion(*outputs, *targets) where either is a tuple.

    Args:
        needs_targets: one of torch.nn's own, which None is no target for.
    """
    needed, _ = _positional(criterion)

    def value(outputs: Any, targets: Any) -> torch.Tensor:
        left = outputs if isinstance(outputs, tuple) else (outputs,)
        right = targets if isinstance(targets, tuple) else (targets,)
        if targets is None and needed <= len(left):
            right = ()
        elif targets is None and needs_targets:
            raise InvalidArgument(f"{_name(criterion)} needs targets, but was given none of them")
        return criterion(*left, *right)

    return _coupled(value, None, _name(criterion))


def _name(function: Callable[..., Any]) -> str:
    function = getattr(function, "func", function)  # of a functools.partial
    return getattr(function, "__name__", type(function).__name__)


def tell(name: str, way_out: str) -> None:
    """Says once for each loss that it is taken as coupled though nobody declared it so."""
    if name in _told:
        return
    _told.add(name)
    warnings.warn(
        f"IB101: {name} is not known to be separable, so it is computed on the outputs of the whole "
        f"batch, which takes a second pass. That is exact for every loss. {way_out}; declare it "
        f"with infinitybatch.losses.coupled to silence this",
        CoupledLossNotice,
        stacklevel=first_frame_outside(),
    )


def first_frame_outside() -> int:
    """The stacklevel, for `warnings.warn` in the function that asks, of the user's own line."""
    frame = sys._getframe(1)
    level = 1
    while frame.f_back is not None and frame.f_globals.get("__package__") == __package__:
        frame = frame.f_back
        level += 1
    return level


def _positional(value: Callable[..., Any]) -> tuple[int, float]:
    """How many positional arguments it needs, and how many it takes at most."""
    called = value.forward if isinstance(value, torch.nn.Module) else value
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):  # some built-in functions do not tell
        return 0, math.inf
    if any(p.kind is p.VAR_POSITIONAL for p in parameters):
        taken = math.inf
    else:
        taken = sum(p.kind in _POSITIONAL for p in parameters)
    needed = sum(p.kind in _POSITIONAL and p.default is p.empty for p in parameters)
    return needed, taken


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
