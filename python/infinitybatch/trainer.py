"""The training loop: the one of C++, with Python's optimizers, loaders, schedules and callbacks."""

import contextlib
import os
from collections import deque
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import nn

from . import _C, _checks, _options, _updates, callbacks
from ._agreement import refuse_other_ranks
from ._batch_dim import BatchDim
from ._behind_back import Watch
from ._evaluation import EvaluationResult, evaluate
from ._loader import Batches
from ._model import CallableModel
from ._offload import Offload, When
from ._options import MicroBatch
from ._trainer_state import HISTORY, EpochSummary, restore, state_of, write
from ._training import Parts
from ._trim import Trim
from ._updates import Updates
from .callbacks import Callback, Callbacks, EpochEnd
from .errors import InvalidArgument, InvalidType, StateError, Unsupported
from .virtual_batch import VirtualBatch
from .wrap import wrap


class Trainer:
    """Trains a model on logical batches of any size, inside a memory budget.

    Each batch that the loader gives is one logical batch: one exact gradient and one step of the
    optimizer. The loop is that of the command line and of C++.

        trainer = ib.Trainer(model, nn.CrossEntropyLoss(), optimizer, loader, memory_budget="4GiB")
        trainer(200)                            # 200 epochs
        trainer.evaluate(test_loader, {"accuracy": accuracy}).metrics

    An exception, Ctrl-C or `stop` at any event leaves a step done, with its optimizer and schedule,
    or not begun: `trainer(...)` goes on with the same bits.

    Args:
        model, loss: as of `VirtualBatch`.
        optimizer: one of torch.optim over the model's parameters.
        loader: gives logical batches as pairs (inputs, targets), mappings, or inputs alone: a
            DataLoader, a list, `ib.windows(loader, samples=4096)`; a function that makes such an
            iterable for each epoch, called with the epoch's number if it takes one; a generator,
            for one pass.
        targets: of mappings the entry that holds the targets.
        schedule: one of torch.optim.lr_scheduler, over the same optimizer.
        schedule_by: whether `schedule` goes on after each "epoch" or each "step".
        clip_norm: the most that the norm of all gradients together may be, after unscaling.
        callbacks: a Callback, or a list of them, told in order.
        batches_per_epoch: ends an epoch after so many batches, for loaders without an end.
        memory_budget, micro_batch_size, micro_batch_tokens, trim, batch_dim,
            retained_micro_batches, use_tapes, static_graph, checkpoint_segments, offload, match_native_rng, batch_coupling,
            on_micro_batch, grad_scaler: as of `VirtualBatch`. The scaler's `step` and `update` are called here.
        keep_outputs: as of `VirtualBatch`; they are in `event.report.outputs` of on_batch_end.

    Raises:
        InvalidType: for parts that cannot be used.
        InvalidArgument: for options out of range, an optimizer without a parameter of the model.
        Unsupported: in one of several processes (`WORLD_SIZE` of torchrun, torch.distributed).
    """

    @_options.of_trainer
    def __init__(
        self,
        model: nn.Module | CallableModel,
        loss: Any,
        optimizer: Any,
        loader: Any,
        *,
        targets: str | None = None,
        schedule: Any = None,
        schedule_by: Literal["epoch", "step"] = "epoch",
        clip_norm: float | None = None,
        callbacks: Callback | list[Callback] | tuple[Callback, ...] | None = None,
        batches_per_epoch: int | None = None,
        memory_budget: int | float | str | None = None,
        micro_batch_size: int | None = None,
        micro_batch_tokens: int | None = None,
        trim: Trim | None = None,
        batch_dim: BatchDim | None = None,
        retained_micro_batches: int = 0,
        use_tapes: bool = True,
        static_graph: bool = False,
        checkpoint_segments: int | None = None,
        offload: When | Offload = "auto",
        match_native_rng: bool = False,
        batch_coupling: Literal["exact", "per_micro_batch"] = "exact",
        keep_outputs: bool = False,
        on_micro_batch: Callable[[MicroBatch], object] | None = None,
        grad_scaler: Any = None,
    ) -> None:
        self._options = _options.checked(locals())
        refuse_other_ranks("Trainer")
        self._on_micro_batch = self._options.pop("on_micro_batch")
        _checks.one_of("schedule_by", schedule_by, "epoch", "step")
        batches_per_epoch = _checks.optional_whole_number(
            "batches_per_epoch", batches_per_epoch, of="batches"
        )
        self._model = model
        self._loss = loss
        self._targets = targets
        self._callbacks = _composed(callbacks)
        self._parts = Parts(self)
        self._batch = self._batch_of(model, loss, self._callbacks)
        self._callbacks._joined(self)
        self._updates = Updates(optimizer, clip_norm, grad_scaler)
        _updates.check_schedule(schedule, optimizer)
        self._schedule = schedule
        self._batches = Batches(loader, targets)
        self._watch = Watch(model, optimizer)
        self._loop = _C.Trainer(self._parts, schedule_by, batches_per_epoch)
        self._schedule_by = schedule_by
        self._scaled = False  # by backward(), since the last step
        self._history: deque[EpochSummary] = deque(maxlen=HISTORY)
        self._this_run: deque[EpochSummary] = deque(maxlen=HISTORY)
        self._wrapped: Any = None

    # Training

    def __call__(self, epochs: int) -> list[EpochSummary]:
        """Trains until `epochs` more epochs are done; one that a run before has left in its middle
        is gone on with and counts as one.

        Returns:
            Summaries of the epochs that this run has ended, the last 1,000 at most.

        Raises:
            InvalidArgument: for epochs below 0.
            StateError: from a callback; for a loader that gives no batch, or that cannot be begun
                again; where parameters are no longer the optimizer's.

            And whatever `VirtualBatch.backward`, the parts and the callbacks raise.
        """
        epochs = _checks.whole_number("epochs", epochs, of="epochs")
        if not self._loop.running:
            self._this_run.clear()
            self._scaled = False
        inside = self._loop.running
        signals = self._updates.signals
        installed = signals.install()
        try:
            self._loop.run(epochs)
        except BaseException as error:
            if not inside:
                self._tell_failure(error)
            raise
        finally:
            if installed:
                signals.uninstall()
        return list(self._this_run)

    train = __call__

    def epoch(self) -> EpochSummary | None:
        """Trains to the end of one epoch. None where a callback has stopped it before."""
        done = self(1)
        return done[-1] if done else None

    def stop(self) -> None:
        """Ends the run after the current step; between runs, the next one before it trains. A later
        run goes on there."""
        self._loop.stop()

    @property
    def epochs_done(self) -> int:
        return self._loop.epochs_done

    @property
    def steps_done(self) -> int:
        return self._loop.steps_done

    @property
    def running(self) -> bool:
        return self._loop.running

    @property
    def history(self) -> list[EpochSummary]:
        """The last 1,000 epochs of all runs."""
        return list(self._history)

    # Stages apart

    def zero_grad(self) -> None:
        """Clears the gradients of the optimizer's parameters."""
        self._scaled = False
        self._updates.zero_grad()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's outputs for a whole logical batch, computed in micro-batches by `wrap` with the
        trainer's options; any loss of them can be given to `backward`."""
        if self._wrapped is None:
            if self._options["checkpoint_segments"] is not None:
                raise Unsupported(
                    "forward computes whole micro-batches, and checkpoint_segments cuts them; "
                    "train with trainer(epochs), or leave checkpoint_segments out"
                )
            for_wrap = {n: v for n, v in self._options.items() if n not in _NOT_FOR_WRAP}
            self._wrapped = wrap(self._model, **for_wrap)
        return self._wrapped(*args, **kwargs)

    def loss(self, outputs: Any, targets: Any = None) -> torch.Tensor:
        """The loss of the whole batch's outputs; outputs in a tuple, and targets, become arguments
        as `VirtualBatch` gives them."""
        if not callable(self._loss):
            raise Unsupported(
                f"{self._batch._step_loss.name} is a loss for trainer(epochs), which gives it "
                f"micro-batches; compute the loss of outputs with one of torch.nn"
            )
        return self._loss(outputs) if targets is None else self._loss(outputs, targets)

    def backward(self, loss: torch.Tensor) -> None:
        """Adds the gradient of `loss` to `.grad`, scaled where there is a grad_scaler."""
        scaler = self._updates.scaler
        (loss if scaler is None else scaler.scale(loss)).backward()
        self._scaled = True

    def step(self, loss: float | torch.Tensor | None = None) -> None:
        """One optimizer step from the gradients that are there, clipped; counted, and followed by a
        schedule that goes by steps (ReduceLROnPlateau reads `loss`). No event is told.

        Raises:
            StateError: no gradient; ReduceLROnPlateau by steps without `loss`; a grad_scaler and no
                `backward` of this trainer since the last step, whose gradient alone is scaled.
        """
        _updates.check_own_step(self, loss)
        value = loss.detach() if isinstance(loss, torch.Tensor) else loss
        self._loop.step(float("nan") if value is None else float(value))
        self._scaled = False

    # Measuring

    def evaluate(self, loader: Any, metrics: Any = None) -> EvaluationResult:
        """Loss and metrics over a loader, forward only, in evaluation mode and under the budget.

        Gradients, training mode of each module, buffers and random state are as before afterwards.
        The budget is in force for forward and loss, in slices that are halved until they fit. Of
        `ib.make_model(function)` modes are yours to set; of a module, or a method of one, they are
        set here.

        Args:
            loader: as of the trainer; a generator is read to its end.
            metrics: one, a list, or a dict by names. A callable is called as metric(outputs,
                targets) on each slice and gives a mean over it; an object with `update` and
                `compute` (torchmetrics) is reset, updated with each slice, and computed. A loss that
                needs the whole batch keeps its outputs for as long, nothing else does.

        Raises:
            BudgetExceeded: where a single sample does not fit.
            StateError: where the loader gives no batch.
        """
        return evaluate(self, loader, metrics)

    # State

    def state_dict(self) -> dict[str, Any]:
        """All that training needs to go on elsewhere: model, criterion and every other parameter of
        the optimizer, optimizer, schedule, scaler, callbacks, counts, position in the epoch and
        random state; copies, which training leaves alone. `torch.load` reads it with weights only.

        Raises:
            StateError: within a step (on_micro_batch); on_batch_end is the place.
        """
        return state_of(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on where `state_dict` was called: the next run's bits are those that followed there.

        The loader is begun anew and read up to its place. Loaders whose order comes from torch's,
        NumPy's or Python's default random numbers, or from their own torch.Generator, give the same
        batches; others must by themselves. Callbacks are told apart by class and order; those
        without a state may be added or left out.

        Raises:
            StateError: while the trainer runs.
            InvalidArgument: for a state of other parts, before anything is loaded.
        """
        restore(self, state)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `state_dict` to a file, whole or not at all.

        Raises:
            StateError: within a step; where a part's state is none that `load` reads.
        """
        name = os.fspath(path)
        folder = os.path.dirname(name)
        if folder and not os.path.isdir(folder):
            raise InvalidArgument(
                f"path is '{name}': there is no folder {folder}: mkdir -p {folder}"
            )
        beside = f"{name}.part"
        try:
            write(state_of(self, cloned=False), beside)
            os.replace(beside, name)
        except BaseException:
            with contextlib.suppress(OSError):
                os.remove(beside)
            raise
        self._callbacks.on_checkpoint_saved(
            callbacks.CheckpointSaved(self, self.epochs_done, self.steps_done, name)
        )

    def load(self, path: str | os.PathLike[str]) -> None:
        """Reads what `save` has written; see `load_state_dict`."""
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:
            raise InvalidArgument(
                f"path is '{os.fspath(path)}', which cannot be read as a checkpoint of a Trainer "
                f"({type(error).__name__}); give a file that trainer.save(path) wrote"
            ) from error
        restore(self, state, copied=True)

    # Parts

    @property
    def model(self) -> Any:
        return self._model

    @model.setter
    def model(self, model: Any) -> None:
        """Another one, with the optimizer's parameters or before the optimizer is set."""
        self._refuse_while_running("model")
        batch = self._batch_of(model, self._loss, self._callbacks)
        self._model = model
        self._watch.model = model
        self._batch = batch
        self._wrapped = None
        self._callbacks._joined(self)

    @property
    def criterion(self) -> Any:
        return self._loss

    @criterion.setter
    def criterion(self, loss: Any) -> None:
        self._refuse_while_running("criterion")
        self._batch = self._batch_of(self._model, loss, self._callbacks)
        self._loss = loss

    @property
    def optimizer(self) -> Any:
        return self._updates.optimizer

    @optimizer.setter
    def optimizer(self, optimizer: Any) -> None:
        """A schedule of the old one has to be set anew, or to None, before the next run."""
        self._refuse_while_running("optimizer")
        updates = Updates(optimizer, self._updates.clip_norm, self._updates.scaler)
        self._watch = Watch(self._model, optimizer)
        self._updates = updates
        self._parts.schedule_is_old |= self._schedule is not None
        self._schedule = None

    @property
    def schedule(self) -> Any:
        return self._schedule

    @schedule.setter
    def schedule(self, schedule: Any) -> None:
        self._refuse_while_running("schedule")
        _updates.check_schedule(schedule, self.optimizer)
        self._schedule = schedule
        self._parts.schedule_is_old = False

    @property
    def loader(self) -> Any:
        return self._batches.loader

    @loader.setter
    def loader(self, loader: Any) -> None:
        """An epoch that is in its middle goes on with as many batches of the new one skipped."""
        self._refuse_while_running("loader")
        batches = Batches(loader, self._targets)
        state = self._loop.state()
        if state["in_epoch"] and state["batch"] > 0:
            raise StateError(
                f"the current epoch has {state['batch']} of its batches done; end it with "
                f"trainer.epoch() before the loader is another"
            )
        self._batches = batches
        self._loop.restore(state)

    @property
    def callbacks(self) -> Callbacks:
        return self._callbacks

    @callbacks.setter
    def callbacks(self, listeners: Any) -> None:
        self._refuse_while_running("callbacks")
        composed = _composed(listeners)
        self._batch = self._batch_of(self._model, self._loss, composed)
        self._callbacks = composed
        composed._joined(self)

    def __repr__(self) -> str:
        return (
            f"Trainer({type(self._model).__name__}, {self._batch._step_loss.name}, "
            f"{type(self.optimizer).__name__}, epochs_done={self.epochs_done}, "
            f"steps_done={self.steps_done})"
        )

    def __reduce__(self) -> Any:
        raise Unsupported(
            "a Trainer cannot be copied or pickled, for its loader is in use: trainer.save(path), "
            "and load(path) of a trainer that is made as this one was"
        )

    def _batch_of(self, model: Any, loss: Any, listeners: Callbacks) -> VirtualBatch:
        listens = self._on_micro_batch is not None or listeners.listens("on_micro_batch")
        return VirtualBatch(
            model,
            loss,
            **self._options,
            on_micro_batch=self._parts.on_micro_batch if listens else None,
        )

    def _refuse_while_running(self, name: str) -> None:
        if hasattr(self, "_loop") and self._loop.running:
            raise StateError(f"{name} cannot be another one while the trainer runs: stop() first")

    def _remember(self, event: EpochEnd) -> None:
        summary = EpochSummary(event.epoch, event.loss, event.samples, event.batches, event.seconds)
        self._history.append(summary)
        self._this_run.append(summary)

    def _tell_failure(self, error: BaseException) -> None:
        try:
            self._callbacks.on_failure(
                callbacks.Failure(self, self.epochs_done, self.steps_done, error)
            )
        except Exception as another:
            error.add_note(f"on_failure of a callback raised {type(another).__name__}: {another}")


_NOT_FOR_WRAP = {"checkpoint_segments", "keep_outputs", "grad_scaler"}


def _composed(listeners: Any) -> Callbacks:
    if listeners is None:
        listeners = []
    given = list(listeners) if isinstance(listeners, list | tuple) else [listeners]
    for callback in given:
        if not isinstance(callback, Callback):
            described = getattr(callback, "__name__", type(callback).__name__)
            raise InvalidType(
                f"callbacks must be Callback objects, not {described}: override the method of an "
                f"event in a class of your own, class Mine(ib.Callback)"
            )
    return Callbacks(*given)
