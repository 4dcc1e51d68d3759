"""torch.compile with its own backend, in micro-batches: kernels that no operator shows, which take
their buffers from the allocator and write them by `out=`."""

import copy
import warnings

import infinitybatch as ib
import pytest
import torch
from fault_support import LONG
from measure import assert_within
from torch import nn
from wrap_support import close, contrastive, grads

X = torch.randn(8, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.fixture(scope="module")
def compiled():
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)).double()
    native = copy.deepcopy(model)
    contrastive(native(X)).backward()
    return torch.compile(model), native


def check(model, native):
    found = {name.replace("_orig_mod.", ""): grad for name, grad in grads(model).items()}
    close(found, grads(native))
    model.zero_grad()


@pytest.mark.parametrize("options", [dict(), dict(retained_micro_batches=1)])
def test_inside(compiled, options):
    model, native = compiled
    contrastive(ib.wrap(model, micro_batch_size=4, **options)(X)).backward()
    check(model, native)
    step = ib.VirtualBatch(model, ib.losses.coupled(contrastive), micro_batch_size=4, **options)
    step.backward(X)
    check(model, native)


def test_inside_with_another_size(compiled):
    """Another size brings another program in the middle of forward."""
    model, native = compiled
    contrastive(ib.wrap(model, micro_batch_size=3)(X)).backward()
    check(model, native)


def test_streamed(compiled):
    model, native = copy.deepcopy(compiled)
    native.zero_grad()
    y = torch.arange(8) % 4
    nn.functional.cross_entropy(native(X), y).backward()
    ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4).backward(X, y)
    check(model, native)


def test_dropout(compiled):
    torch.manual_seed(0)
    model = torch.compile(nn.Sequential(nn.Linear(6, 8), nn.Dropout()).double())
    wrapped = ib.wrap(model, micro_batch_size=4)
    z = wrapped(X)
    z.sum().backward()  # that the same numbers are drawn again is compared
    kept = (z != 0).double() * 2
    assert_within({"bias": model._orig_mod[0].bias.grad}, {"bias": kept.sum(0)})


AROUND = [(norm, budget) for norm in (False, True) for budget in (False, True)]


@pytest.mark.parametrize("outside", [False, True])
@pytest.mark.parametrize(("norm", "budget"), AROUND if LONG else [(False, True), (True, True)])
def test_around_a_wrapped_model_and_inside(norm, budget, outside):
    """Beside a layer that sees the whole batch, and under a budget."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    beside = nn.BatchNorm1d(8) if norm else nn.LayerNorm(8)
    native = nn.Sequential(nn.Linear(6, 8), beside, nn.GELU(), nn.Linear(8, 4)).double()
    model = copy.deepcopy(native)
    options = {"memory_budget": "64MiB"} if budget else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # IB103: such a model runs uncompiled
        if outside:
            step = torch.compile(ib.wrap(model, micro_batch_size=3, **options))
        else:
            step = ib.wrap(torch.compile(model), micro_batch_size=3, **options)
        for _ in range(2):
            native.zero_grad()
            model.zero_grad()
            contrastive(native(X)).backward()
            contrastive(step(X)).backward()
            check(model, native)
    for found, wanted in zip(model.buffers(), native.buffers(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
