"""Ordinary ops that combine samples are noticed by a step, and named."""

import copy

import infinitybatch as ib
import pytest
import torch
from mixing_support import (
    MIXERS,
    SIZE,
    WAYS,
    N,
    criterion,
    mixing,
    spread,
    step,
)
from support import Calls, classification, native, result_of, worst_error
from torch import nn


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MIXERS)
def test_mixed_samples_are_refused_by_name(name, way):
    mix, op = MIXERS[name]
    model = mixing(mix)
    model.head.weight.grad = given = torch.ones_like(model.head.weight)
    before = copy.deepcopy(model.state_dict())
    inputs, targets = classification(N)
    random = torch.get_rng_state()
    with pytest.raises(ib.CouplingError, match=r"across_batch.*per_micro_batch") as raised:
        step(way, model, inputs, targets, micro_batch_size=SIZE)
    assert raised.value.op == op and op in str(raised.value)
    assert torch.equal(torch.get_rng_state(), random)
    assert model.head.weight.grad is given and torch.equal(given, torch.ones_like(given))
    assert all(p.grad is None for p in model.parameters() if p is not model.head.weight)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), f"{key} changed"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MIXERS)
def test_across_batch_makes_mixers_exact(name, way):
    mix, _ = MIXERS[name]
    inputs, targets = classification(N)
    model = mixing(lambda h: ib.across_batch(mix, h))
    wanted = native(model, criterion(way), inputs, targets)
    found = copy.deepcopy(model)
    step(way, found, inputs, targets, micro_batch_size=SIZE)
    assert worst_error(result_of(found, wanted.loss), wanted) <= 1e-12


@pytest.mark.parametrize("way", WAYS)
def test_the_whole_batch_as_one_micro_batch_is_exact(way):
    model = mixing(MIXERS["standardised"][0])
    inputs, targets = classification(N)
    wanted = native(model, criterion(way), inputs, targets)
    found = copy.deepcopy(model)
    step(way, found, inputs, targets, memory_budget="64MiB")
    assert worst_error(result_of(found, wanted.loss), wanted) <= 1e-12


@pytest.mark.parametrize("way", WAYS)
def test_a_budget_for_less_than_the_whole_batch_refuses(way):
    garbage = ib.memory.stats().live  # that other tests have left
    model = Calls(
        lambda self, x: self.head((h := torch.tanh(self.body(x))) - h.mean(0)),
        body=nn.Linear(6, 4096),
        head=nn.Linear(4096, 5),
    ).double()
    inputs, targets = classification(256)
    weights = sum(p.nbytes for p in model.parameters())
    with pytest.raises(ib.CouplingError) as raised:
        step(way, model, inputs, targets, memory_budget=garbage + 3 * weights + (4 << 20))
    # Of a coupled loss's plan the first recording that is sure is a large one: there may be no room
    # to look for the op, which takes three ways side by side.
    names = {"aten::mean", "forward"} if way == "coupled" else {"aten::mean"}
    assert raised.value.op in names
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("way", WAYS)
def test_every_step_is_refused(way):
    """Nothing has been learned that would hide it."""
    model = mixing(MIXERS["centred"][0])
    inputs, targets = classification(N)
    if way == "wrap":
        wrapped = ib.wrap(model, micro_batch_size=SIZE)
        again = lambda: wrapped(inputs)  # noqa: E731
    else:
        loss = nn.CrossEntropyLoss() if way == "streaming" else ib.losses.coupled(spread)
        batch = ib.VirtualBatch(model, loss, micro_batch_size=SIZE)
        again = lambda: batch.backward(inputs, targets)  # noqa: E731
    for _ in range(3):
        with pytest.raises(ib.CouplingError):
            again()


@pytest.mark.parametrize("way", WAYS)
def test_per_micro_batch_allows_mixing(way):
    model = mixing(MIXERS["centred"][0])
    inputs, targets = classification(N)
    step(way, model, inputs, targets, micro_batch_size=SIZE, batch_coupling="per_micro_batch")
    assert model.head.weight.grad is not None


@pytest.mark.parametrize("way", WAYS)
def test_mixing_beside_layers_that_see_the_whole_batch_is_refused(way):
    for mix, refused in ((lambda h: h - h.mean(0), True), (lambda h: 2 * h, False)):
        model = Calls(
            lambda self, x, mix=mix: self.head(mix(torch.tanh(self.norm(self.body(x))))),
            body=nn.Linear(6, 8),
            norm=nn.BatchNorm1d(8),
            head=nn.Linear(8, 5),
        ).double()
        before = copy.deepcopy(model.state_dict())
        inputs, targets = classification(N)
        if refused:
            with pytest.raises(ib.CouplingError) as raised:
                step(way, model, inputs, targets, micro_batch_size=SIZE)
            assert raised.value.op == "aten::mean"
            for key, value in model.state_dict().items():
                assert torch.equal(value, before[key]), f"{key} changed"
        else:
            wanted = native(model, criterion(way), inputs, targets)
            step(way, model, inputs, targets, micro_batch_size=SIZE)
            assert worst_error(result_of(model, wanted.loss), wanted) <= 1e-12


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 3 * x

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient


def test_where_no_tape_can_tell_the_same_rows_do():
    """Code of the user's that ends the recording; `verify` tells, too."""
    model = mixing(lambda h: Triple.apply(h - h.mean(0)))
    inputs, targets = classification(N)
    with pytest.raises(ib.CouplingError, match=r"differ between a batch of \d+ and one of \d"):
        step("streaming", model, inputs, targets, micro_batch_size=SIZE)
    options = {"micro_batch_size": SIZE, "batch_coupling": "per_micro_batch"}
    assert not ib.verify(model, nn.CrossEntropyLoss(), inputs, targets, **options).exact
