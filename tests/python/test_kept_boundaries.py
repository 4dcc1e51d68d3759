"""Where boundary activations of the whole batch do not all fit, some are kept and the others computed
again on the way back: gradients, statistics and random numbers stay those of the whole batch."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import batch_norm_models
import infinitybatch as ib
import pytest
import test_checkpoints_whole_batch as stretches
import torch
import torch.nn.functional as F
from batch_norm_models import Dense, Residual
from batch_norm_support import assert_same, contrastive
from measure import gradients, worst
from support import Calls, Result, native, ours, until_quiet
from torch import nn

TOLERANCE = 1e-12
KEPT = "boundary activations are kept at"
ROWS, SIZE = 32, 2


def made(make: Callable[[], nn.Module], rows: int = ROWS) -> tuple[nn.Module, Any, Any]:
    torch.manual_seed(0)
    model = make().double().train()
    return model, *batch_norm_models.images(rows)


def whole_peak(model: nn.Module, criterion: Any, inputs: Any, targets: Any) -> int:
    """What native takes above what is live."""
    model = copy.deepcopy(model)
    gc.collect()
    before = ib.memory.stats().live
    with ib.memory.peak() as scope:
        criterion(model(inputs), targets).backward()
    return scope.peak - before


def chosen(
    model: nn.Module, criterion: Any, inputs: Any, targets: Any, **options: Any
) -> Iterator[tuple[float, Result]]:
    """Steps of a given size under ever smaller budgets, each of which keeps other boundaries."""
    native_peak = whole_peak(model, criterion, inputs, targets)
    loss = ib.losses.coupled(criterion) if criterion is contrastive else criterion
    seen = set()
    for share in (95 - 5 * step for step in range(19)):
        gc.collect()
        live = ib.memory.stats().live
        budget = live + native_peak * share // 100
        given = {"micro_batch_size": SIZE, "memory_budget": budget, "offload": "never", **options}
        torch.manual_seed(1)
        try:
            found = ours(model, loss, inputs, targets, **given)
        except ib.BudgetExceeded:
            return
        report = found.report
        assert report.strategy == "cut" and report.peak_bytes <= budget
        if report.strategy_reason in seen:
            continue
        seen.add(report.strategy_reason)
        yield (report.peak_bytes - live) / native_peak, found


def dropping() -> nn.Module:
    """Dropout behind every BatchNorm."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            x = x + F.dropout(layer(F.relu(norm(x))), 0.3)
        return self.head(x.mean((2, 3)))

    return Calls(
        forward,
        stem=nn.Conv2d(3, 6, 3, padding=1),
        norms=nn.ModuleList(nn.BatchNorm2d(6) for _ in range(9)),
        layers=nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(9)),
        head=nn.Linear(6, 5),
    )


#: Network, how many ways to keep boundaries the budgets bring about at least, and the least peak.
NETWORKS = {
    "residual, 1 layer": (lambda: Residual(0), 1, 0.9),
    "residual, 9 layers": (lambda: Residual(8), 5, 0.35),
    "residual, 17 layers": (lambda: Residual(16), 7, 0.35),
    "DenseNet": (lambda: Dense(8), 3, 0.35),
}


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), contrastive], ids=["", "coupled"])
@pytest.mark.parametrize("network", NETWORKS)
def test_every_choice_is_exact(network: str, criterion: Any) -> None:
    make, ways, least = NETWORKS[network]
    model, inputs, targets = made(make)
    wanted = native(model, criterion, inputs, targets)
    peaks = []
    for peak, found in chosen(model, criterion, inputs, targets):
        assert_same(found, wanted, TOLERANCE)  # buffers among it: statistics move once
        peaks.append(peak)
    assert len(peaks) >= ways
    assert peaks == sorted(peaks, reverse=True)
    if criterion is not contrastive:
        assert peaks[-1] <= least


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), contrastive], ids=["", "coupled"])
def test_the_same_bits_as_where_all_are_kept(criterion: Any) -> None:
    """Random numbers too: they are drawn again as they were."""
    model, inputs, targets = made(dropping)
    loss = ib.losses.coupled(criterion) if criterion is contrastive else criterion
    torch.manual_seed(1)
    wanted = ours(model, loss, inputs, targets, micro_batch_size=SIZE)
    after = torch.get_rng_state()
    recomputed = 0
    for _, found in chosen(model, criterion, inputs, targets):
        recomputed += found.report.strategy_reason.startswith(KEPT)
        assert torch.equal(found.loss, wanted.loss)
        assert torch.equal(torch.get_rng_state(), after)
        for name, gradient in wanted.gradients.items():
            assert torch.equal(found.gradients[name], gradient), name
    assert recomputed >= 3


