"""Logical batches out of the batches of a loader."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils import _pytree

from ._C import BatchSource
from .errors import BatchError, InvalidArgument, InvalidType
from .sources import join_pieces

Piece = tuple[Any, ...]


class Windows:
    """What `windows` gives: an iterable of logical batches, which may be gone through again."""

    def __init__(
        self, loader: Iterable[Any], batches: int | None, samples: int | None, targets: str | None
    ) -> None:
        self._loader = loader
        self._batches = batches
        self._samples = samples
        self._targets = targets

    def __iter__(self) -> Iterator[tuple[BatchSource, ...]]:
        pieces = (_parts(piece, self._targets) for piece in self._loader)
        if self._batches:
            taken = _by_batches(pieces, self._batches)
        else:
            taken = _by_samples(pieces, self._samples or 1)
        for window in taken:
            if len({len(piece) for piece in window}) > 1:
                raise BatchError("the loader gives pairs (inputs, targets), and inputs alone")
            yield tuple(join_pieces(list(column)) for column in zip(*window, strict=True))

    def __len__(self) -> int:
        """Raises TypeError where nobody knows how many there will be, as for a generator."""
        if self._batches:
            return -(-len(self._loader) // self._batches)  # type: ignore[arg-type]
        return -(-_samples_of(self._loader) // (self._samples or 1))

    def __repr__(self) -> str:
        size = f"batches={self._batches}" if self._batches else f"samples={self._samples}"
        return f"windows({type(self._loader).__name__}, {size})"


def windows(
    loader: Iterable[Any],
    *,
    batches: int | None = None,
    samples: int | None = None,
    targets: str | None = None,
) -> Windows:
    """Logical batches of so many batches of a loader, or of so many samples.

    Each sample comes once, in the loader's order; what is left in the end is a smaller last window.
    The loader is read as windows are asked for, never ahead and never from its beginning again, and
    its batches stay what and where they are: no window exists as one tensor.

    Args:
        loader: gives pairs (inputs, targets), mappings, or inputs alone; a DataLoader, a list, a
            generator, one without an end.
        batches: of the loader, in each window. Give this or `samples`.
        samples: in each window; a batch of the loader may lie in two.
        targets: of mappings the entry that holds the targets.

    Returns:
        An iterable of tuples for `VirtualBatch.backward(*window)`: sources of inputs and targets, or
        of inputs alone where the loader gives no pairs, for a model that computes its own loss. Its
        `len` is known where the loader's is.

    Raises:
        InvalidArgument: for both or none of the sizes, or one below 1.
        InvalidType: where `loader` is no iterable, or gives what is none of the above.
        BatchError: for batches of different structure.

    Example:
        for window in ib.windows(loader, samples=4096):
            optimizer.zero_grad()
            batch.backward(*window)
            optimizer.step()
    """
    if not hasattr(loader, "__iter__"):
        raise InvalidType(f"windows needs an iterable of batches, not {type(loader).__name__}")
    if (batches is None) == (samples is None):
        raise InvalidArgument(
            f"windows needs either batches= or samples=, and got "
            f"{'none' if batches is None else 'both'}: windows(loader, batches=8)"
        )
    for name, size in (("batches", batches), ("samples", samples)):
        if size is None:
            continue
        if not isinstance(size, int) or isinstance(size, bool):
            raise InvalidType(f"{name} must be an int, not {type(size).__name__}")
        if size < 1:
            raise InvalidArgument(f"{name} must be at least 1, not {size}")
    return Windows(loader, batches, samples, targets)


def _parts(piece: Any, targets: str | None) -> Piece:
    """Inputs and targets, or inputs alone."""
    if targets is None and type(piece) is tuple and len(piece) == 2:
        return piece  # asked for each batch, and whether it is a Mapping takes longer
    if isinstance(piece, Mapping):
        if targets is None:
            return (dict(piece),)
        if targets not in piece:
            raise InvalidType(
                f"targets={targets!r} is no entry of a batch of the loader, which has "
                f"{', '.join(map(repr, piece))}"
            )
        return {name: value for name, value in piece.items() if name != targets}, piece[targets]
    if targets is not None:
        raise InvalidType(
            f"targets={targets!r} names an entry of mappings, and the loader gives "
            f"{type(piece).__name__}"
        )
    if isinstance(piece, torch.Tensor):
        return (piece,)
    if isinstance(piece, tuple | list) and len(piece) in (1, 2):
        return tuple(piece)
    length = f" of {len(piece)}" if isinstance(piece, tuple | list) else ""
    raise InvalidType(
        f"each batch of the loader must be a pair (inputs, targets), a mapping, or a tensor, not "
        f"{type(piece).__name__}{length}; make pairs with a generator: "
        f"(((a, b), y) for a, b, y in loader)"
    )


def _by_batches(pieces: Iterator[Piece], count: int) -> Iterator[list[Piece]]:
    window: list[Piece] = []
    for piece in pieces:
        window.append(piece)
        if len(window) == count:
            yield window
            window = []
    if window:
        yield window


def _by_samples(pieces: Iterator[Piece], count: int) -> Iterator[list[Piece]]:
    window: list[Piece] = []
    missing = count
    for piece in pieces:
        size = _size_of(piece)
        begin = 0
        while size - begin >= missing:
            window.append(_rows(piece, begin, begin + missing))
            begin += missing
            yield window
            window, missing = [], count
        if begin < size:
            window.append(_rows(piece, begin, size))
            missing -= size - begin
    if window:
        yield window


def _has_rows(leaf: Any) -> bool:
    return len(getattr(leaf, "shape", ())) > 0  # NumPy's arrays too


def _size_of(piece: Piece) -> int:
    sizes = {len(leaf) for leaf in _pytree.tree_leaves(piece) if _has_rows(leaf)}
    if len(sizes) != 1:
        raise BatchError(
            f"a batch of the loader needs tensors of one size along their first dimension, which has "
            f"{sorted(sizes) or 'none'} here"
        )
    return sizes.pop()


def _rows(piece: Piece, begin: int, end: int) -> Piece:
    """A view."""
    if begin == 0 and end == _size_of(piece):
        return piece
    rows: Piece = _pytree.tree_map(lambda leaf: leaf[begin:end] if _has_rows(leaf) else leaf, piece)
    return rows


def _samples_of(loader: Any) -> int:
    """Raises TypeError where it is not known without reading."""
    if isinstance(loader, list | tuple):
        return sum(_size_of(_parts(piece, None)) for piece in loader)
    sampler = getattr(loader, "sampler", None)
    size = getattr(loader, "batch_size", None)
    if sampler is None or not isinstance(size, int):
        raise TypeError(
            f"nobody knows how many samples a {type(loader).__name__} gives before it is read"
        )
    dropped = getattr(loader, "drop_last", False)
    return len(loader) * size if dropped else len(sampler)
