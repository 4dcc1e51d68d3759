"""What a trainer asks of an optimizer of torch.optim, its GradScaler and its schedule."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ._signals import HeldBack
from .errors import InvalidArgument, InvalidType, StateError


class Updates:
    """Steps of an optimizer: unscaling, clipping, the step, the scaler's update."""

    def __init__(self, optimizer: Any, clip_norm: float | None, scaler: Any) -> None:
        for name in ("zero_grad", "step", "param_groups"):
            if not hasattr(optimizer, name):
                raise InvalidType(
                    f"optimizer must be an instance of torch.optim.Optimizer, not "
                    f"{_describe(optimizer)}: torch.optim.Adam(model.parameters())"
                )
        if isinstance(optimizer, torch.optim.LBFGS):
            raise InvalidType(
                "LBFGS asks for the loss several times a step, where one logical batch gives one "
                "gradient; use SGD, Adam or another optimizer without a closure"
            )
        if clip_norm is not None:
            if isinstance(clip_norm, bool) or not isinstance(clip_norm, int | float):
                raise InvalidType(f"clip_norm must be a number, not {type(clip_norm).__name__}")
            if not clip_norm > 0:
                raise InvalidArgument(f"clip_norm is {clip_norm:g}; it is above 0, or None")
        self.optimizer = optimizer
        self.clip_norm = clip_norm
        self.scaler = scaler
        self.signals = HeldBack()

    def parameters(self) -> Iterable[torch.Tensor]:
        return (p for group in self.optimizer.param_groups for p in group["params"])

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def step(self) -> None:
        if not self._has_gradient():
            raise StateError(
                "no parameter of the optimizer has a gradient: the model's parameters are frozen "
                "(parameter.requires_grad_()) or were replaced, or the optimizer is of another "
                "model; make it anew, "
                "trainer.optimizer = torch.optim.Adam(trainer.model.parameters())"
            )
        if self.clip_norm is not None:
            if self.scaler is not None:
                self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(list(self.parameters()), self.clip_norm)
        if self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def learning_rates(self) -> tuple[float, ...]:
        return tuple([float(group.get("lr", _NO_RATE)) for group in self.optimizer.param_groups])

    def _has_gradient(self) -> bool:
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    return True
        return False


_NO_RATE = float("nan")


def check_schedule(schedule: Any, optimizer: Any) -> None:
    if schedule is None:
        return
    if isinstance(schedule, type) or not callable(getattr(schedule, "step", None)):
        raise InvalidType(
            f"schedule must be one of torch.optim.lr_scheduler, not {_describe(schedule)}: "
            f"StepLR(optimizer, step_size=10)"
        )
    of = getattr(schedule, "optimizer", optimizer)
    if of is not optimizer:
        raise InvalidArgument(
            "schedule belongs to another optimizer than the trainer's; make it with that one, "
            "StepLR(optimizer, step_size=10)"
        )


def check_own_step(trainer: Any, loss: Any) -> None:
    """What a step of a loop of the user's own must not do without a word."""
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    if loss is None and trainer._schedule_by == "step" and isinstance(trainer.schedule, plateau):
        raise StateError(
            "ReduceLROnPlateau goes on after each step and reads its loss: step(loss), or "
            'schedule_by="epoch"'
        )
    if trainer._updates.scaler is not None and not trainer._scaled:
        raise StateError(
            "there is a grad_scaler, whose step divides gradients by its scale, and no scaled "
            "backward since the last step: trainer.backward(loss) in place of loss.backward()"
        )


def schedule_step(schedule: Any, loss: float) -> None:
    if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
        schedule.step(loss)
    else:
        schedule.step()


def _describe(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__} itself"
    return type(value).__name__