def test_random_numbers_of_the_whole_batch() -> None:
    model, inputs, targets = made(dropping)
    criterion = nn.CrossEntropyLoss()
    torch.manual_seed(1)
    wanted = native(model, criterion, inputs, targets)
    recomputed = 0
    for _, found in chosen(model, criterion, inputs, targets, match_native_rng=True):
        recomputed += found.report.strategy_reason.startswith(KEPT)
        assert_same(found, wanted, TOLERANCE)
    assert recomputed >= 3


#: Other ops of the whole batch, values that cross many cuts, writes in place behind them.
OTHERS = {
    name: stretches.MODELS[name]
    for name in ("three layers", "skips", "shared", "other ops", "in place", "modes")
} | {
    name: batch_norm_models.MODELS[name]
    for name in ("pre-activation", "depthwise", "two streams", "shortcut", "used twice", "LSTM")
}


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), contrastive], ids=["", "coupled"])
@pytest.mark.parametrize("name", OTHERS)
def test_other_networks(name: str, criterion: Any) -> None:
    model, inputs, targets = made(OTHERS[name], rows=24)
    wanted = native(model, criterion, inputs, targets)
    for _, found in chosen(model, criterion, inputs, targets):
        assert_same(found, wanted, TOLERANCE)


def test_static_graph() -> None:
    model, inputs, targets = made(lambda: Residual(8))
    criterion = nn.CrossEntropyLoss()
    wanted = native(model, criterion, inputs, targets)
    recomputed = 0
    for _, found in chosen(model, criterion, inputs, targets, static_graph=True):
        recomputed += found.report.strategy_reason.startswith(KEPT)
        assert_same(found, wanted, TOLERANCE)
    assert recomputed >= 3


def test_the_planner_keeps_what_fits_and_says_so() -> None:
    model, inputs, targets = made(lambda: Residual(16), rows=64)
    criterion = nn.CrossEntropyLoss()
    wanted = native(model, criterion, inputs, targets)
    buffers = copy.deepcopy(dict(model.named_buffers()))
    native_peak = whole_peak(model, criterion, inputs, targets)
    kept = []
    for share in (0.6, 0.45, 0.33):
        gc.collect()
        budget = ib.memory.stats().live + int(share * native_peak)
        batch = ib.VirtualBatch(model, criterion, memory_budget=budget, offload="never")
        predicted = 0
        for step in range(6):
            model.load_state_dict(buffers, strict=False)
            model.zero_grad(set_to_none=True)
            live = ib.memory.stats().live
            report = batch.backward(inputs, targets)
            assert worst(gradients(model), wanted.gradients) <= TOLERANCE
            assert report.peak_bytes <= budget and report.offloaded_bytes == 0
            assert step == 0 or report.restarts == 0
            if report.predicted_peak_bytes is not None:
                predicted += 1
                above = report.predicted_peak_bytes - live
                assert above == pytest.approx(report.peak_bytes - live, rel=0.01)
        assert predicted >= 2
        assert report.strategy == "cut" and report.strategy_reason.startswith(KEPT)
        model.zero_grad(set_to_none=True)
        plan = batch.plan(inputs, targets)
        assert report.strategy_reason in plan.explain()
        assert plan.kept_boundaries == sorted(plan.kept_boundaries)
        assert any(each.operation == "recompute" for each in plan.instructions)
        kept.append(len(plan.kept_boundaries))
    assert kept == sorted(kept, reverse=True) and kept[0] > kept[-1]


