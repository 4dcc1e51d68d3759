"""Micro-batches of one sample, where two samples side by side are all that can tell whether forward
combines them: under budgets that hardly leave room for two, and with inputs that require grad."""

import copy
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from same_rows_support import WAYS, TimeFirst, spread
from support import Calls, classification, native, result_of, worst_error
from torch import nn

N = 24
torch.manual_seed(0)
X, Y = classification(N)


def one_step(way: str, model: nn.Module, inputs: Any, budget: int) -> None:
    """The first step under a budget of `budget` bytes beside what is live already."""
    budget += ib.memory.stats().live
    if way == "wrap":
        spread(ib.wrap(model, memory_budget=budget)(inputs), Y).backward()
        return
    loss = nn.CrossEntropyLoss() if way == "streaming" else ib.losses.coupled(spread)
    ib.VirtualBatch(model, loss, memory_budget=budget).backward(inputs, Y)


def outcome(way: str, model: nn.Module, inputs: Any, budget: int) -> str:
    """What came of it: an error that leaves gradients alone, or the gradient of the whole batch."""
    loss = nn.CrossEntropyLoss() if way == "streaming" else spread
    wanted = native(copy.deepcopy(model), loss, inputs, Y)
    try:
        one_step(way, model, inputs, budget)
    except (ib.CouplingError, ib.BudgetExceeded) as error:
        assert all(p.grad is None for p in model.parameters())
        assert not isinstance(error, ib.BudgetExceeded) or error.needed > error.limit
        return "look" if "Comparing forward" in str(error) else type(error).__name__
    error = worst_error(result_of(model, wanted.loss), wanted)
    assert error <= 1e-10, f"{budget} bytes: {error} off"
    return "exact"


@pytest.mark.parametrize("way", WAYS)
def test_unmarked_time_first_inputs_under_budgets_without_room_for_two(way: str) -> None:
    """They were compared with nothing, and the gradient was 1.0 off."""
    found = []
    for budget in range(5500, 11000, 250):
        torch.manual_seed(0)
        model = TimeFirst().double()
        found.append(outcome(way, model, torch.randn(N, 3, 6).double(), budget))
    assert set(found) <= {"look", "BudgetExceeded", "CouplingError"}
    assert found[-1] == "CouplingError"
    assert way == "streaming" or "look" in found


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)),
    "BatchNorm": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_what_combines_nothing_hardly_needs_more(name: str, way: str) -> None:
    found = []
    for budget in range(1500, 9500, 250):
        torch.manual_seed(0)
        found.append(outcome(way, MODELS[name]().double(), X, budget))
    assert set(found) <= {"look", "BudgetExceeded", "exact"}
    assert found[-1] == "exact" and found.count("look") <= 4


def spread_of_channels(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return spread(outputs.flatten(1), targets)


def pairs(self: Any, x: torch.Tensor) -> Any:
    h = self.net(x)
    h = self.norm(h) if hasattr(self, "norm") else F.dropout(h, 0.3)
    return h, h @ h.T


def weighted(self: Any, x: torch.Tensor) -> Any:
    h = self.norm(self.net(x)) if hasattr(self, "norm") else F.dropout(self.net(x), 0.3)
    return h * (1 + 1 / len(h)), h


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("cut_by", ["draws", "BatchNorm"])
@pytest.mark.parametrize("forward", [pairs, weighted])
@pytest.mark.parametrize("wants", [False, True])
def test_inputs_that_require_grad_are_looked_at_too(
    wants: bool, forward: Callable[..., Any], cut_by: str, size: int
) -> None:
    """Behind wrap, where forward is cut (BatchNorm, native's numbers)."""
    torch.manual_seed(0)
    norm = {"norm": nn.BatchNorm1d(5)} if cut_by == "BatchNorm" else {}
    model = Calls(forward, net=nn.Linear(6, 5), **norm).double()
    options = {"micro_batch_size": size, "match_native_rng": cut_by == "draws"}
    with pytest.raises((ib.CouplingError, ib.BatchError)):
        a, b = ib.wrap(model, **options)(X.clone().requires_grad_(wants))
        (a.square().mean() + b.square().mean()).backward()
    assert all(p.grad is None for p in model.parameters())


def test_samples_of_such_inputs_lie_where_two_of_them_show() -> None:
    """Of one sample each of several dimensions of size 1 could be that of the samples."""
    torch.manual_seed(0)
    model = Calls(lambda self, x: self.net(x)[:, :, None, None], net=nn.Linear(6, 5)).double()
    wanted = native(copy.deepcopy(model), spread_of_channels, X, Y)
    wrapped = ib.wrap(model, micro_batch_size=1, static_graph=True)
    loss = spread_of_channels(wrapped(X.clone().requires_grad_()), Y)
    loss.backward()
    assert worst_error(result_of(model, loss.detach()), wanted) <= 1e-12
