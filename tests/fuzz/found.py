"""What is wrong with a step of ours."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import infinitybatch as ib
import torch

from .case import Case
from .device import adds_in_any_order, live, on_host, peak
from .oracle import TOLERANCE, State, differences, skeletons, state_of
from .sensitivity import moved
from .side import Side

KINDS = """gradient parameter buffer attribute output further eval loss generator fired""".split()
#: What a failure must leave as it was.
KEPT = ("gradient", "parameter", "buffer", "attribute", "generator")


@dataclass(frozen=True)
class Outcome:
    #: "exact", "refused" (with good reason), "invalid" (native fails) or "finding".
    kind: str
    #: What kind of finding it is, so that a smaller case can be told to show the same.
    signature: str = ""
    text: str = ""
    #: Of a refusal of the first step: the budget that is said to do.
    smallest: int | None = None
    #: What reports said of the schedules that were taken.
    schedules: frozenset[str] = frozenset()


class Found(Exception):
    """A finding."""

    def __init__(self, signature: str, text: str) -> None:
        super().__init__(text)
        self.signature, self.text = signature, text


def guard_of(side: Side, budget: int | None) -> Callable[[str, Callable[[], Any]], Any]:
    """Runs a part of a step inside the budget; where it fails everything has to be as before."""

    way = side.case.way
    # A wrapped model runs natively where a batch is one micro-batch and nothing but a size was given.
    one = way.size is None or way.size >= min(side.case.rows)
    native_below = way.api == "wrap" and budget is None and one and not way.trim

    def guard(part: str, run: Callable[[], Any]) -> Any:
        before = state_of(side)
        live_before = live()
        try:
            failing = contextlib.nullcontext()
            if side.fails is not None:
                failing = ib.memory.fail_allocation(side.fails)
            with peak() as scope, failing:
                result = run()
        except Exception as error:
            if native_below and not isinstance(error, ib.Error):
                raise
            kept = KEPT
            if isinstance(error, side.space["Bomb"]):
                # The user's own forward failed: what it had changed in Python stays, as natively.
                kept = tuple(kind for kind in KEPT if kind != "attribute")
            changed = differences(state_of(side), before, kept)
            if changed:
                kinds = ", ".join(sorted({name.split(" ")[0] for name in changed}))
                name = type(error).__name__
                raise Found(
                    f"changed after {name} in {part}: {kinds}", f"{changed} after {error}"
                ) from error
            raise
        # An accelerator has no cap: a first plan may pass its budget (docs/limits.md).
        if budget is not None and on_host() and scope.peak > max(budget, live_before):
            raise Found("the budget was passed", f"{scope.peak} of {budget} bytes in {part}")
        return result

    return guard


def kinds_of(case: Case) -> tuple[str, ...]:
    """What can be compared with native."""
    kinds = set(KINDS)
    if case.way.api != "wrap":
        kinds -= {"further"}
        # Those that are kept are as the loss left them.
        if "keep_outputs" not in case.way.options or case.loss == "in place":
            kinds -= {"output"}
    return tuple(sorted(kinds))


def _raise(wrong: dict[str, float], step: int, before: str = "wrong") -> None:
    kinds = ", ".join(sorted({name.split(" ")[0] for name in wrong}))
    raise Found(f"{before} {kinds}", f"step {step}: {wrong}")


def compared(case: Case, found: State, wanted: State, step: int) -> None:
    """Raises what differs."""
    kinds = kinds_of(case)
    left = {n for n, v in wanted.items() if n.startswith("attribute") and torch.is_tensor(v)}
    other_numbers = "random" in case.tags and not case.way.options.get("match_native_rng")
    if other_numbers:
        # Other numbers than native's; `same_again` tells whether they are the same each time.
        drawn = {"generator torch", "generator of the device"}
        if "python_random" in case.tags:
            drawn |= {"generator Python", "generator NumPy"}
        found, wanted = ({n: v for n, v in s.items() if n not in drawn} for s in (found, wanted))
        found, wanted = skeletons(found), skeletons(wanted)
    errors = differences(found, wanted, kinds)
    for name in list(errors):
        if name in left:
            del errors[name]  # the last micro-batch's, as documented
        elif ".rows_seen" in name and case.way.options.get("static_graph"):
            del errors[name]  # forward and its hooks are skipped, as documented
        elif name.startswith("gradient") and other_numbers and "python_random" in case.tags:
            # Another number may leave a layer out, whose gradient is then None.
            if found[name] is None or wanted[name] is None:
                del errors[name]
    wrong = {name: error for name, error in errors.items() if error > TOLERANCE}
    if wrong and min(wrong.values()) < 1e-3:
        moves = moved(case, step)
        wrong = {name: error for name, error in wrong.items() if error > 10 * moves.get(name, 0)}
    if wrong:
        _raise(wrong, step)


def same_again(first: list[State], second: list[State]) -> None:
    """The same seed and plan give the same bits, whatever is drawn."""
    most = TOLERANCE if adds_in_any_order() else 0.0
    for step, (one, two) in enumerate(zip(first, second, strict=True)):
        errors = differences(two, one, ("gradient", "buffer", "loss", "generator"))
        if wrong := {name: error for name, error in errors.items() if error > most}:
            _raise(wrong, step, "another draw with the same seed:")
