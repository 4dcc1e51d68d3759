"""Runs a case natively and by the library, and says how they differ."""

import gc
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import infinitybatch as ib
import torch

from .case import Case
from .oracle import TOLERANCE, State, differences, state_of
from .refusals import excuse
from .side import Side, drive, marked, seeded

KINDS = (
    "gradient",
    "parameter",
    "buffer",
    "attribute",
    "output",
    "further",
    "eval",
    "loss",
    "generator",
    "fired",
)
#: What a failure must leave as it was.
KEPT = ("gradient", "parameter", "buffer", "attribute", "generator")

#: A larger loss tells of a model that rounding rules.
LARGEST = 1e6


@dataclass(frozen=True)
class Outcome:
    #: "exact", "refused" (with good reason), "invalid" (native fails) or "finding".
    kind: str
    #: What kind of finding it is, so that a smaller case can be told to show the same.
    signature: str = ""
    text: str = ""


class Found(Exception):
    """A finding."""

    def __init__(self, signature: str, text: str) -> None:
        super().__init__(text)
        self.signature, self.text = signature, text


def native(case: Case) -> tuple[list[State], int]:
    """What each step leaves, and the most memory that one needed beyond what was there."""
    side, states, needed = Side(case), [], 0
    for step, rows in enumerate(case.rows):
        side.optimizer.zero_grad()
        seeded(case.seed + step)
        before = ib.memory.stats().live
        with ib.memory.peak() as scope:
            state = drive(side, side.model, step, rows, lambda _, run: run())
        needed = max(needed, scope.peak - before)
        if case.evaluate:
            state |= side.look(side.model, side.batch(step, rows)[0])
        if not abs(float(state["loss"])) < LARGEST:
            raise ArithmeticError("the loss is not finite, or nearly so")
        states.append(state)
        side.step()
    return states, needed


def options_of(case: Case, needed: int) -> dict[str, Any]:
    options = dict(case.way.options)
    if case.way.size is not None:
        options["micro_batch_size"] = case.way.size
    if case.way.budget is not None:
        options["memory_budget"] = ib.memory.stats().live + int(case.way.budget * needed)
    elif case.way.size is None:
        options["micro_batch_size"] = max(case.rows)
    return options


def guard_of(side: Side) -> Callable[[str, Callable[[], Any]], Any]:
    """Runs a part of a step; where it fails everything has to be as before."""

    def guard(part: str, run: Callable[[], Any]) -> Any:
        before = state_of(side)
        try:
            return run()
        except Exception as error:
            changed = differences(state_of(side), before, KEPT)
            if changed:
                kinds = ", ".join(sorted({name.split(" ")[0] for name in changed}))
                name = type(error).__name__
                raise Found(
                    f"changed after {name} in {part}: {kinds}", f"{changed} after {error}"
                ) from error
            raise

    return guard


def steps_of(side: Side, options: dict[str, Any]) -> Callable[[int, int], State]:
    """One step of ours."""
    case, guard = side.case, guard_of(side)
    if case.way.api == "wrap":
        wrapped = ib.wrap(side.model, **options)
        side.call = lambda **inputs: wrapped(**marked(inputs))
        return lambda step, rows: drive(side, side.call, step, rows, guard)
    batch = ib.VirtualBatch(side.model, side.space["ours"], **options)
    side.call = side.model

    def step_of(step: int, rows: int) -> State:
        inputs, y = side.batch(step, rows)
        report = guard("backward", lambda: batch.backward(marked(inputs), y))
        return side.left(inputs, {"loss": report.loss.detach().clone()})

    return step_of


def kinds_of(case: Case) -> tuple[str, ...]:
    """What can be compared with native."""
    kinds = set(KINDS)
    if case.way.api != "wrap":
        kinds -= {"output", "further"}
    if "random" in case.tags and not case.way.options.get("match_native_rng"):
        kinds = {"fired", "eval"} if "samples_in_state" in case.tags else {"fired"}
    return tuple(sorted(kinds))


def compared(case: Case, found: State, wanted: State, step: int) -> None:
    """Raises what differs."""
    errors = differences(found, wanted, kinds_of(case))
    for name in list(errors):
        if name.startswith("attribute") and isinstance(wanted.get(name), torch.Tensor):
            del errors[name]  # the last micro-batch's, as documented
        elif name.startswith("fired forward"):  # once for each micro-batch
            del errors[name]
    wrong = {name: error for name, error in errors.items() if error > TOLERANCE}
    if wrong and max(wrong.values()) < 1e-3:
        from .sensitivity import moved  # runs native again

        moves = moved(case, step)
        wrong = {name: error for name, error in wrong.items() if error > 100 * moves.get(name, 0)}
    if wrong:
        kinds = ", ".join(sorted({name.split(" ")[0] for name in wrong}))
        raise Found(f"wrong {kinds}", f"step {step}: {wrong}")


def ours(case: Case, states: list[State], needed: int) -> Outcome:
    side = Side(case)
    try:
        step_of = steps_of(side, options_of(case, needed))
    except ib.InvalidArgument as error:
        return Outcome("invalid", "options", str(error))
    for step, rows in enumerate(case.rows):
        side.optimizer.zero_grad()
        seeded(case.seed + step)
        try:
            state = step_of(step, rows)
            if case.evaluate:
                state |= side.look(side.call, side.batch(step, rows)[0])
        except Found:
            raise
        except Exception as error:
            first = str(error).split("\n")[0]
            if not isinstance(error, ib.Error):
                raise Found(
                    f"untyped {type(error).__name__}: {first[:50]}", f"step {step}: {error}"
                ) from error
            reason = excuse(case, error)
            if reason is None:
                raise Found(
                    f"needless {type(error).__name__}: {first[:50]}", f"step {step}: {error}"
                ) from error
            return Outcome("refused", reason, first)
        compared(case, state, states[step], step)
        side.step()
    return Outcome("exact")


def run(case: Case) -> Outcome:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            states, needed = native(case)
        except Exception as error:
            return Outcome("invalid", type(error).__name__, str(error))
        try:
            return ours(case, states, needed)
        except Found as found:
            return Outcome("finding", found.signature, found.text)
        finally:
            if case.way.budget is not None:
                gc.collect(0)
