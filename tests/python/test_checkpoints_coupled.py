"""A coupled loss of samples that are played segment by segment."""

from __future__ import annotations

import infinitybatch as ib
import pytest
import torch
from checkpoint_models import (
    MODELS,
    TOLERANCE,
    Chain,
    CountedChain,
    contrast,
    make,
)
from measure import numbered, worst
from support import LOOKS, Log, gradient_error, looks, native_gradients


def spread(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """No sample's share can be told from the others'."""
    return torch.logsumexp(outputs, 0).sum() * (2 + (outputs * targets).sum())


@pytest.mark.parametrize("offload", ["never", "always"])
@pytest.mark.parametrize("segments", [2, 7])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("loss", [contrast, spread])
@pytest.mark.parametrize("name", MODELS)
def test_coupled_losses(name: str, loss, size: int, segments: int, offload: str) -> None:
    model, inputs, targets = make(name)
    wanted = native_gradients(model, loss, inputs, targets)
    calls = Log()
    model.register_forward_hook(lambda *_: calls.append(1))
    batch = ib.VirtualBatch(
        model,
        ib.losses.coupled(loss),
        micro_batch_size=size,
        checkpoint_segments=segments,
        offload=offload,
    )
    for step in range(2):
        model.zero_grad()
        calls.clear()
        report = batch.backward(inputs, targets)
        assert report.strategy == "checkpoint"
        # Of one sample nothing tells along which dimension samples lie: two are looked at once.
        # And in micro-batches of one each of the six samples is.
        more = (6 + 1 if size == 1 else LOOKS * (size < 6)) * (looks(step) > 0)
        more += name == "counting" and size == 1 and step == 0  # buffers that may count samples
        assert len(calls) == -(-6 // size) + more + (size == 1 and step == 0)
        assert gradient_error(model, wanted) <= TOLERANCE, step


@pytest.mark.parametrize("size", [3, 5, 6])
def test_masks_are_those_that_a_coupled_loss_saw(size: int) -> None:
    torch.manual_seed(0)
    model = Chain(12, 8, dropout=0.4).double()
    inputs = torch.randn(6, 10, 8, dtype=torch.float64)
    targets = torch.randn(6, 1, dtype=torch.float64)
    results = []
    for options in ({}, {"checkpoint_segments": 5}):
        batch = ib.VirtualBatch(
            model, ib.losses.coupled(contrast), micro_batch_size=size, **options
        )
        for step in range(2):
            torch.manual_seed(step)
            model.zero_grad()
            report = batch.backward(inputs, targets)
        results.append([report.loss, torch.get_rng_state(), *(p.grad for p in model.parameters())])
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert worst(numbered(results[1][2:]), numbered(results[0][2:])) <= TOLERANCE


@pytest.mark.parametrize(
    ("offload", "above", "times"),
    [("never", 160, 2), ("auto", 60, 2), ("never", 90, 3), ("never", 40, 4)],
    ids=["kept", "offloaded", "made again", "computed again and again"],
)
def test_one_sample_beyond_the_device_with_a_coupled_loss(
    offload: str, above: int, times: int
) -> None:
    torch.manual_seed(0)
    model = CountedChain(60).double()
    inputs = torch.randn(6, 64, 8, dtype=torch.float64)
    targets = torch.randn(6, 1, dtype=torch.float64)
    wanted = native_gradients(model, contrast, inputs, targets)
    sums = sum(parameter.nbytes for parameter in model.parameters())
    budget = ib.memory.stats("cpu").live + sums + above * 1024
    batch = ib.VirtualBatch(
        model, ib.losses.coupled(contrast), memory_budget=budget, offload=offload
    )
    for _ in range(3):
        model.zero_grad()
        model.take_counts()
        report = batch.backward(inputs, targets)
        assert report.strategy == "checkpoint"
        assert report.peak_bytes <= budget
        assert gradient_error(model, wanted) <= TOLERANCE
    assert report.restarts == 0
    assert (report.offloaded_bytes > 0) == (offload == "auto")
    most = max(model.take_counts())
    assert (most >= 6 * times) if times > 3 else (most == 6 * times), most / 6
    model.zero_grad()
    assert "loss of all" in batch.plan(inputs, targets).explain()


@pytest.mark.parametrize("above", [2**16, 2**18], ids=["nor does a sample", "a sample does"])
@pytest.mark.parametrize("offload", ["auto", "never"])
def test_a_coupled_loss_that_does_not_fit_is_told_soon(offload: str, above: int) -> None:
    model, inputs, targets = make("chain")

    def large(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs * torch.ones(1 << 20, dtype=torch.float64)).sum()

    budget = ib.memory.stats("cpu").live + above
    batch = ib.VirtualBatch(model, ib.losses.coupled(large), memory_budget=budget, offload=offload)
    # Beside one sample's segments and the gradients there may be too little for the loss to begin.
    with pytest.raises(ib.BudgetExceeded, match="loss on the outputs of all|smallest segment"):
        batch.backward(inputs, targets)
    assert all(parameter.grad is None for parameter in model.parameters())
