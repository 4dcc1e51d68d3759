"""A context around a training loop that compares its steps with the whole batch's gradient."""

from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .. import _checks, _random_state
from ..errors import Error, InvalidArgument, InvalidType, StateError, Unsupported
from . import causes, losses
from .arguments import checked_model, inner_optimizer, parameters_of
from .batches import Given, Join, Loader, join, rows_of
from .calls import Calls
from .causes import cause
from .diagnosis import Examination, Window
from .experiment import Experiment, untouched
from .report import AuditReport, MicroBatchWeight, versions
from .step_batches import Groups, StepBatches, consumed, of_calls, of_loader
from .trace import Slot, Trace


class Watch:
    """What `ib.audit.watch` gives. Enter it around the loop; read `report` after."""

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        loader: Any,
        *,
        loss: Any,
        join: Any,
        steps: Any,
        memory_budget: Any,
        same_random_numbers: Any,
        batch: Any = None,
        skip: int = 0,
    ) -> None:
        self._model = checked_model(model)
        self._optimizer = inner_optimizer(optimizer, self._model)
        self._loss = losses.checked(loss)
        if join is not None and not callable(join):
            raise InvalidType(
                f"join must be a function of a list of batches, not {type(join).__name__}"
            )
        self._join: Join | None = join
        self._steps = _checks.whole_number("steps", steps, "steps")
        if self._steps < 1:
            raise InvalidArgument(f"steps must be at least 1, not {self._steps}")
        self._budget = memory_budget
        self._same_random_numbers = _checks.truth("same_random_numbers", same_random_numbers)
        self._batch = batch
        self._skip = skip
        self._inside = False
        self._used = False
        self.loader = (
            None if loader is None else Loader(loader, lambda: self._inside and self._needs_loader)
        )
        self._trace = Trace()
        self._calls = Calls(
            self._model,
            follow=self._loss is None,
            inputs=not self._needs_loader,
            passes=lambda: self._trace.passes,
            epoch=lambda: 0 if self.loader is None else self.loader.epochs,
        )
        #: Where each optimizer's window begins: (step, batch of the loader, backward pass).
        self._begins: dict[Optimizer, tuple[int, int, int]] = {}
        self._kinds: set[Any] = set()
        #: Optimizers in whose window another one has moved parameters.
        self._disturbed: set[Optimizer] = set()
        #: Parameters whose gradient was examined with another optimizer's, at this backward pass.
        self._covered: dict[nn.Parameter, int] = {}
        #: Backward passes that a right step's zero_grad dropped: those of another model's turn.
        self._usually_dropped = 0
        self._reports: list[AuditReport] = []
        self._handles: list[Any] = []

    @property
    def _needs_loader(self) -> bool:
        """Whether batches are the loader's; otherwise they are what the model is called with."""
        return self._loss is not None and (self.loader is not None or self._batch is not None)

    # What the user reads.

    @property
    def reports(self) -> list[AuditReport]:
        """One for each step that was examined, in order."""
        return list(self._reports)

    @property
    def report(self) -> AuditReport:
        """The first wrong one, else the first undecided one, else the last one.

        Raises StateError where no step was examined.
        """
        if not self._reports:
            raise StateError(
                "no step was examined yet: run the loop inside `with ib.audit.watch(...):` and read "
                "the report after it"
            )
        for verdict in ("wrong", "undecided"):
            for report in self._reports:
                if report.verdict == verdict:
                    return report
        return self._reports[-1]

    @property
    def ok(self) -> bool:
        """Whether all steps that were examined are right."""
        return self.report.ok

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, "steps": [report.as_dict() for report in self._reports]}

    def raise_if_wrong(self) -> None:
        """Raises AuditError, with the report, if a step is wrong."""
        self.report.raise_if_wrong()

    def __str__(self) -> str:
        wrong = sum(report.verdict == "wrong" for report in self._reports)
        head = f"infinitybatch audit: {len(self._reports)} steps examined, {wrong} wrong"
        return f"{head}\n{self.report}" if self._reports else head

    # Around the loop.

    def __enter__(self) -> "Watch":
        if self._used:
            raise StateError("this watch was entered before: make another one for another loop")
        self._used = self._inside = True
        self._trace.watch(self._model.parameters())
        self._calls.watch()
        if self._loss is None:
            self._calls.__enter__()
        if self.loader is not None:
            self.loader.watch()
        self._handles = [
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        ]
        return self

    def __exit__(self, kind: Any, value: Any, traceback: Any) -> None:
        self._inside = False
        if self.loader is not None:
            self.loader.leave()
        if self._loss is None:
            self._calls.__exit__(kind, value, traceback)
        for handle in (*self._handles, self._calls, self._trace):
            handle.remove()
        if kind is None:
            self._look_at_what_is_left()
        self._calls.calls.clear()

    def _look_at_what_is_left(self) -> None:
        """Gradients that no step has used."""
        optimizers = [self._optimizer] if self._optimizer else list(self._begins)
        slots = self._trace.slots
        left = max(
            [self._passes_of(o) for o in optimizers] or [s.passes for s in slots.values()] or [0]
        )
        left -= max(self._trace.skipped, self._usually_dropped)
        is_one_step = bool(self._skip and not self._begins)  # ib.audit, which says so itself
        if left > 0 and _are_finite(slots.values()) and not is_one_step:
            step = max([begin[0] for begin in self._begins.values()], default=0)
            self._reports.append(
                AuditReport(
                    verdict="wrong",
                    step=step,
                    causes=(
                        cause(causes.NEVER_STEPPED, rows=left, what="the loop ended before step()"),
                    ),
                    notes=(),
                    error=1.0,
                    allowed=0.0,
                    parameters=(),
                    micro_batches=(MicroBatchWeight(None, 0.0, None),) * left,
                    reference="none needed",
                    model=type(self._model).__name__,
                    dtype=", ".join(sorted({str(p.dtype)[6:] for p in slots})),
                    versions=versions(),
                )
            )
        elif not self._reports and not self._skip:
            raise StateError(self._nothing_seen())

    def _nothing_seen(self) -> str:
        if not self._trace.passes:
            return (
                f"no backward() reached the parameters of {type(self._model).__name__}: watch the "
                f"very model that is trained"
            )
        if not self._begins:
            whose = "the optimizer" if self._optimizer else "an optimizer of the model's parameters"
            return f"{whose} made no step inside the watch"
        return "no step was examined: give steps= more, or train longer"

    # At each step.

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if not self._is_watched(optimizer):
            return None
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._look(optimizer)
            return None
        looked: list[bool] = []

        def looking(*given: Any, **named: Any) -> Any:
            value = closure(*given, **named)
            if not looked:  # LBFGS asks again, at other parameters
                looked.append(True)
                self._look(optimizer)
            return value

        if "closure" in kwargs:
            return args, {**kwargs, "closure": looking}
        return (args[0], looking, *args[2:]), kwargs

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if self._inside and self._trains_the_model(optimizer):
            others = {o for o in (*self._begins, self._optimizer) if o and self._passes_of(o)}
            self._disturbed = (self._disturbed | others) - {optimizer}
        if not self._is_watched(optimizer):
            return
        number = self._begin(optimizer)[0]
        self._begins[optimizer] = (number + 1, self._consumed(optimizer), self._trace.passes)
        self._trace.stepped(parameters_of(optimizer))
        self._trace.watch(self._model.parameters())
        self._calls.forget(min(begin[2] for begin in self._begins.values()))
        if self.loader is not None:
            self.loader.drop(min(begin[1] for begin in self._begins.values()))

    def _is_watched(self, optimizer: Optimizer) -> bool:
        if not self._inside or self._trace.paused:
            return False
        if self._optimizer is not None:
            return optimizer is self._optimizer
        return self._trains_the_model(optimizer)

    def _trains_the_model(self, optimizer: Optimizer) -> bool:
        return any(p in self._trace.slots for p in parameters_of(optimizer))

    def _begin(self, optimizer: Optimizer) -> tuple[int, int, int]:
        return self._begins.get(optimizer, (0, 0, 0))

    def _look(self, optimizer: Optimizer) -> None:
        step = self._begin(optimizer)[0]
        passes = self._passes_of(optimizer)
        if not passes or step < self._skip:
            return
        groups = self._groups(optimizer, passes)
        kind = (passes, *(tuple(c.rows for c in group) for group in groups))
        if step >= self._steps + self._skip and kind in self._kinds:
            return
        self._kinds.add(kind)
        own = [p for p in parameters_of(optimizer) if p in self._trace.slots]
        if all(self._covered.get(p) == self._trace.passes for p in own):
            return
        if optimizer in self._disturbed:
            why = StateError(
                f"another optimizer moved parameters before this {type(optimizer).__name__} made its "
                f"step, so this gradient belongs to other parameters: leave optimizer= out"
            )
            self._reports.append(self._undecided(step, why))
            return
        self._trace.paused = self._calls.paused = True
        try:
            with untouched(self._model):
                self._reports.append(self._examine(optimizer, step, passes, groups))
        except Exception as error:
            if not self._reports:
                raise
            self._reports.append(self._undecided(step, error))
        finally:
            self._trace.paused = self._calls.paused = False

    def _passes_of(self, optimizer: Optimizer) -> int:
        slots = self._trace.slots
        return max((slots[p].passes for p in parameters_of(optimizer) if p in slots), default=0)

    def _undecided(self, step: int, error: Exception) -> AuditReport:
        """A training that has begun goes on; the report tells."""
        return AuditReport(
            verdict="undecided",
            step=step,
            causes=(),
            notes=(str(error),),
            error=float("nan"),
            allowed=0.0,
            parameters=(),
            micro_batches=(),
            reference="none",
            model=type(self._model).__name__,
            dtype="",
            versions=versions(),
        )

    def _groups(self, optimizer: Optimizer, passes: int) -> Groups:
        """The forward calls before each backward pass of the window."""
        first = self._begin(optimizer)[2] + self._trace.skipped
        return [[c for c in self._calls.calls if c.group == first + i] for i in range(passes)]

    # What is compared.

    def _examine(self, optimizer: Optimizer, step: int, passes: int, groups: Groups) -> AuditReport:
        named = {p: name for name, p in self._model.named_parameters()}
        own = parameters_of(optimizer)
        if self._optimizer is None:
            own = own + self._of_other_optimizers(own, passes)
        parameters = [p for p in own if p in named and p.requires_grad]
        self._covered = dict.fromkeys(parameters, self._trace.passes)
        batches = self._batches(optimizer, groups)
        slots = [self._trace.slots.get(p, Slot()) for p in parameters]
        scale = getattr(optimizer, "grad_scale", None)  # of a fused optimizer, which unscales

        def dense(tensor: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
            if tensor is None:
                return torch.zeros_like(like)
            return (tensor if tensor.layout == torch.strided else tensor.to_dense()).detach()

        reached = [dense(p.grad, p) for p in parameters]
        if scale is not None:
            reached = [g / scale.to(g.device) for g in reached]
        starts = [s.start if s.passes else p.grad for s, p in zip(slots, parameters, strict=True)]
        has_start = any(s is not None and bool(dense(s, s).any()) for s in starts)
        window = Window(
            step=step,
            names=[named[p] for p in parameters],
            reached=reached,
            last=[
                dense(s.last if s.passes else p.grad, p)
                for s, p in zip(slots, parameters, strict=True)
            ],
            start=(
                [dense(s, p) for s, p in zip(starts, parameters, strict=True)]
                if has_start
                else None
            ),
            factors=[slot.factors for slot in slots],
            passes=passes,
            whole=batches.whole,
            pieces=batches.pieces,
            sizes=[rows_of(piece.batch) or 1 for piece in batches.pieces],
            other_pieces=batches.others,
            before_the_end=batches.before_the_end,
            rows=self._rows(),
            unseen=self._unseen(groups),
        )
        experiment = Experiment(self._model, parameters, batches.loss, self._budget)
        experiment.reached = {
            p: named[p] for p, slot in zip(parameters, slots, strict=True) if slot.passes
        }
        try:
            report = Examination(window, experiment, self._same_random_numbers).run()
            if report.ok:
                dropped = [i + 1 for f in window.factors for i, by in enumerate(f) if by == 0.0]
                self._usually_dropped = max([self._usually_dropped, *dropped])
            return report
        except (Error, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise Unsupported(
                f"the loss of a batch could not be computed again, {type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else ''}; {losses.WAY_OUT}"
            ) from error

    def _of_other_optimizers(self, own: list[nn.Parameter], passes: int) -> list[nn.Parameter]:
        """Whose gradient came with the same passes: once this optimizer has moved its parameters it
        is too late to compute them again."""
        slots = self._trace.slots
        return [p for p in slots if p not in set(own) and slots[p].passes == passes]

    def _rows(self) -> int:
        return 0 if self._batch is None else rows_of(self._batch) or 0

    def _unseen(self, groups: Groups) -> int:
        """Samples of the batch that ib.audit was given which the step never called the model on."""
        rows = self._rows()
        seen = sum(call.rows or rows for group in groups for call in group)
        return max(0, rows - seen) if all(groups) else 0

    def _batches(self, optimizer: Optimizer, groups: Groups) -> StepBatches:
        joined = self._join or join
        if self._loss is None or not self._needs_loader:
            return of_calls(groups, self._model, self._loss, joined)
        if self._batch is not None:
            given = [Given(self._batch, _random_state.capture(), 0)]
        else:
            given = self._given(optimizer, groups)
            if not given:
                raise StateError(self._no_batch())
        return of_loader(given, groups, self._loss, joined)

    def _given(self, optimizer: Optimizer, groups: Groups) -> list[Given]:
        assert self.loader is not None
        given = self.loader.given[self._begin(optimizer)[1] - self.loader.first :]
        return consumed(given, groups, self._trace.skipped)

    def _consumed(self, optimizer: Optimizer) -> int:
        """The number of the loader's first batch that belongs to the next step."""
        if self.loader is None or not self._needs_loader:
            return 0
        _, first, passes = self._begin(optimizer)
        skipped = self._trace.skipped
        groups = self._groups(optimizer, max(self._trace.passes - passes - skipped, 0))
        return first + len(self._given(optimizer, groups)) + skipped

    def _no_batch(self) -> str:
        assert self.loader is not None
        kind = type(self.loader.loader).__name__
        if self.loader.sees_the_own_loop:
            return (
                f"the loop took no batch out of this {kind}: watch the loader that it iterates over"
            )
        return (
            f"a loop over a {kind} cannot be seen: iterate over the watch's own loader, "
            f"`with ib.audit.watch(...) as watched: for batch in watched.loader:`"
        )


def _are_finite(slots: Any) -> bool:
    return all(bool(torch.isfinite(s.last).all()) for s in slots if s.passes and s.last is not None)
