"""A context around a training loop that compares its steps with the whole batch's gradient."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .. import _checks
from ..errors import Error, InvalidArgument, InvalidType, StateError, Unsupported
from . import causes, losses
from .arguments import checked_model, hook_bases, inner_optimizer, parameters_of
from .at_step import AtStep
from .batches import Loader, keep, rows_of
from .calls import Awaited, Calls
from .causes import cause
from .clipping import Clipping
from .diagnosis import Examination
from .experiment import Experiment, untouched
from .matching import Seen
from .other_rows import judge
from .report import AuditReport, MicroBatchWeight, versions
from .rows import take
from .source import Source
from .step_batches import Groups
from .trace import Trace
from .window import Window, seen_gradients


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
        clip: Any = None,
        batch: Any = None,
    ) -> None:
        self._model = checked_model(model)
        self._optimizer = inner_optimizer(optimizer, self._model)
        self._loss = losses.checked(loss)
        if join is not None and not callable(join):
            raise InvalidType(
                f"join must be a function of a list of batches, not {type(join).__name__}"
            )
        self._steps = _checks.whole_number("steps", steps, "steps")
        if self._steps < 1:
            raise InvalidArgument(f"steps must be at least 1, not {self._steps}")
        self._budget = memory_budget
        self._same_random_numbers = _checks.truth("same_random_numbers", same_random_numbers)
        self._batch = None if batch is None else keep(batch)
        #: Steps are examined only where this is set: ib.audit leaves its first round out.
        self.examines = batch is None
        self._rounds = batch is not None
        self._inside = False
        self._used = False
        self._trace = Trace()
        self._clipping = Clipping(clip, self._trace.clipping_begins, self._trace.clipping_ends)
        self._calls = Calls(
            self._model,
            follow=self._loss is None,
            clipping=self._clipping,
            passes=lambda: self._trace.passes,
            epoch=lambda: 0 if self.loader is None else self.loader.epochs,
        )
        self._rows = None if batch is None else take(batch, 0, self._calls.origins, self._batch)
        self.loader = (
            None if loader is None else Loader(loader, lambda: self._inside, self._calls.origins)
        )
        self._source = Source(
            self._model,
            self._loss,
            join,
            self._calls,
            self._trace,
            self.loader,
            self._batch,
            self._rows,
        )
        #: Where each optimizer's window begins: (step, batch of the loader, backward pass).
        self._begins: dict[Optimizer, tuple[int, int, int]] = {}
        self._kinds: set[Any] = set()
        #: What was computed for the parameters of optimizers that step later, at this pass.
        self._prepared: tuple[int, list[nn.Parameter], Examination] | None = None
        #: Optimizers that are in step(), how deep (a subclass calls its base's), with our hook there.
        self._stepping: dict[Optimizer, int] = {}
        self._at = AtStep(self._look_at_step)
        #: Reports of steps that saw a part of their samples: what they say if no more come.
        self._awaited: list[tuple[Awaited, AuditReport, AuditReport]] = []
        #: Optimizers in step() that were examined.
        self._examined: set[Optimizer] = set()
        #: Backward passes that a right step's zero_grad dropped: those of another model's turn.
        self._usually_dropped = 0
        self._reports: list[AuditReport] = []
        self._handles: list[Any] = []

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
        self._calls.__exit__(kind, value, traceback)
        for handle in (*self._handles, self._calls, self._trace):
            handle.remove()
        self._at.remove_all()
        self._no_more_come()
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
        is_one_step = self._rounds and not self._begins  # ib.audit, which says so itself
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
        elif not self._reports and not self._rounds:
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

    def _before_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        """Puts a hook behind the optimizer's own ones: they may change gradients too."""
        if not self._is_watched(optimizer):
            return
        if optimizer not in self._at:
            hook_bases(optimizer)
        self._stepping[optimizer] = self._stepping.get(optimizer, 0) + 1
        self._at.place(optimizer)

    def _look_at_step(self, optimizer: Optimizer, first: bool) -> None:
        if not self._is_watched(optimizer):
            return
        self._clipping.close()
        if first:
            self._look(optimizer)

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not self._is_watched(optimizer):
            return
        self._at.remove(optimizer)
        depth = self._stepping.pop(optimizer, 1)
        if depth > 1:  # of a subclass whose own step() is not over
            self._stepping[optimizer] = depth - 1
            return
        self._examined.discard(optimizer)
        number, batch, begin = self._begin(optimizer)
        passes = self._trace.passes - begin
        groups = self._groups(optimizer, max(passes - self._trace.skipped, 0))
        end = self._source.end(batch, groups)
        self._begins[optimizer] = (number + 1, end, self._trace.passes)
        self._trace.stepped(parameters_of(optimizer))
        self._trace.watch(self._model.parameters())
        self._source.note_used()
        if any(0 < slot.passes <= passes for slot in self._trace.slots.values()):
            return  # another optimizer steps after the same micro-batches
        first = min(begin[2] for begin in self._begins.values())
        self._trace.forget(self._trace.passes - first)
        self._calls.forget(first)
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
        if not passes or not self.examines:
            return
        groups = self._groups(optimizer, passes)
        again = optimizer in self._examined
        if again:  # from a subclass's step(), which may have changed gradients
            self._reports.pop()
        else:
            kind = (passes, *(tuple(c.rows for c in group) for group in groups))
            if step >= self._steps and kind in self._kinds:
                return
            self._kinds.add(kind)
        self._trace.paused = self._calls.paused = True
        count = len(self._reports)
        try:
            with untouched(self._model):
                report = self._examine(optimizer, step, passes, groups)
            if report is not None:
                self._reports.append(report)
        except Exception as error:
            if not self._reports:
                raise
            self._reports.append(self._undecided(step, error))
        finally:
            self._trace.paused = self._calls.paused = False
        if len(self._reports) > count:
            self._examined.add(optimizer)

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

    def _examine(
        self, optimizer: Optimizer, step: int, passes: int, groups: Groups
    ) -> AuditReport | None:
        named = {p: name for name, p in self._model.named_parameters()}
        mine = set(parameters_of(optimizer))
        own = [p for p in self._trace.slots if p in mine and p in named and self._trains(p)]
        prepared = self._prepared
        if prepared and prepared[0] == self._trace.passes and set(own) <= set(prepared[1]):
            places = {p: place for place, p in enumerate(prepared[1])}
            examination = prepared[2].of([places[p] for p in own])
            examination.window = replace(
                examination.window, step=step, **seen_gradients(self._trace, optimizer, own, named)
            )
            report = self._run(examination, groups, optimizer)
            # A step of the other optimizer told of this one's share.
            return None if report.ok else report
        if self._trace.have_moved(passes) or any(self._trace.slots[p].is_late for p in own):
            return self._undecided(
                step,
                StateError(
                    f"parameters of {type(self._model).__name__} were changed after this step's first "
                    f"backward() and before step(), so its gradients belong to no one state of the "
                    f"model: audit a loop in which all optimizers step after the same micro-batches"
                ),
            )
        others = [] if self._optimizer else self._of_other_optimizers(mine, passes, named)
        report = self._compared(optimizer, step, groups, own, others, named)
        unseen = self._source.unseen_rows(self._begin(optimizer)[1], groups)
        if unseen is None:
            return report
        # Batches of the loader that were passed over: for good, or until later?
        prepared = self._prepared
        with_all = self._compared(optimizer, step, groups, own, others, named, unseen=True)
        self._prepared = prepared
        if with_all.ok:
            return report
        awaited = Awaited(unseen)
        self._calls.awaited.append(awaited)
        self._awaited.append((awaited, with_all, report))
        return with_all

    def _compared(
        self,
        optimizer: Optimizer,
        step: int,
        groups: Groups,
        own: list[nn.Parameter],
        others: list[nn.Parameter],
        named: dict[Any, str],
        unseen: bool = False,
    ) -> AuditReport:
        parameters = own + others
        batches = self._source.batches(self._begin(optimizer)[1], groups, unseen)
        window = Window(
            step=step,
            **seen_gradients(self._trace, optimizer, parameters, named),
            passes=len(groups),
            whole=batches.whole,
            pieces=batches.pieces,
            sizes=[rows_of(piece.batch) or 1 for piece in batches.pieces],
            other_pieces=batches.others,
            before_the_end=batches.before_the_end,
            rows=self._source.count,
            unseen=self._source.missed(groups),
        )
        experiment = Experiment(self._model, parameters, batches.loss, self._budget)
        experiment.reached = {p: named[p] for p in parameters if self._trace.slots[p].passes}
        examination = Examination(window, experiment, self._same_random_numbers)
        if others:
            with self._computing():
                examination.prepare()
            self._prepared = (self._trace.passes, parameters, examination)
            examination = examination.of(list(range(len(own))))
        return self._run(examination, groups, optimizer, unseen)

    def _trains(self, parameter: nn.Parameter) -> bool:
        """Now, or when a micro-batch of this step was computed."""
        return parameter.requires_grad or self._trace.slots[parameter].passes > 0

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        try:
            yield
        except (Error, torch.OutOfMemoryError):
            raise
        except Exception as error:
            raise Unsupported(
                f"the loss of a batch could not be computed again, {type(error).__name__}: "
                f"{str(error).splitlines()[0] if str(error) else ''}; {losses.WAY_OUT}"
            ) from error

    def _run(
        self,
        examination: Examination,
        groups: Groups,
        optimizer: Optimizer,
        unseen: bool = False,
    ) -> AuditReport:
        with self._computing():
            report = examination.run()
            is_given = self._source.has_loss
            if not (is_given and report.ok):
                seen = self._source.seen(self._begin(optimizer)[1], groups, unseen)
                report, early = judge(report, examination, seen, groups, is_given)
                if early is not None and not unseen:
                    self._await(early, report, seen)
        if report.verdict == "wrong" and self._loss is None:
            losses.refuse_other(groups)
        if report.ok:
            factors = examination.window.factors
            dropped = [i + 1 for f in factors for i, by in enumerate(f) if by == 0.0]
            self._usually_dropped = max([self._usually_dropped, *dropped])
        return report

    def _await(self, early: AuditReport, report: AuditReport, seen: Seen | None) -> None:
        """The step saw a part of its samples: was it early, or are the others never seen?"""
        rows = None
        if seen is not None:
            rows = seen.numbers[torch.tensor(seen.missing, dtype=torch.int64, device="cpu")]
        awaited = Awaited(rows)
        self._calls.awaited.append(awaited)
        self._awaited.append((awaited, report, early))

    def _no_more_come(self) -> None:
        for awaited, report, early in self._awaited:
            if awaited.seen:
                self._reports = [early if r is report else r for r in self._reports]
        self._awaited.clear()

    def _of_other_optimizers(
        self, mine: set[nn.Parameter], passes: int, named: dict[Any, str]
    ) -> list[nn.Parameter]:
        """Whose gradient came with the same passes: once this optimizer has moved its parameters it
        is too late to compute them again."""
        slots = self._trace.slots
        return [p for p in slots if p not in mine and p in named and slots[p].passes == passes]


def _are_finite(slots: Any) -> bool:
    return all(bool(torch.isfinite(s.last).all()) for s in slots if s.passes and s.last is not None)
