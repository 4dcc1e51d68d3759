"""`batch_dim=` of `VirtualBatch` and `wrap`: a dimension, or one for each argument that names it."""

import inspect
from collections.abc import Callable, Mapping
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


def by_argument(given: BatchDim | None, forward: Any, also: tuple[str, ...] = ()) -> Any:
    """`given` as C++ takes it: each argument under its name and its position.

    Args:
        given: a checked `batch_dim`.
        forward: what is called with the arguments.
        also: names that are no arguments of it.

    Raises:
        InvalidArgument: for arguments that `forward` does not have, or one with two dimensions.
    """
    if not isinstance(given, Mapping):
        return given
    names, keywords, open_ended, any_keyword = _parameters(forward)
    dims: dict[str, int] = {}
    for argument, dim in given.items():
        known = [str(argument)]
        if isinstance(argument, int) and argument < len(names):
            known.append(names[argument])
        elif argument in names:
            known.append(str(names.index(argument)))  # type: ignore[arg-type]
        elif not (open_ended if isinstance(argument, int) else any_keyword or argument in keywords):
            if argument not in also:
                raise InvalidArgument(
                    f"batch_dim names {argument!r}, which is no argument of the model's forward; "
                    f"it has {', '.join(map(repr, [*names, *keywords])) or 'none'}"
                )
        for key in known:
            here = _SHARED if dim is None else dim
            if dims.setdefault(key, here) != here:
                raise InvalidArgument(
                    f"batch_dim gives {known[-1]!r} two dimensions, by its name and by its position; "
                    f"leave one of them out"
                )
    return dims


def _parameters(forward: Callable[..., Any]) -> tuple[list[str], list[str], bool, bool]:
    """Names by position and by keyword alone, and whether it takes more of either."""
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):  # of C++
        return [], [], True, True
    kinds = {p.kind for p in parameters}
    return (
        [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)],
        [p.name for p in parameters if p.kind is p.KEYWORD_ONLY],
        inspect.Parameter.VAR_POSITIONAL in kinds,
        inspect.Parameter.VAR_KEYWORD in kinds,
    )


__all__ = ["BatchDim", "by_argument", "checked"]
