"""Recording what a function does as a list of ATen ops, and replaying it without the function.

    outputs, tape = ib.tape.record(model, (images,), buffers=list(model.buffers()))
    print(tape)                  # one line for each op
    again = tape.replay(images)  # the same bits, with a graph of its own

What a list of ops cannot tell (autograd functions, hooks set inside, compiled regions) is noticed:
`tape.opaque` says why, and `replay` refuses.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import _C
from ._C.tape import Tape
from .errors import InvalidType

__all__ = ["Tape", "record"]


def record(
    function: Callable[..., Any], inputs: tuple[Any, ...], buffers: Sequence[torch.Tensor] = ()
) -> tuple[Any, Tape]:
    """Calls function(*inputs) and records it. Returns (what it returned, its Tape).

    Args:
        buffers: tensors that the function may write into.

    Raises:
        InvalidType: for what is not callable, and for inputs that are no tuple.
    """
    if not callable(function):
        raise InvalidType(f"function must be callable, not {type(function).__name__}")
    if not isinstance(inputs, tuple):
        raise InvalidType(
            f"inputs must be the tuple of arguments, not {type(inputs).__name__}: "
            f"record(function, (x,))"
        )
    return _C.tape.record(function, inputs, list(buffers))


def __dir__() -> list[str]:
    """Public names alone, for completion."""
    return __all__
