"""Samples cut for memory: the smallest budgets, what cannot be cut, failures within a step."""

from __future__ import annotations

import random

import infinitybatch as ib
import pytest
import torch
from checkpoint_models import (
    TOLERANCE,
    Chain,
    Recurrent,
    contrast,
    make,
)
from fault_support import LONG
from support import Square, gradient_error, native_gradients
from torch import nn


@pytest.mark.parametrize(
    ("make_model", "shape", "above"),
    [
        pytest.param(
            lambda: Chain(1000, 8),
            (2, 128, 8),
            2.5,
            marks=pytest.mark.skipif(not LONG, reason="in make test-long"),
        ),
        (lambda: Recurrent(32), (2, 1000, 4), 0.5),
    ],
    ids=["1,000 layers", "1,000 time steps"],
)
def test_one_sample_beyond_the_device(make_model, shape, above) -> None:
    torch.manual_seed(0)
    model = make_model().double()
    inputs = torch.randn(shape, dtype=torch.float64)
    targets = torch.randn(shape[0], 1, dtype=torch.float64)
    wanted = native_gradients(model, nn.MSELoss(), inputs, targets)
    for parameter in model.parameters():
        parameter.grad = None
    budget = ib.memory.stats("cpu").live + int(above * 2**20)
    with pytest.raises(ib.BudgetExceeded):  # without cuts
        ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=1, memory_budget=budget).backward(
            inputs, targets
        )
    batch = ib.VirtualBatch(model, nn.MSELoss(), memory_budget=budget)
    for step in range(4):
        for parameter in model.parameters():
            parameter.grad = None
        report = batch.backward(inputs, targets)
        assert report.strategy == "checkpoint"
        assert report.peak_bytes <= budget
        assert step <= 1 or report.restarts == 0
        assert gradient_error(model, wanted) <= TOLERANCE
    assert "segments" in batch.plan(inputs, targets).explain()


def test_a_budget_below_the_smallest_segment_says_so() -> None:
    model, inputs, targets = make("chain")
    before = [parameter.clone() for parameter in model.parameters()]
    budget = ib.memory.stats("cpu").live + sum(p.nbytes for p in model.parameters()) + 2000
    batch = ib.VirtualBatch(model, nn.MSELoss(), memory_budget=budget)
    with pytest.raises(ib.BudgetExceeded, match="segment of a single sample"):
        batch.backward(inputs, targets)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "with BatchNorm"])
@pytest.mark.parametrize("above", [0, 1000, 20_000])
def test_a_budget_that_nothing_fits_into_is_told_soon(above: int, norm: bool) -> None:
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(64)] if norm else []
    model = nn.Sequential(nn.Linear(64, 64), *middle, nn.Tanh(), nn.Linear(64, 1)).double()
    inputs = torch.randn(64, 64, dtype=torch.float64)
    targets = torch.randn(64, 1, dtype=torch.float64)
    batch = ib.VirtualBatch(
        model, nn.MSELoss(), memory_budget=ib.memory.stats("cpu").live + 6000 + above
    )
    with pytest.raises(ib.BudgetExceeded):
        batch.backward(inputs, targets)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(3, 1)

        def forward(self, x):
            return Square.apply(self.line(x))

    model = Model()
    batch = ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=2, checkpoint_segments=2)
    with pytest.raises(ib.Unsupported, match="Square.*larger memory_budget"):
        batch.backward(torch.randn(4, 3), torch.randn(4, 1))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batch_size": 2, "checkpoint_segments": 1}, "2 or more"),
        ({"checkpoint_segments": 3}, "without micro_batch_size"),
        ({"micro_batch_size": 2, "checkpoint_segments": 3, "static_graph": True}, "static_graph"),
        ({"micro_batch_size": 2, "checkpoint_segments": 3.5}, "whole number"),
        (
            {"micro_batch_size": 2, "checkpoint_segments": 3, "retained_micro_batches": 1},
            "retained_micro_batches",
        ),
    ],
)
def test_misuse(options: dict, message: str) -> None:
    with pytest.raises((ib.InvalidArgument, ib.InvalidType), match=message):
        ib.VirtualBatch(nn.Linear(2, 1), nn.MSELoss(), **options)


@pytest.mark.parametrize("loss", ["separable", "coupled"])
@pytest.mark.parametrize("offload", ["never", "always"])
def test_a_failed_allocation_anywhere_leaves_everything_as_it_was(offload: str, loss: str) -> None:
    model, inputs, targets = make("residual")
    batch = ib.VirtualBatch(
        model,
        nn.MSELoss() if loss == "separable" else ib.losses.coupled(contrast),
        micro_batch_size=2,
        checkpoint_segments=4,
        offload=offload,
    )
    for _ in range(2):
        model.zero_grad()
        batch.backward(inputs, targets)
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with ib.memory.fail_allocation() as counter:
        batch.backward(inputs, targets)
    count = counter.seen - 5
    assert count > 300
    model.zero_grad()
    live = ib.memory.stats("cpu").live
    places = range(1, count + 1)
    if not LONG:
        places = sorted(random.Random(1).sample(places, 60))
    for place in places:
        with ib.memory.fail_allocation(place) as failure:
            with pytest.raises(torch.OutOfMemoryError) as raised:
                batch.backward(inputs, targets)
        raised.value.__traceback__ = None
        del raised
        assert failure.failed
        assert all(parameter.grad is None for parameter in model.parameters()), place
        assert ib.memory.stats("cpu").live == live, place
        if place % 7 == 0 or LONG:
            batch.backward(inputs, targets)
            assert all(map(torch.equal, wanted, (p.grad for p in model.parameters()))), place
            model.zero_grad()


def test_a_failing_step_leaves_everything_as_it_was() -> None:
    model, inputs, targets = make("chain")
    wanted = native_gradients(model, nn.MSELoss(), inputs, targets)
    batch = ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=2, checkpoint_segments=4)
    batch.backward(inputs, targets)
    model.zero_grad()
    failing = model.head.register_full_backward_pre_hook(lambda *_: 1 / 0)
    state = torch.get_rng_state()
    live = ib.memory.stats("cpu").live
    with pytest.raises((ZeroDivisionError, ib.Unsupported)):
        batch.backward(inputs, targets)
    failing.remove()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert ib.memory.stats("cpu").live == live
    batch.backward(inputs, targets)
    assert gradient_error(model, wanted) <= TOLERANCE