def test_what_is_too_small_says_what_would_do() -> None:
    model, inputs, targets = made(lambda: Residual(8))
    criterion = nn.CrossEntropyLoss()
    native_peak = whole_peak(model, criterion, inputs, targets)
    gc.collect()
    live = ib.memory.stats().live
    options = {"offload": "never"}
    batch = ib.VirtualBatch(model, criterion, memory_budget=live + native_peak // 6, **options)
    with pytest.raises(ib.BudgetExceeded) as raised:
        batch.backward(inputs, targets)
    smallest = raised.value.smallest_feasible
    assert smallest is not None and smallest - live <= 0.4 * native_peak
    report = ib.VirtualBatch(model, criterion, memory_budget=smallest, **options).backward(
        inputs, targets
    )
    assert report.peak_bytes <= smallest


def test_offload_that_is_allowed_comes_first() -> None:
    """It takes no second forward; whether it is slower, nobody knows before."""
    model, inputs, targets = made(lambda: Residual(8))
    criterion = nn.CrossEntropyLoss()
    budget = ib.memory.stats().live + whole_peak(model, criterion, inputs, targets) // 2
    found = ours(model, criterion, inputs, targets, micro_batch_size=SIZE, memory_budget=budget)
    assert found.report.offloaded_bytes > 0 and found.report.strategy_reason == ""


@until_quiet
@pytest.mark.real_times
@pytest.mark.parametrize("bandwidth", [2e7, 0], ids=["slow copies", "fast copies"])
def test_what_is_faster_stays(bandwidth: float) -> None:
    """Slow copies take many times what forward does; fast ones about as long as the part of it that
    is computed again, so either may stay."""
    model, inputs, targets = made(lambda: Residual(8))
    criterion = nn.CrossEntropyLoss()
    expected = native(model, criterion, inputs, targets)
    budget = ib.memory.stats().live + whole_peak(model, criterion, inputs, targets) // 2
    offload = ib.Offload("auto", host_budget="64MiB", host_bandwidth=bandwidth)
    batch = ib.VirtualBatch(model, criterion, memory_budget=budget, offload=offload)
    for _ in range(20):
        reason = batch.plan(inputs, targets).reason
        if "boundary activations are" in reason:
            break
    recomputes = "boundary activations are computed again, not offloaded" in reason
    assert recomputes or "boundary activations are offloaded, not computed again" in reason
    assert recomputes or bandwidth == 0
    report = batch.backward(inputs, targets)
    assert worst(gradients(model), expected.gradients) <= TOLERANCE
    assert report.peak_bytes <= budget
    assert (report.offloaded_bytes == 0) == recomputes
    assert report.strategy_reason.startswith(KEPT) == recomputes


@until_quiet
@pytest.mark.real_times
def test_larger_micro_batches_beside_fewer_boundaries_where_size_pays() -> None:
    """Each micro-batch waits so long that fewer of them win what keeping less costs. What fits first
    is made for 32 samples at a time."""
    model, inputs, targets = made(lambda: Residual(8), rows=256)
    criterion = nn.CrossEntropyLoss()
    expected = native(model, criterion, inputs, targets)
    model.stem.register_forward_hook(lambda *_: time.sleep(0.02))
    budget = ib.memory.stats().live + whole_peak(model, criterion, inputs, targets) * 45 // 100
    offload = ib.Offload("auto", host_budget="256MiB", host_bandwidth=1e8)
    batch = ib.VirtualBatch(model, criterion, memory_budget=budget, offload=offload)
    for _ in range(20):
        plan = batch.plan(inputs, targets)
        if "boundary activations are" in plan.reason:
            break
    report = batch.backward(inputs, targets)
    assert max(report.micro_batch_sizes) > 32, report
    assert worst(gradients(model), expected.gradients) <= TOLERANCE
    assert report.peak_bytes <= budget and report.strategy_reason.startswith(KEPT)


def stepping(way: str, model: nn.Module, data: Sequence[Any], **options: Any) -> Callable:
    """A step in one of our two ways, which gives its report."""
    criterion = nn.CrossEntropyLoss()
    if way == "stream":
        batch = ib.VirtualBatch(model, criterion, **options)
    else:
        wrapped = ib.wrap(model, **options)

    def step() -> Any:
        inputs, targets = data
        model.zero_grad(set_to_none=True)
        if way == "stream":
            return batch.backward(inputs, targets)
        criterion(wrapped(inputs), targets).backward()
        return wrapped.last_report

    return step


@pytest.mark.parametrize("offload", ["auto", "never"])
@pytest.mark.parametrize("way", ["stream", "wrap"])
def test_no_budget_means_many_micro_batches(way: str, offload: str) -> None:
    """Where all boundary activations fit beside a few samples alone, fewer of them are kept."""
    model, *data = made(lambda: Residual(8), rows=64)
    criterion = nn.CrossEntropyLoss()
    expected = native(model, criterion, *data)
    native_peak = whole_peak(model, criterion, *data)
    counts = []
    for share in range(46, 90, 4):
        gc.collect()
        budget = ib.memory.stats().live + native_peak * share // 100
        step = stepping(way, model, data, memory_budget=budget, offload=offload)
        for _ in range(4):
            report = step()
            assert worst(gradients(model), expected.gradients) <= TOLERANCE
            assert report.peak_bytes <= budget
        model.zero_grad(set_to_none=True)
        counts.append(len(report.micro_batch_sizes))
    assert max(counts) <= 5, counts


@pytest.mark.parametrize("way", ["stream", "wrap"])
def test_a_plan_that_became_another_is_compared_again(way: str) -> None:
    """As behind the first step of an optimizer, whose state is live from then on."""
    model, *data = made(lambda: Residual(8), rows=64)
    native_peak = whole_peak(model, nn.CrossEntropyLoss(), *data)
    gc.collect()
    budget = ib.memory.stats().live + native_peak * 90 // 100
    step = stepping(way, model, data, memory_budget=budget, offload="never")
    for _ in range(4):
        report = step()
    assert len(report.micro_batch_sizes) <= 5
    state = torch.empty(native_peak * 24 // 100, dtype=torch.uint8)
    for _ in range(6):
        report = step()
    assert len(report.micro_batch_sizes) <= 5
    assert report.peak_bytes <= budget and state.numel() > 0


@pytest.mark.parametrize("offload", ["auto", "never"])
@pytest.mark.parametrize("way", ["stream", "wrap"])
def test_shapes_that_take_turns_are_compared_too(way: str, offload: str) -> None:
    """Though each step is planned for other samples than the one in front of it."""
    model, *data = made(lambda: Residual(8), rows=64)
    smaller = [data[0][:, :, :-4, :-4].contiguous(), data[1]]
    expected = native(copy.deepcopy(model), nn.CrossEntropyLoss(), *data)
    native_peak = whole_peak(model, nn.CrossEntropyLoss(), *data)
    gc.collect()
    budget = ib.memory.stats().live + native_peak * 63 // 100
    turn = list(data)  # what the step is given, in its place
    step = stepping(way, model, turn, memory_budget=budget, offload=offload)
    for _ in range(8):
        turn[:] = data
        report = step()
        assert worst(gradients(model), expected.gradients) <= TOLERANCE
        turn[:] = smaller
        step()
    assert len(report.micro_batch_sizes) <= 5, report
    assert report.peak_bytes <= budget
