"""Outputs that micro-batches do not give as the whole batch does: under a budget that holds the whole
batch it is one micro-batch, whatever size would be the fastest."""

from typing import Any

import infinitybatch as ib
import pytest
import torch
from support import Calls
from torch import nn
from wrap_support import close, grads

N = 40
DRAWS = torch.Generator().manual_seed(8)
X = torch.randn(N, 6, dtype=torch.float64, generator=DRAWS)
KINDS: dict[str, tuple[Any, Any]] = {
    "listed": (lambda z: list(z.unbind()), torch.stack),
    "number": (lambda z: (z, (z @ z.T).tanh().mean()), lambda o: o[0] + o[1]),
    "chosen": (lambda z: (z, z[z[:, 0] > 0]), lambda o: o[0] + o[1].square().sum()),
}
#: Where splitting is faster a plan would split.
ROOM = {"memory_budget": "64MiB"}


def model_of(kind: str) -> nn.Module:
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4)).double()
    return Calls(lambda self, x: KINDS[kind][0](self.layers(x)), layers=layers)


def loss_of(kind: str, outputs: Any) -> torch.Tensor:
    z = KINDS[kind][1](outputs)
    assert z.shape == (N, 4)
    return (z @ z.T).tanh().sum()


@pytest.mark.parametrize("entry", ["wrap", "VirtualBatch"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_natives_in_every_step(kind, entry):
    native, model = model_of(kind), model_of(kind)
    loss_of(kind, native(X)).backward()
    wrapped = ib.wrap(model, **ROOM)
    batch = ib.VirtualBatch(model, ib.losses.coupled(lambda o, _: loss_of(kind, o)), **ROOM)
    for _ in range(5):
        model.zero_grad()
        loss_of(kind, wrapped(X)).backward() if entry == "wrap" else batch.backward(X)
        close(grads(model), grads(native), 1e-11)


@pytest.mark.parametrize("kind", KINDS)
def test_values_without_gradients_are_natives_in_every_call(kind):
    model = model_of(kind).eval()
    wrapped = ib.wrap(model, **ROOM)
    with torch.no_grad():
        for _ in range(5):
            close(loss_of(kind, wrapped(X)), loss_of(kind, model(X)))


@pytest.mark.parametrize("entry", ["wrap", "VirtualBatch"])
def test_where_the_whole_batch_has_no_room_the_way_out_is_told(entry):
    """Activations of 40 samples take 12 MiB; the budget holds some."""
    torch.manual_seed(3)
    layers = [nn.Linear(6, 4096), nn.Tanh(), *([nn.Tanh()] * 7), nn.Linear(4096, 4)]
    model = Calls(lambda self, x: list(self.net(x).unbind()), net=nn.Sequential(*layers).double())
    live = ib.memory.stats("cpu").live
    options = {"memory_budget": live + (4 << 20)}
    with pytest.raises((ib.BatchError, ib.CouplingError), match="torch.stack"):
        if entry == "wrap":
            loss_of("listed", ib.wrap(model, **options)(X)).backward()
        else:
            loss = ib.losses.coupled(lambda o, _: loss_of("listed", o))
            ib.VirtualBatch(model, loss, **options).backward(X)
    assert all(grad is None for grad in grads(model).values())
