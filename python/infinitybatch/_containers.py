"""Bounded containers: `container[epoch][batch]`."""

from collections.abc import Callable, Iterator
from typing import Any

from ._selection import Selection
from ._stores import Handle, Store


class Epoch:
    """What is kept of one epoch: `[batch]` is an entry, counted from 0 as the batches were; `[-1]`
    the last that is kept."""

    def __init__(self, container: "Container", epoch: int) -> None:
        self._container = container
        self._epoch = epoch

    def _handles(self) -> dict[int, Handle]:
        return self._container._epochs.get(self._epoch, {})

    def __getitem__(self, batch: int) -> Any:
        handles = self._handles()
        number = sorted(handles)[batch] if batch < 0 and -batch <= len(handles) else batch
        if number not in handles:
            raise IndexError(
                f"{self._container.name}[{self._epoch}][{batch}] is not kept; epoch "
                f"{self._epoch} has batches {_ranges(handles)}"
            )
        return self._container._get(handles[number])

    def __iter__(self) -> Iterator[Any]:
        for batch in self.batches:
            yield self[batch]

    def __len__(self) -> int:
        return len(self._handles())

    @property
    def batches(self) -> list[int]:
        """Numbers of the batches that are kept."""
        return sorted(self._handles())

    def __repr__(self) -> str:
        return f"{self._container.name}[{self._epoch}]: {len(self)} batches kept"


class Container:
    """Entries of epochs and batches: `[epoch]` is an epoch, counted from 0 as they came; `[-1]` the
    last one of which anything is kept. Iterating goes over the epochs of which anything is kept."""

    def __init__(self, name: str, keep: Selection, store: Store | None) -> None:
        self.name = name
        self.keep = keep
        self._store = store
        self.clear()

    def clear(self) -> None:
        """Forgets all entries, and begins to choose anew."""
        for handles in getattr(self, "_epochs", {}).values():
            for handle in handles.values():
                self._store.drop(handle)  # type: ignore[union-attr]
        self._selector = self.keep.start()
        self._seen = 0
        self._epochs: dict[int, dict[int, Handle]] = {}
        self._places: dict[int, tuple[int, int]] = {}
        self._numbers: dict[tuple[int, int], int] = {}

    @property
    def seen(self) -> int:
        """How many entries have come, kept or not."""
        return self._seen

    @property
    def stores(self) -> bool:
        """Whether anything is ever kept."""
        return self._store is not None

    @property
    def wants(self) -> bool:
        """Whether the next entry will be kept."""
        return self._store is not None and self._selector.wants(self._seen)

    def add(
        self, epoch: int, batch: int, make: Callable[[], Any], *, is_copy: bool = False
    ) -> None:
        """Offers an entry; `make` is called only if it is kept. `is_copy`: what it gives is nobody
        else's, where it is to be kept or on the host."""
        kept = self.wants
        number = self._seen
        self._seen += 1
        if not kept:
            return
        leaving = self._selector.admit(number)
        if leaving is not None:
            self._forget(leaving)
        store: Store = self._store  # type: ignore[assignment]
        handle = store.take(make()) if is_copy else store.put(make())
        self._remove(epoch, batch)  # computed a second time, after training went on from before it
        self._epochs.setdefault(epoch, {})[batch] = handle
        self._places[number] = (epoch, batch)
        self._numbers[epoch, batch] = number

    def state_dict(self) -> dict[str, Any]:
        """Entries and how the choice stands, for containers of plain numbers."""
        entries = [
            (number, epoch, batch, self._epochs[epoch][batch])
            for number, (epoch, batch) in self._places.items()
        ]
        return {"seen": self._seen, "entries": entries, "selector": self._selector.state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.clear()
        self._seen = state["seen"]
        self._selector.load(state["selector"])
        for number, epoch, batch, value in state["entries"]:
            self._epochs.setdefault(epoch, {})[batch] = value
            self._places[number] = (epoch, batch)
            self._numbers[epoch, batch] = number

    def _forget(self, number: int) -> None:
        if number in self._places:  # not replaced, and there was room for it
            self._remove(*self._places[number])

    def _remove(self, epoch: int, batch: int) -> None:
        number = self._numbers.pop((epoch, batch), None)
        if number is None:
            return
        del self._places[number]
        handles = self._epochs[epoch]
        self._store.drop(handles.pop(batch))  # type: ignore[union-attr]
        if not handles:
            del self._epochs[epoch]

    def _get(self, handle: Handle) -> Any:
        return self._store.get(handle)  # type: ignore[union-attr]

    def __getitem__(self, epoch: int) -> Epoch:
        number = self.epochs[epoch] if epoch < 0 and -epoch <= len(self) else epoch
        if number not in self._epochs:
            what = f"there are epochs {_ranges(self._epochs)}" if self._epochs else "nothing is yet"
            raise IndexError(f"{self.name}[{epoch}] is not kept; {what}")
        return Epoch(self, number)

    def __iter__(self) -> Iterator[Epoch]:
        return (Epoch(self, epoch) for epoch in self.epochs)

    def __len__(self) -> int:
        return len(self._epochs)

    @property
    def epochs(self) -> list[int]:
        """Numbers of the epochs of which anything is kept."""
        return sorted(self._epochs)

    def __repr__(self) -> str:
        kept = sum(map(len, self._epochs.values()))
        return f"{self.name}: {kept} of {self._seen} entries kept, of {len(self)} epochs"


def _ranges(numbers: "dict[int, Any]") -> str:
    """ "3, 5 to 9" of {3, 5, 6, 7, 8, 9}."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    words = [str(first) if first == end else f"{first} to {end}" for first, end in runs]
    if len(words) > 6:
        words[3:-2] = ["…"]
    return ", ".join(words) or "none"
