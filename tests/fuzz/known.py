"""Failures that are known, each with its reason; the list has to shrink.

A finding that one of these describes is printed and passes, as long as there are no more of its kind
than it says. `run.py --known` tells whether its seeds still show it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from .case import Case
from .found import Outcome


@dataclass(frozen=True)
class Known:
    reason: str
    describes: Callable[[Case, Outcome], bool]
    #: That show the failure today.
    seeds: tuple[int, ...]
    #: How many findings of a hundred programs may be of this kind.
    most: float = 1
    #: Of programs; see schedules.py.
    kind: str = "any"


def _wrong(outcome: Outcome) -> bool:
    return outcome.signature.startswith("wrong")


def _one_row(case: Case) -> bool:
    return case.way.size == 1 or case.way.budget is not None


def _norm_in_front_of_a_mean(case: Case) -> bool:
    names = [statement.name for statement in case.statements]
    if "mixed columns" not in names:
        return False
    before = names[: names.index("mixed columns")]
    return not {"GroupNorm", "InstanceNorm"}.isdisjoint(before)


#: What mixes only where samples have the right values.
SOME_VALUES = (
    "branch on the largest",
    "branch on the mean",
    "graph",
    "scatter mean",
    "bin counts",
    "capacity",
    "expert capacity",
    "unique values",
)

#: Whose numbers no look can fix.
REJECTION = ("poisson", "rrelu")


def _has(case: Case, *names: str) -> bool:
    return any(statement.name in names for statement in case.statements)


KNOWN = [
    Known(
        "mixing that begins with some values only, which the first batch of a kind does not have",
        lambda c, o: _wrong(o) and _has(c, *SOME_VALUES),
        (17733,),
    ),
    Known(
        "static_graph undoes what forward installs once: gradients are exact, the hook is not kept",
        lambda c, o: (
            o.signature == "wrong attribute"
            and "static_graph" in c.way.options
            and _has(c, "hook installed once")
        ),
        (4117, 18395),
    ),
    Known(
        "static_graph for a forward that flips a switch is refused, after a failure in other words",
        lambda c, o: (
            o.signature.startswith("needless CouplingError")
            and "static_graph" in c.way.options
            and _has(c, "switch that flips")
        ),
        (15930, 18271),
    ),
    Known(
        "the loss's own backward behind wrap passes the budget, which only the node's keeps",
        lambda c, o: o.signature == "the budget was passed" and c.way.api == "wrap",
        (9901,),
    ),
    Known(
        "a forward that mixes samples, and fails on one of them, is refused for another reason",
        lambda c, o: o.signature.startswith("needless BatchError") and "mixes" in c.tags,
        (8980,),
    ),
    Known(
        "a generator of the user's own that a failed step behind wrap has moved, as natively",
        lambda c, o: (
            "generator" in o.signature
            and c.fault is not None
            and c.way.api == "wrap"
            and _has(c, "own generator")
        ),
        (6607,),
    ),
    Known(
        "mixing beside draws by rejection: nothing can be compared",
        lambda c, o: (
            _wrong(o) and "mixes" in c.tags and any(s.name in REJECTION for s in c.statements)
        ),
        (2159,),
    ),
    Known(
        "a separable loss that reads one number of each micro-batch (a mean over its samples)",
        lambda c, o: _wrong(o) and c.output == "mean of the batch" and c.way.api == "stream",
        (20954,),
    ),
    Known(
        "outputs that stand once are not told from others in micro-batches of one row",
        lambda c, o: "could be the same for any samples" in o.text and _one_row(c),
        (66,),
        most=3,
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
        "mixing of values that a norm has made zero on average, so that gradients alone show it",
        lambda c, o: _wrong(o) and _norm_in_front_of_a_mean(c),
        (3449,),
    ),
    Known(
        "a table that the first call makes: a cut model's first micro-batch is recorded once more, and"
        " a hook's list counts it twice",
        lambda c, o: (
            o.signature == "wrong attribute"
            and "rows_seen" in o.text
            and "whole" in c.tags
            and _has(c, "cache made once")
        ),
        (151,),
        kind="kept",
    ),
]


def known(case: Case, outcome: Outcome) -> Known | None:
    return next((each for each in KNOWN if each.describes(case, outcome)), None)
