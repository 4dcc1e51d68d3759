"""Hooks of parameters that get no gradient do not run, as natively: behind a wrapper they were
called with None (`NoneType * float`)."""

import copy
from typing import Any

import infinitybatch as ib
import pytest
import torch
from measure import excess, gradients
from torch import nn

WAYS: dict[str, dict[str, Any]] = {
    "fixed": {"micro_batch_size": 3},
    "one": {"micro_batch_size": 64},
    "kept": {"micro_batch_size": 3, "retained_micro_batches": 2},
    "budget": {"memory_budget": "64MiB"},
    "static": {"micro_batch_size": 3, "static_graph": True},
    "static, budget": {"memory_budget": "64MiB", "static_graph": True},
}


class Heads(nn.Module):
    """One head of two is read by the loss, and a layer by nobody."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8) if normed else nn.Tanh())
        self.first, self.second = nn.Linear(8, 5), nn.Linear(8, 5)
        self.unused = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.trunk(x)
        return self.first(hidden), self.second(hidden)


def hooked(model: nn.Module, unused: bool = True) -> list[str]:
    fired: list[str] = []
    for name, parameter in model.named_parameters():
        if not unused and name.startswith("unused"):
            continue

        def hook(gradient: torch.Tensor, name: str = name) -> torch.Tensor:
            fired.append(name)
            return gradient * 0.5

        parameter.register_hook(hook)
    return fired


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_hooks_run_where_a_gradient_arrives(way: str, normed: bool) -> None:
    torch.manual_seed(0)
    model = Heads(normed).double()
    twin = copy.deepcopy(model)
    wrapped = ib.wrap(model, **WAYS[way])
    fired, wanted = hooked(model), hooked(twin)
    for step in range(4):
        x = torch.randn(12, 6, dtype=torch.float64)
        for module, names in ((wrapped, fired), (twin, wanted)):
            module.zero_grad()
            names.clear()
            module(x)[step % 2].square().sum().backward()
        assert sorted(fired) == sorted(wanted)
        assert excess(gradients(model), gradients(twin), least=1e-12) == {}


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_of_another_call_arrives_once(way: str) -> None:
    """The second call reaches what the first one leaves out: hooks see the sum."""
    torch.manual_seed(0)
    model = Heads(normed=False).double()
    twin = copy.deepcopy(model)
    wrapped = ib.wrap(model, **WAYS[way])
    fired, wanted = hooked(model, unused=False), hooked(twin, unused=False)
    x, y = torch.randn(2, 12, 6, dtype=torch.float64)
    for module in (wrapped, twin):
        (module(x)[0].square().sum() + module(y)[1].sum() + module.second.weight.sum()).backward()
    assert sorted(fired) == sorted(wanted)
    assert excess(gradients(model), gradients(twin), least=1e-12) == {}


@pytest.mark.parametrize("way", WAYS)
def test_a_graph_that_is_kept_reaches_them_later(way: str) -> None:
    torch.manual_seed(0)
    model = Heads(normed=False).double()
    twin = copy.deepcopy(model)
    wrapped = ib.wrap(model, **WAYS[way])
    x = torch.randn(12, 6, dtype=torch.float64)
    for module in (wrapped, twin):
        first, second = module(x)
        first.square().sum().backward(retain_graph=True)
        second.square().sum().backward()
    assert excess(gradients(model), gradients(twin), least=1e-12) == {}


@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_hooks_run_once_for_each_backward_that_reaches_them(way: str, normed: bool) -> None:
    torch.manual_seed(0)
    model = Heads(normed).double()
    twin = copy.deepcopy(model)
    wrapped = ib.wrap(model, **WAYS[way])
    fired, wanted = hooked(model), hooked(twin)
    x = torch.randn(12, 6, dtype=torch.float64)
    for module in (wrapped, twin):
        first, second = module(x)
        first.square().sum().backward(retain_graph=True)
        second.square().sum().backward(retain_graph=True)
        (first.sum() + second.sum()).backward()
    assert sorted(fired) == sorted(wanted)
    assert excess(gradients(model), gradients(twin), least=1e-12) == {}


def test_a_backward_that_failed_between_is_told() -> None:
    torch.manual_seed(0)
    model = Heads(normed=False).double()
    hooked(model)
    wrapped = ib.wrap(model, micro_batch_size=3)
    first, second = wrapped(torch.randn(12, 6, dtype=torch.float64))

    def interrupt(gradient: torch.Tensor) -> None:
        raise KeyboardInterrupt

    handle = model.trunk[0].weight.register_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        first.sum().backward(retain_graph=True)
    handle.remove()
    with pytest.raises(ib.StateError, match="call the model once more"):
        second.sum().backward(retain_graph=True)
    first.sum().backward(retain_graph=True)  # reaches what that one has reached
    model.zero_grad()
    second.sum().backward()
    assert model.second.weight.grad is not None
