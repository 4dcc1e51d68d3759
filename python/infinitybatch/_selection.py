"""Which entries of an endless row a container keeps."""

import random
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass
from typing import Any

from . import _checks
from .errors import InvalidArgument


class Selector(ABC):
    """Decides about entries as they come, counted from 0. What it remembers is no more than what it
    keeps."""

    @abstractmethod
    def wants(self, number: int) -> bool:
        """Whether entry `number`, the next one, is to be kept; the same however often it is asked."""

    @abstractmethod
    def admit(self, number: int) -> int | None:
        """Entry `number`, which is wanted, is there: the number of the one that leaves for it."""

    @abstractmethod
    def state(self) -> list[Any]:
        """As plain numbers, for checkpoints."""

    @abstractmethod
    def load(self, state: list[Any]) -> None: ...


@dataclass(frozen=True)
class Selection(ABC):
    """Which entries are kept: `last`, `every`, `reservoir`, `everything`."""

    @abstractmethod
    def start(self) -> Selector: ...


@dataclass(frozen=True)
class last(Selection):
    """The last `n` entries."""

    n: int

    def __post_init__(self) -> None:
        at_least_one("n", self.n)

    def start(self) -> Selector:
        return _EveryNth(1, self.n)


@dataclass(frozen=True)
class every(Selection):
    """Every `n`-th entry, beginning with the first; of those the last `at_most` (None: all)."""

    n: int
    at_most: int | None = None

    def __post_init__(self) -> None:
        at_least_one("n", self.n)
        if self.at_most is not None:
            at_least_one("at_most", self.at_most)

    def start(self) -> Selector:
        return _EveryNth(self.n, self.at_most)


@dataclass(frozen=True)
class everything(Selection):
    """All entries: grows for as long as training goes on."""

    def start(self) -> Selector:
        return _EveryNth(1, None)


@dataclass(frozen=True)
class reservoir(Selection):
    """`n` entries out of all that ever came, each equally likely to be among them.

    Args:
        n: how many.
        seed: of random numbers of its own; those of Python, NumPy and torch are left alone.
    """

    n: int
    seed: int = 0

    def __post_init__(self) -> None:
        at_least_one("n", self.n)
        _checks.whole_number("seed", self.seed, "the seed")

    def start(self) -> Selector:
        return _Reservoir(self.n, self.seed)


def at_least_one(name: str, value: object) -> int:
    number = _checks.whole_number(name, value, "entries")
    if number < 1:
        raise InvalidArgument(f"{name} is {number}; it is 1 or more")
    return number


class _EveryNth(Selector):
    def __init__(self, n: int, at_most: int | None) -> None:
        self._n = n
        self._at_most = at_most
        self._kept: deque[int] = deque()

    def wants(self, number: int) -> bool:
        return number % self._n == 0

    def admit(self, number: int) -> int | None:
        if self._at_most is None:
            return None
        self._kept.append(number)
        return self._kept.popleft() if len(self._kept) > self._at_most else None

    def state(self) -> list[Any]:
        return list(self._kept)

    def load(self, state: list[Any]) -> None:
        self._kept = deque(state)


class _Reservoir(Selector):
    """Vitter's algorithm R."""

    def __init__(self, n: int, seed: int) -> None:
        self._n = n
        self._random = random.Random(seed)
        self._kept: list[int] = []
        self._drawn = (-1, 0)  # the number of an entry, and the place that it got

    def wants(self, number: int) -> bool:
        if len(self._kept) < self._n:
            return True
        if self._drawn[0] != number:
            self._drawn = number, self._random.randrange(number + 1)
        return self._drawn[1] < self._n

    def admit(self, number: int) -> int | None:
        if len(self._kept) < self._n:
            self._kept.append(number)
            return None
        place = self._drawn[1]
        leaving, self._kept[place] = self._kept[place], number
        return leaving

    def state(self) -> list[Any]:
        return [list(self._kept), list(self._drawn), self._random.getstate()]

    def load(self, state: list[Any]) -> None:
        self._kept, (number, place), (version, words, gauss) = state
        self._drawn = number, place
        self._random.setstate((version, tuple(words), gauss))
