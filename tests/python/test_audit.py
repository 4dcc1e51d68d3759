"""audit names the cause of a gradient that is not the whole batch's: one planted bug each."""

import functools
from typing import Any

import infinitybatch as ib
import pytest
import torch
from audit_support import (
    CRITERION,
    X,
    Y,
    accumulate,
    centred,
    codes,
    contrastive,
    each,
    loader,
    loss,
    net,
    sgd,
    share,
    watched,
    windows,
    with_dropout,
)
from torch import nn
from torch.nn import functional as F

#: Of 4, 4 and 2 samples.
RAGGED = 10


def by(weight: Any, **options: Any) -> Any:
    return lambda model, optimizer, batches: accumulate(
        model, optimizer, batches, weight, **options
    )


def last(sizes: list[int], i: int) -> float:
    return sizes[i] / sizes[-1]


WEIGHTS = {
    "mean_of_means": each,
    "no_division": lambda sizes, i: 1.0,
    "divided_by_last": last,
    "divided_by_nominal": lambda sizes, i: sizes[i] / (4 * len(sizes)),
    "divided_twice": lambda sizes, i: share(sizes, i) / len(sizes),
    "other_divisor": lambda sizes, i: 1 / 8,
    "other_factor": lambda sizes, i: 0.7 * share(sizes, i),
}


@pytest.mark.parametrize("given", [None, loss, CRITERION, F.cross_entropy])
@pytest.mark.parametrize("code", WEIGHTS)
def test_a_wrong_division_is_named(code: str, given: Any) -> None:
    watch = watched(by(WEIGHTS[code]), batches=loader(samples=RAGGED), loss=given)
    assert codes(watch.report) == [code], print(watch)
    found = watch.report.micro_batches
    assert [one.rows for one in found] == [4, 4, 2]
    for i, one in enumerate(found):
        assert one.weight == pytest.approx(WEIGHTS[code]([4, 4, 2], i))
        assert one.right == pytest.approx([0.4, 0.4, 0.2][i])
    assert not watch.ok and watch.report.verdict == "wrong"
    with pytest.raises(ib.AuditError, match=code) as raised:
        watch.raise_if_wrong()
    assert raised.value.report is watch.report


@pytest.mark.parametrize("code", WEIGHTS)
def test_of_one_step_without_training(code: str) -> None:
    model = net()
    optimizer = sgd(model)

    def step(model: Any, batch: Any) -> None:
        pieces = list(zip(batch[0].split(4), batch[1].split(4), strict=True))
        accumulate(model, optimizer, pieces, WEIGHTS[code])

    for given in (None, loss):
        report = ib.audit(step, model, (X[:RAGGED], Y[:RAGGED]), loss=given)
        assert codes(report) == [code], print(report)
        assert [one.rows for one in report.micro_batches] == [4, 4, 2]


def ignoring() -> torch.Tensor:
    """Labels of which each micro-batch of four ignores another number."""
    y = Y.clone()
    y[[0, 1, 2, 4, 11]] = -100
    return y


def test_token_means_of_equal_micro_batches() -> None:
    """4, 4 and 4 samples; 1, 3 and 3 labels count."""
    batches = loader(samples=12, y=ignoring())
    report = watched(by(each), batches=batches).report
    assert codes(report) == ["mean_of_means"]
    assert [one.right for one in report.micro_batches] == pytest.approx([1 / 7, 3 / 7, 3 / 7])


def test_samples_are_not_tokens() -> None:
    y = ignoring()
    report = watched(by(share), batches=loader(samples=10, y=y)).report
    assert codes(report) == ["weighted_by_samples"]
    tokens = [int((part != -100).sum()) for part in y[:10].split(4)]
    right = by(lambda sizes, i: tokens[i] / sum(tokens))
    assert watched(right, batches=loader(samples=10, y=y)).ok


def test_class_weights_are_seen_in_the_loss() -> None:
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9, 1, 1, 4]).double())
    watch = watched(by(each, criterion=weighted), batches=loader(samples=12))
    assert codes(watch.report) == ["mean_of_means"]


