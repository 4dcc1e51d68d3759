"""Logical batches that are read piece by piece."""

import bisect
from collections.abc import Callable, Iterable
from itertools import accumulate
from typing import Any

import torch
from torch.utils import _pytree
from torch.utils.data import default_collate

from ._C import BatchSource
from ._tree import as_tensor
from .errors import BatchError, InvalidType


def from_dataset(
    dataset: Any, collate_fn: Callable[[list[Any]], Any] = default_collate
) -> tuple[BatchSource, BatchSource]:
    """Inputs and targets of a dataset of pairs, read as micro-batches ask for them.

    Args:
        dataset: `len(dataset)` samples; `dataset[i]` is a pair (input, target) and gives the same
            values each time it is asked (denominators and restarts ask again).
        collate_fn: makes one pair (inputs, targets) of a list of samples, as a DataLoader's does.

    Returns:
        Two BatchSources over all samples.

    Example:
        batch.backward(*ib.from_dataset(dataset))
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise InvalidType(
            f"a dataset needs __len__ and __getitem__, which {type(dataset).__name__} lacks; read an "
            f"iterable dataset into a list, or write a BatchSource"
        )
    last: dict[tuple[int, int], tuple[Any, Any]] = {}

    def pair(begin: int, end: int) -> tuple[Any, Any]:
        # Inputs and targets of a micro-batch are asked for one after the other: read them once.
        if (begin, end) not in last:
            last.clear()
            collated = collate_fn([dataset[i] for i in range(begin, end)])
            if not isinstance(collated, (tuple, list)) or len(collated) != 2:
                raise InvalidType(
                    f"collate_fn must give a pair (inputs, targets), not "
                    f"{type(collated).__name__}; name what is what with a collate_fn of your own"
                )
            last[begin, end] = (collated[0], collated[1])
        return last[begin, end]

    size = len(dataset)
    return (
        BatchSource(size, lambda begin, end: pair(begin, end)[0]),
        BatchSource(size, lambda begin, end: pair(begin, end)[1]),
    )


def from_batches(batches: Iterable[tuple[Any, Any]]) -> tuple[BatchSource, BatchSource]:
    """Inputs and targets of one logical batch that comes in pieces, from a DataLoader for example.

    The pieces are kept where they are (on the host, mostly) and joined along their first dimension
    as micro-batches ask for rows; micro-batches need not have the pieces' sizes.

    Args:
        batches: pairs (inputs, targets) of the same structure. An iterator is read to its end.

    Returns:
        Two BatchSources over all samples.

    Raises:
        BatchError: for no piece at all, and for pieces of different structure or without samples.

    Example:
        batch.backward(*ib.from_batches(loader))  # all of an epoch; `windows` gives parts of it
    """
    if not hasattr(batches, "__iter__"):
        raise InvalidType(
            f"pieces must be an iterable of pairs (inputs, targets), not {type(batches).__name__}: "
            f"from_batches(loader)"
        )
    pieces = [_check_pair(piece) for piece in batches]
    if not pieces:
        raise BatchError("there is no piece to make a batch of: the iterable was empty")
    inputs, targets = zip(*pieces, strict=True)
    return join_pieces(list(inputs)), join_pieces(list(targets))


def _check_pair(piece: Any) -> tuple[Any, Any]:
    if not isinstance(piece, (tuple, list)) or len(piece) != 2:
        raise InvalidType(
            f"each piece must be a pair (inputs, targets), not {type(piece).__name__}; make pairs "
            f"with a generator: ((b['x'], b['y']) for b in loader)"
        )
    return piece[0], piece[1]


def join_pieces(pieces: list[Any]) -> BatchSource:
    """One source over the rows of all, which stay where they are."""
    flat = [_pytree.tree_flatten(piece) for piece in pieces]
    spec = flat[0][1]
    leaves = [[as_tensor(leaf, leaf) for leaf in piece] for piece, _ in flat]
    sizes = []
    for i, (piece, (_, structure)) in enumerate(zip(leaves, flat, strict=True)):
        if structure != spec:
            raise BatchError(f"piece {i} has another structure than piece 0: {structure}")
        lengths = {len(leaf) for leaf in piece if isinstance(leaf, torch.Tensor) and leaf.dim()}
        if len(lengths) != 1 or 0 in lengths:
            raise BatchError(
                f"piece {i} needs tensors of one size along their first dimension, which has "
                f"{sorted(lengths) or 'none'} here"
            )
        sizes += lengths
    ends = list(accumulate(sizes))

    def rows(begin: int, end: int) -> Any:
        first, last = bisect.bisect_right(ends, begin), bisect.bisect_left(ends, end)
        start = ends[first] - sizes[first]
        columns = zip(*leaves[first : last + 1], strict=True)
        return _pytree.tree_unflatten(
            [_rows_of(column, begin - start, end - start) for column in columns], spec
        )

    return BatchSource(ends[-1], rows)


def _rows_of(column: tuple[Any, ...], begin: int, end: int) -> Any:
    """Rows of one leaf's consecutive pieces; joined only where they lie in more than one."""
    if not isinstance(column[0], torch.Tensor) or column[0].dim() == 0:
        return column[0]
    if len(column) == 1:
        return column[0][begin:end]
    if len({leaf.shape[1:] for leaf in column}) > 1:
        shapes = " and ".join(str(list(leaf.shape)) for leaf in column)
        raise BatchError(
            f"pieces of shapes {shapes} cannot be joined, and a micro-batch lies in both; pad all "
            f"pieces alike, or let micro_batch_size divide their sizes"
        )
    return torch.cat(column)[begin:end]
