"""Budgets of wrapped modules with ops that see the whole batch."""

import copy

import infinitybatch as ib
import pytest
import torch
from batch_norm_models import Residual, images
from wrap_support import X, close, contrastive, grads
from wrap_whole_batch_support import buffers, live, small


@pytest.mark.parametrize("room", [1 << 30, 4 << 20])
def test_under_a_budget(room):
    """The first step measures, undoes that, and plans; later ones know what the loss needs."""
    torch.manual_seed(19)
    inner = Residual(2, width=8).double()
    native = copy.deepcopy(inner)
    x = images(96)[0]
    budget = live() + room
    wrapped = ib.wrap(inner, memory_budget=budget)
    predicted = 0
    for step in range(10):
        torch.manual_seed(step)
        state = torch.get_rng_state()
        inner.zero_grad(set_to_none=True)
        native.zero_grad(set_to_none=True)
        outputs = wrapped(x)
        assert torch.equal(torch.get_rng_state(), state)
        contrastive(outputs).backward()
        del outputs
        report = wrapped.last_report
        assert report.strategy == "cut" and report.peak_bytes <= budget
        assert len(report.micro_batch_sizes) > 1 or room == 1 << 30
        if report.predicted_peak_bytes is not None:  # settled, sooner on a quiet machine
            # Sizes may have been tried at the beginning of the first such call.
            assert not predicted or report.peak_bytes <= 1.01 * report.predicted_peak_bytes
            predicted += 1
        contrastive(native(x)).backward()
        close(grads(inner), grads(native))
        close(buffers(inner), buffers(native))
        if predicted == 3:
            break
    assert predicted == 3


def test_a_budget_with_a_given_size_and_without_gradients():
    torch.manual_seed(20)
    inner = small()
    native = copy.deepcopy(inner)
    for options in ({"micro_batch_size": 4}, {}):
        wrapped = ib.wrap(inner, memory_budget="1GiB", **options)
        for _ in range(2):
            with torch.no_grad():
                close(wrapped(X), native(X))
            close(buffers(inner), buffers(native))
            for module in (wrapped, native):
                module.zero_grad(set_to_none=True)
                a, b = module(X), module(X[:7])
                contrastive(torch.cat([a, b])).backward()
            close(grads(inner), grads(native))
            close(buffers(inner), buffers(native))


def test_a_budget_that_nothing_fits_into():
    torch.manual_seed(21)
    inner = Residual(2, width=8).double()
    x = images(256)[0]
    before = copy.deepcopy(inner.state_dict())
    for offload, room in (("never", 300 << 10), ("auto", 50 << 10)):
        wrapped = ib.wrap(inner, memory_budget=live() + room, offload=offload)
        with pytest.raises(ib.BudgetExceeded) as raised:
            wrapped(x)
        assert raised.value.needed > raised.value.limit
        assert all(torch.equal(v, before[n]) for n, v in inner.state_dict().items())


def test_a_loss_that_leaves_too_little():
    """Backward cannot begin again: BudgetExceeded, gradients as before, and a forward that knows."""
    torch.manual_seed(22)
    inner = Residual(2, width=8).double()
    native = copy.deepcopy(inner)
    x = images(64)[0]
    budget = live() + (6 << 20)
    wrapped = ib.wrap(inner, memory_budget=budget, offload="never")
    outputs = wrapped(x)
    ballast = torch.empty(6 << 20, dtype=torch.uint8)
    with pytest.raises(ib.BudgetExceeded):
        outputs.square().mean().backward()
    assert all(p.grad is None for p in inner.parameters())
    del ballast, outputs
    native(x)
    before = copy.deepcopy(inner.state_dict())
    with pytest.raises(ib.BudgetExceeded):
        wrapped(x)  # the loss is known to need so much
    assert all(torch.equal(v, before[n]) for n, v in inner.state_dict().items())
    ib.wrap(inner, memory_budget=budget)(x).square().mean().backward()
    native(x).square().mean().backward()
    close(grads(inner), grads(native))
    close(buffers(inner), buffers(native))
