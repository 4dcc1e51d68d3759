"""Calls of functions that clip gradients, noticed by the operations that they do."""

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FrameType
from typing import Any

from torch.nn.utils import clip_grad

from ..errors import InvalidType

#: accelerate, Lightning and Hugging Face's Trainer call these.
_TORCHS = ("clip_grad_norm_", "clip_grad_value_", "clip_grads_with_norm_", "_clip_grads_with_norm_")
#: Operators that write to their first argument.
_IN_PLACE = {
    "__set__",
    "__delete__",
    "__setitem__",
    *(f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "div", "floordiv", "pow")),
}


def writes(function: Any) -> bool:
    """Whether this function of torch writes to one of its arguments."""
    name = getattr(function, "__name__", "")
    return (name.endswith("_") and not name.endswith("__")) or name in _IN_PLACE


class Clipping:
    """Tells when a call of torch's clipping functions, or of one of the user's, begins and ends.

    Nothing is put in their place: the function is on the stack while it writes.
    """

    def __init__(self, own: Any, begins: Callable[[], None], ends: Callable[[], None]) -> None:
        functions = [getattr(clip_grad, name, None) for name in _TORCHS]
        functions += _checked(own)
        self._codes = {_code(f) for f in functions if f is not None}
        self._begins = begins
        self._ends = ends
        self._frame: FrameType | None = None

    def before(self, function: Any) -> None:
        """Before a function of torch runs."""
        if self._frame is not None and not any(f is self._frame for f in _frames()):
            self.close()
        if self._frame is None and writes(function):
            # The outermost: clip_grad_norm_ calls clip_grads_with_norm_.
            for frame in _frames():
                if frame.f_code in self._codes:
                    self._frame = frame
            if self._frame is not None:
                self._begins()

    def close(self) -> None:
        """Nothing of torch has run since the call ended."""
        if self._frame is not None:
            self._frame = None
            self._ends()


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _checked(own: Any) -> Sequence[Any]:
    each = () if own is None else own if isinstance(own, (list, tuple)) else (own,)
    for function in each:
        if _code(function) is None:
            raise InvalidType(
                f"clip must be a Python function that clips gradients, or a list of them, not "
                f"{type(function).__name__}: clip=my_clip"
            )
    return each


def _code(function: Any) -> CodeType | None:
    if inspect.ismethod(function):
        function = function.__func__
    function = inspect.unwrap(function) if callable(function) else function
    return getattr(function, "__code__", None)
