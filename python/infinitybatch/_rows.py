"""Values with one entry for each sample that are no tensors, which nobody can split."""

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree

from . import _tree
from ._C import Marked
from .errors import BatchError

_WAY_OUT = (
    "make it a tensor or an array of numbers, wrap it in shared(...) if every micro-batch needs all "
    "of it, or pass a BatchSource"
)
_STACK = (
    "Pad the tensors to one size and pass torch.stack(padded), and where the model needs their sizes "
    "a tensor of these beside it"
)
# Shorter tuples are mostly sizes, as in (height, width).
_LONGEST_SIZE = 4


def refuse_hidden_rows(value: Any, samples: int, name: str) -> None:
    """Raises BatchError for what would go whole to every micro-batch and seems to be rows.

    That is a list with one entry for each of `samples`, without any tensor in it; a tuple of more
    than four such numbers or texts; an array of anything but numbers; and an object of an
    unregistered dataclass that holds tensors. What is marked `shared` is taken at its word.

    Args:
        value: inputs or targets, as they were given.
        samples: how many there are; 0 where nobody knows.
        name: of `value`, for people.
    """
    if isinstance(value, Marked):
        if value.dim >= 0:
            refuse_hidden_rows(value.value, samples, name)
    elif value is None or isinstance(value, (torch.Tensor, str, bytes, int, float, complex)):
        return
    elif type(value) in (list, tuple):
        if samples > 1 and len(value) == samples and _is_rows(value):
            raise BatchError(
                f"{name} is a {type(value).__name__} with one entry for each of {samples} samples "
                f"and no tensor in it, which every micro-batch would see whole; {_WAY_OUT}"
            )
        for i, child in enumerate(value):
            refuse_hidden_rows(child, samples, f"{name}[{i}]")
    elif isinstance(value, Mapping):
        for key, child in value.items():
            refuse_hidden_rows(child, samples, f"{name}[{key!r}]")
    elif _is_array(value):
        if value.ndim > 0 and len(value) == samples > 1 and _tree.as_tensor(value) is None:
            raise BatchError(
                f"{name} is an array of {value.dtype} with {samples} rows, which every micro-batch "
                f"would see whole; {_WAY_OUT}"
            )
    elif _tree.is_node(value):
        children = _pytree.tree_leaves(value, is_leaf=lambda node: node is not value)
        for i, child in enumerate(children):
            refuse_hidden_rows(child, samples, f"{name}[{i}]")
    elif dataclasses.is_dataclass(value) and _holds_tensors(vars(value)):
        kind = type(value).__name__
        raise BatchError(
            f"{name} is a {kind}, a dataclass that holds tensors and that torch's pytrees do not "
            f"know, so every micro-batch would see it whole; register it with "
            f"torch.utils._pytree.register_dataclass({kind}), or wrap it in shared(...)"
        )


def refuse_lists_of_samples(error: BatchError, inputs: Any, targets: Any = None) -> None:
    """Raises BatchError for a list with one entry for each sample of everything else, which was
    taken for as many inputs. `error` says that sizes differ, or that a tensor has none."""
    for name, values in (("inputs", inputs), ("targets", targets)):
        for where, count in _scalars(values, name):
            raise BatchError(
                f"{where} is a list of {count} tensors without dimensions; stack it into one tensor: "
                f"torch.stack({where})"
            ) from error
    _refuse_entries(error, inputs, targets, ("inputs", "targets"))


def refuse_lists_beside_targets(inputs: Any, targets: Any) -> None:
    """The same of inputs alone, beside targets that a loss of all outputs sees whole: they may well
    be a list with one entry for each sample, and say how many there are."""
    _refuse_entries(None, inputs, targets, ("inputs",))


