"""What was learned of a forward is not believed of another program: other flags, other arguments."""

import copy
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from support import classification
from torch import nn
from wrap_support import close, grads


class Switched(nn.Module):
    """Another program with `flag`, by argument or by attribute."""

    def __init__(self, other: str, norm: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.LayerNorm(8)
        self.head = nn.Linear(8, 5)
        self.other = other
        self.phase = False
        self.calls = 0
        self.double()

    def forward(self, x: torch.Tensor, flag: bool = False) -> Any:
        self.calls += 1
        h = self.norm(self.first(x))
        on = flag or self.phase
        if on and self.other == "mixes":
            h = h - h.mean(0).sigmoid()
        if on and self.other == "reads":
            h = h * torch.tensor(h.detach().abs().mean(0).tolist(), dtype=h.dtype)
        out = self.head(h)
        if self.other == "stands once":
            return out, self.first.weight.square().sum() if on else out.sum(1)
        return out


def loss_of(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    if isinstance(outputs, tuple):
        return F.cross_entropy(outputs[0], targets) * (1 + outputs[1].square().mean())
    return F.cross_entropy(outputs, targets)


def stepper(model: nn.Module, way: str) -> Callable[..., None]:
    if way == "wrap":
        wrapped = ib.wrap(model, micro_batch_size=3)
        return lambda x, flag, y: loss_of(wrapped(x, flag=flag), y).backward()
    loss = ib.losses.coupled(loss_of) if way == "coupled" else nn.CrossEntropyLoss()
    batch = ib.VirtualBatch(model, loss, micro_batch_size=3)
    return lambda x, flag, y: batch.backward({"x": x, "flag": flag}, y)


def outcome(model: Switched, way: str, by: str, before: int) -> str:
    """Of a step of the other program, after `before` steps of the first."""
    step = stepper(model, way)
    inputs, targets = classification(9)
    for _ in range(before):
        step(inputs, False, targets)
    model.phase = by == "attribute"
    model.zero_grad()
    twin = copy.deepcopy(model)
    loss_of(twin(inputs, flag=by == "argument"), targets).backward()
    try:
        step(inputs, by == "argument", targets)
    except ib.Error as error:
        return type(error).__name__
    close(grads(model), grads(twin), 1e-12)
    return "exact"


WAYS = ["streaming", "coupled", "wrap"]
# A criterion takes one output; what only the host computes from several samples is seen beside ops
# of the whole batch alone.
CASES = [
    *(("mixes", norm, way) for norm in (True, False) for way in WAYS),
    *(("reads", True, way) for way in WAYS),
    *(("stands once", norm, way) for norm in (True, False) for way in WAYS[1:]),
]


@pytest.mark.parametrize("by", ["argument", "attribute"])
@pytest.mark.parametrize(("other", "norm", "way"), CASES)
def test_it_is_looked_at_again(other: str, norm: bool, by: str, way: str) -> None:
    wanted = outcome(Switched(other, norm), way, by, before=0)
    found = outcome(Switched(other, norm), way, by, before=2)
    assert found == wanted
    assert wanted == ("exact" if other == "stands once" else "CouplingError")


def test_a_schedule_brings_another_program_in_every_step() -> None:
    model = Switched("", norm=False)
    twin = copy.deepcopy(model)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=3)
    inputs, targets = classification(9)
    for i in range(150):  # more than are remembered
        model.zero_grad()
        batch.backward({"x": inputs, "flag": i}, targets)
    loss_of(twin(inputs), targets).backward()
    close(grads(model), grads(twin), 1e-12)


@pytest.mark.parametrize("way", ["VirtualBatch", "wrap"])
def test_static_graph_records_anew_for_other_arguments(way: str) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 5).double()

        def forward(self, x: torch.Tensor, scale: float = 1.0, act: str = "tanh") -> torch.Tensor:
            return getattr(torch, act)(self.linear(x)) * scale

    model = Scaled()
    twin = copy.deepcopy(model)
    loss = nn.CrossEntropyLoss()
    batch = ib.VirtualBatch(model, loss, micro_batch_size=3, static_graph=True)
    wrapped = ib.wrap(model, micro_batch_size=3, static_graph=True)
    for scale, act in [(1.0, "tanh"), (1.0, "tanh"), (0.5, "tanh"), (0.5, "sin"), (1.0, "tanh")]:
        inputs, targets = classification(9)
        model.zero_grad()
        twin.zero_grad()
        if way == "wrap":
            loss(wrapped(inputs, scale=scale, act=act), targets).backward()
        else:
            batch.backward({"x": inputs, "scale": scale, "act": act}, targets)
        loss(twin(inputs, scale=scale, act=act), targets).backward()
        close(grads(model), grads(twin), 1e-12)


def test_modules_of_an_old_pickle_are_looked_into() -> None:
    """Their `_modules` is an OrderedDict."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LeakyReLU(0.1), nn.Linear(8, 5)).double()
    model._modules = OrderedDict(model._modules)
    inputs, targets = classification(12)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4, static_graph=True)
    for slope in (0.1, 0.1, 0.7):
        model[1].negative_slope = slope
        model.zero_grad()
        batch.backward(inputs, targets)
    found = grads(model)
    twin = copy.deepcopy(model)
    twin.zero_grad()
    F.cross_entropy(twin(inputs), targets).backward()
    close(found, grads(twin))
