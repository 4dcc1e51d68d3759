"""The same rows, split otherwise, give the same rows of outputs, or the step says so: whatever in
forward sees other samples, how many there are, or where a sample stands among them."""

import copy
import math
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from same_rows_support import DRAWS, WAYS, N, TimeFirst, Triple, X, Y, coupled_model, spread, step
from support import Calls, native, result_of, worst_error
from torch import nn


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("way", WAYS)
def test_unmarked_time_first_inputs_are_refused(way: str, size: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(N, 3, 6).double()
    with pytest.raises(ib.CouplingError):
        step(way, TimeFirst().double(), x, micro_batch_size=size)


def similar(self: Any, x: torch.Tensor) -> torch.Tensor:
    h = F.normalize(self.net(x), dim=1)
    return h @ h.T


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 2])
def test_similarities_of_a_micro_batch_are_refused(way: str, size: int) -> None:
    torch.manual_seed(0)
    model = Calls(similar, net=nn.Linear(6, 8)).double()
    targets = torch.zeros(N, dtype=torch.long)  # whatever the shape of a micro-batch
    spread = lambda z, y: z.exp().sum(1).log().mean()  # noqa: E731
    with pytest.raises((ib.CouplingError, ib.BatchError)):
        if way == "wrap":
            wrapped = ib.wrap(model, micro_batch_size=size)
            spread(wrapped(X), targets).backward()
        else:
            loss = nn.CrossEntropyLoss() if way == "streaming" else ib.losses.coupled(spread)
            ib.VirtualBatch(model, loss, micro_batch_size=size).backward(X, targets)


def capacity(h: torch.Tensor) -> torch.Tensor:
    """First come, first served, for as many as a share of the samples."""
    expert = (h[:, 0] > 0).long()
    slot = F.one_hot(expert, 2).cumsum(0).gather(1, expert[:, None])
    return h * (slot <= math.ceil(len(h) / 4))


def ghost(h: torch.Tensor) -> torch.Tensor:
    parts = [F.batch_norm(p, None, None, training=True) for p in h.chunk(math.ceil(len(h) / 8))]
    return torch.cat(parts)


def scattered(h: torch.Tensor) -> torch.Tensor:
    groups = (h[:, 0] > 0).long()
    return h + torch.zeros(2, 8).double().index_add(0, groups, h)[groups]


COUPLED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda h: h - h.mean(0),
    "weak mean": lambda h: h + 1e-5 * h.mean(0),
    "weakest mean": lambda h: h + 1e-8 * h.mean(0),
    "ranks": lambda h: h * h.argsort(0).argsort(0),
    "sorted": lambda h: h.sort(0).values,
    "capacity": capacity,
    "largest on the host": lambda h: h / h.detach().abs().max().item(),
    "norm": lambda h: h / (1 + h.norm()),
    "norm on the host": lambda h: h / (1 + float(h.norm())),
    "scatter": scattered,
    "a branch on values": lambda h: h * 2 if h[:, 0].amax() > 0.7 else h,
    "steps": lambda h: h * math.ceil(len(h) / 4),
    "a branch on how many": lambda h: h * 0.5 if len(h) < 5 else h,
    "elements": lambda h: h / h.numel(),
    "positions": lambda h: h * (1 + torch.arange(len(h))[:, None] // 3),
    "a reduction": lambda h: h / torch.ones(len(h)).sum(),
    "linspace": lambda h: h * torch.linspace(1, 2, len(h)).double()[:, None],
    "exponent": lambda h: h.abs() ** (1 + 1 / len(h)),
    "relative to the first": lambda h: h - h[:1],
    "relative to the last": lambda h: h - h[-1:],
    "opaque mean": lambda h: Triple.apply(h - h.mean(0)),
    "opaque count": lambda h: Triple.apply(h / len(h)),
    "pieces": lambda h: torch.cat([p - p.mean(0) for p in h.chunk(math.ceil(len(h) / 8))]),
    "pieces of BatchNorm": ghost,
}


@pytest.mark.parametrize("size", [1, 4, 5])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", COUPLED)
def test_what_sees_other_samples_is_refused_or_exact(name: str, way: str, size: int) -> None:
    model = coupled_model(COUPLED[name])
    loss = nn.CrossEntropyLoss() if way == "streaming" else spread
    wanted = native(model, loss, X, Y)
    try:
        step(way, model, micro_batch_size=size)
    except ib.CouplingError:
        assert all(p.grad is None for p in model.parameters())
        return
    assert worst_error(result_of(model, wanted.loss), wanted) <= 1e-12, f"{name}: not noticed"


