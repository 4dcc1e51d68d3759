"""`ib.audit`."""

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from ..errors import InvalidType, StateError
from .at_step import AtStep
from .batches import Join
from .experiment import untouched
from .report import AuditReport
from .watch import Watch

#: A GradScaler skips steps until its scale fits.
_ATTEMPTS = 20
#: Steps that one round may make.
_ALL = 2**30


class Audit:
    """Is the gradient that reaches `optimizer.step()` the whole batch's? `docs/audit.md`.

    Example:
        report = ib.audit(step, model, batch)  # one step, without training
        with ib.audit.watch(model, optimizer) as watched:  # around any training loop
            train()
        print(watched.report)
    """

    def __call__(
        self,
        step: Callable[[Any, Any], Any],
        model: nn.Module,
        batch: Any,
        *,
        loss: Any = None,
        optimizer: Any = None,
        memory_budget: int | float | str | None = None,
        same_random_numbers: bool = False,
        clip: Any = None,
    ) -> AuditReport:
        """Runs `step(model, batch)` and compares the gradient that reaches `optimizer.step()`.

        It runs twice, so that a forgotten zero_grad shows. Optimizers find no gradients, so nothing
        is trained: parameters, `.grad`, buffers, modes, optimizer state and random state are as
        before. What else `step` moves (a schedule, a GradScaler) stays moved.

        Args:
            step: does what your loop does between two steps: forward, backward, `optimizer.step()`.
            batch: the whole batch, of which `step` makes its micro-batches: each row once, in any
                order, which is compared.
            loss, memory_budget, same_random_numbers, clip: as for `watch`.
            optimizer: the one to look at, where several train the model.

        Raises:
            StateError: `optimizer.step()` was not called, or the loss is not known: give `loss`.

            And what `watch` and `step` raise.
        """
        if not callable(step):
            raise InvalidType(
                f"step must be a function of model and batch, not {type(step).__name__}: "
                f"audit(step, model, batch)"
            )
        watched = Watch(
            model,
            optimizer,
            None,
            loss=loss,
            join=None,
            steps=_ALL,
            memory_budget=memory_budget,
            same_random_numbers=same_random_numbers,
            clip=clip,
            batch=batch,
        )
        parameters = list(model.parameters())
        grads = [(p, p.grad, None if p.grad is None else p.grad.clone()) for p in parameters]
        nothing = _Untrained()
        try:
            with untouched(model), watched, nothing:
                for _ in range(_ATTEMPTS):
                    step(model, batch)
                    if watched.reports:
                        break
                    watched.examines = True
        finally:
            for parameter, grad, value in grads:
                if grad is not None and value is not None:
                    grad.detach().copy_(value)
                parameter.grad = grad
        if not watched.reports:
            raise StateError(
                "step(model, batch) did not reach optimizer.step() of the model's parameters with a "
                "gradient: it must do all that your loop does between two steps"
            )
        return watched.report

    @staticmethod
    def watch(
        model: nn.Module,
        optimizer: Any = None,
        loader: Iterable[Any] | None = None,
        *,
        loss: Any = None,
        join: Join | None = None,
        steps: int = 3,
        memory_budget: int | float | str | None = None,
        same_random_numbers: bool = False,
        clip: Any = None,
    ) -> Watch:
        """A context around a training loop, which compares steps as they are made.

        The training is the same, bit for bit. A step that is examined costs the whole batch's
        gradient, and where that differs one more for each micro-batch.

        Args:
            model: the module that is trained.
            optimizer: the one to look at; None for each that trains the model.
            loader: what the loop iterates over. The rows that the model sees are compared with what
                it gives; needed with `loss` where a batch holds more than the model's inputs. A list or generator cannot be seen from outside: iterate over
                `watched.loader`.
            loss: of a batch of the loader, `loss(model, batch)`, or a criterion of torch.nn for
                pairs (inputs, targets); without a loader the batch is what the model is called with
                (a tuple of several calls). None takes it from the loop: the model's own loss
                (`outputs.loss`), or the one criterion of torch.nn that is called on its outputs.
            join: makes the whole batch of a list of micro-batches; None concatenates rows.
            steps: the first so many are examined, then the first of each other kind (sizes).
            memory_budget: computes the whole batch's gradient inside it, by `ib.wrap`; None in one
                piece, and if that runs out of memory by `ib.wrap` with "auto".
            same_random_numbers: demand the random numbers (dropout) that the whole batch would draw.
            clip: your own function that clips gradients, or a list of them, where it is not torch's.

        Returns:
            A Watch: `report`, `reports`, `ok`, `raise_if_wrong()`, `print(watch)`.

        Raises:
            InvalidType, InvalidArgument, Unsupported: arguments that cannot be used.
            StateError: from the first step, where the loss or the batches are not known; from the
                end of the context, where no step was seen.
            BatchError: micro-batches that cannot be joined: give `join`.
        """
        return Watch(
            model,
            optimizer,
            loader,
            loss=loss,
            join=join,
            steps=steps,
            memory_budget=memory_budget,
            same_random_numbers=same_random_numbers,
            clip=clip,
        )


class _Untrained:
    """Optimizers find no gradients inside, and leave parameters and their state alone."""

    def __enter__(self) -> None:
        self._held: list[tuple[nn.Parameter, torch.Tensor | None]] = []
        self._at = AtStep(self._hold)
        self._depth: dict[Optimizer, int] = {}
        self._values: dict[Optimizer, Any] = {}
        self._handles = [
            register_optimizer_step_pre_hook(self._before),
            register_optimizer_step_post_hook(self._after),
        ]

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._at.remove_all()

    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._at.place(optimizer)  # behind the optimizer's own hooks, and the watch's

    def _hold(self, optimizer: Optimizer, first: bool) -> None:
        own = [p for group in optimizer.param_groups for p in group["params"]]
        self._depth[optimizer] = self._depth.get(optimizer, 0) + 1
        if self._depth[optimizer] > 1:
            return
        if not type(optimizer).__module__.startswith("torch.optim"):
            # Its step() may ask for gradients, and move parameters without any.
            values = [(p, p.detach().clone()) for p in own]
            state = [(key, copy.deepcopy(value)) for key, value in optimizer.state.items()]
            self._values[optimizer] = values, state
            return
        self._held = [(p, p.grad) for p in own]
        for parameter in own:
            parameter.grad = None

    @torch.no_grad()
    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._at.remove(optimizer)
        depth = self._depth.pop(optimizer, 1)
        if depth > 1:
            self._depth[optimizer] = depth - 1
            return
        for parameter, grad in self._held:
            parameter.grad = grad
        self._held = []
        if optimizer in self._values:
            values, state = self._values.pop(optimizer)
            for parameter, value in values:
                parameter.copy_(value)
            optimizer.state.clear()
            optimizer.state.update(state)


audit = Audit()
