"""What the extension module asks of torch.utils._pytree, torch's own registry of nested classes."""

import sys
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch.utils import _pytree

from ._C import Marked


def is_node(value: Any) -> bool:
    """Whether `value` has leaves of its own: an instance of a registered class, or any mapping."""
    if isinstance(value, Mapping):
        return True
    leaves = _pytree.tree_leaves(value)
    return len(leaves) != 1 or leaves[0] is not value


def _opened(leaf: Any) -> Any:
    """A leaf that holds more leaves, opened: a marked value, a mapping that is not registered."""
    if isinstance(leaf, Marked):
        return leaf.value
    if isinstance(leaf, Mapping):
        return dict(leaf)
    return leaf


def flatten(value: Any) -> tuple[list[Any], list[int], list[str], _pytree.TreeSpec]:
    """The leaves of `value`, the dimension along which each is split, their names, the structure."""
    leaves, spec = _pytree.tree_flatten(value)
    dims = [0] * len(leaves)
    while any(isinstance(leaf, (Marked, Mapping)) for leaf in leaves):
        opened_dims: list[int] = []
        for leaf, dim in zip(leaves, dims, strict=True):
            here = leaf.dim if isinstance(leaf, Marked) else dim
            opened_dims += [here] * len(_pytree.tree_leaves(_opened(leaf)))
        value = _pytree.tree_unflatten([_opened(leaf) for leaf in leaves], spec)
        leaves, spec = _pytree.tree_flatten(value)
        dims = opened_dims
    return leaves, dims, _names(value, len(leaves)), spec


def _names(value: Any, count: int) -> list[str]:
    try:
        paths, _ = _pytree.tree_flatten_with_path(value)
    except ValueError:  # a class that was registered without names for its children
        return [f"[{i}]" for i in range(count)]
    return [_pytree.keystr(path) for path, _ in paths]


def unflatten(leaves: list[Any], spec: _pytree.TreeSpec) -> Any:
    return _pytree.tree_unflatten(leaves, spec)


def as_tensor(value: Any, otherwise: Any = None) -> Any:
    """A NumPy array of numbers as a tensor on the same memory; `otherwise` for anything else."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(value, numpy.ndarray) or value.dtype.kind not in "biufc":
        return otherwise
    with warnings.catch_warnings():
        # Arrays that are mapped read-only cannot be written through a tensor. Nobody does here.
        warnings.filterwarnings("ignore", message=".*not writable", category=UserWarning)
        return torch.from_numpy(value)


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
