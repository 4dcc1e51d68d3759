"""What the extension module asks of torch.utils._pytree, torch's own registry of nested classes."""

import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree

from . import _packed
from ._C import Marked
from ._mapping import Opened, opened
from ._packed import is_packed
from .errors import BatchError


def is_node(value: Any) -> bool:
    """Whether `value` has leaves of its own: an instance of a registered class, or any mapping."""
    if isinstance(value, Mapping):
        return True
    leaves = _pytree.tree_leaves(value)
    return len(leaves) != 1 or leaves[0] is not value


def flatten(value: Any) -> tuple[list[Any], list[int | None], list[str], _pytree.TreeSpec]:
    """The leaves of `value`, the dimension along which each is split as it is marked (None: it is
    not), their names, the structure.

    A mapping of a class that is not registered keeps it where `_mapping` can make another one; but
    one that is the whole value and no dict is a dict, for models are called with its items.
    """
    leaves, spec = _pytree.tree_flatten(value, is_leaf=is_packed)
    dims: list[int | None] = [None] * len(leaves)
    if any(isinstance(leaf, (Marked, Mapping, PackedSequence)) for leaf in leaves):
        value, dims = _open(value, None, whole=True)
        leaves, spec = _pytree.tree_flatten(value)
    return leaves, dims, _names(value, len(leaves)), spec


def _open(value: Any, dim: int | None, whole: bool = False) -> tuple[Any, list[int | None]]:
    """`value` with all leaves opened that hold more leaves (marked values, mappings that are not
    registered), and the dimension along which each leaf is split, as far as it is marked."""
    leaves, spec = _pytree.tree_flatten(value, is_leaf=is_packed)
    dims: list[int | None] = []
    for i, leaf in enumerate(leaves):
        here = whole and leaf is value
        opened_dims: list[int | None] = [dim]
        if isinstance(leaf, Marked):
            leaves[i], opened_dims = _open(leaf.value, leaf.dim, here)
        elif isinstance(leaf, PackedSequence):
            leaves[i] = _packed.opened(leaf)
            opened_dims = [dim, dim]
        elif isinstance(leaf, Mapping):
            node = dict(leaf) if here and not isinstance(leaf, dict) else opened(leaf)
            if isinstance(node, Opened):
                node.children, opened_dims = _open(node.children, dim)
            else:
                node, opened_dims = _open(node, dim)
            leaves[i] = node
        dims += opened_dims
    return _pytree.tree_unflatten(leaves, spec), dims


def _names(value: Any, count: int) -> list[str]:
    try:
        paths, _ = _pytree.tree_flatten_with_path(value)
    except ValueError:  # a class that was registered without names for its children
        return [f"[{i}]" for i in range(count)]
    return [_pytree.keystr(path) for path, _ in paths]


def unflatten(leaves: list[Any], spec: _pytree.TreeSpec) -> Any:
    return _pytree.tree_unflatten(leaves, spec)


def are_empty(leaves: list[Any], dims: list[int | None], unmarked: int) -> bool:
    """Whether there are tensors to split along `dims`, and all of them have no rows."""
    known = [unmarked if dim is None else dim for dim in dims]
    split = [
        leaf.shape[dim]
        for leaf, dim in zip(leaves, known, strict=True)
        if isinstance(leaf, torch.Tensor) and 0 <= dim < leaf.ndim
    ]
    return bool(split) and not any(split)


def as_tensor(value: Any, otherwise: Any = None) -> Any:
    """A NumPy array of numbers as a tensor, on the same memory where torch has tensors like it;
    `otherwise` for anything else."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray) or value.dtype.kind not in "biufc":
        return otherwise
    with warnings.catch_warnings():
        # Arrays that are mapped read-only cannot be written through a tensor. Nobody does here.
        warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
        try:
            return torch.from_numpy(_as_torch_has_it(value))
        except (TypeError, ValueError) as error:
            raise BatchError(
                f"a NumPy array of {value.dtype} is of a type that torch has no tensors of; convert "
                f"it, for example: x.astype(numpy.float64)"
            ) from error


def _as_torch_has_it(array: Any) -> Any:
    """A copy where the bytes of a number are swapped, or strides are none of a tensor's (negative
    ones; a field of records)."""
    array = array.astype(array.dtype.newbyteorder("="), copy=False)
    step = array.itemsize
    if any(stride < 0 or stride % step for stride in array.strides):
        return array.copy()
    return array


def is_number(value: Any) -> bool:
    """Whether a leaf that is no tensor may hang on how many samples there are."""
    if isinstance(value, (bool, str, bytes)):
        return False
    numpy = sys.modules.get("numpy")
    numbers: tuple[type, ...] = (int, float, complex, torch.Size)
    if numpy is not None:
        numbers += (numpy.number, numpy.ndarray)
    return isinstance(value, numbers)


def alike(left: Any, right: Any) -> bool:
    """Whether two leaves that are no tensors say the same; True for objects nobody can compare."""
    comparable = (bool, int, float, complex, str, bytes, type(None), torch.Size)
    if not isinstance(left, comparable) and not is_number(left):
        return not isinstance(right, comparable)
    if type(left) is not type(right):
        return False
    if hasattr(left, "tobytes"):  # NumPy's: arrays and scalars
        return (left.shape, left.dtype) == (right.shape, right.dtype) and (
            left.tobytes() == right.tobytes()
        )
    return bool(left == right or (left != left and right != right))
