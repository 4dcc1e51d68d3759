"""The options of `VirtualBatch` and `wrap`, each with its check.

A new one is named in `Options` of C++, here, and in the signatures and docstrings of those two;
tests/python/test_options.py tells what was forgotten. Their defaults are those of C++.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from . import _batch_dim, _checks, _offload, _trim
from .errors import InvalidArgument, InvalidType

_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One micro-batch as `on_micro_batch` sees it."""

    #: Rows of the logical batch: from `begin` up to and without `end`.
    begin: int
    end: int
    #: What the model returned for them, detached.
    outputs: Any
    #: Their targets, on the model's device; None behind `wrap`.
    targets: Any
    #: Which samples of the logical batch these are: `range(begin, end)`, or, where `trim` has
    #: sorted rows by length, their indices in the order of the rows here.
    samples: Sequence[int]


def _callback(name: str, value: Any) -> Any:
    if value is None or callable(value):
        return value and _checks.called_with(name, value, "micro_batch")
    raise InvalidType(f"{name} must be callable with a MicroBatch, not {type(value).__name__}")


def _scaler(name: str, value: Any) -> Any:
    if isinstance(value, type):
        raise InvalidType(
            f"{name} is the class {value.__name__} itself; give an instance: {value.__name__}(...)"
        )
    if value is None or callable(getattr(value, "scale", None)):
        return value
    raise InvalidType(
        f"{name} must have a method `scale` as torch.amp.GradScaler has, not be a "
        f"{type(value).__name__}"
    )


#: What becomes of the value that a user gives; raises where it is none.
CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "memory_budget": lambda _, value: value,  # C++ knows what a budget is
    "batch_dim": _batch_dim.checked,
    "micro_batch_size": functools.partial(_checks.optional_whole_number, of="samples"),
    "micro_batch_tokens": functools.partial(_checks.optional_whole_number, of="positions"),
    "trim": _trim.checked,
    "retained_micro_batches": functools.partial(_checks.whole_number, of="micro-batches"),
    "use_tapes": _checks.truth,
    "static_graph": _checks.truth,
    "checkpoint_segments": functools.partial(_checks.optional_whole_number, of="segments"),
    "match_native_rng": _checks.truth,
    "batch_coupling": lambda *given: _checks.one_of(*given, "exact", "per_micro_batch"),
    "offload": lambda _, value: _offload.resolve(value),
    "keep_outputs": _checks.truth,
    "on_micro_batch": _callback,
    "grad_scaler": _scaler,  # `loss_scale` in C++
    # Of wrap alone:
    "reduce": lambda *given: _checks.one_of(*given, "sum", "mean", None),
    "output_batch_dim": _checks.dimension,
}

_BY_EITHER = inspect.Parameter.POSITIONAL_OR_KEYWORD

_RENAMED = {
    old: f"{old} is not an argument any more: use {new}" for old, new in _offload.OLD_NAMES.items()
}
_NOT_FOR_WRAP = {
    "checkpoint_segments": "checkpoint_segments means nothing for wrap, which computes whole "
    "micro-batches; use VirtualBatch, or give a smaller micro_batch_size",
    "keep_outputs": "keep_outputs means nothing for wrap, whose forward returns the outputs of all "
    "samples; leave it out",
    "grad_scaler": "grad_scaler means nothing for wrap, which does not see the loss; call "
    "scaler.scale(loss).backward()",
}


#: What to say beside the error of an argument that nobody takes.
_INSTEAD = {
    "device": "it runs where the model is, model.to(device)",
    "optimizer": "your loop keeps optimizer.zero_grad() and optimizer.step()",
}


def checked(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Those of a function's arguments that are options, as the library works with them."""
    return {n: check(n, arguments[n]) for n, check in CHECKS.items() if n in arguments}


def _refuses(reasons: Mapping[str, str]) -> Callable[[_Function], _Function]:
    """Arguments that the function does not have raise an error that says what to write instead. The
    signature that editors and type checkers see stays the function's own."""

    def decorate(function: _Function) -> _Function:
        parameters = inspect.signature(function).parameters
        names = [n for n, p in parameters.items() if p.kind in (p.KEYWORD_ONLY, _BY_EITHER)]
        whose = function.__qualname__.removesuffix(".__init__")
        placed = [n for n, p in parameters.items() if p.kind is _BY_EITHER]

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if len(args) > len(placed):
                first = ", ".join(n for n in placed if n != "self")
                value = args[len(placed)]
                is_size = type(value) is int and value < 1 << 20
                option = "micro_batch_size" if is_size else "memory_budget"
                raise InvalidType(
                    f"{whose} takes options by name: {whose}({first}, {option}={value!r})"
                )
            for name in kwargs.keys() - names:
                if name in reasons:
                    raise InvalidArgument(reasons[name])
                near = [n for n in names if n.startswith(name)]
                near = near or difflib.get_close_matches(name, names, 1)
                hint = f"; did you mean {near[0]}=?" if near else ""
                hint = f"; {_INSTEAD[name]}" if name in _INSTEAD else hint
                raise InvalidType(f"{whose} has no argument {name!r}{hint}")
            return function(*args, **kwargs)

        return cast(_Function, call)

    return decorate


of_virtual_batch = _refuses(_RENAMED)
of_wrap = _refuses({**_RENAMED, **_NOT_FOR_WRAP})
of_trainer = _refuses(
    {
        **_RENAMED,
        "scaler": "scaler is not an argument: use grad_scaler",
        "batch_size": "batch_size is not an argument: each batch of the loader is one step; for larger "
        "ones, loader=ib.windows(loader, samples=4096)",
        "epochs": "epochs is not an argument: trainer(epochs) trains as many",
        "lr": "lr is not an argument: it is the optimizer's, "
        "torch.optim.Adam(model.parameters(), lr=0.01)",
        "metrics": "metrics is not an argument: trainer.evaluate(loader, metrics)",
    }
)
