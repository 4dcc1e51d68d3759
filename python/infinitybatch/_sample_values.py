"""What tells samples apart that a loss may weigh differently: labels, and other numbers of samples."""

from collections.abc import Iterator
from typing import Any

import torch

Inputs = dict[str, Any]

#: Values of one input that are told apart; an input that has more of them is no label that a loss
#: would weigh by a table.
FEW = 64

#: Samples that are looked at together, whatever the size of micro-batches.
AT_ONCE = 4


def size_of(inputs: Inputs) -> int:
    return next(len(v) for v in inputs.values() if isinstance(v, torch.Tensor) and v.dim())


class Values:
    """Labels, and other inputs with one number for each sample, that were seen: a loss may weigh
    samples by a table of them."""

    def __init__(self) -> None:
        self._seen: dict[str, set[float]] = {}
        self._many: set[str] = set()  # inputs with more values than a table has

    def unlike(self, pieces: list[Inputs], labelled: torch.Tensor | None) -> Iterator[list[int]]:
        """Samples with values that none had so far, beside one without such, until there are none;
        AT_ONCE at most.

        Args:
            labelled: zero for samples without any label, of which there is no mean.
        """
        rows = {
            i: row
            for i, row in enumerate(self._values(pieces))
            if row and (labelled is None or labelled[i] > 0)
        }
        known = {(name, value) for name, values in self._seen.items() for value in values}
        fresh: list[int] = []
        for i in rows:
            if not rows[i] <= known:
                fresh.append(i)
                known |= rows[i]
        for name, value in known:
            self._seen.setdefault(name, set()).add(value)
        if fresh:
            first, *others = [*[i for i in rows if i not in fresh][:1], *fresh]
            for i in range(0, len(others), AT_ONCE - 1):
                yield [first, *others[i : i + AT_ONCE - 1]]

    def _values(self, pieces: list[Inputs]) -> list[set[tuple[str, float]]]:
        """What may be weighed, of each sample."""
        found: list[set[tuple[str, float]]] = []
        for piece in pieces:
            rows: list[set[tuple[str, float]]] = [set() for _ in range(size_of(piece))]
            for name, value in piece.items():
                if self._may_be_weighed(name, value, len(rows)):
                    for row, own in zip(rows, value.reshape(len(rows), -1).tolist(), strict=True):
                        row.update((name, each) for each in own if each == each and each != -100)
            found += rows
        return found

    def _may_be_weighed(self, name: str, value: Any, size: int) -> bool:
        if name in self._many or not isinstance(value, torch.Tensor) or value.dim() == 0:
            return False
        labels = name == "labels" and not value.is_floating_point()
        if len(value) != size or value.is_complex() or not (value.dim() == 1 or labels):
            return False
        if len(self._seen.get(name, set()).union(value.unique().tolist())) > FEW:
            self._many.add(name)
            return False
        return True


__all__ = ["Values", "size_of"]
