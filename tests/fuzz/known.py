"""Failures that are known, each with its reason; the list has to shrink.

A finding that one of these describes is printed and passes. Where a seed is named it shows the
failure today, and `run.py --known` tells whether it still does.
"""

from collections.abc import Callable
from dataclasses import dataclass

from .case import Case
from .found import Outcome


@dataclass(frozen=True)
class Known:
    reason: str
    describes: Callable[[Case, Outcome], bool]
    seeds: tuple[int, ...] = ()


def _wrong(outcome: Outcome) -> bool:
    return outcome.signature.startswith("wrong")


def _one_row(case: Case) -> bool:
    return case.way.size == 1 or case.way.budget is not None


#: What mixes only where samples have the right values.
SOME_VALUES = (
    "branch on the largest",
    "graph",
    "scatter mean",
    "bin counts",
    "capacity",
    "expert capacity",
    "unique values",
)

KNOWN = [
    Known(
        "buffers that count samples are not noticed by wrap in micro-batches of one row",
        lambda c, o: o.signature == "wrong buffer" and "samples_in_state" in c.tags and _one_row(c),
        (1293,),
    ),
    Known(
        "a separable loss that reads one number of each micro-batch (a mean over its samples)",
        lambda c, o: _wrong(o) and c.output == "mean of the batch" and c.way.api == "stream",
        (20954,),
    ),
    Known(
        "outputs that stand once are not told from others in micro-batches of one row",
        lambda c, o: "could be the same for any samples" in o.text and _one_row(c),
    ),
    Known(
        "mixing that gradients alone show is not noticed (behind a straight-through rounding)",
        lambda c, o: (
            _wrong(o)
            and "mixes" in c.tags
            and any(
                s.name in ("straight through", "autograd.Function that is straight through")
                for s in c.statements
            )
        ),
        (5787,),
    ),
    Known(
        "static_graph, one micro-batch whose graph is kept: a loss that writes its outputs is refused",
        lambda c, o: c.loss == "in place" and "when it was replayed" in o.text,
        (3688,),
    ),
    Known(
        "tensors that a failed forward has left in attributes stay",
        lambda c, o: o.signature.startswith("changed after") and "leaves" in c.tags,
    ),
    Known(
        "mixing that begins with some values only, which the first batch of a kind does not have",
        lambda c, o: _wrong(o) and any(s.name in SOME_VALUES for s in c.statements),
        (4203,),
    ),
]


def known(case: Case, outcome: Outcome) -> Known | None:
    return next((each for each in KNOWN if each.describes(case, outcome)), None)
