"""The ways in which a loop is trained: native's, and eleven of ours."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass(frozen=True)
class Way:
    name: str
    kind: Literal["native", "stream", "wrap"]
    options: dict[str, Any] = field(default_factory=dict)
    #: The loss is declared as one that couples samples.
    coupled: bool = False
    #: Budgets: so many times what native's step takes beside what is live before it.
    rooms: tuple[float, ...] = ()


NATIVE = Way("native", "native")
THREE, ONE = {"micro_batch_size": 3}, {"micro_batch_size": 1}
STATIC = {"micro_batch_size": 4, "static_graph": True}
# Room for all samples at once: whether plans and looks leave everything as it is.
BUDGET = {"memory_budget": "256MiB"}
# From where hardly one sample fits to where small micro-batches do: looks find little room.
TIGHT = (1.0, 1.5, 2.0, 3.0)
WAYS = [
    Way("stream 3", "stream", THREE),
    Way("stream 1", "stream", ONE),
    Way("stream static", "stream", STATIC),
    Way("coupled 3", "stream", THREE, coupled=True),
    Way("coupled 1", "stream", ONE, coupled=True),
    Way("coupled budget", "stream", BUDGET, coupled=True),
    Way("coupled tight", "stream", coupled=True, rooms=TIGHT),
    Way("wrap 3", "wrap", THREE),
    Way("wrap 1", "wrap", ONE),
    Way("wrap static", "wrap", STATIC),
    Way("wrap budget", "wrap", BUDGET),
]
