"""Compares the rows that a model saw with those of the batch that it was given."""

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .origins import Origin
from .rows import Batch, Column, hashes


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
        rows = torch.cat(known) if known else torch.zeros(0, dtype=torch.int64, device="cpu")
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
    numbers = torch.cat([torch.arange(b.first, b.first + b.count, device="cpu") for b in batches])
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
        self._hashes: dict[tuple[str, torch.dtype], Tensor] = {}
        self._taken: Counter[Any] = Counter()

    def hash(self, name: str, dtype: torch.dtype) -> Tensor:
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

    def _is_rich(self, found: Tensor) -> bool:
        return len(found.unique()) > 0.9 * len(found)

    def _by_value(self, columns: list[Column], seen: Seen) -> Tensor | None:
        matched: list[tuple[Tensor, Tensor]] = []
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
        return torch.tensor(found, device="cpu")


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
