"""What a trainer tells while it runs, and what listens.

Each event is a frozen value with a `trainer`; a `Callback` has one method for each of them and is
composed with others by `+`. The names are those of C++'s `infinitybatch::events`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ._C import StepReport
from .errors import InvalidArgument

__all__ = [
    "BatchBegin",
    "BatchEnd",
    "Callback",
    "Callbacks",
    "Checkpoint",
    "CheckpointSaved",
    "EMA",
    "EarlyStopping",
    "EpochBegin",
    "EpochEnd",
    "EvaluationBegin",
    "EvaluationEnd",
    "Event",
    "Failure",
    "MicroBatch",
    "NoiseScale",
    "RunBegin",
    "RunEnd",
]


@dataclass(frozen=True, slots=True, eq=False)
class Event:
    """Something that happened in a training. Counts of epochs and steps begin at 0."""

    #: The Trainer.
    trainer: Any

    def __repr__(self) -> str:
        shown = ", ".join(
            f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name in _SHOWN
        )
        return f"{type(self).__name__}({shown})"


#: Fields that a line has room for: no batches, outputs or trainers.
_SHOWN = {"epoch", "epochs", "step", "batch", "loss", "samples", "begin", "end", "metrics", "path"}


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RunBegin(Event):
    """A call `trainer(epochs)` or `trainer.epoch()` begins."""

    #: Whole epochs and steps done before it.
    epoch: int
    step: int
    #: How many epochs this run is to do.
    epochs: int


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class RunEnd(Event):
    """A run ends by itself or by `trainer.stop()`; an exception is a Failure instead."""

    #: Whole epochs and steps done in all runs.
    epoch: int
    step: int
    #: Whether `trainer.stop()` ended it.
    stopped: bool


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class EpochBegin(Event):
    """An epoch begins; not told again where training goes on in the middle of one."""

    epoch: int
    #: Steps done before it.
    step: int


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class EpochEnd(Event):
    """An epoch is done, its schedule's step included."""

    epoch: int
    #: Steps done in all runs, this epoch's included.
    step: int
    #: Mean over the epoch's samples, each before its step.
    loss: float
    samples: int
    #: Logical batches.
    batches: int
    #: Of its steps; evaluation is not in it.
    seconds: float
    #: Of each parameter group, from here on.
    learning_rates: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class BatchBegin(Event):
    """A logical batch is about to be computed; told again where training goes on after a failure."""

    epoch: int
    #: Steps done in all runs: the number of this one.
    step: int
    #: Number of the batch in its epoch.
    batch: int
    #: What the loader gave.
    inputs: Any
    targets: Any


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class BatchEnd(Event):
    """A logical batch's step is done, optimizer and schedule included. Told once for each step."""

    epoch: int
    #: The number of this step, counted over all runs from 0.
    step: int
    batch: int
    #: Of the whole logical batch, before its step.
    loss: float
    #: In this logical batch.
    samples: int
    #: What VirtualBatch.backward returned.
    report: StepReport
    #: Of each parameter group, as this step used them.
    learning_rates: tuple[float, ...]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class MicroBatch(Event):
    """A micro-batch's loss is known; after a restart those computed again are told again."""

    epoch: int
    step: int
    #: Rows of the logical batch: from `begin` up to and without `end`.
    begin: int
    end: int
    #: Detached, on the model's device.
    outputs: Any
    targets: Any
    #: Which samples these are: `range(begin, end)`, or their indices where `trim` sorts rows.
    samples: Sequence[int] | None = None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class EvaluationBegin(Event):
    """`trainer.evaluate` begins."""

    #: Whole epochs and steps done.
    epoch: int
    step: int


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class EvaluationEnd(Event):
    """`trainer.evaluate` has its results; model and random state are as before it."""

    epoch: int
    step: int
    #: Over all samples.
    loss: float
    samples: int
    #: Results of the metrics by their names.
    metrics: dict[str, Any]
    seconds: float


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class CheckpointSaved(Event):
    """A checkpoint lies whole at `path`."""

    epoch: int
    step: int
    path: str


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Failure(Event):
    """An exception, KeyboardInterrupt included, ends the run; it is raised after this."""

    epoch: int
    step: int
    exception: BaseException


