"""Compares the rows that a model saw with those of the batch that it was given."""

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .. import _tree
from .origins import Origin, Origins

#: Of which type a column's numbers are compared, and the hash of each row.
_Hash = Tensor


def hashes(tensor: Tensor, dtype: torch.dtype | None = None) -> _Hash:
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
    place = torch.arange(1, bits.shape[1] + 1, dtype=torch.int64)
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
    hash: _Hash
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
                origins.begin(leaf, name, torch.arange(first, first + count))
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
            origins.begin(sample[place], f"[{place}]", torch.tensor(first + i), single=True)
    return Batch(first, len(samples), columns)


@dataclass
class Seen:
    """What is known of the rows that the model saw in one window."""

    #: For each of the model's calls the samples' numbers in `whole`, -1 for rows that are not of
    #: the batch; None for a call of which nothing is known.
    calls: list[Tensor | None]
    #: The batch, or the batches of the window one after the other.
    whole: dict[str, Tensor]
    #: The samples' numbers over all batches.
    numbers: Tensor
    #: The column that is a call's leaf, by its place, and how it is made of the batch's.
    origins: dict[str, Origin] = field(default_factory=dict)
    #: Rows whose target is another sample's.
    mispaired: int = 0
    #: Rows in which one input is of another sample than the first one.
    unlike_inputs: int = 0
    #: Whether there are targets that are neither followed nor found.
    lost_target: bool = False

    @property
    def is_known(self) -> bool:
        return any(call is not None for call in self.calls)

    def _times(self) -> Tensor:
        known = [c for c in self.calls if c is not None]
        rows = torch.cat(known) if known else torch.zeros(0, dtype=torch.int64)
        return torch.bincount(rows[rows >= 0], minlength=len(self.numbers))

    @property
    def foreign(self) -> int:
        """Rows that are not of the batch."""
        return sum(int((c < 0).sum()) for c in self.calls if c is not None)

    @property
    def is_whole(self) -> bool:
        """Whether each row was seen, all equally often, and nothing else."""
        times = self._times()
        return bool(
            self.is_known
            and all(c is not None for c in self.calls)
            and not self.foreign
            and not self.mispaired
            and len(times)
            and int(times.min()) == int(times.max()) > 0
        )

    @property
    def missing(self) -> list[int]:
        return (self._times() == 0).nonzero().flatten().tolist()

    @property
    def repeated(self) -> list[int]:
        times = self._times()
        return (times > max(1, int(times.min()))).nonzero().flatten().tolist()

    @property
    def most(self) -> int:
        return int(self._times().max()) if len(self.numbers) else 0


def compare(batches: list[Batch], calls: list[list[Column]]) -> Seen | None:
    """Which rows of the batches the calls saw. None where the batches have no tensors."""
    if not batches or not any(batch.columns for batch in batches):
        return None
    names = [n for n in batches[0].columns if all(n in b.columns for b in batches)]
    whole = {}
    for name in names:
        parts = [b.columns[name] for b in batches]
        if len({p.shape[1:] for p in parts}) == 1:
            whole[name] = torch.cat(parts)
    numbers = torch.cat([torch.arange(b.first, b.first + b.count) for b in batches])
    seen = Seen([], whole, numbers)
    match = _Match(whole, numbers)
    for columns in calls:
        seen.calls.append(match.rows(columns, seen))
    return seen


