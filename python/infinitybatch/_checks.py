"""Checks of arguments: each wrong one is an error that says which, what it was and what it may be."""

import inspect
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .errors import InvalidArgument, InvalidType

_LARGEST = 2**63 - 1


def truth(name: str, value: Any) -> bool:
    """True or False, and nothing that only counts as one: "False" would be true."""
    numpy = sys.modules.get("numpy")
    if isinstance(value, bool) or (numpy is not None and isinstance(value, numpy.bool_)):
        return bool(value)
    raise InvalidType(f"{name} is {value!r}; it is True or False")


def whole_number(name: str, value: Any, of: str) -> int:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise InvalidType(f"{name} must be a whole number of {of}, not {type(value).__name__}")
    number = value.__index__()
    if abs(number) > _LARGEST:
        raise InvalidArgument(f"{name} is {number:.3g}; it is a number of {of} below 2^63")
    return number


def optional_whole_number(name: str, value: Any, of: str) -> int | None:
    return None if value is None else whole_number(name, value, of)


def dimension(name: str, value: Any) -> int | None:
    dim = optional_whole_number(name, value, "dimensions")
    if dim is not None and dim < 0:
        raise InvalidArgument(f"{name} is {dim}; count dimensions from the front, starting at 0")
    return dim


def bandwidth(name: str, value: Any) -> float:
    """Bytes per second; 0: as fast as it goes."""
    if isinstance(value, bool) or not (hasattr(value, "__float__") or hasattr(value, "__index__")):
        raise InvalidType(f"{name} must be a number of bytes per second, not {value!r}")
    try:
        number = float(value)
    except OverflowError:
        number = float("inf")
    if not 0 <= number < float("inf"):  # also not a number
        raise InvalidArgument(
            f"{name} is {number:g}; it is a number of bytes per second, or 0 to leave copies alone"
        )
    return number


def one_of(name: str, value: Any, *choices: str | None) -> Any:
    if (value is None or isinstance(value, str)) and value in choices:
        return value
    *others, last = (f'"{choice}"' if choice else str(choice) for choice in choices)
    raise InvalidArgument(f"{name} is {value!r}; it is {', '.join(others)} or {last}")


def called_with(name: str, function: Any, *arguments: str) -> Any:
    """`function`, which can be called with so many arguments. What tells nothing of its own, as some
    built-in functions do, is believed."""
    if isinstance(function, type) and issubclass(function, nn.Module):
        raise InvalidType(
            f"{name} is the class {function.__name__} itself; give an instance: "
            f"{function.__name__}(...)"
        )
    called = function.forward if isinstance(function, nn.Module) else function
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        return function
    try:
        signature.bind(*arguments)
    except TypeError:
        given = ", ".join(arguments)
        raise InvalidArgument(
            f"{name} takes {signature}, but is called with ({given}): {('lambda ' + given).strip()}: ..."
        ) from None
    return function


def path(name: str, value: Any) -> str:
    if not isinstance(value, (str, os.PathLike)):
        raise InvalidType(f"{name} must be a path, not {type(value).__name__}")
    return os.fsdecode(value)


def device(name: str, value: Any) -> torch.device:
    """A device that torch knows and that this machine has."""
    wanted = _from_torch(name, value, lambda: torch.device(value))
    module = getattr(torch, wanted.type, None)
    is_available: Callable[[], bool] | None = getattr(module, "is_available", None)
    if is_available is not None and not is_available():
        raise InvalidArgument(f"{name} is '{wanted}', but torch finds no {wanted.type} here")
    return wanted


def _from_torch(name: str, value: Any, make: Callable[[], torch.device]) -> torch.device:
    try:
        return make()
    except (RuntimeError, AssertionError) as error:
        known, _, _ = str(error).partition(" device type")
        why = "" if known != str(error) else f": {str(error).splitlines()[0]}"
        raise InvalidArgument(
            f"{name} is {value!r}, which is not a device; write 'cpu', 'cuda' or 'cuda:1'{why}"
        ) from None
    except TypeError:
        raise InvalidType(
            f'{name} must be a torch.device or its name ("cpu"), not {type(value).__name__}'
        ) from None