def _refuse_entries(
    error: BatchError | None, inputs: Any, targets: Any, sides: tuple[str, ...]
) -> None:
    given = {"inputs": inputs, "targets": targets}
    sizes = {_rows_of(tensor) for tensor in _pytree.tree_leaves(list(given.values()))}
    for name in sides:
        values = given[name]
        for where, entries in _per_sample(values, name):
            if entries is values and type(values) is tuple:  # the model's arguments
                continue
            own = {_rows_of(tensor) for tensor in _pytree.tree_leaves(entries)}
            others = len(entries) in sizes or any(
                len(entries) == len(other)
                for another in given
                if another != name
                for _, other in _per_sample(given[another], another)
            )
            if others and len(entries) not in own:
                raise BatchError(
                    f"{where} is a {type(entries).__name__} with an entry of tensors for each of "
                    f"{len(entries)} samples, which was taken for {len(entries)} inputs of "
                    f"{max(own)} samples each: lists are not split. {_STACK}"
                ) from error


def _rows_of(value: Any) -> int:
    return len(value) if isinstance(value, torch.Tensor) and value.dim() > 0 else 0


def _scalars(value: Any, name: str) -> Iterator[tuple[str, int]]:
    """Lists of tensors of one number each, and how many there are."""
    if type(value) is list and len(value) > 1 and all(map(_is_scalar, value)):
        yield name, len(value)
    elif type(value) in (list, tuple):
        for i, child in enumerate(value):
            yield from _scalars(child, f"{name}[{i}]")
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield from _scalars(child, f"{name}[{key!r}]")


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0


def _per_sample(value: Any, name: str) -> Iterator[tuple[str, list[Any]]]:
    """Lists and tuples, the outermost first, each entry of which holds tensors."""
    if type(value) in (list, tuple):
        leaves = [_pytree.tree_leaves(child) for child in value]
        if len(value) > 1 and all(any(map(_rows_of, each)) for each in leaves):
            yield name, value
        for i, child in enumerate(value):
            yield from _per_sample(child, f"{name}[{i}]")
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield from _per_sample(child, f"{name}[{key!r}]")


def explain_lists(error: Exception, given: Any) -> None:
    """Says with an error of the model's own that a list of tensors was split tensor by tensor: one
    with a tensor for each sample looks the same. Raises BatchError for images and for tensors of
    several sizes, which mostly are such."""
    for name, values in _lists(given, "inputs"):
        several = any(value.shape[1:] != values[0].shape[1:] for value in values)
        images = all(value.dim() == 3 and len(value) in (1, 3, 4) for value in values)
        on_a_part = bool(getattr(error, "__notes__", None))
        if on_a_part and (several or images):
            raise BatchError(
                f"{name} is a list of {len(values)} tensors, each of which was split along its first "
                f"dimension, of {len(values[0])}, and forward fails on that ({error}). If it has one "
                f"tensor for each sample: lists are not split. {_STACK}"
            ) from error
        error.add_note(
            f"infinitybatch: {name} is a list of {len(values)} tensors, and each of them was split "
            f"along its first dimension, of {len(values[0])}. If it has one tensor for each sample, "
            f"pad them and pass torch.stack(tensors)"
        )


def _lists(value: Any, name: str) -> Iterator[tuple[str, list[torch.Tensor]]]:
    if type(value) is list and len(value) > 1 and all(_can_be_sample(item) for item in value):
        yield name, value
    elif type(value) in (list, tuple):
        for i, child in enumerate(value):
            yield from _lists(child, f"{name}[{i}]")
    elif isinstance(value, Mapping):
        for key, child in value.items():
            yield from _lists(child, f"{name}[{key!r}]")


def _can_be_sample(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 1


def _is_rows(row: list[Any] | tuple[Any, ...]) -> bool:
    if type(row) is tuple and (len(row) <= _LONGEST_SIZE or not all(map(_is_plain, row))):
        return False
    if _holds_tensors(row):
        return False
    return any(leaf is not None for leaf in _pytree.tree_leaves(row))


def _is_plain(value: Any) -> bool:
    return isinstance(value, (str, bytes, int, float, complex))


def _holds_tensors(value: Any) -> bool:
    leaves = _pytree.tree_leaves(value)
    return any(isinstance(leaf, (torch.Tensor, Marked)) or _is_array(leaf) for leaf in leaves)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)
