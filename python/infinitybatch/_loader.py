"""Logical batches of any loader, from the beginning of an epoch or from its middle."""

import inspect
from collections.abc import Iterator
from typing import Any

import torch

from . import _loader_parts, _random_state
from .errors import InvalidType, StateError
from .windows import _parts


class Batches:
    """One epoch after the other of a loader's batches as pairs (inputs, targets).

    An epoch that is begun again after a failure, or in another process, is begun with the random
    state that it had and read up to where it was: as native loops would have gone on.
    """

    def __init__(self, loader: Any, targets: str | None) -> None:
        self._targets = targets
        self.at_work: Any = None  # not to be begun: a trainer's, see `not_begun_twice`
        self._is_factory = callable(loader) and not hasattr(loader, "__iter__")
        if not (self._is_factory or hasattr(loader, "__iter__")):
            raise InvalidType(
                f"loader must be an iterable of batches, or a function that makes one for each "
                f"epoch, not {type(loader).__name__}; a DataLoader, a list, ib.windows(loader, ...)"
            )
        if isinstance(loader, torch.Tensor):
            raise InvalidType("loader is a tensor; give batches, as in loader=[(inputs, targets)]")
        if isinstance(loader, str | bytes | dict):
            raise InvalidType(
                f"loader is a {type(loader).__name__}; give batches, as in [(inputs, targets)]"
            )
        self.loader = loader
        #: A generator: one pass, which several epochs may share.
        self._once = not self._is_factory and _loader_parts.is_one_pass(loader)
        #: What gives the batches of the epoch at work, within windows and out of functions.
        self._source = None if self._is_factory else _loader_parts.source_of(loader)
        self._may_draw = True
        self._takes_epoch = self._is_factory and _takes_one(loader)
        self._iterator: Iterator[Any] | None = None
        self._epoch = -1
        self._begun: dict[str, Any] | None = None  # random state where the epoch at work began
        self._before: _random_state.Snapshot | _random_state.State | None = (
            None  # in front of the batch drawn last
        )
        self._failed = False  # that batch
        self._drawn = 0  # batches of the epoch at work that were handed out
        self._held: list[Any] = []  # drawn by the run before, to be handed out first
        self._taken = 0  # of a generator, in all epochs
        self._dead = False  # a generator that has raised gives nothing more
        self._restored = False
        self._missing = 0  # of a new generator: what the run before had taken
        self._shared = False  # a function gives the same loader in each epoch
        self._next: dict[str, Any] | None = None  # restored, for an epoch that is not begun yet

    def begin(self, epoch: int, skip: int) -> None:
        if self._once:
            self._begin_once(epoch, skip)
            return
        again = epoch == self._epoch and self._begun is not None
        now = _random_state.Snapshot() if again else None
        self._iterator = None
        if self._begun is not None and again:
            _random_state.restore(self._begun["default"])
            self._set_kept(self._begun, skip)
            made = self._make(epoch)
            self._set_source(self._begun, skip)
        else:
            if self._next is not None:
                self._set_kept(self._next, skip)
            begun = {"default": _random_state.Snapshot(), **self._kept_state()}
            made = self._make(epoch)
            if self._next is not None and (self._shared or not self._is_factory):
                self._set_source(self._next, skip)
            self._begun = {**begun, **self._source_state()}
            self._drawn = 0
        self._next = None
        self._epoch = epoch
        self._may_draw = _loader_parts.may_draw(self._source)
        self._iterator = iter(made)
        self._held = []
        if now is None:
            return
        for batch in range(skip):
            self._read_again(batch)
        if self._drawn > skip or self._failed:
            # With the random numbers that it was, or would have been, drawn with.
            _random_state.restore(self._before or now)
        if self._drawn > skip:
            self._held.append(self._read_again(skip))
        if not self._failed:
            _random_state.restore(now)
        self._failed = False
        self._drawn = skip

    def _read_again(self, batch: int) -> Any:
        assert self._iterator is not None
        item = next(self._iterator, None)
        if item is None:
            raise StateError(
                f"the loader ends after {batch} batches in epoch {self._epoch}, of which more had "
                f"been read before; give the loader that the run began with"
            )
        return item

    def next(self) -> tuple[Any, Any] | None:
        assert self._iterator is not None
        if self._held:
            item = self._held.pop(0)
        else:
            if self._may_draw:
                self._before = _random_state.Snapshot()
            try:
                item = next(self._iterator)
            except StopIteration:
                if self._once and self._drawn == 0:
                    raise StateError(
                        "the loader is a generator that has ended, and another epoch begins; give "
                        "a function that makes it, loader=lambda: batches()"
                    ) from None
                return None
            except BaseException:
                self._failed = True
                self._dead = inspect.isgenerator(self._iterator)
                raise
            self._taken += 1
        self._drawn += 1
        inputs, *targets = _parts(item, self._targets)
        return inputs, targets[0] if targets else None

    def state(self) -> dict[str, Any]:
        return {
            "epoch": self._epoch,
            "begun": self._begun
            and {**self._begun, "default": _random_state.values(self._begun["default"])},
            "before": _random_state.values(self._before),
            "failed": self._failed,
            **(self._next or {**self._source_state(), **self._kept_state()}),
            "shared": self._shared,
            "drawn": self._drawn,
            "taken": self._taken,
        }

    def check(self, state: dict[str, Any]) -> None:
        """Raises StateError where a generator cannot go back to that state."""
        if self._once and self._taken > state["taken"]:
            raise StateError(
                f"the loader is a generator that has given {self._taken} batches, and the state is "
                f"after {state['taken']}; give a new one, or a function that makes it"
            )

    def restore(self, state: dict[str, Any]) -> None:
        self._epoch = state["epoch"]
        self._begun = state["begun"]
        self._drawn = state["drawn"]
        self._before = state["before"]
        self._failed = state["failed"]
        self._shared = state.get("shared", False)
        self._next = {n: state[n] for n in ("own", "workers", "kept") if n in state}
        self._iterator = None
        self._held = []
        if self._once:
            self._missing = state["taken"] - self._taken
            self._restored = True

    def _begin_once(self, epoch: int, skip: int) -> None:
        self._iterator = self.loader
        if self._dead:
            raise StateError(
                "the loader is a generator that has raised and cannot go on; give a function that "
                "makes it, loader=lambda: batches()"
            )
        pending = self._drawn - skip if epoch == self._epoch else 0
        if self._restored and pending > self._missing:
            raise StateError(
                "the loader is a generator that has already given the current batch; give a new "
                "one, or a function that makes it"
            )
        self._restored = False
        if self._missing > 0:
            after = _random_state.Snapshot()
            items = [next(self.loader, None) for _ in range(self._missing)]
            if any(item is None for item in items):
                raise StateError(
                    f"the loader is a generator that ends before the {self._missing} batches that "
                    f"were read before; give a new one, or a function that makes it"
                )
            self._held = items[len(items) - pending :] if pending > 0 else []
            self._taken += self._missing
            self._missing = 0
            _random_state.restore(after)
        self._epoch = epoch
        self._drawn = skip

    def _make(self, epoch: int) -> Any:
        made = self.loader
        if self._is_factory:
            made = self.loader(epoch) if self._takes_epoch else self.loader()
            if not hasattr(made, "__iter__"):
                raise InvalidType(
                    f"the loader's function gave a {type(made).__name__}; it makes an iterable of "
                    f"batches for one epoch"
                )
            before, self._source = self._source, _loader_parts.source_of(made)
            self._shared = self._shared or self._source is before
        if self.at_work is not None and self._source is self.at_work:
            raise StateError(
                f"the loader ({type(self._source).__name__}) is in the middle of the trainer's epoch "
                f"and would be begun anew; give another one, or evaluate in on_epoch_end"
            )
        _loader_parts.set_epoch(self._source, epoch)
        return made

    def end(self) -> None:
        """Of an epoch: lets go of its iterator and the iterator's worker processes."""
        self._iterator = None

    def put_back(self, workers: bool) -> None:
        """The loader's own generators as they were when the epoch began."""
        self._iterator = None
        if self._begun is not None:
            _loader_parts.set_generators(self._source, self._begun["own"])
            if workers:
                _loader_parts.set_workers(self._source, self._begun["workers"], 0)

    def not_begun_twice(self) -> Any:
        """The loader of an epoch in its middle, where another pass over it would end that one."""
        source = self._source
        alone = _loader_parts.is_persistent(source) or hasattr(source, "__next__")
        return source if self._iterator is not None and alone and not self._once else None

    def _source_state(self) -> dict[str, Any]:
        return {
            "own": _loader_parts.states_of(self._source),
            "workers": _loader_parts.has_workers(self._source),
        }

    def _kept_state(self) -> dict[str, Any]:
        """Of what a function holds: it may draw of it, and begin it, when it is called."""
        parts = _loader_parts.kept_by(self.loader) if self._is_factory else []
        return {
            "kept": [
                (_loader_parts.states_of(part), _loader_parts.has_workers(part)) for part in parts
            ]
        }

    def _set_kept(self, state: dict[str, Any], skip: int) -> None:
        parts = _loader_parts.kept_by(self.loader) if self._is_factory else []
        for part, (own, workers) in zip(parts, state.get("kept", ()), strict=False):
            _loader_parts.set_generators(part, own)
            _loader_parts.set_workers(part, workers, skip)

    def _set_source(self, state: dict[str, Any], skip: int) -> None:
        _loader_parts.set_generators(self._source, state["own"])
        _loader_parts.set_workers(self._source, state.get("workers", False), skip)


def _takes_one(function: Any) -> bool:
    """Whether it wants the epoch's number: one argument without a default."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return False
    wanted = [
        p
        for p in parameters
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    return len(wanted) == 1
