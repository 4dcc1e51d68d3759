"""`match_native_rng` beside native: tensors that lie in memory in another order than their
dimensions, and numbers of Python's and NumPy's in static graphs. Gradients and where every
generator stands, over three steps."""

import random

import infinitybatch as ib
import numpy as np
import pytest
import torch
from support import Calls
from torch import nn
from torch.nn import functional as F

SAMPLES = 7


def positive(x: torch.Tensor) -> torch.Tensor:
    return x.detach().abs() + 0.1


def chosen(probabilities: torch.Tensor, count: int = 1) -> torch.Tensor:
    """Rows of 6 probabilities; what is drawn, as numbers."""
    return torch.multinomial(probabilities.softmax(-1).detach(), count).to(probabilities.dtype)


LAYOUTS = {
    "rrelu of a transpose": lambda h: F.rrelu(h.T, training=True).T,
    "rrelu in place of a transpose": lambda h: F.rrelu_(h.mul(1).T, training=True).T,
    "rrelu of channels last": lambda h: F.rrelu(
        h.view(-1, 3, 1, 2).to(memory_format=torch.channels_last), training=True
    ).flatten(1),
    "poisson of a transpose": lambda h: h + torch.poisson(3 * positive(h).T).T,
    "bernoulli of a transpose": lambda h: h * torch.bernoulli(torch.sigmoid(h.T).detach()).T,
    "bernoulli with a number": lambda h: h * torch.bernoulli(h.detach().T, 0.3).T,
    "binomial of a transpose": lambda h: (
        h + torch.binomial(torch.full_like(h.detach(), 9.0).T, torch.sigmoid(h.T).detach()).T
    ),
    "gamma of a transpose": lambda h: torch._standard_gamma((h.abs() + 0.1).T).T,
    "normal of a transpose": lambda h: torch.normal(h.detach().T, 1.0).T * h,
    "rand of a transpose": lambda h: torch.rand_like(h.T).T * h,
    "rand transposed": lambda h: torch.rand(6, len(h), dtype=h.dtype).T * h,
    "dropout of a transpose": lambda h: F.dropout(h.T, 0.3).T,
    "multinomial": lambda h: h + chosen(h),
    "multinomial of several": lambda h: h + chosen(h, 3).sum(1, keepdim=True),
    "multinomial, batch first": lambda h: (
        h + chosen(torch.stack([h, 2 * h, -h], 1).flatten(0, 1)).view(-1, 3)[:, :1]
    ),
    "multinomial, time first": lambda h: (
        h + chosen(torch.stack([h, 2 * h, -h]).flatten(0, 1)).view(3, -1).T[:, :1]
    ),
    "multinomial, time first, wide": lambda h: (
        h * chosen(torch.stack([h, 2 * h, -h]).flatten(0, 1)).view(3, -1).sum(0)[:, None]
    ),
}

FOREIGN = {
    "random": lambda h: h * (1 + random.random()),
    "random and dropout": lambda h: F.dropout(h, 0.3) * (1 + random.random()),
    "layers at random": lambda h: torch.tanh(h) if random.random() < 0.5 else torch.sin(h),
    "dropout at random": lambda h: F.dropout(h, 0.3) if random.random() < 0.5 else h,
    "NumPy": lambda h: F.dropout(h, 0.3) * float(np.random.rand()),
}


def states() -> tuple:
    numpy = np.random.get_state(legacy=False)["state"]
    return torch.get_rng_state().tolist(), random.getstate(), numpy["pos"], numpy["key"].tolist()


def train(middle, way, **options):
    """Gradients and generators of three steps; the library's error where it refuses."""
    torch.manual_seed(1)
    model = Calls(
        lambda self, x: self.last(torch.tanh(middle(self.first(x)))),
        first=nn.Linear(4, 6),
        last=nn.Linear(6, 2),
    ).double()
    batches = [(torch.randn(SAMPLES, 4).double(), torch.randn(SAMPLES, 2).double()) for _ in "123"]
    torch.manual_seed(3)
    random.seed(3)
    np.random.seed(3)
    options |= dict(match_native_rng=True)
    call = ib.wrap(model, **options) if way == "wrap" else model
    if way in ("stream", "coupled"):
        loss = nn.MSELoss() if way == "stream" else ib.losses.coupled(F.mse_loss)
        step = ib.VirtualBatch(model, loss, **options).backward
    else:

        def step(x, target):
            F.mse_loss(call(x), target).backward()

    found = []
    for x, target in batches:
        model.zero_grad()
        before = states()
        try:
            step(x, target)
        except ib.Error as error:
            assert way == "wrap" or states() == before
            assert all(parameter.grad is None for parameter in model.parameters())
            return error
        found.append(([parameter.grad for parameter in model.parameters()], states()))
    return found


def compare(middle, way, **options):
    wanted, found = train(middle, "native"), train(middle, way, **options)
    if isinstance(found, ib.Error):
        return found
    for (gradients, generators), (exact, stand) in zip(found, wanted, strict=True):
        torch.testing.assert_close(gradients, exact, rtol=1e-10, atol=1e-12)
        assert generators == stand
    return None


@pytest.mark.parametrize("way", ["stream", "coupled", "wrap"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts(name, way):
    refused = 0
    for size in (1, 2, 3, 4, 6, 7):
        for static in (False, True):
            error = compare(LAYOUTS[name], way, micro_batch_size=size, static_graph=static)
            refused += error is not None
            assert error is None or isinstance(error, ib.CouplingError)
    # Gradients that need the numbers, too, are known with the batch first alone.
    assert refused == (10 if name == "gamma of a transpose" else 0)


@pytest.mark.parametrize("way", ["stream", "coupled", "wrap"])
@pytest.mark.parametrize("name", FOREIGN)
def test_numbers_of_python_and_static_graphs(name, way):
    for options in (dict(micro_batch_size=size) for size in (1, 2, 3, 7)):
        assert compare(FOREIGN[name], way, static_graph=True, **options) is None
    budget = ib.memory.stats("cpu").live + (1 << 20)
    assert compare(FOREIGN[name], way, static_graph=True, memory_budget=budget) is None
