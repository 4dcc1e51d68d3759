"""Architectures of many kinds, step by step beside the native whole batch: streamed, replayed,
wrapped."""

import copy
from typing import Any

import infinitybatch as ib
import pytest
import torch
from architectures import ARCHITECTURES
from image_architectures import images, mobile
from support import Calls, call, native, ours, worst_error
from torch import nn
from wrap_support import close, grads


@pytest.fixture(autouse=True)
def double_precision():
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def spread(outputs: torch.Tensor, targets: Any = None) -> torch.Tensor:
    """Couples all samples: each output beside every other's."""
    flat = outputs.flatten(1)
    return torch.logsumexp(flat @ flat.T / 8 + flat.mean(0).square().sum(), 1).mean()


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_streamed(name):
    model, inputs = ARCHITECTURES[name]()
    targets = torch.randn_like(call(copy.deepcopy(model), copy.deepcopy(inputs)))
    wanted = native(model, nn.MSELoss(), inputs, targets)
    for way in ({"micro_batch_size": 2}, {"memory_budget": "64MiB"}):
        found = ours(model, nn.MSELoss(), inputs, targets, **way)
        assert worst_error(found, wanted) <= 1e-12, way


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_replayed(name):
    model, inputs = ARCHITECTURES[name]()
    targets = torch.zeros(7)
    wanted = native(model, spread, inputs, targets)
    loss = ib.losses.coupled(spread)
    for kept in (0, 1, 4):
        found = ours(model, loss, inputs, targets, micro_batch_size=2, retained_micro_batches=kept)
        assert worst_error(found, wanted) <= 1e-12, kept
    found = ours(model, loss, inputs, targets, memory_budget="64MiB")
    assert worst_error(found, wanted) <= 1e-12


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_wrapped(name):
    model, inputs = ARCHITECTURES[name]()
    whole = copy.deepcopy(model)
    spread(call(whole, inputs)).backward()
    for way in ({"micro_batch_size": 2}, {"memory_budget": "64MiB"}):
        inner = copy.deepcopy(model)
        spread(call(ib.wrap(inner, **way), inputs)).backward()
        close(grads(inner), grads(whole))


@pytest.mark.parametrize("loss", [nn.MSELoss(), ib.losses.coupled(spread)])
def test_an_efficientnet_with_batch_norm(loss):
    model, inputs, targets = mobile(nn.BatchNorm2d), images(), torch.randn(7, 5)
    criterion = loss if isinstance(loss, nn.Module) else spread
    wanted = native(model, criterion, inputs, targets)
    noise = worst_error(native(model, criterion, inputs.flip(0), targets.flip(0)), wanted)
    for way in ({"micro_batch_size": 2}, {"memory_budget": "64MiB"}):
        found = ours(model, loss, inputs, targets, **way)
        assert worst_error(found, wanted) <= max(1e-12, 10 * noise), way
        for name, buffer in wanted.buffers.items():
            torch.testing.assert_close(found.buffers[name], buffer, rtol=1e-12, atol=0)


def autoencoder() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        mean, spread = self.encode(x).chunk(2, -1)
        q = torch.distributions.Normal(mean, nn.functional.softplus(spread))
        far = torch.distributions.kl_divergence(q, torch.distributions.Normal(0.0, 1.0))
        return torch.cat([self.decode(q.rsample()), far], 1)

    return Calls(forward, encode=nn.Linear(4, 6), decode=nn.Linear(3, 4))


def discrete_autoencoder() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        codes = nn.functional.gumbel_softmax(self.encode(x).view(-1, 3, 4), hard=True)
        return self.decode(codes.flatten(1))

    return Calls(forward, encode=nn.Linear(4, 12), decode=nn.Linear(12, 4))


@pytest.mark.parametrize("make", [autoencoder, discrete_autoencoder])
def test_autoencoders_that_draw(make):
    """With the numbers of the whole batch, and so its gradient."""
    model, inputs = make(), torch.randn(7, 4)
    targets = torch.randn_like(model(inputs))
    torch.manual_seed(5)
    wanted = native(model, nn.MSELoss(), inputs, targets)
    for way in ({"micro_batch_size": 2}, {"memory_budget": "64MiB"}):
        torch.manual_seed(5)
        found = ours(model, nn.MSELoss(), inputs, targets, match_native_rng=True, **way)
        assert worst_error(found, wanted) <= 1e-12, way
