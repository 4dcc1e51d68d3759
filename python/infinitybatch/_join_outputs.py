"""Outputs of micro-batches as those of their logical batch."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree

from ._stores import Handle, Store
from .errors import StateError, Unsupported


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """Rows of a logical batch, where a store keeps them."""

    begin: int
    end: int
    handle: Handle
    #: Shape of the first tensor whose rows are not in dimension 0.
    odd: list[int] | None


class PieceStore(Store):
    """Keeps outputs micro-batch by micro-batch as another store does, and joins them when they are
    asked for: not all of a batch need be in memory before."""

    def __init__(self, inner: Store) -> None:
        self._inner = inner

    def piece(self, begin: int, end: int, outputs: Any) -> Piece:
        leaves = [leaf for leaf in _pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
        odd = [list(leaf.shape) for leaf in leaves if leaf.dim() == 0 or len(leaf) != end - begin]
        return Piece(begin, end, self._inner.put(outputs), odd[0] if odd else None)

    def put(self, value: Any) -> Handle:
        return [Piece(0, 0, self._inner.put(value), None)]

    def get(self, handle: Handle) -> Any:
        outputs = [self._inner.get(piece.handle) for piece in handle]
        if len(outputs) == 1:
            return outputs[0]
        columns, layouts = zip(*map(_pytree.tree_flatten, outputs), strict=True)
        if any(layout != layouts[0] for layout in layouts):
            raise Unsupported(
                "micro-batches gave outputs of different structure, which a history cannot join: "
                "hand keep_outputs=True to the trainer"
            )
        leaves = [_join(column) for column in zip(*columns, strict=True)]
        return _pytree.tree_unflatten(leaves, layouts[0])

    def drop(self, handle: Handle) -> None:
        for piece in handle:
            self._inner.drop(piece.handle)


def whole(pieces: list[Piece], samples: int) -> list[Piece]:
    """Pieces in order. Raises StateError where rows are missing, Unsupported where they cannot be
    joined."""
    pieces = sorted(pieces, key=lambda piece: piece.begin)
    ends = [0, *(piece.end for piece in pieces)]
    begins = [*(piece.begin for piece in pieces), samples]
    if begins != ends:
        raise StateError(
            f"the history saw outputs of {sum(p.end - p.begin for p in pieces)} of {samples} samples "
            f"of this batch: hand keep_outputs=True to the trainer"
        )
    odd = next((piece for piece in pieces if piece.odd is not None), None)
    if odd is not None and len(pieces) > 1:
        raise Unsupported(
            f"an output of shape {odd.odd} does not have its {odd.end - odd.begin} samples in the "
            f"first dimension, so that a history cannot join it: hand keep_outputs=True to the trainer"
        )
    return pieces


def _join(leaves: tuple[Any, ...]) -> Any:
    return torch.cat(leaves) if isinstance(leaves[0], Tensor) else leaves[0]
