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


def _counts(case: Case) -> bool:
    return "counts" in case.tags


def _blind(case: Case) -> bool:
    """Where no tape tells, or it is not believed."""
    return case.way.options.get("use_tapes") is False or not case.tags.isdisjoint(
        ("opaque", "host_read", "dynamic", "dispatch_only", "weight_written")
    )


#: What mixes only where samples have the right values.
SOME_VALUES = (
    "graph",
    "scatter mean",
    "bin counts",
    "capacity",
    "expert capacity",
    "unique values",
)

KNOWN = [
    Known(
        "mixing is not noticed in micro-batches of one row",
        lambda c, o: _wrong(o) and "mixes" in c.tags and _one_row(c),
    ),
    Known(
        "mixing is not noticed where no tape can be trusted",
        lambda c, o: _wrong(o) and "mixes" in c.tags and _blind(c),
        (173,),
    ),
    Known(
        "mixing is not noticed beside layers that see the whole batch",
        lambda c, o: _wrong(o) and {"mixes", "whole"} <= c.tags,
        (217, 266),
    ),
    Known(
        "what the number of rows decides is not noticed in micro-batches of two",
        lambda c, o: _wrong(o) and _counts(c),
        (185,),
    ),
    Known(
        "capacities that no micro-batch reaches are not met",
        lambda c, o: _wrong(o) and any(s.name == "expert capacity" for s in c.statements),
        (672,),
    ),
    Known(
        "coupling weaker than 1e-4 is not noticed",
        lambda c, o: _wrong(o) and any(s.name == "weak mean" for s in c.statements),
        (717,),
    ),
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
        "an output that stands once in a static graph is refused in another length",
        lambda c, o: "no dimension follows" in o.text and "static_graph" in c.way.options,
        (603,),
    ),
    Known(
        "outputs of one row and one column are refused",
        lambda c, o: "samples could lie along any of several" in o.text and _one_row(c),
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
        "a generator of the user's own is left elsewhere by a wrapped forward that fails",
        lambda c, o: o.signature.startswith("changed after") and "own_generator" in c.tags,
        (5154,),
    ),
    Known(
        "experiments with other values meet no mixing that begins with some values only",
        lambda c, o: _wrong(o) and any(s.name in SOME_VALUES for s in c.statements),
        (4096, 4203, 5133),
    ),
]


def known(case: Case, outcome: Outcome) -> Known | None:
    return next((each for each in KNOWN if each.describes(case, outcome)), None)