@pytest.mark.parametrize("way", WAYS)
def test_a_branch_that_no_row_looked_at_takes_is_not_noticed(way: str) -> None:
    """A limit of any look; `verify` runs all rows."""
    inputs = X.clone()
    inputs[4, 5] = 9  # the first of the second micro-batch, in none that is looked at
    model = coupled_model(lambda h: h)
    mixing = Calls(lambda self, x: self.net(x) * (2 if x[0, 5] > 8 else 1), net=model)
    loss = nn.CrossEntropyLoss() if way == "streaming" else spread
    wanted = native(mixing, loss, inputs, Y)
    step(way, mixing, inputs, micro_batch_size=4)
    assert worst_error(result_of(mixing, wanted.loss), wanted) > 1e-3
    mixing.zero_grad()
    value = nn.CrossEntropyLoss() if way == "streaming" else ib.losses.coupled(spread)
    assert not ib.verify(mixing, value, inputs, Y, micro_batch_size=4).exact


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["steps", "largest on the host", "opaque mean"])
def test_where_the_budget_allows_all_samples_at_once_they_are(name: str, way: str) -> None:
    model = coupled_model(COUPLED[name])
    loss = nn.CrossEntropyLoss() if way == "streaming" else spread
    wanted = native(model, loss, X, Y)
    step(way, model, memory_budget=ib.memory.stats().live + (1 << 20))
    assert worst_error(result_of(model, wanted.loss), wanted) <= 1e-12


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("name", ["steps", "capacity", "norm on the host", "opaque count"])
def test_beside_random_numbers_too(name: str, draw: str, way: str) -> None:
    with pytest.raises(ib.CouplingError):
        step(way, coupled_model(COUPLED[name], draw), micro_batch_size=4)
    if draw == "lstm":
        return  # its numbers are not those of a whole batch
    with pytest.raises(ib.CouplingError):
        model = coupled_model(COUPLED[name], draw)
        step(way, model, micro_batch_size=1, match_native_rng=True)


@pytest.mark.parametrize("way", WAYS)
def test_beside_a_workspace_that_takes_as_much_for_few_rows(way: str) -> None:
    def steps(h: torch.Tensor) -> torch.Tensor:
        torch.empty(1 << 25, dtype=torch.uint8)
        return COUPLED["steps"](h)

    with pytest.raises(ib.CouplingError):
        step(way, coupled_model(steps), micro_batch_size=4)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["steps", "norm on the host", "a branch on how many"])
def test_beside_layers_that_see_the_whole_batch_too(name: str, way: str) -> None:
    torch.manual_seed(0)
    mix = COUPLED[name]
    model = Calls(
        lambda self, x: self.head(mix(torch.tanh(self.norm(self.body(x))))),
        body=nn.Linear(6, 8),
        norm=nn.BatchNorm1d(8),
        head=nn.Linear(8, 5),
    ).double()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ib.CouplingError):
        step(way, model, micro_batch_size=4)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), f"{key} changed"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 4])
def test_samples_combined_in_front_of_a_function_of_all_samples_are_refused(
    way: str, size: int
) -> None:
    mix = lambda h: h / (1 + float(h.norm()))  # noqa: E731
    model = coupled_model(lambda h: ib.across_batch(lambda t: t - t.mean(0), mix(h)))
    with pytest.raises(ib.CouplingError):
        step(way, model, micro_batch_size=size)


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("by", ["coupled", "wrap"])
@pytest.mark.parametrize("draw", ["poisson", "rrelu", "dropout"])
def test_similarities_are_refused_whatever_is_drawn(
    draw: str, by: str, size: int, native: bool
) -> None:
    """Shapes tell where numbers that nobody can fix leave nothing else to compare."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = self.net(x)
        if draw == "poisson":
            h = h + torch.poisson(torch.ones_like(h))
        h = F.rrelu(h, training=True) if draw == "rrelu" else F.dropout(h, 0.3)
        return h @ h.T

    model = Calls(forward, net=nn.Linear(6, 8)).double()
    loss = lambda z: z.exp().sum(1).log().mean()  # noqa: E731
    options = {"micro_batch_size": size, "match_native_rng": native}
    with pytest.raises(ib.Error):
        if by == "wrap":
            loss(ib.wrap(model, **options)(X)).backward()
        else:
            ib.VirtualBatch(model, ib.losses.coupled(loss), **options).backward(X)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mixes", [True, False])
def test_a_forward_that_writes_its_inputs_is_looked_at_too(way: str, mixes: bool) -> None:
    def forward(self: Any, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        z.mul_(1.5)
        h = self.net(x + z)
        return h / (1 + float(h.norm())) if mixes else h

    torch.manual_seed(0)
    model = Calls(forward, net=nn.Linear(6, 5)).double()
    other = X.clone()
    loss = nn.CrossEntropyLoss() if way == "streaming" else spread
    wanted = native(model, loss, (X, X.clone()), Y)
    inputs = (X, other)
    options = {"micro_batch_size": 4}

    def one() -> None:
        if way == "wrap":
            spread(ib.wrap(model, **options)(*inputs), Y).backward()
        else:
            step(way, model, inputs, **options)

    if mixes:
        with pytest.raises(ib.Error):
            one()
        return
    one()
    assert worst_error(result_of(model, wanted.loss), wanted) <= 1e-12
    assert torch.equal(other, X * 1.5)


@pytest.mark.parametrize("name", ["norm on the host", "capacity", "steps", "opaque mean"])
def test_where_a_budget_leaves_no_room_for_more_rows_halves_are_compared(name):
    """Of a micro-batch's own rows: that takes no more memory than the micro-batch did."""
    torch.manual_seed(0)
    model = coupled_model(COUPLED[name])
    wanted = native(model, spread, X, Y)
    sizes = set()
    for room in range(5 << 10, 9 << 10, 64):
        own = copy.deepcopy(model)
        loss = ib.losses.coupled(spread)
        batch = ib.VirtualBatch(own, loss, memory_budget=ib.memory.stats().live + room)
        try:
            report = batch.backward(X, Y)
        except ib.CouplingError:
            sizes.add(0)
            continue
        sizes.add(max(report.micro_batch_sizes))
        assert worst_error(result_of(own, report.loss), wanted) <= 1e-10
    assert sizes == {0, len(X)}
