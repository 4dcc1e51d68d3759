"""Makes a failing case smaller: leaves out statements and options while it fails alike."""

from collections.abc import Iterator
from dataclasses import replace

from .case import Case
from .found import Outcome
from .runner import run


def _smaller(case: Case) -> Iterator[Case]:
    """Cases with one thing less, the most telling first."""
    way = case.way
    for number in range(len(case.statements)):
        yield case.having(statements=case.statements[:number] + case.statements[number + 1 :])
    if len(case.rows) > 1:
        yield case.having(rows=case.rows[:-1])
        yield case.having(rows=case.rows[1:])
    if case.output != "tensor":
        yield case.having(output="tensor")
    for name in way.options:
        kept = {other: value for other, value in way.options.items() if other != name}
        yield case.having(way=replace(way, options=kept))
    if way.budget is not None and way.size is not None:
        yield case.having(way=replace(way, budget=None))
    if way.input_gradient:
        yield case.having(way=replace(way, input_gradient=False))
    if way.loop != "once":
        yield case.having(way=replace(way, loop="once"))
    if case.evaluate:
        yield case.having(evaluate=False)
    if case.accumulate:
        yield case.having(accumulate=False)
    if case.fault is not None:
        yield case.having(fault=None)
        for count in (1, 2, case.fault[1] // 2):
            if 0 < count < case.fault[1]:
                yield case.having(fault=(case.fault[0], count))
    if case.momentum:
        yield case.having(momentum=0.0)
    for plainer in ("squared error", "ranking"):
        fits = way.api != "stream" or plainer == "squared error"
        if fits and case.loss not in ("squared error", plainer):
            yield case.having(loss=plainer, way=replace(way, criterion=False))
    for rows in (4, 5, 6):
        if max(case.rows) > rows:
            yield case.having(rows=tuple(min(each, rows) for each in case.rows))
    if way.size is not None and way.size > 2:
        yield case.having(way=replace(way, size=2))


def _alike(case: Case, wanted: str, tries: int) -> Outcome | None:
    """With a budget measured times choose the plan, so that one run tells little."""
    for _ in range(tries):
        outcome = run(case)
        if outcome.kind == "finding" and _kind(outcome.signature) == _kind(wanted):
            return outcome
    return None


def _kind(signature: str) -> str:
    """A wrong gradient is one, whatever else is wrong beside it."""
    if signature.startswith("wrong"):
        return "wrong gradient" if "gradient" in signature else signature
    return signature[:35]


def minimised(case: Case, outcome: Outcome) -> tuple[Case, Outcome]:
    tries = 1 if case.way.budget is None else 3
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(case):
            found = _alike(smaller, outcome.signature, tries)
            if found is not None:
                case, outcome, progress = smaller, found, True
                break
    return case, outcome
