"""Callbacks that are ready to use; public as members of `infinitybatch.callbacks`."""

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from . import _checks
from ._checks import optional_whole_number, whole_number
from ._signals import held_back
from .callbacks import BatchEnd, Callback, EpochEnd, EvaluationEnd, RunBegin, RunEnd
from .errors import InvalidArgument, InvalidType, StateError


class EarlyStopping(Callback):
    """Stops a run when a value has not fallen for some epochs: the run at work, or where the
    evaluation was between runs, the next one before it trains. A run after that waits anew.

    Args:
        patience: epochs (or evaluations) without a better value, after which the run stops.
        monitor: "loss" is an epoch's mean loss; "evaluation" the loss of `trainer.evaluate`, and any
            other name a metric there.
        min_delta: by how much a value has to be better.
        mode: "min" where less is better, "max" where more is.
    """

    def __init__(
        self, patience: int, monitor: str = "loss", min_delta: float = 0.0, mode: str = "min"
    ) -> None:
        if whole_number("patience", patience, of="epochs") < 1:
            raise InvalidArgument(f"patience is {patience}; it is 1 or more epochs")
        if mode not in ("min", "max"):
            raise InvalidArgument(f'mode is {mode!r}; it is "min" or "max"')
        self.patience = patience
        self.monitor = monitor
        self.min_delta = min_delta
        self._sign = 1.0 if mode == "min" else -1.0
        self.best = math.inf * self._sign
        #: Since the best value.
        self.waited = 0
        self._stops = False  # a run that has not ended yet

    def on_run_begin(self, event: RunBegin) -> None:
        if self._stops:
            event.trainer.stop()
        elif self.waited >= self.patience:
            self.waited = 0

    def on_run_end(self, event: RunEnd) -> None:
        self._stops = False

    def on_epoch_end(self, event: EpochEnd) -> None:
        if self.monitor == "loss":
            self._see(event.loss, event.trainer)

    def on_evaluation_end(self, event: EvaluationEnd) -> None:
        if self.monitor == "evaluation":
            self._see(event.loss, event.trainer)
        elif self.monitor != "loss":
            if self.monitor not in event.metrics:
                names = ", ".join(map(repr, event.metrics)) or "none"
                raise InvalidArgument(
                    f"monitor is {self.monitor!r}, and the evaluation has {names}; name one of its "
                    f"metrics"
                )
            self._see(float(event.metrics[self.monitor]), event.trainer)

    def _see(self, value: float, trainer: Any) -> None:
        if (value - self.best) * self._sign < -self.min_delta:
            self.best = value
            self.waited = 0
            return
        self.waited += 1
        if self.waited >= self.patience:
            self._stops = True
            trainer.stop()

    def state_dict(self) -> dict[str, Any]:
        return {
            "monitor": self.monitor,
            "best": self.best,
            "waited": self.waited,
            "stops": self._stops,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("monitor", self.monitor) != self.monitor:
            raise InvalidArgument(
                f"the state is of an EarlyStopping that monitors {state['monitor']!r}, and this one "
                f"monitors {self.monitor!r}; give the callbacks in the order of the saved trainer"
            )
        self.best, self.waited = state["best"], state["waited"]
        self._stops = state.get("stops", False)


class EMA(Callback):
    """Averages of a model's parameters, `decay * average + (1 - decay) * now` after each step, in
    float32 at least; buffers are the model's own.

        ema = ib.callbacks.EMA(0.999)
        trainer = ib.Trainer(..., callbacks=ema)
        with ema.applied():
            trainer.evaluate(loader)
    """

    def __init__(self, decay: float = 0.999) -> None:
        if isinstance(decay, bool) or not isinstance(decay, int | float):
            raise InvalidType(f"decay must be a number, not {type(decay).__name__}")
        if not 0 <= decay < 1:
            raise InvalidArgument(f"decay is {decay:g}; it is at least 0 and below 1")
        self.decay = decay
        #: By the parameters' names.
        self.averages: dict[str, torch.Tensor] = {}
        self._model: Any = None
        self._applied = False

    def _joined(self, trainer: Any) -> None:
        self._model = trainer.model

    @torch.no_grad()
    def on_run_begin(self, event: RunBegin) -> None:
        if self._applied:
            raise StateError("averages are applied; train after `with ema.applied()` has ended")
        self._model = event.trainer.model
        for name, parameter in self._model.named_parameters():
            like = {"device": parameter.device, "dtype": _wide(parameter.dtype)}
            average = self.averages.get(name)
            self.averages[name] = (
                parameter.detach().to(copy=True, **like) if average is None else average.to(**like)
            )

    @torch.no_grad()
    def on_batch_end(self, event: BatchEnd) -> None:
        with held_back():
            for name, parameter in self._model.named_parameters():
                average = self.averages[name]
                average.lerp_(parameter.to(average.dtype), 1 - self.decay)

    @contextmanager
    def applied(self, model: nn.Module | None = None) -> Iterator[nn.Module]:
        """The model, the trainer's unless given, with the averages in place of its parameters, which
        come back at the end.

        Raises:
            StateError: before a run or `load`, or within `applied`; averages of another model.
        """
        if not self.averages or self._applied:
            why = "they are applied already" if self._applied else "no run has begun"
            raise StateError(f"there are no averages to apply: {why}; train first, or load")
        model = self._model if model is None else model
        if model is None:
            raise StateError("these averages have no model: applied(model), or give them a trainer")
        parameters = dict(model.named_parameters())
        for name, parameter in parameters.items():
            average = self.averages.get(name)
            if average is None or average.shape != parameter.shape:
                raise StateError(f"averages are of another model: there is none for its {name}")
        self._applied = True
        own: dict[str, torch.Tensor] = {}
        try:
            with held_back():
                for name, parameter in parameters.items():
                    own[name] = parameter.detach().clone()
                    parameter.detach().copy_(self.averages[name])
            yield model
        finally:
            with held_back():
                for name, value in own.items():
                    parameters[name].detach().copy_(value)
                self._applied = False

    def state_dict(self) -> dict[str, Any]:
        return {"decay": self.decay, "averages": dict(self.averages)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state.get("decay", self.decay) != self.decay:
            raise InvalidArgument(
                f"the state is of an EMA with decay {state['decay']:g}, and this one has "
                f"{self.decay:g}; give the callbacks in the order of the saved trainer (or set "
                f"ema.decay after loading)"
            )
        self.averages = {name: value.clone() for name, value in state["averages"].items()}


def _wide(dtype: torch.dtype) -> torch.dtype:
    """What an average is kept in: small changes would be lost in half precision."""
    return torch.promote_types(dtype, torch.float32)


class Checkpoint(Callback):
    """Saves the trainer to a file every so many epochs, steps, or both; after all other callbacks
    have heard of the event, wherever it stands among them.

    Args:
        path: "{epoch}" and "{step}" in it become the numbers that are done. Its folder is made.

    Raises:
        InvalidType, InvalidArgument: no path, other names in braces, counts below 1.
    """

    _told_last = True

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every_epochs: int | None = None,
        every_steps: int | None = None,
    ) -> None:
        for name, count in (("every_epochs", every_epochs), ("every_steps", every_steps)):
            if (optional_whole_number(name, count, of=name[6:]) or 1) < 1:
                raise InvalidArgument(f"{name} is {count}; it is 1 or more")
        if every_epochs is None and every_steps is None:
            every_epochs = 1
        self.path = _checks.path("path", path)
        try:
            self._at(0, 0)
        except (LookupError, ValueError, TypeError, AttributeError) as error:
            raise InvalidArgument(
                f"path is {self.path!r}; braces in it are {{epoch}} and {{step}}, or doubled where "
                f"they are meant ({error})"
            ) from None
        self.every_epochs = every_epochs
        self.every_steps = every_steps

    def on_batch_end(self, event: BatchEnd) -> None:
        if self.every_steps and (event.step + 1) % self.every_steps == 0:
            self._save(event.trainer)

    def on_epoch_end(self, event: EpochEnd) -> None:
        if self.every_epochs and (event.epoch + 1) % self.every_epochs == 0:
            self._save(event.trainer)

    def on_run_begin(self, event: RunBegin) -> None:
        folder = os.path.dirname(self._at(0, 0))
        if folder and folder == os.path.dirname(self._at(1, 1)):  # else made when it is known
            os.makedirs(folder, exist_ok=True)

    def _at(self, epoch: int, step: int) -> str:
        return self.path.format(epoch=epoch, step=step)

    def _save(self, trainer: Any) -> None:
        path = self._at(trainer.epochs_done, trainer.steps_done)
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        trainer.save(path)
