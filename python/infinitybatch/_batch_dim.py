"""`batch_dim=` of `VirtualBatch` and `wrap`: a dimension, or one for each argument that names it."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from . import _checks
from .errors import InvalidArgument, InvalidType

#: A dimension; of an argument also None, which is `shared`.
BatchDim = int | Mapping[str | int, int | None]

_SHARED = -1  # in C++


def checked(name: str, value: Any) -> BatchDim | None:
    if not isinstance(value, Mapping):
        if value is not None and (
            isinstance(value, (bool, str)) or not hasattr(value, "__index__")
        ):
            raise InvalidType(
                f"{name} must be a dimension or a dict of dimensions by argument, not "
                f"{type(value).__name__}: {name}=1, {name}={{'source': 1, 'mask': None}}"
            )
        return _checks.dimension(name, value)
    dims: dict[str | int, int | None] = {}
    for argument, dim in value.items():
        if isinstance(argument, bool) or not isinstance(argument, (str, int)):
            raise InvalidType(
                f"{name} has the key {argument!r}; arguments are named or counted: "
                f"{name}={{'source': 1}}, {name}={{0: 1}}"
            )
        if not isinstance(argument, str) and argument < 0:
            raise InvalidArgument(f"{name} has the key {argument}; count arguments from 0")
        dims[argument] = _checks.dimension(f"{name}[{argument!r}]", dim)
    return dims


def by_argument(given: BatchDim | None, forward: Callable[..., Any]) -> Any:
    """`given` as C++ takes it: each argument of `forward` under its name and its position. Raises
    InvalidArgument for one with two dimensions."""
    if not isinstance(given, Mapping):
        return given
    names = _parameters(forward).names
    dims: dict[str, int] = {}
    for argument, dim in given.items():
        known = [str(argument)]
        if isinstance(argument, int) and argument < len(names):
            known.append(names[argument])
        elif argument in names:
            known.append(str(names.index(argument)))  # type: ignore[arg-type]
        for key in known:
            here = _SHARED if dim is None else dim
            if dims.setdefault(key, here) != here:
                raise InvalidArgument(
                    f"batch_dim gives {known[-1]!r} two dimensions, by its name and by its position; "
                    f"leave one of them out"
                )
    return dims


def check_arguments(
    given: BatchDim | None, functions: Iterable[Callable[..., Any]], also: tuple[str, ...] = ()
) -> None:
    """Raises InvalidArgument for arguments that none of `functions` has.

    Args:
        also: names that are no arguments of them.
    """
    if not isinstance(given, Mapping):
        return
    of_all = [_parameters(function) for function in functions]
    for argument in given:
        if argument in also or any(each.has(argument) for each in of_all):
            continue
        known = dict.fromkeys(name for each in of_all for name in [*each.names, *each.keywords])
        raise InvalidArgument(
            f"batch_dim names {argument!r}, which is no argument of the model's forward; it has "
            f"{', '.join(map(repr, known)) or 'none'}"
        )


@dataclass(frozen=True, slots=True)
class _Parameters:
    names: list[str]  # by position
    keywords: list[str]  # by keyword alone
    more_positions: bool
    more_keywords: bool

    def has(self, argument: str | int) -> bool:
        if isinstance(argument, int):
            return argument < len(self.names) or self.more_positions
        return argument in self.names or argument in self.keywords or self.more_keywords


def _parameters(function: Callable[..., Any]) -> _Parameters:
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of C++
        return _Parameters([], [], True, True)
    kinds = {p.kind for p in parameters}
    return _Parameters(
        [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)],
        [p.name for p in parameters if p.kind is p.KEYWORD_ONLY],
        inspect.Parameter.VAR_POSITIONAL in kinds,
        inspect.Parameter.VAR_KEYWORD in kinds,
    )


__all__ = ["BatchDim", "by_argument", "check_arguments", "checked"]
