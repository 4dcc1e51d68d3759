"""Outputs that are a list with a tensor for each sample: micro-batches do not give what the whole batch
gives, and those of one sample each look as if they did."""

import copy
from typing import Any

import infinitybatch as ib
import pytest
import torch
from support import Calls
from torch import nn
from wrap_support import X, close, grads

N = len(X)


def model_of(width: int, make: Any) -> nn.Module:
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, width)).double()
    return Calls(lambda self, x: make(self.layers(x)), layers=layers)


def of_all(outputs: Any) -> torch.Tensor:
    z = torch.stack(list(outputs)).flatten(1)
    assert len(z) == N
    return (z @ z.T).tanh().sum()


def listed(z: torch.Tensor) -> list[torch.Tensor]:
    return list(z.unbind())


def bags(z: torch.Tensor) -> dict[str, tuple[torch.Tensor, ...]]:
    """As of detectors and bags: [1, classes] each."""
    return {"each": z.split(1)}


def backward(entry: str, model: nn.Module, read: Any, **options: Any) -> None:
    if entry == "wrap":
        return of_all(read(ib.wrap(model, **options)(X))).backward()
    loss = ib.losses.coupled(lambda outputs, _: of_all(read(outputs)))
    ib.VirtualBatch(model, loss, **options).backward(X)


KINDS = {"listed": (listed, lambda o: o), "bags": (bags, lambda o: o["each"])}


@pytest.mark.parametrize("entry", ["wrap", "VirtualBatch"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 12])
@pytest.mark.parametrize("width", [1, 4])
def test_a_tensor_for_each_sample_is_refused(entry, kind, size, width):
    make, read = KINDS[kind]

    def whole(outputs: Any) -> Any:  # what is joined is no list of all
        return torch.zeros(N, 1) + read(outputs)[0].sum()

    model = model_of(width, make)
    with pytest.raises((ib.BatchError, ib.CouplingError)) as caught:
        backward(entry, model, whole, micro_batch_size=size)
    # An entry as wide as the micro-batch has samples might be a head's; that is for the look to tell.
    if size in (1, 2, 3) or width == 1:
        assert "torch.stack(outputs)" in str(caught.value)
    assert all(grad is None for grad in grads(model).values())


@pytest.mark.parametrize("entry", ["wrap", "VirtualBatch"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_ways_out_are_exact(entry, kind):
    make, read = KINDS[kind]
    native = model_of(1, make)
    of_all(read(native(X))).backward()
    for options in ({"micro_batch_size": N}, {"memory_budget": "64MiB"}):
        model = model_of(1, make)
        backward(entry, model, read, **options)
        close(grads(model), grads(native), 1e-11)
    for size in (1, 2, 4):  # torch.stack, and unbind behind the model
        model = model_of(1, lambda z: torch.stack(listed(z)))
        backward(entry, model, lambda z: z.unbind(), micro_batch_size=size)
        close(grads(model), grads(native), 1e-11)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_a_separable_loss_reads_each_list_for_itself(size):
    model = model_of(4, listed)
    native = copy.deepcopy(model)
    torch.stack(native(X)).square().sum().backward()
    loss = ib.losses.separable(
        lambda outputs, _: torch.stack(list(outputs)).square().sum(), lambda _: 1.0
    )
    ib.VirtualBatch(model, loss, micro_batch_size=size).backward(X)
    close(grads(model), grads(native))


@pytest.mark.parametrize("entry", ["wrap", "VirtualBatch"])
def test_a_list_of_fixed_length_is_joined(entry):
    """Two values more for three samples than for one would be a list; these are always three."""

    def heads(z: torch.Tensor) -> list[torch.Tensor]:
        return [z, z.tanh(), z.square()]

    def read(outputs: Any) -> torch.Tensor:
        assert len(outputs) == 3
        return outputs[0] + outputs[1] * outputs[2]

    native = model_of(4, heads)
    of_all(read(native(X))).backward()
    model = model_of(4, heads)
    backward(entry, model, read, micro_batch_size=1)
    close(grads(model), grads(native))
