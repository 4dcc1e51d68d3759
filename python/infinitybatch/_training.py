"""What the C++ loop asks of Python: a trainer's loader, step, optimizer, schedule and callbacks."""

from typing import TYPE_CHECKING, Any

from . import _updates, callbacks
from ._options import MicroBatch
from .errors import StateError

if TYPE_CHECKING:
    from .trainer import Trainer


class Parts:
    """Called by name from python/src/bind_trainer.cpp."""

    def __init__(self, trainer: "Trainer") -> None:
        self._trainer = trainer
        self.in_step = False
        self.schedule_is_old = False  # of the optimizer before

    # Loader

    def begin(self, epoch: int, skip: int) -> None:
        self._trainer._batches.begin(epoch, skip)

    def next(self) -> tuple[Any, Any] | None:
        return self._trainer._batches.next()

    # Step

    def gradient(self, batch: tuple[Any, Any]) -> Any:
        self.in_step = True
        try:
            return self._trainer._batch.backward(*batch)
        finally:
            self.in_step = False

    def on_micro_batch(self, part: MicroBatch) -> None:
        trainer = self._trainer
        if trainer._on_micro_batch is not None:
            trainer._on_micro_batch(part)
        if not self.in_step:
            return
        trainer._callbacks.on_micro_batch(
            callbacks.MicroBatch(
                trainer,
                trainer.epochs_done,
                trainer.steps_done,
                part.begin,
                part.end,
                part.outputs,
                part.targets,
                part.samples,
            )
        )

    # Optimizer

    def zero_grad(self) -> None:
        self._trainer._updates.zero_grad()

    def step(self) -> None:
        self._trainer._updates.step()

    def learning_rates(self) -> tuple[float, ...]:
        return self._trainer._updates.learning_rates()

    def schedule_step(self, loss: float) -> None:
        if self._trainer._schedule is not None:
            _updates.schedule_step(self._trainer._schedule, loss)

    def hold_signals(self) -> None:
        self._trainer._updates.signals.hold()

    def forget_signals(self) -> None:
        self._trainer._updates.signals.forget()

    def release_signals(self) -> None:
        self._trainer._updates.signals.release()

    # Events

    def on_run_begin(self, *values: Any) -> None:
        if self.schedule_is_old:
            raise StateError(
                "the schedule was one of the optimizer before; make it of the new one, "
                "trainer.schedule = StepLR(trainer.optimizer, 10), or set it to None"
            )
        self._trainer._watch.look()
        self._trainer._callbacks.on_run_begin(callbacks.RunBegin(self._trainer, *values))

    def on_run_end(self, *values: Any) -> None:
        self._trainer._callbacks.on_run_end(callbacks.RunEnd(self._trainer, *values))

    def on_epoch_begin(self, *values: Any) -> None:
        self._trainer._watch.look()
        self._trainer._callbacks.on_epoch_begin(callbacks.EpochBegin(self._trainer, *values))

    def on_epoch_end(self, *values: Any) -> None:
        self._trainer._batches.end()
        event = callbacks.EpochEnd(self._trainer, *values)
        self._trainer._remember(event)
        self._trainer._callbacks.on_epoch_end(event)

    def on_batch_begin(self, epoch: int, step: int, batch: int, data: tuple[Any, Any]) -> None:
        listener = self._trainer._callbacks
        if listener.listens("on_batch_begin"):
            event = callbacks.BatchBegin(self._trainer, epoch, step, batch, *data)
            listener.on_batch_begin(event)

    def hears_batch_end(self) -> bool:
        return self._trainer._callbacks.listens("on_batch_end")

    def on_batch_end(self, *values: Any) -> None:
        self._trainer._callbacks.on_batch_end(callbacks.BatchEnd(self._trainer, *values))