def test_a_gradient_of_an_earlier_step() -> None:
    watch = watched(by(share, zero=False))
    assert [report.verdict for report in watch.reports] == ["right", "wrong"]
    assert codes(watch.report) == ["stale_gradient"]
    both = watched(by(each, zero=False), batches=loader(4, 20))
    assert codes(both.reports[1]) == ["stale_gradient"] and len(both.reports) == 2
    ragged = watched(by(each, zero=False), batches=list(loader(4, 10)) * 2).reports[1]
    assert codes(ragged) == ["stale_gradient", "mean_of_means"], print(ragged)


@pytest.mark.parametrize("weight", [share, each])
def test_clipping_before_the_sum(weight: Any) -> None:
    for clip in (nn.utils.clip_grad_norm_, nn.utils.clip_grad_value_):
        model = net()
        clips = functools.partial(clip, list(model.parameters()), 0.02)
        watch = watched(by(weight, between=clips), model, loader(samples=RAGGED))
        wanted = ["clipped_before_sum"]
        if clip is nn.utils.clip_grad_norm_ and weight is each:
            wanted.append("mean_of_means")
        assert codes(watch.report) == wanted, print(watch)


def test_gradients_emptied_between_micro_batches() -> None:
    def run(model: Any, optimizer: Any, batches: Any) -> None:
        for window in windows(batches, 3):
            for x, y in window:
                optimizer.zero_grad()
                (CRITERION(model(x), y) / 3).backward()
            optimizer.step()

    watch = watched(run)
    assert codes(watch.report) == ["zeroed_between"] and "number 1, 2" in str(watch)


def test_batch_norm_of_slices() -> None:
    norm = nn.BatchNorm1d(8)
    watch = watched(by(share), net(norm))
    assert codes(watch.report) == ["batch_norm"]
    assert "BatchNorm1d '1'" in watch.report.causes[0].says
    ragged = watched(by(each), net(norm), loader(samples=RAGGED))
    assert codes(ragged.report) == ["mean_of_means", "batch_norm"]
    dropout = net(nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 8), nn.Dropout(0.3))
    assert codes(watched(by(share), dropout).report) == ["batch_norm"]
    assert watched(by(share), net(norm.eval())).ok


def test_samples_that_are_combined_by_hand() -> None:
    watch = watched(by(share), centred())
    assert codes(watch.report) == ["samples_combined"], print(watch)
    assert "Sequential 'net'" in str(watch) or "Linear 'net.0'" in str(watch)


def test_a_fraction_of_the_negatives() -> None:
    batches = [(x, y) for x, y in loader()]

    def contrast(model: Any, batch: Any) -> torch.Tensor:
        return contrastive(model(batch[0]))

    own = functools.partial(accumulate, criterion=lambda z, _: contrastive(z))

    def run(model: Any, optimizer: Any, loader: Any) -> None:
        own(model, optimizer, loader, share)

    watch = watched(run, batches=batches, loss=contrast)
    assert codes(watch.report) == ["fraction_of_negatives"]
    assert "33.3%" in watch.report.causes[0].says
    both = watched(run, net(nn.BatchNorm1d(8)), batches, loss=contrast)
    assert codes(both.report) == ["batch_norm", "fraction_of_negatives"], print(both)


def by_counting(model: Any, optimizer: Any, batches: Any, epochs: int = 2) -> None:
    """Steps after every third micro-batch, and forgets those that are left."""
    for _ in range(epochs):
        for i, (x, y) in enumerate(batches):
            (CRITERION(model(x), y) / 3).backward()
            if (i + 1) % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()


def by_counting_afresh(model: Any, optimizer: Any, batches: Any) -> None:
    for _ in range(2):
        optimizer.zero_grad()
        by_counting(model, optimizer, batches, epochs=1)


@pytest.mark.parametrize("given", [None, loss])
def test_a_last_window_that_never_steps(given: Any) -> None:
    """Five micro-batches: a step after three, two are left."""
    watch = watched(by_counting, batches=loader(samples=20), loss=given)
    assert [report.verdict for report in watch.reports] == ["right", "wrong", "wrong"]
    assert codes(watch.reports[1]) == ["never_stepped"]
    assert "the next epoch's first step has them too" in str(watch.reports[1])
    assert codes(watch.reports[2]) == ["never_stepped"]
    assert "2 micro-batches" in watch.reports[2].causes[0].says
    afresh = watched(by_counting_afresh, batches=loader(samples=20), loss=given)
    assert codes(afresh.reports[1]) == ["never_stepped"]
    assert "zero_grad() dropped them" in str(afresh.reports[1])
    assert watched(by_counting, loss=given).ok


