"""What only looks as if samples were combined goes through."""

import copy

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from mixing_support import (
    LOOK_ALIKES,
    SIZE,
    WAYS,
    N,
    criterion,
    spread,
    step,
)
from support import LOOKS, Calls, Log, classification, native, result_of, worst_error
from torch import nn


def plain(leaf):
    """Without the mark that says how it is split."""
    return leaf if isinstance(leaf, torch.Tensor) else leaf.value


RANDOM = ("dropout", "random slopes")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_what_only_looks_like_mixing_goes_through(name, way):
    make, data = LOOK_ALIKES[name]
    model = make().double()
    inputs, targets = data(), torch.randint(5, (N,))
    wanted = None
    if name not in RANDOM:
        leaves = inputs if type(inputs) is tuple else (inputs,)
        wanted = native(model, criterion(way), tuple(map(plain, leaves)), targets)
    calls = Log()
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    step(way, model, inputs, targets, micro_batch_size=SIZE)
    assert len(calls) == N // SIZE + LOOKS
    if wanted is not None:
        assert worst_error(result_of(model, wanted.loss), wanted) <= 1e-12


def test_outputs_that_the_loss_does_not_read_may_mix():
    model = Calls(lambda self, x: (self.head(x), x.mean(0)[:SIZE]), head=nn.Linear(6, 5)).double()
    inputs, targets = classification(N)
    first = lambda outputs, y: F.cross_entropy(outputs[0], y, reduction="sum")  # noqa: E731
    wanted = native(model, lambda a, _, y: F.cross_entropy(a, y), inputs, targets)
    found = copy.deepcopy(model)
    loss = ib.losses.separable(first, denominator=lambda y: len(y))
    ib.VirtualBatch(found, loss, micro_batch_size=SIZE).backward(inputs, targets)
    assert worst_error(result_of(found, wanted.loss), wanted) <= 1e-12


@pytest.mark.parametrize("way", [{"micro_batch_size": SIZE}, {"memory_budget": "64MiB"}])
def test_outputs_that_a_coupled_loss_does_not_read_may_mix(way):
    model = Calls(lambda self, x: (h := self.head(x), h - h.mean(0)), head=nn.Linear(6, 5)).double()
    inputs, targets = classification(N)
    first = lambda outputs, y: spread(outputs[0], y)  # noqa: E731
    wanted = native(model, lambda a, _, y: spread(a, y), inputs, targets)
    found = copy.deepcopy(model)
    ib.VirtualBatch(found, ib.losses.coupled(first), **way).backward(inputs, targets)
    assert worst_error(result_of(found, wanted.loss), wanted) <= 1e-12
    second = ib.losses.coupled(lambda outputs, y: spread(outputs[1], y))
    with pytest.raises(ib.CouplingError, match="aten::mean"):
        ib.VirtualBatch(model, second, micro_batch_size=SIZE).backward(inputs, targets)
