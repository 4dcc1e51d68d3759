"""PackedSequence as rows: padded sequences and their lengths, which can be split and joined."""

from collections.abc import Iterable
from typing import Any

import torch
from torch.nn.utils import rnn
from torch.utils import _pytree


class Packed:
    """A PackedSequence as a node of a tree; what is made of its leaves is packed again."""

    def __init__(self, padded: torch.Tensor, lengths: torch.Tensor) -> None:
        self.children = [padded, lengths]


def is_packed(value: Any) -> bool:
    return isinstance(value, rnn.PackedSequence)


def opened(sequences: rnn.PackedSequence) -> Packed:
    longest = max(len(sequences.batch_sizes), getattr(sequences, "longest", 0))
    # torch pads with zeros, which no length counts.
    return Packed(*rnn.pad_packed_sequence(sequences, batch_first=True, total_length=longest))


def keep_longest(outputs: Any, inputs: Iterable[Any]) -> None:
    """Has packed outputs of a micro-batch padded as the whole batch is, so that they can be joined."""
    found = [outputs] if is_packed(outputs) else outputs
    if type(found) not in (tuple, list):
        return
    for output in filter(is_packed, found):
        output.longest = max((getattr(given, "longest", 0) for given in inputs), default=0)


def _again(children: Any, _: Any) -> Any:
    padded, lengths = children
    if not isinstance(lengths, torch.Tensor):  # pytree maps functions over leaves, too
        return Packed(padded, lengths)
    sequences = rnn.pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=False)
    sequences.longest = padded.shape[1]  # of the whole batch, where this is a part of it
    return sequences


_pytree.register_pytree_node(
    Packed,
    lambda node: (node.children, None),
    _again,
    flatten_with_keys_fn=lambda node: (
        [
            (_pytree.GetAttrKey("data"), node.children[0]),
            (_pytree.GetAttrKey("lengths"), node.children[1]),
        ],
        None,
    ),
)

__all__ = ["Packed", "is_packed", "keep_longest", "opened"]