def test_a_loop_that_never_steps() -> None:
    watch = watched(by_counting, batches=loader(samples=8))
    assert codes(watch.report) == ["never_stepped"]


def test_a_division_after_the_sum() -> None:
    model = net()

    def divide() -> None:
        for parameter in model.parameters():
            parameter.grad /= 3

    watch = watched(by(share, before=divide), model)
    assert codes(watch.report) == ["scaled_after_sum"] and "1/3" in str(watch)
    right = by(lambda sizes, i: 1.0, before=divide)
    assert watched(right, model).ok


def test_other_dropout_is_an_error_for_those_who_want_the_whole_batch_s() -> None:
    watch = watched(by(share), with_dropout(), same_random_numbers=True)
    assert codes(watch.report) == ["other_dropout"]
    watch = watched(by(each), with_dropout(), loader(samples=RAGGED), same_random_numbers=True)
    assert codes(watch.report) == ["mean_of_means"]
    watch = watched(by(share), with_dropout())
    assert watch.ok and "drew its own numbers" in watch.report.notes[0]


def test_a_step_on_a_part_of_the_batch() -> None:
    model = net()
    optimizer = sgd(model)

    def step(model: Any, batch: Any) -> None:
        for x, y in zip(batch[0].split(4), batch[1].split(4), strict=True):
            optimizer.zero_grad()
            CRITERION(model(x), y).backward()
            optimizer.step()

    for given in (None, loss):
        report = ib.audit(step, model, (X[:12], Y[:12]), loss=given)
        assert codes(report) == ["stepped_early"] and "4 of the 12" in str(report)


def test_another_loss_is_unknown() -> None:
    watch = watched(by(share), loss=lambda model, batch: model(batch[0]).square().mean())
    assert codes(watch.report) == ["unknown"] and "check that loss=" in str(watch)


def test_a_window_that_is_shorter_than_the_division() -> None:
    """What accelerate does: 4, 4, 4 and then 4 alone, all divided by 3."""
    watch = watched(by(lambda sizes, i: 1 / 3), batches=loader(samples=16))
    assert [report.verdict for report in watch.reports] == ["right", "wrong"]
    assert codes(watch.report) == ["other_divisor"]
    assert "divided by 3" in str(watch)


def test_later_windows_of_another_kind_are_examined() -> None:
    watch = watched(by(each), batches=loader(2, 26), steps=1)
    assert [report.step for report in watch.reports] == [0, 4]
    watch = watched(by(each), batches=loader(2, 24), steps=1)
    assert len(watch.reports) == 1


def test_under_a_budget_and_where_native_has_no_memory() -> None:
    report = watched(by(each), batches=loader(samples=RAGGED), memory_budget="64MiB").report
    assert "memory_budget='64MiB'" in report.reference and codes(report) == ["mean_of_means"]
    big = nn.Sequential(nn.Linear(6, 64), *(nn.Linear(64, 64) for _ in range(20)), nn.Linear(64, 5))
    x, y = torch.randn(3072, 6), torch.randint(5, (3072,))
    batches = loader(256, 3072, x, y)
    with ib.memory.limit(ib.memory.stats("cpu").live + 12 * 2**20):
        watch = watched(by(each, count=12), big, batches, loss=loss, steps=1)
    assert watch.ok and "memory_budget='auto'" in watch.report.reference


def test_the_report_can_be_pasted_kept_and_read_by_programs() -> None:
    import json

    watch = watched(by(each), batches=loader(samples=RAGGED))
    text = str(watch.report)
    for part in ("WRONG", "mean_of_means", "fix:", "0.333333", "0.4", torch.__version__, "float64"):
        assert part in text
    assert max(map(len, text.splitlines())) < 400
    found = json.loads(json.dumps(watch.as_dict()))
    assert found["ok"] is False and found["steps"][0]["causes"][0]["code"] == "mean_of_means"
    assert found["steps"][0]["parameters"][0]["error"] > 0.1
