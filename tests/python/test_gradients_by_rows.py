"""Samples that are combined in backward alone: the gradient of a micro-batch is not the sum of what
its halves give, where an autograd.Function or a hook of the user's has a part in it."""

from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from fault_support import LONG
from support import Calls, classification, native, result_of, worst_error
from torch import nn

N = 12
torch.manual_seed(0)
X, Y = classification(N)
WAYS = ("streaming", "coupled", "wrap")


def spread(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets) + outputs.std(0).sum()


def step(way: str, model: nn.Module, data: Any = (X, Y), **options: Any) -> None:
    if way == "wrap":
        spread(ib.wrap(model, **options)(data[0]), data[1]).backward()
        return
    loss = nn.CrossEntropyLoss() if way == "streaming" else ib.losses.coupled(spread)
    ib.VirtualBatch(model, loss, **options).backward(*data)


def function(back: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            return back(gradient)

    return Function.apply


def hook(back: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    def call(h: torch.Tensor) -> torch.Tensor:
        h = h * 1
        if h.requires_grad:
            h.register_hook(back)
        return h

    return call


class Passed(nn.Module):
    def forward(self, h: torch.Tensor) -> torch.Tensor:
        return h * 1


def module_hook(back: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    module = Passed()
    module.register_full_backward_hook(lambda _, inner, outer: (back(outer[0]),))
    return module


PLACES = {"a function": function, "a hook": hook, "a hook of a module": module_hook}
COMBINED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "norm": lambda g: g / (1e-9 + g.norm()),
    "mean": lambda g: g - g.mean(0),
    "count": lambda g: g / len(g),
    "largest on the host": lambda g: g / (1e-9 + float(g.abs().max())),
}
ALONE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "reversed": lambda g: -0.5 * g,
    "norms of rows": lambda g: g / (1e-9 + g.norm(dim=1, keepdim=True)),
    "centred rows": lambda g: g - g.mean(1, keepdim=True),
}


def model_of(place: str, back: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return Calls(
        lambda self, x: self.head(self.between(torch.tanh(self.body(x)))),
        body=nn.Linear(6, 8),
        between=made
        if isinstance(made := PLACES[place](back), nn.Module)
        else Calls(lambda self, h: made(h)),
        head=nn.Linear(8, 5),
    ).double()


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", COMBINED)
def test_what_backward_combines_is_refused(name: str, place: str, way: str, size: int) -> None:
    model = model_of(place, COMBINED[name])
    with pytest.raises(ib.CouplingError, match="backward combines samples"):
        step(way, model, micro_batch_size=size)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
def test_budgets_without_room_for_two_gradients(place: str, way: str) -> None:
    """Where two samples with a graph do not fit, nobody knows, and the step is refused."""
    loss = nn.CrossEntropyLoss() if way == "streaming" else spread
    data = classification(48)
    wanted = native(model_of(place, COMBINED["norm"]), loss, *data)
    found = set()
    for room in range(2000, 40000, 500 if LONG else 1000):
        model = model_of(place, COMBINED["norm"])
        try:
            step(way, model, data, memory_budget=ib.memory.stats().live + room)
        except (ib.CouplingError, ib.BudgetExceeded) as error:
            found.add(type(error).__name__)
            assert all(p.grad is None for p in model.parameters())
        else:  # all of them fit at once
            found.add("exact")
            assert worst_error(result_of(model, wanted.loss), wanted) <= 1e-12
    assert found >= {"BudgetExceeded", "exact"}


@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ALONE)
def test_what_it_does_to_each_sample_is_not(name: str, place: str, way: str, size: int) -> None:
    back = ALONE[name]
    model = model_of(place, back)
    step(way, model, micro_batch_size=size)
    if name != "norms of rows":  # linear, so that the loss's scale does not matter
        loss = nn.CrossEntropyLoss() if way == "streaming" else spread
        wanted = native(model_of(place, back), loss, X, Y)
        assert worst_error(result_of(model, wanted.loss), wanted) <= 1e-12


@pytest.mark.parametrize("way", WAYS)
def test_hooks_of_parameters_see_sums_only(way: str) -> None:
    norms: list[float] = []

    def clip(gradient: torch.Tensor) -> torch.Tensor:
        norms.append(float(gradient.norm()))
        return gradient / (1 + gradient.norm())

    model = model_of("a function", ALONE["reversed"])
    model.body.weight.register_hook(clip)
    step(way, model, micro_batch_size=3)
    assert len(norms) == 1


@pytest.mark.parametrize("way", WAYS)
def test_beside_dropout_too(way: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        model_of("a function", COMBINED["norm"]), nn.Dropout(0.3), nn.Linear(5, 5)
    ).double()
    with pytest.raises(ib.CouplingError):
        step(way, model, micro_batch_size=3)


@pytest.mark.parametrize("way", WAYS)
def test_there_is_room_for_it_wherever_there_is_for_the_step(way: str) -> None:
    """One set of gradients beside the sums is enough, however many parameters there are."""
    torch.manual_seed(0)
    between = PLACES["a function"](COMBINED["norm"])
    model = Calls(
        lambda self, x: self.head(between(torch.tanh(self.body(x))))[:, :5],
        body=nn.Linear(6, 600),
        head=nn.Linear(600, 400),
    ).double()
    parameters = sum(p.nbytes for p in model.parameters())
    budget = ib.memory.stats().live + int(2.6 * parameters)
    with pytest.raises(ib.CouplingError, match="backward combines samples"):
        step(way, model, memory_budget=budget, micro_batch_size=2)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_of_any_shape_are_summed_up_alike(way: str) -> None:
    """Transposed weights, three dimensions, many short rows and few long ones: no difference."""
    torch.manual_seed(0)
    between = PLACES["a function"](ALONE["reversed"])

    class Shapes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.long = nn.Parameter(torch.randn(6, 5000).div(50))
            self.deep = nn.Parameter(torch.randn(40, 5, 125).div(9))
            self.short = nn.Parameter(torch.randn(3000, 5).div(50))
            self.table = nn.Embedding(3000, 5)
            self.sparse = nn.Embedding(700, 5, sparse=True)
            self.number = nn.Parameter(torch.tensor(0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = torch.tanh(x @ self.long)
            h = between(torch.tanh(h.view(-1, 40, 125)))
            h = torch.einsum("nij,ikj->nik", h, self.deep).flatten(1)
            words = (x[:, 0].abs() * 100).long()
            h = h.repeat(1, 15) @ self.short
            return (h + self.table(words) + self.sparse(words)) * self.number

    step(way, Shapes().double(), micro_batch_size=4)
