"""Runs a case natively and by the library, and says how they differ."""

import gc
import warnings
from typing import Any

import infinitybatch as ib

from .case import Case
from .device import live, peak
from .faults import tried
from .found import Found, Outcome, compared, guard_of, same_again
from .oracle import State, outputs_of
from .refusals import excuse
from .side import Side, drive, marked, nested, seeded

#: A larger loss tells of a model that rounding rules.
LARGEST = 1e6


def begin(side: Side, step: int) -> None:
    if not side.case.accumulate:
        side.optimizer.zero_grad()
    seeded(side.case.seed + step)
    side.turn(step)


def native(case: Case, skipped: frozenset[int] = frozenset()) -> tuple[list[State], int]:
    """What each step leaves, and the most memory that one needed beyond what was there."""
    side, states, needed = Side(case), [], 0
    for step, rows in enumerate(case.rows):
        if step in skipped:
            states.append({})
            continue
        begin(side, step)
        before = live()
        with peak() as scope:
            state = drive(side, side.model, step, rows, lambda _, run: run())
        needed = max(needed, scope.peak - before)
        if case.evaluate:
            state |= side.look(side.model, side.batch(step, rows)[0])
        if not abs(float(state["loss"])) < LARGEST:
            raise ArithmeticError("the loss is not finite, or nearly so")
        states.append(state)
        side.step()
    return states, needed


class Ours:
    """The library's side; a room in bytes, beside what is there anyway, takes the place of the
    case's budget."""

    def __init__(self, case: Case, needed: int, room: int | None = None) -> None:
        if case.way.budget is not None:
            gc.collect()  # what goes later is not there anyway
        self.case, self.side = case, Side(case)
        options = dict(case.way.options)
        #: Bytes that are there anyway.
        self.live = live()
        if case.way.size is not None:
            options["micro_batch_size"] = case.way.size
        if case.way.budget is not None:
            room = int(case.way.budget * needed) if room is None else room
            self.budget = self.live + room
            options["memory_budget"] = self.budget
        elif case.way.size is None and "micro_batch_tokens" not in options:
            options["micro_batch_size"] = max(case.rows)
        if case.way.trim:
            options["trim"] = eval(case.way.trim)
        self.guard = guard_of(self.side, options.get("memory_budget"))
        model = nested(self.side.model, case.way.nested)
        if case.way.api == "wrap":
            self.wrapped = ib.wrap(model, **options)
        else:
            self.batch = ib.VirtualBatch(model, self.side.space["ours"], **options)
        self.states: list[State] = []
        self.schedules: set[str] = set()

    def call(self, **inputs: Any) -> Any:
        wraps = self.case.way.api == "wrap"
        return self.wrapped(**marked(inputs)) if wraps else self.side.model(**inputs)

    def step_of(self, step: int, rows: int) -> State:
        side = self.side
        if self.case.way.api == "wrap":
            state = drive(side, self.call, step, rows, self.guard)
            self.note(self.wrapped.last_report)
            return state
        inputs, y = side.batch(step, rows)
        report = self.guard("backward", lambda: self.batch.backward(marked(inputs), y))
        self.note(report)
        seen = {"loss": report.loss.detach().clone()}
        if self.case.way.options.get("keep_outputs"):
            seen |= outputs_of(report.outputs)
        return side.left(inputs, seen)

    def note(self, report: Any) -> None:
        """Which schedule a step had."""
        if report is None:  # as natively
            return
        if report.strategy_reason.startswith("boundary activations are kept at"):
            self.schedules.add("kept")
        if self.case.way.trim and len(set(report.micro_batch_sizes[:-1])) > 1:
            self.schedules.add("packed")

    def run(self, states: list[State]) -> Outcome:
        case, side, refused = self.case, self.side, {}
        for step, rows in enumerate(case.rows):
            begin(side, step)
            try:
                state = None
                if step == 0 and case.fault is not None:
                    state = tried(side, self.step_of)
                    seeded(case.seed) if state is None else None
                state = self.step_of(step, rows) if state is None else state
                if case.evaluate:
                    state |= side.look(self.call, side.batch(step, rows)[0])
            except Found:
                raise
            except Exception as error:
                refused[step] = refusal(case, step, error)
                if case.way.api == "wrap" or step + 1 == len(case.rows):
                    return refused[step]  # a wrapped model's forward may have been as it should
                states, _ = native(case, frozenset(refused))
                continue
            compared(case, state, states[step], step)
            self.states.append(state)
            side.step()
        exact = Outcome("exact", schedules=frozenset(self.schedules))
        return next(iter(refused.values()), exact)


def refusal(case: Case, step: int, error: Exception) -> Outcome:
    first, name = str(error).split("\n")[0], type(error).__name__
    text = f"step {step}: {error}"
    if not isinstance(error, ib.Error):
        raise Found(f"untyped {name}: {first[:50]}", text) from error
    reason = excuse(case, error)
    if reason is None:
        raise Found(f"needless {name}: {first[:50]}", text) from error
    smallest = getattr(error, "smallest_feasible", None) if step == 0 else None
    return Outcome("refused", reason, first, smallest)


def ours(case: Case, states: list[State], needed: int) -> Outcome:
    us = Ours(case, needed)
    outcome, before = us.run(states), us.live
    if "random" in case.tags and outcome.kind == "exact" and case.way.budget is None:
        again = Ours(case, needed)
        again.run(states)
        same_again(us.states, again.states)
    del us
    if outcome.smallest is not None and case.fault is None:
        again = Ours(case, needed, room=outcome.smallest - before)
        second = again.run(states)
        if second.smallest is not None:
            raise Found(
                "smallest_feasible is too small",
                f"{outcome.text}; with {again.budget}: {second.text}",
            )
    return outcome


def run(case: Case) -> Outcome:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            states, needed = native(case)
        except Exception as error:
            return Outcome("invalid", type(error).__name__, str(error))
        try:
            return ours(case, states, needed)
        except ib.InvalidArgument as error:
            return Outcome("invalid", "options", str(error))
        except Found as found:
            return Outcome("finding", found.signature, found.text)
        finally:
            if case.way.budget is not None:
                gc.collect(0)