class Callback:
    """Listens to a trainer. Override the methods of the events that you want; `a + b` is both.

    Where one of several raises, the others hear of the event all the same, then the first exception
    ends the run. `trainer.stop()` ends it after the current step.
    """

    #: Told after those beside it: it saves what they make of the event.
    _told_last = False

    def _joined(self, trainer: Any) -> None:
        """A trainer has this callback, or another model, from now on."""

    def on_run_begin(self, event: RunBegin) -> None: ...
    def on_run_end(self, event: RunEnd) -> None: ...
    def on_epoch_begin(self, event: EpochBegin) -> None: ...
    def on_epoch_end(self, event: EpochEnd) -> None: ...
    def on_batch_begin(self, event: BatchBegin) -> None: ...
    def on_batch_end(self, event: BatchEnd) -> None: ...
    def on_micro_batch(self, event: MicroBatch) -> None: ...
    def on_evaluation_begin(self, event: EvaluationBegin) -> None: ...
    def on_evaluation_end(self, event: EvaluationEnd) -> None: ...
    def on_checkpoint_saved(self, event: CheckpointSaved) -> None: ...
    def on_failure(self, event: Failure) -> None: ...

    def state_dict(self) -> dict[str, Any]:
        """What a trainer's `state_dict` keeps of this callback; nothing unless you say so."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Takes back what `state_dict` gave."""

    def listens(self, method: str) -> bool:
        """Whether the method of an event, "on_micro_batch", does anything."""
        return getattr(type(self), method) is not getattr(Callback, method) or method in vars(self)

    def __add__(self, other: "Callback") -> "Callbacks":
        if not isinstance(other, Callback):
            return NotImplemented
        return Callbacks(self, other)

    def __radd__(self, other: Any) -> "Callback":
        return self if other == 0 else NotImplemented  # sum([...])


class Callbacks(Callback):
    """Several callbacks as one, told in order, a Checkpoint after all others; composed ones are
    flattened."""

    def __init__(self, *callbacks: Callback) -> None:
        flat: list[Callback] = []
        for callback in callbacks:
            flat += callback if isinstance(callback, Callbacks) else [callback]
        self._all = tuple(flat)
        self._told = tuple(sorted(flat, key=lambda callback: callback._told_last))

    def _joined(self, trainer: Any) -> None:
        for callback in self._all:
            callback._joined(trainer)

    def __iter__(self) -> Iterator[Callback]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    def listens(self, method: str) -> bool:
        for callback in self._all:  # asked in each step: a generator costs as much as a callback
            if callback.listens(method):
                return True
        return False

    def state_dict(self) -> dict[str, Any]:
        return {"callbacks": [[name, own.state_dict()] for (name, _), own in self._named()]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """To each callback the state of the one of its class, the first to the first. Those
        without a state may be more or fewer; with one, InvalidArgument before any is loaded."""
        self.check(state)
        states = _by_class(state)
        for key, callback in self._named():
            if key in states:
                callback.load_state_dict(states[key])

    def check(self, state: dict[str, Any]) -> None:
        states, mine = _by_class(state), dict(self._named())
        without = [k for k in mine.keys() - states.keys() if mine[k].state_dict() not in _NOTHING]
        unknown = [k for k in states.keys() - mine.keys() if states[k] not in _NOTHING]
        for keys, where in ((without, "this trainer"), (unknown, "the state")):
            if keys:
                shown = ", ".join(sorted({name for name, _ in keys}))
                raise InvalidArgument(
                    f"only {where} has the callback {shown}, which has a state of its own; make "
                    f"the trainer with the callbacks that it was saved with, and others after "
                    f"loading: trainer.callbacks = [...]"
                )

    def _named(self) -> Iterator[tuple[tuple[str, int], Callback]]:
        """Each by its class and its place among those of the class."""
        counts: dict[str, int] = {}
        for callback in self._all:
            name = type(callback).__qualname__
            counts[name] = counts.get(name, -1) + 1
            yield (name, counts[name]), callback

    def __repr__(self) -> str:
        return " + ".join(map(repr, self._all)) or "Callbacks()"


#: States that say nothing.
_NOTHING: tuple[Any, ...] = ({}, None)


def _by_class(state: dict[str, Any]) -> dict[tuple[str, int], Any]:
    counts: dict[str, int] = {}
    found: dict[tuple[str, int], Any] = {}
    for name, own in state["callbacks"]:
        counts[name] = counts.get(name, -1) + 1
        found[name, counts[name]] = own
    return found


def _tells_all(method: str) -> Any:
    def tell(self: Callbacks, event: Event) -> None:
        first: BaseException | None = None
        for callback in self._told:
            try:
                getattr(callback, method)(event)
            except BaseException as error:
                first = first or error
        if first is not None:
            raise first

    tell.__name__ = method
    return tell


METHODS = tuple(name for name in vars(Callback) if name.startswith("on_"))
for _name in METHODS:
    setattr(Callbacks, _name, _tells_all(_name))

from ._noise_scale import NoiseScale  # noqa: E402 (it is a Callback)
from ._ready_callbacks import EMA, Checkpoint, EarlyStopping  # noqa: E402
