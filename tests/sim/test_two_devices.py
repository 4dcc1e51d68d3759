"""Forward on one device, the loss on another."""

import copy

import infinitybatch as ib
import pytest
import simulated_device as sim
import torch
import torch.nn.functional as F
from measure import gradients, worst
from torch import nn

pytestmark = sim.two_devices
HERE, THERE = (torch.device(torch.get_default_device().type, index) for index in (0, 1))


def encoder():
    return nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)).double().to(HERE)


def data(n=24):
    return tuple(torch.randn(n, size, dtype=torch.float64, device=HERE) for size in (8, 4))


def native(model, run):
    model = copy.deepcopy(model)
    run(model).backward()
    return gradients(model)


def assert_same(model, wanted):
    assert all(parameter.grad.device == HERE for parameter in model.parameters())
    error = worst(gradients(model), wanted)
    assert error <= 1e-12, error


def peak_there():
    return torch.accelerator.max_memory_allocated(1)


def test_a_coupled_loss_on_the_other_device():
    model, (inputs, others) = encoder(), data()
    others = others.to(THERE)
    where = []

    def contrast(embeddings, others):
        where.append(embeddings.device)
        return F.cross_entropy(embeddings @ others.T, torch.arange(24, device=embeddings.device))

    wanted = native(model, lambda m: contrast(m(inputs).to(THERE), others))
    where.clear()
    batch = ib.VirtualBatch(
        model, ib.losses.coupled(contrast, loss_device=THERE), micro_batch_size=7
    )
    for _ in range(3):
        model.zero_grad()
        batch.backward(inputs, others)
        assert_same(model, wanted)
    assert set(where) == {THERE}


def test_a_tiled_loss_on_the_other_device():
    class Pairs(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = encoder(), encoder()

        def forward(self, x):
            return self.one(x), self.other(x)

    model, (inputs, _) = Pairs(), data()

    def contrast(model):
        a, b = (F.normalize(e.to(THERE), dim=1) for e in model(inputs))
        scores, right = a @ b.T / 0.1, torch.arange(24, device=THERE)
        return (F.cross_entropy(scores, right) + F.cross_entropy(scores.T, right)) / 2

    wanted = native(model, contrast)
    loss = ib.losses.info_nce(temperature=0.1, loss_device=THERE)
    ib.VirtualBatch(model, loss, micro_batch_size=7).backward(inputs)
    assert_same(model, wanted)


class Elsewhere(nn.Module):
    """Its outputs, and so the loss, are on the other device."""

    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return self.body(x).to(THERE)


@pytest.mark.parametrize("way", ["size", "budget", "static", "from the host"])
def test_a_separable_loss_on_the_other_device(way):
    model, (inputs, targets) = Elsewhere(encoder()), data()
    targets = targets.to(THERE)
    wanted = native(model, lambda m: F.mse_loss(m(inputs), targets))
    options = {"micro_batch_size": 7}
    if way == "budget":
        options = {"memory_budget": torch.accelerator.memory_allocated(0) + 30_000}
    if way == "static":
        options["static_graph"] = True
    if way == "from the host":
        inputs = inputs.cpu().pin_memory()
    batch = ib.VirtualBatch(model, nn.MSELoss(), **options)
    for _ in range(3):
        model.zero_grad()
        torch.accelerator.reset_peak_memory_stats(1)
        before = torch.accelerator.memory_allocated(1)
        batch.backward(inputs, targets)
        assert_same(model, wanted)
    assert peak_there() > before  # it was computed there


def test_wrap_with_the_loss_on_the_other_device():
    model, (inputs, targets) = encoder(), data()
    targets = targets.to(THERE)
    wanted = native(model, lambda m: F.mse_loss(m(inputs).to(THERE), targets))
    wrapped = ib.wrap(model, micro_batch_size=7)
    for _ in range(3):
        model.zero_grad()
        sim.reset()
        F.mse_loss(wrapped(inputs).to(THERE), targets).backward()
        waits = sim.waits()
        assert_same(model, wanted)
    assert waits <= 1
