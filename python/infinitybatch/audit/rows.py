"""The rows of a batch that was given, and those that a model was called with."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _tree
from .origins import Origin, Origins


def hashes(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """A number for each row that is the same for the same values, whatever stands beside it.

    Whole numbers are summed, which rounds nothing.
    """
    flat = tensor.detach()
    if flat.is_complex():
        flat = torch.view_as_real(flat)
    flat = flat.reshape(len(flat), -1)
    if dtype is not None and not dtype.is_complex:
        flat = flat.to(dtype)
    bits = (flat.double().cpu() + 0.0).view(torch.int64)
    place = torch.arange(1, bits.shape[1] + 1, dtype=torch.int64, device="cpu")
    # Odd multipliers that differ widely, so that neither sums nor swaps go unnoticed.
    by = (place * 6364136223846793005 + 1442695040888963407) | 1
    mixed = (bits ^ (bits >> 29)) * by
    return (mixed ^ (mixed >> 31)).sum(1)


@dataclass
class Column:
    """A tensor with a row for each sample that the model, or a criterion, was called with."""

    place: str
    #: None where nothing is known of where it comes from.
    origin: Origin | None
    hash: Tensor
    dtype: torch.dtype
    shape: tuple[int, ...]
    #: Numbers in a row.
    size: int


def columns_of(
    leaves: list[Any], place: str, count: int | None, origins: list[Origin | None]
) -> list[Column]:
    """Of the tensors that have `count` rows, or a multiple (tokens)."""
    found = []
    for i, (leaf, origin) in enumerate(zip(leaves, origins, strict=True)):
        if not isinstance(leaf, Tensor) or leaf.layout != torch.strided or leaf.is_quantized:
            continue
        rows = leaf.detach()
        if origin is not None and origin.single:
            rows = rows[None]
        elif not count or not rows.ndim or not len(rows) or len(rows) % count:
            continue
        else:
            rows = rows.reshape(count, -1, *rows.shape[1:]) if len(rows) != count else rows
        size = rows[0].numel()
        found.append(
            Column(f"{place}{i}", origin, hashes(rows), leaf.dtype, tuple(leaf.shape[1:]), size)
        )
    return found


@dataclass
class Batch:
    """A batch that was given: its tensors by name, one row for each sample."""

    #: The number of its first sample, over all batches.
    first: int
    count: int
    columns: dict[str, Tensor]


def take(batch: Any, first: int, origins: Origins, kept: Any) -> Batch | None:
    """Notes where the tensors of `batch` come from; `kept` is a copy of it. None without rows."""
    samples = _samples(batch)
    if samples is not None:
        return _take_samples(samples, _samples(kept) or [], first, origins)
    leaves, _, names, _ = _tree.flatten(batch)
    count = next((len(x) for x in leaves if isinstance(x, Tensor) and x.ndim), None)
    copies = _tree.flatten(kept)[0]
    if count is None:
        arrays = [_tree.as_tensor(leaf) for leaf in leaves]
        count = next((len(a) for a in arrays if a is not None and a.ndim), None)
    if not count:
        return None
    columns: dict[str, Tensor] = {}
    for leaf, copy, name in zip(leaves, copies, names, strict=True):
        array = _tree.as_tensor(copy)
        if array is not None and array.ndim and len(array) == count:
            columns[name] = array.clone()
        elif isinstance(leaf, Tensor) and leaf.ndim and len(leaf) == count:
            if leaf.layout == torch.strided:
                columns[name] = copy.detach()
                origins.begin(leaf, name, torch.arange(first, first + count, device="cpu"))
    return Batch(first, count, columns)


def _samples(batch: Any) -> list[list[Any]] | None:
    """The leaves of each sample, of a batch that is a list of samples."""
    if type(batch) is not list or not batch or isinstance(batch[0], Tensor):
        return None
    each = [_tree.flatten(sample) for sample in batch]
    if any(one[3] != each[0][3] or len(one[0]) < 2 for one in each):
        return None
    if len(each) < 2 or not any(isinstance(leaf, Tensor) for leaf in each[0][0]):
        return None
    return [one[0] for one in each]


def _take_samples(samples: Any, kept: Any, first: int, origins: Origins) -> Batch:
    columns: dict[str, Tensor] = {}
    for place in range(len(samples[0])):
        column = [sample[place] for sample in kept]
        if not all(isinstance(c, Tensor) and c.shape == column[0].shape for c in column):
            continue
        columns[f"[{place}]"] = torch.stack([c.detach() for c in column])
        for i, sample in enumerate(samples):
            origins.begin(
                sample[place], f"[{place}]", torch.tensor(first + i, device="cpu"), single=True
            )
    return Batch(first, len(samples), columns)