class _Match:
    """Finds the samples of rows, by where they come from or else by their values."""

    def __init__(self, whole: dict[str, Tensor], numbers: Tensor) -> None:
        self.whole = whole
        self.numbers = numbers
        self._hashes: dict[tuple[str, torch.dtype], _Hash] = {}
        self._taken: Counter[Any] = Counter()

    def hash(self, name: str, dtype: torch.dtype) -> _Hash:
        key = (name, dtype)
        if key not in self._hashes:
            self._hashes[key] = hashes(self.whole[name], dtype)
        return self._hashes[key]

    def rows(self, columns: list[Column], seen: Seen) -> Tensor | None:
        followed: list[tuple[Column, Tensor]] = []
        others: list[Column] = []
        for column in columns:
            rows = self._followed(column)
            if rows is None:
                others.append(column)
            else:
                followed.append((column, rows))
                assert column.origin is not None
                seen.origins.setdefault(column.place, column.origin)
        if any(column.place.startswith("input") for column, _ in followed) or (
            followed and not any(column.place.startswith("input") for column in columns)
        ):
            return self._paired(followed, others, seen)
        # Which sample's target it is tells nothing of inputs that come from elsewhere.
        inputs = [column for column in others if column.place.startswith("input")]
        rows = self._by_value(inputs if followed else others, seen)
        for column, found in followed if rows is not None else ():
            seen.mispaired += int((found != rows).sum()) if column.origin else 0
        return rows

    def _followed(self, column: Column) -> Tensor | None:
        origin = column.origin
        if origin is None or origin.rows is None:
            return None
        rows = origin.rows.reshape(-1)
        if len(rows) != len(column.hash):
            if not len(column.hash) or len(rows) % len(column.hash):
                return None
            rows = rows[:: len(rows) // len(column.hash)]
        places = self._places(rows)
        if origin.same and origin.column in self.whole and bool((places >= 0).all()):
            if not torch.equal(self.hash(origin.column, column.dtype)[places], column.hash):
                return None  # written to behind our back
        return places

    def _places(self, rows: Tensor) -> Tensor:
        """Where these samples are in the whole batch."""
        order = torch.argsort(self.numbers)
        at = torch.searchsorted(self.numbers[order], rows.contiguous()).clamp(max=len(order) - 1)
        places = order[at]
        return torch.where(self.numbers[places] == rows, places, -1)

    def _paired(self, followed: Any, others: list[Column], seen: Seen) -> Tensor:
        first, rows = followed[0]
        for column, found in followed[1:]:
            others_here = int((found != rows).sum())
            if not column.place.startswith("target"):
                seen.unlike_inputs += others_here
            elif column.origin.column != first.origin.column:
                seen.mispaired += others_here
        known = rows[rows >= 0]
        for column in others:
            # What was not followed (NumPy) is at least the same sample's.
            is_found = False
            for name in self._of_size(column.size) if len(known) == len(rows) else ():
                wanted = self.hash(name, column.dtype)
                is_same = torch.equal(wanted[rows], column.hash)
                is_found = is_found or is_same
                if not is_same and self._is_rich(wanted) and torch.isin(column.hash, wanted).all():
                    seen.mispaired += int((wanted[rows] != column.hash).sum())
            if column.place.startswith("target") and not is_found:
                seen.lost_target |= any(name != first.origin.column for name in self.whole)
        return rows

    def _of_size(self, size: int) -> list[str]:
        return [n for n, t in self.whole.items() if len(t) and t[0].numel() == size]

    def _is_rich(self, found: _Hash) -> bool:
        return len(found.unique()) > 0.9 * len(found)

    def _by_value(self, columns: list[Column], seen: Seen) -> Tensor | None:
        matched: list[tuple[_Hash, _Hash]] = []
        for column in columns:
            best: tuple[float, str] = (0.0, "")
            for name in self._of_size(column.size):
                wanted = self.hash(name, column.dtype)
                share = float(torch.isin(column.hash, wanted).double().mean())
                if share > best[0] and (share == 1 or share >= 0.25 and self._is_rich(wanted)):
                    best = (share, name)
            if best[1]:
                name = best[1]
                matched.append((column.hash, self.hash(name, column.dtype)))
                shape = column.shape
                seen.origins.setdefault(
                    column.place,
                    Origin(name, None, _cast(name, column.dtype, shape), same=True),
                )
            elif column.place.startswith("target"):
                seen.lost_target = len(self.whole) > 1
        if not matched:
            return None
        keys = list(zip(*(h.tolist() for h, _ in matched), strict=True))
        wanted: dict[Any, list[int]] = {}
        for place, key in enumerate(zip(*(w.tolist() for _, w in matched), strict=True)):
            wanted.setdefault(key, []).append(place)
        if len(wanted) <= len(self.numbers) / 2:  # labels alone tell no sample
            return None
        found = []
        for key in keys:
            places = wanted.get(key)
            if places is None:
                found.append(-1)
                continue
            # Samples that are the same: the next one that was not seen yet.
            found.append(places[self._taken[key] % len(places)])
            self._taken[key] += 1
        return torch.tensor(found)


def _cast(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Any:
    return lambda columns: columns[name].to(dtype).reshape(-1, *shape)


def repeats(calls: list[list[Column]]) -> int:
    """Without a batch to compare with: rows of runs that more than one call saw.

    Single rows may well be alike; slices that begin where others have not ended are a mistake.
    """
    keys = [
        list(zip(*(column.hash.tolist() for column in columns), strict=False)) for columns in calls
    ]
    if len(keys) < 2 or not all(keys):
        return 0
    if all(len(one) == 1 for one in keys):
        return int(all(one == keys[0] for one in keys))
    pairs = itertools.pairwise(keys)
    if all(one[-1] == other[0] and len(one) > 1 and len(other) > 1 for one, other in pairs):
        return 1
    return max(_run(one, other) for one, other in itertools.combinations(keys, 2))


def _run(one: list[Any], other: list[Any]) -> int:
    """The longest run of rows that is in both, if it is two rows or more or all of a call."""
    places: dict[Any, list[int]] = {}
    for j, key in enumerate(other):
        places.setdefault(key, []).append(j)
    best = 0
    lengths: dict[int, int] = {}
    for key in one:
        now = {j: lengths.get(j - 1, 0) + 1 for j in places.get(key, ())}
        best = max([best, *now.values()])
        lengths = now
    # Where rows repeat within a call too the data has repeats of its own.
    if len(set(one)) < len(one) or len(set(other)) < len(other):
        return 0
    return best if best >= 2 or best == len(one) == len(other) else 0
