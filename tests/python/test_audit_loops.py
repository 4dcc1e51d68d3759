"""Right and wrong loops, each proven by plain SGD's update: no false alarm, and none is missed."""

from typing import Any

import infinitybatch as ib
import pytest
from audit_loops import Both, Loop, N, accumulate, each_split, loss, micro_batches, net, sgd, taken
from audit_loops_gradients import GRADIENTS
from audit_loops_right import RIGHT
from audit_loops_rows import ROWS
from audit_loops_shares import SHARES
from audit_loops_undecided import UNDECIDED
from audit_support import codes

WRONG = ROWS | GRADIENTS | SHARES | UNDECIDED


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


def watched(run: Any, batches: Any, optimizer: Any = sgd, **options: Any) -> Any:
    model = net()
    with ib.audit.watch(model, **options) as watch:
        run(model, optimizer(model), batches)
    return watch


def test_without_a_batch_slices_that_overlap_are_undecided() -> None:
    for rows in ([slice(0, 4)] * 4, [slice(i, i + 5) for i in (0, 3, 6, 9)]):
        run = each_split(accumulate(taken(*rows), lambda piece, batch: 1 / 4))
        report = watched(run, micro_batches(N)()).report
        assert report.verdict == "undecided" and "no batch was given" in report.notes[-1]
    report = watched(each_split(accumulate()), micro_batches(N)()).report
    assert report.ok and "rows were not compared" in report.notes[-1]


def test_a_loader_that_is_read_at_once_and_shuffled() -> None:
    loader = micro_batches()()

    def run(model: Any, optimizer: Any, loader: Any) -> None:
        batches = list(loader)
        for window in ((batches[2], batches[0]), (batches[1], batches[3])):
            samples = sum(len(x) for x, _ in window)
            for x, y in window:
                (loss(model, (x, y)) * (len(x) / samples)).backward()
            optimizer.step()
            optimizer.zero_grad()

    watch = watched(run, loader, loader=loader)
    assert watch.ok and len(watch.reports) == 2, print(watch)


def test_a_batch_that_was_used_before_in_place_of_the_new_one() -> None:
    loader = micro_batches(7)()

    def run(model: Any, optimizer: Any, loader: Any) -> None:
        before = None
        for batch in loader:
            accumulate()(model, optimizer, before or batch)
            before = batch

    watch = watched(run, loader, loader=loader)
    assert [report.verdict for report in watch.reports] == ["right", "wrong"]
    assert codes(watch.report) == ["other_rows"]


def test_optimizers_that_step_at_other_frequencies() -> None:
    loader = micro_batches(7)()

    def run(model: Any, optimizer: Any, loader: Any) -> None:
        often, seldom = optimizer.each
        for i, batch in enumerate(loader):
            loss(model, batch).backward()
            often.step()
            often.zero_grad()
            if i % 2:
                seldom.step()
                seldom.zero_grad()

    watch = watched(run, loader, Both, loader=loader)
    verdicts = [report.verdict for report in watch.reports]
    assert verdicts == ["right", "right", "undecided"], print(watch)
    assert "belong to no one state" in watch.report.notes[-1]


def test_what_is_said_of_rows() -> None:
    report = audited(WRONG["one slice twice"])
    says = report.causes[0].says
    assert "2 samples ([12, 13]) never seen" in says
    assert "4 samples ([8, 9, 10, 11]) seen more often than others, up to 2 times" in says
    assert (
        "14 rows have another sample's target"
        in audited(WRONG["labels of another slice"]).causes[0].says
    )
    assert "rows are of no sample" in audited(WRONG["filled up with zeros"]).causes[0].says


def test_two_causes_are_both_named() -> None:
    found = codes(audited(WRONG["one slice four times, and not divided"]))
    assert found == ["other_rows", "no_division"]


def test_a_function_that_clips_is_a_function() -> None:
    with pytest.raises(ib.InvalidType, match="clip must be a Python function"):
        ib.audit.watch(net(), clip=0.1)


def test_there_are_as_many_of_each_as_there_were() -> None:
    assert len(RIGHT) >= 56 and len(WRONG) >= 68
