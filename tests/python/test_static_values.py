"""Under `static_graph`, values that decide what forward does: each way in which user code sees them
is exact, or a typed error, also where the first micro-batches agree by chance."""

import copy
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
from measure import excess, gradients
from support import Calls
from torch import nn
from torch.nn import functional as F

Forward = Callable[[Any, torch.Tensor], torch.Tensor]
STEPS = 3


def by_item(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.last(torch.tanh(self.first(x)) * x.mean().item())


def by_comparison(self: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = self.first(x)
    return self.last(hidden.relu() if hidden.mean() > 0 else hidden.tanh())


def by_nonzero(self: Any, x: torch.Tensor) -> torch.Tensor:
    """An expert for each sign."""
    chosen, hidden = x[:, 0] > 0, self.first(x)
    rows, others = chosen.nonzero().flatten(), (~chosen).nonzero().flatten()
    made = torch.zeros_like(hidden)
    if len(rows):
        made = made.index_add(0, rows, hidden[rows].relu())
    if len(others):
        made = made.index_add(0, others, hidden[others].tanh())
    return self.last(made)


def by_mask(self: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = self.first(x)
    picked = hidden[x[:, 0] > 0]
    return self.last(hidden) * len(picked)


def by_where(self: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = self.first(x)
    (rows,) = torch.where(x[:, 0] > 0)
    return self.last(hidden) * len(rows)


def by_list(self: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = self.first(x)
    first = (x[:, 0] > 0).tolist()
    made = [h.relu() if p else h.tanh() for h, p in zip(hidden, first, strict=True)]
    return self.last(torch.stack(made))


def by_numpy(self: Any, x: torch.Tensor) -> torch.Tensor:
    largest = int(x.detach().sum(0).numpy().argmax())
    return self.last(self.first(x)[:, largest:].sum(1, keepdim=True) + self.first(x))


def by_repeats(self: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = self.first(x)
    repeated = hidden.repeat_interleave((x[:, 0] > 0).long() + 1, dim=0)
    return self.last(hidden) * len(repeated)


def by_classes(self: Any, x: torch.Tensor) -> torch.Tensor:
    classes = F.one_hot((x[:, 0] > 0).long())
    return self.last(self.first(x)) * classes.shape[1]


def by_unique(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.last(self.first(x)) * len((x > 0).sum(1).unique())


def by_equality(self: Any, x: torch.Tensor) -> torch.Tensor:
    hidden = self.first(x)
    return self.last(hidden.relu() if torch.equal(x.abs(), x) else hidden.tanh())


def by_parameter(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.last(torch.tanh(self.first(x))) * self.last.bias.sum().item()


FORWARDS: dict[str, Forward] = {
    name.removeprefix("by_"): value for name, value in globals().items() if name.startswith("by_")
}  # fmt: skip


def rows_that_agree(n: int) -> torch.Tensor:
    """Samples of the second half are of another sign than those of the first: what a recording of
    the first ones shows holds for a while."""
    x = torch.full((n, 6), 0.5, dtype=torch.float64)
    x[n // 2 :] = -0.25
    x[n // 2 :, 3] = 0.75
    return x + torch.arange(6.0) / 100


def native(model: nn.Module, x: torch.Tensor, y: torch.Tensor, size: int) -> nn.Module:
    """Micro-batch by micro-batch, for what forward computes from all of its rows."""
    twin = copy.deepcopy(model)
    twin.zero_grad()
    for begin in range(0, len(x), size):
        outputs = twin(x[begin : begin + size])
        loss = F.cross_entropy(outputs, y[begin : begin + size], reduction="sum")
        (loss / len(x)).backward()
    return twin


def make(forward: Forward) -> nn.Module:
    torch.manual_seed(0)
    return Calls(forward, first=nn.Linear(6, 7), last=nn.Linear(7, 5)).double()


def stepper(model: nn.Module, way: str, **options: Any) -> Callable[..., Any]:
    options = {"static_graph": True, **options}
    if way.startswith("wrap"):
        wrapped = ib.wrap(model, **options)
        return lambda x, y: F.cross_entropy(wrapped(x), y).backward()
    loss = nn.CrossEntropyLoss() if way == "streamed" else ib.losses.coupled(F.cross_entropy)
    return ib.VirtualBatch(model, loss, **options).backward


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("way", ["streamed", "coupled", "wrap"])
@pytest.mark.parametrize("name", FORWARDS)
def test_exact_or_typed(name: str, way: str, size: int) -> None:
    model = make(FORWARDS[name])
    step = stepper(model, way, micro_batch_size=size)
    x, y = rows_that_agree(8), torch.arange(8) % 5
    for number in range(STEPS):
        model.zero_grad()
        inputs = x if number < STEPS - 1 else x.flip(0)
        twin = native(model, inputs, y, size)
        before = torch.get_rng_state()
        try:
            step(inputs, y)
        except ib.Error as error:
            assert torch.equal(torch.get_rng_state(), before)
            assert all(p.grad is None for p in model.parameters()), str(error)
        else:
            assert excess(gradients(model), gradients(twin), least=1e-10) == {}
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 0.01


@pytest.mark.parametrize("way", ["streamed", "coupled", "wrap"])
def test_experts_that_the_sample_chooses(way: str) -> None:
    """The first samples choose one expert, the others another: exact, by recording each."""
    model = make(by_nonzero)
    step = stepper(model, way, micro_batch_size=1)
    x, y = rows_that_agree(8), torch.arange(8) % 5
    for _ in range(STEPS):
        model.zero_grad()
        twin = native(model, x, y, 1)
        try:
            step(x, y)
        except ib.Unsupported as error:
            assert "static_graph" in str(error)
            continue
        assert excess(gradients(model), gradients(twin), least=1e-10) == {}


@pytest.mark.parametrize("way", ["streamed", "coupled", "wrap"])
@pytest.mark.parametrize("budget", [None, "64MiB"])
def test_what_is_only_shown_costs_no_exactness(way: str, budget: str | None) -> None:
    """A forward that logs a number: the program is the same, and so is the gradient."""
    seen: list[float] = []

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        seen.append(self.first(x).mean().item())
        return self.last(torch.tanh(self.first(x)))

    model = make(forward)
    options = {"memory_budget": budget} if budget else {"micro_batch_size": 2}
    step = stepper(model, way, **options)
    for _ in range(STEPS):
        x, y = torch.randn(8, 6, dtype=torch.float64), torch.arange(8) % 5
        twin = copy.deepcopy(model)
        twin.zero_grad()
        model.zero_grad()
        F.cross_entropy(twin(x), y).backward()
        seen.clear()
        step(x, y)
        assert excess(gradients(model), gradients(twin), least=1e-10) == {}
        assert seen, "each number is logged"


def test_tapes_that_show_no_values_are_played() -> None:
    """Labels, embeddings and masks that hide nothing but values cost no recording."""
    calls: list[int] = []

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        words = (x > 0).long().sum(1)
        return self.last(self.first(x).masked_fill(x[:, :1] > 0, 0.0)) + self.table(words)

    model = make(forward)
    model.table = nn.Embedding(7, 5).double()
    for way in ("streamed", "coupled", "wrap"):
        step = stepper(model, way, micro_batch_size=2)
        x, y = rows_that_agree(8), torch.arange(8) % 5
        for number in range(4):
            calls.clear()
            twin = native(model, x, y, 2)
            calls.clear()
            model.zero_grad()
            step(x, y)
            assert excess(gradients(model), gradients(twin), least=1e-10) == {}
            assert number < 2 or calls == []
