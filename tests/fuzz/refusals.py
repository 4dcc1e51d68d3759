"""Which typed errors a case may end in, and why. Any other is a finding: the error is needless."""

from collections.abc import Callable

import infinitybatch as ib

from .case import Case
from .device import on_host

Rule = tuple[type[ib.Error], Callable[[Case], bool], str]


def _has(*tags: str) -> Callable[[Case], bool]:
    return lambda case: any(tag in case.tags for tag in tags)


def _option(name: str) -> Callable[[Case], bool]:
    return lambda case: bool(case.way.options.get(name))


def _cut(case: Case) -> bool:
    """Whether recordings are cut: these have no way around code that none can hold."""
    return (
        "whole" in case.tags
        or "checkpoint_segments" in case.way.options
        or _option("static_graph")(case)
        or _option("match_native_rng")(case)
        or case.way.budget is not None
    )


def _single(case: Case) -> bool:
    """Whether there is a micro-batch of one sample."""
    size = case.way.size
    # A wrapped model splits a micro-batch where two sizes have to tell.
    small = case.way.api == "wrap" and size is not None and size <= 3
    return (
        case.way.budget is not None or small or any(rows % size == 1 % size for rows in case.rows)
    )


def _branches_behind(case: Case) -> bool:
    """Whether Python decides for rows by values that are known only once all samples were there."""
    waits = False
    for statement in case.statements:
        if waits and "branches" in statement.tags:
            return True
        draws = _option("match_native_rng")(case) and "random" in statement.tags
        waits = waits or draws or "whole" in statement.tags
    return False


#: Outputs that are the same for any samples.
STANDING = ("temperature", "penalty", "prototypes")

TIGHT = "a tight budget"

RULES: list[Rule] = [
    (ib.BudgetExceeded, lambda c: c.way.budget is not None and c.way.budget < 50, TIGHT),
    (ib.CouplingError, _has("mixes"), "ordinary ops mix samples"),
    (
        ib.BatchError,
        lambda c: _has("mixes")(c) and c.output == "channels" and _single(c),
        "no second look tells where the samples of outputs lie that ordinary ops mix",
    ),
    (ib.BatchError, lambda c: c.output in ("all pairs", "mean of the batch"), "an output mixes"),
    (ib.Error, _has("samples_in_state", "carried"), "state depends on the samples"),
    (ib.Error, lambda c: _has("opaque", "host_read", "dynamic")(c) and _cut(c), "opaque where cut"),
    (
        ib.Error,
        lambda c: _has("weight_written")(c) and (c.way.api != "stream" or _cut(c)),
        "weights written where recorded",
    ),
    (ib.CouplingError, _branches_behind, "rows branch behind what sees the whole batch"),
    (ib.Error, lambda c: _has("input_write")(c), "inputs written where forward runs again"),
    (
        ib.Unsupported,
        lambda c: (
            _option("static_graph")(c) and _has("number_state", "python_random", "first_call")(c)
        ),
        "a graph that is not static",
    ),
    (
        ib.Error,
        lambda c: _has("dispatch_only")(c) and _cut(c),
        "written past the dispatcher where cut",
    ),
    (
        ib.BatchError,
        lambda c: (
            c.output in STANDING
            and (
                _has("opaque", "host_read", "dynamic", "dispatch_only")(c)
                or c.way.options.get("use_tapes") is False
            )
        ),
        "whether an output stands once is told by tapes",
    ),
    (
        ib.BatchError,
        lambda c: c.output in STANDING and "keep_outputs" in c.way.options,
        "an output that stands once is not kept while streaming",
    ),
    (
        ib.CouplingError,
        lambda c: _single(c) and any(s.name == "functional batch_norm" for s in c.statements),
        "a batch_norm with neither weights nor statistics of one sample",
    ),
    (
        ib.CouplingError,
        lambda c: _option("match_native_rng")(c) and _has("odd_draw")(c),
        "numbers that are not known for the whole batch",
    ),
    (
        ib.CouplingError,
        lambda c: (
            not on_host()
            and _option("match_native_rng")(c)
            and any(s.name == "attention with dropout" for s in c.statements)
        ),
        "on accelerators attention draws within its kernel",
    ),
]


def excuse(case: Case, error: ib.Error) -> str | None:
    for kind, applies, reason in RULES:
        if isinstance(error, kind) and applies(case):
            return reason
    return None
