"""Buffers that forward writes, resizes or brings from a pickle."""

import copy
import pickle
from typing import Any

import infinitybatch as ib
import pytest
import torch
from module_state_support import CRITERION, layers
from support import Calls, Double, classification, mlp, native, ours, worst_error
from torch import nn


def test_a_buffer_that_couples_is_named_where_forward_cannot_be_cut():
    """No op of the whole batch is at work, so nothing is cut: no word of tapes or static graphs."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.seen.copy_(x.detach().mean(0))
        return self.net(Double.apply(x))

    model = Calls(forward, net=mlp(), seen=torch.zeros(6, dtype=torch.float64))
    inputs, targets = classification(12)
    with pytest.raises(ib.CouplingError, match="buffer 'seen'"):
        ib.VirtualBatch(model, CRITERION, micro_batch_size=4).backward(inputs, targets)
    with pytest.raises(ib.CouplingError, match="buffer 'seen'"):
        loss = ib.losses.coupled(CRITERION)
        ib.VirtualBatch(model, loss, micro_batch_size=4).backward(inputs, targets)
    wanted = native(model, CRITERION, inputs, targets)
    found = ours(model, CRITERION, inputs, targets, memory_budget="256MiB")
    assert worst_error(found, wanted) <= 1e-12


@pytest.mark.parametrize("way", ["streamed", "coupled", "wrapped"])
def test_a_buffer_written_through_data_is_a_buffer(way):
    """As exponential moving averages of codebooks are written."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.codes.data.lerp_(y.detach().mean(0), 0.1)
        return self.head(Double.apply(y) - self.codes.detach())

    model = layers(forward)
    model.register_buffer("codes", torch.ones(8, dtype=torch.float64))
    inputs, targets = classification(12)
    with pytest.raises(ib.CouplingError, match="buffer 'codes'"):
        if way == "wrapped":
            ib.wrap(model, micro_batch_size=4)(inputs)
        else:
            loss = CRITERION if way == "streamed" else ib.losses.coupled(CRITERION)
            ib.VirtualBatch(model, loss, micro_batch_size=4).backward(inputs, targets)
    assert torch.equal(model.codes, torch.ones(8, dtype=torch.float64))


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(8), nn.utils.spectral_norm(nn.Linear(8, 8))])
def test_buffers_of_modules_that_come_out_of_a_pickle_are_buffers(layer):
    """The names of their attributes are other strings than the interpreter's."""
    torch.manual_seed(0)
    made = nn.Sequential(nn.Linear(6, 8), layer, nn.Linear(8, 4)).double()
    model = pickle.loads(pickle.dumps(made))
    native = copy.deepcopy(made)
    x, y = torch.randn(10, 6).double(), torch.randint(4, (10,))
    CRITERION(native(x), y).backward()
    ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=3).backward(x, y)
    for found, wanted in zip(model.parameters(), native.parameters(), strict=True):
        assert torch.allclose(found.grad, wanted.grad, rtol=1e-10, atol=1e-14)


def observed(self: Any, x: torch.Tensor) -> torch.Tensor:
    """As an observer of quantization does it, which learns its shape from the first batch."""
    with torch.no_grad():
        if self.most.numel() == 0:
            self.most.resize_(8)
        self.most.copy_(self.first.weight.amax(1))
    return self.head(self.first(x))


@pytest.mark.parametrize("options", [dict(micro_batch_size=3), dict(memory_budget="64MiB")])
@pytest.mark.parametrize("way", ["streaming", "coupled", "wrap"])
def test_a_buffer_that_forward_resizes(way, options):
    torch.manual_seed(0)
    layers = dict(first=nn.Linear(6, 8), head=nn.Linear(8, 5))
    model = Calls(observed, most=torch.empty(0), **layers).double()
    theirs = copy.deepcopy(model)
    buffer = model.most
    x, y = classification(10)
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        theirs.zero_grad(set_to_none=True)
        CRITERION(theirs(x), y).backward()
        if way == "wrap":
            CRITERION(ib.wrap(model, **options)(x), y).backward()
        else:
            loss = (
                ib.losses.coupled(lambda z, t: CRITERION(z, t)) if way == "coupled" else CRITERION
            )
            ib.VirtualBatch(model, loss, **options).backward(x, y)
        assert model.most is buffer and torch.equal(buffer, theirs.most)
        for found, wanted in zip(model.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(found.grad, wanted.grad, rtol=1e-10, atol=1e-14)


def test_a_step_that_fails_leaves_a_buffer_in_its_old_shape():
    def forward(self, x):
        observed(self, x)
        if len(x) == 1:
            raise KeyError("the last of ten")
        return self.head(self.first(x))

    layers = dict(first=nn.Linear(6, 8), head=nn.Linear(8, 5))
    model = Calls(forward, most=torch.empty(0), **layers).double()
    x, y = classification(10)
    for step in (
        lambda: ib.VirtualBatch(model, CRITERION, micro_batch_size=3).backward(x, y),
        lambda: ib.wrap(model, micro_batch_size=3)(x),
    ):
        with pytest.raises(KeyError):
            step()
        assert model.most.shape == (0,)
