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


#: Whose numbers no look can fix.
REJECTION = ("poisson", "rrelu")

KNOWN = [
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
]


def known(case: Case, outcome: Outcome) -> Known | None:
    return next((each for each in KNOWN if each.describes(case, outcome)), None)
