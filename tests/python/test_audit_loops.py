"""Right and wrong loops, each proven by plain SGD's update: no false alarm, and none is missed."""

from typing import Any

import infinitybatch as ib
import pytest
from audit_loops import RIGHT, WRONG, Loop
from audit_support import codes


def audited(loop: Loop) -> Any:
    model = loop.model()
    optimizer = loop.optimizer(model)
    if loop.loader is None:

        def step(model: Any, batch: Any) -> None:
            loop.run(model, optimizer, batch)

        return ib.audit(step, model, loop.batch, loss=loop.loss, **loop.options)
    loader = loop.loader()
    with ib.audit.watch(model, loader=loader, loss=loop.loss, **loop.options) as watch:
        loop.run(model, optimizer, loader)
    return watch.report


@pytest.mark.parametrize("name", RIGHT)
def test_a_right_loop_is_right(name: str) -> None:
    loop = RIGHT[name]
    assert loop.error() < 1e-12
    report = audited(loop)
    assert report.verdict == "right", print(report)


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_loop_is_told_with_its_cause(name: str) -> None:
    loop = WRONG[name]
    assert loop.error() > 1e-6
    report = audited(loop)
    if loop.cause == "undecided":
        assert report.verdict == "undecided", print(report)
        return
    assert report.verdict == "wrong", print(report)
    assert report.causes and report.error > report.allowed
    if loop.cause != "?":
        assert codes(report)[0] in loop.cause.split(), print(report)


def test_there_are_thirty_of_each() -> None:
    assert len(RIGHT) >= 30 and len(WRONG) >= 30
