"""Mappings of classes that torch.utils._pytree does not know, taken apart and made again."""

import copy
import sys
from collections import UserDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree

from ._C import Marked

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.Size)


@dataclass(frozen=True)
class _Like:
    """What a mapping is beside its children, which are its items and its plain attributes."""

    kind: type
    keys: tuple[Any, ...]
    attributes: tuple[str, ...]
    copied: tuple[str, ...]  # items that stand in an attribute of their name, too
    template: Any = field(compare=False)  # holds nothing of the batch, which lives no longer by it


class Opened:
    """A mapping as a node of a tree; what is made of its leaves is a mapping of the same class."""

    def __init__(self, like: _Like, children: list[Any]) -> None:
        self.like = like
        self.children = children


def opened(mapping: Mapping[Any, Any]) -> Opened | dict[Any, Any]:
    """`mapping` as a node: a plain dict where no other object of its class can be made, or where
    its attributes hold what may be rows, which nobody could split."""
    items = dict(mapping)
    try:
        template = _copy(mapping)
    except Exception:  # whatever the class raises
        return items
    if template is None or list(_store(template)) != list(items):
        return items
    for key in items:
        dict.__setitem__(_store(template), key, None)
    own = vars(template) if vars(template) is not template else {}
    copied = tuple(name for name in own if name in items and own[name] is items[name])
    attributes = tuple(name for name in own if name not in copied and type(own[name]) in _PLAIN)
    children = [*items.values(), *(own[name] for name in attributes)]
    own.update(dict.fromkeys(copied + attributes))
    if any(_may_be_rows(leaf) for leaf in _pytree.tree_leaves(list(own.values()))):
        return items
    return Opened(_Like(type(mapping), tuple(items), attributes, copied, template), children)


def _copy(mapping: Any) -> Any:
    """A copy with a store and attributes of its own, or None."""
    # A mapping of another kind keeps its items where a copy might share them. What stands in slots
    # is not seen here.
    slots = any(getattr(base, "__slots__", ()) for base in type(mapping).__mro__)
    if slots or not isinstance(mapping, (dict, UserDict)):
        return None
    made = copy.copy(mapping)
    if type(made) is not type(mapping):
        return None
    if vars(mapping) is mapping:
        object.__setattr__(made, "__dict__", made)
    apart = vars(made) is not vars(mapping) and _store(made) is not _store(mapping)
    return made if apart and isinstance(_store(made), dict) else None


def _store(mapping: Any) -> Any:
    return mapping.data if isinstance(mapping, UserDict) else mapping


def _may_be_rows(value: Any) -> bool:
    numpy = sys.modules.get("numpy")
    if numpy is not None and isinstance(value, numpy.ndarray):
        return True
    plain = type(value) in _PLAIN and value is not None
    return plain or isinstance(value, (torch.Tensor, Marked, Mapping))


def _made_again(children: Any, like: _Like) -> Any:
    children = list(children)
    items = dict(zip(like.keys, children, strict=False))
    made = _copy(like.template)
    for key, value in items.items():
        # Not as the class does it, which may have more to say to that.
        dict.__setitem__(_store(made), key, value)
    vars(made).update((name, items[name]) for name in like.copied)
    vars(made).update(zip(like.attributes, children[len(items) :], strict=True))
    return made


def _with_keys(node: Opened) -> tuple[list[tuple[Any, Any]], _Like]:
    names: list[Any] = [_pytree.MappingKey(key) for key in node.like.keys]
    names += [_pytree.GetAttrKey(name) for name in node.like.attributes]
    return list(zip(names, node.children, strict=True)), node.like


_pytree.register_pytree_node(
    Opened,
    lambda node: (node.children, node.like),
    _made_again,
    flatten_with_keys_fn=_with_keys,
)

__all__ = ["Opened", "opened"]
