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
from support import LOOKS, Calls, Log, classification, looks, native, result_of, worst_error
from torch import nn

N = 24
torch.manual_seed(0)
X, Y = classification(N)


def spread(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets) + outputs.std(0).sum()


def steps(way: str, model: nn.Module, **options: Any) -> Callable[[Any, Any], Any]:
    """Steps with a separable loss, a coupled one, or a wrapped model under the latter."""
    if way == "wrap":
        wrapped = ib.wrap(model, **options)
        return lambda inputs, targets: spread(wrapped(inputs), targets).backward()
    loss = nn.CrossEntropyLoss() if way == "streaming" else ib.losses.coupled(spread)
    return ib.VirtualBatch(model, loss, **options).backward


def step(way: str, model: nn.Module, inputs: Any = X, targets: Any = Y, **options: Any) -> None:
    """One first step."""
    steps(way, model, **options)(inputs, targets)


WAYS = ("streaming", "coupled", "wrap")


class TimeFirst(nn.Module):
    """(time, n, 6) in, (time, 5) out: sums over n, so that time is taken for the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(6, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.gru(x)[0].mean(1))


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


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 3 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 3 * gradient


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


def coupled_model(mix: Callable[[torch.Tensor], torch.Tensor], drops: bool = False) -> nn.Module:
    torch.manual_seed(0)
    return Calls(
        lambda self, x: self.head(F.dropout(mix(torch.tanh(self.body(x))), 0.2 * drops)),
        body=nn.Linear(6, 8),
        head=nn.Linear(8, 5),
    ).double()


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
@pytest.mark.parametrize("name", ["steps", "capacity", "norm on the host", "opaque count"])
def test_beside_random_numbers_too(name: str, way: str) -> None:
    with pytest.raises(ib.CouplingError):
        step(way, coupled_model(COUPLED[name], drops=True), micro_batch_size=4)
    with pytest.raises(ib.CouplingError):
        model = coupled_model(COUPLED[name], drops=True)
        step(way, model, micro_batch_size=1, match_native_rng=True)


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


class Chaotic(nn.Module):
    """Rounding grows by a factor of some ten thousand, which is no other sample's doing."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = torch.sigmoid(self.net(x))
        for _ in range(24):
            z = 3.9 * z * (1 - z)
        return z


class Drawn(nn.Module):
    """Draws in every spelling, also numbers for each sample from Python's generator."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.net(x) + 0.1 * torch.randn(len(x), 5) + 0.1 * torch.rand_like(x[:, :5])
        z = z * torch.bernoulli(torch.full_like(z, 0.9)) + torch.empty_like(z).normal_()
        return F.rrelu(z, training=True) + torch.randint(3, (len(x), 1))


INNOCENT: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(6, 5),
    "chaotic": Chaotic,
    "drawn": Drawn,
    "dropout": lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.ReLU(), nn.Linear(8, 5)),
    "BatchNorm": lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)),
    "eval of a transformer": lambda: Calls(
        lambda self, x: self.head(self.layer(x[:, None, :].expand(-1, 3, -1))[:, 0]),
        layer=nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True).eval(),
        head=nn.Linear(6, 5),
    ),
    "gradients inside": lambda: Calls(
        lambda self, x: (
            self.net(x)
            + torch.autograd.grad(
                (y := x.detach().requires_grad_()).pow(3).sum(), y, create_graph=True
            )[0][:, :5]
        ),
        net=nn.Linear(6, 5),
    ),
    "large and small": lambda: Calls(
        lambda self, x: self.net(x).masked_fill(x[:, :5] > 0, -1e9), net=nn.Linear(6, 5)
    ),
    "mostly zero": lambda: nn.Sequential(nn.Linear(6, 5), nn.ReLU()),
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("size", [1, 5])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", INNOCENT)
def test_no_false_alarms(name: str, way: str, size: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = INNOCENT[name]().to(dtype)
    step(way, model, X.to(dtype), micro_batch_size=size)
    assert all(p.grad is not None for p in model.parameters())


def test_it_looks_after_steps_1_2_4_8_16_and_leaves_nothing() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(6, 5)
            self.rows: list[int] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen.append(len(x))
            return F.dropout(self.net(x), 0.3)

    seen = Log()
    model = Counting().double()
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4)
    torch.manual_seed(3)
    batch.backward(X, Y)
    state = torch.get_rng_state()
    assert seen == [4] * (N // 4) + [N, 4, 4, 4]
    for number in range(2, 21):
        seen.clear()
        model.zero_grad()
        batch.backward(X, Y)
        assert len(seen) == N // 4 + looks(number - 1)
        assert seen[: N // 4] == [4] * (N // 4) and seen[N // 4 :].count(4) in (0, LOOKS - 1)
    torch.manual_seed(3)
    other = ib.VirtualBatch(
        model, nn.CrossEntropyLoss(), micro_batch_size=4, batch_coupling="per_micro_batch"
    )
    other.backward(X, Y)
    assert torch.equal(torch.get_rng_state(), state)


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


@pytest.mark.parametrize("way", ["coupled", "wrap"])
def test_what_a_function_of_all_samples_returns_may_be_anything(way: str) -> None:
    table, rows = torch.ones(1).double(), torch.ones(len(X), 1).double()
    functions: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t,
        lambda t: table.expand(len(t)),
        lambda t: rows[: len(t)],
        lambda t: t.T.contiguous().T,
        lambda t: t.softmax(0),
    ]
    for function in functions:
        given = X.clone()
        model = coupled_model(lambda h, f=function: h * ib.across_batch(f, h).reshape(len(h), -1))
        wanted = native(model, spread, given, Y)
        step(way, model, given, micro_batch_size=4)
        assert worst_error(result_of(model, wanted.loss), wanted) <= 1e-12
        assert torch.equal(given, X) and table.eq(1).all() and rows.eq(1).all()


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


def warm_up(self: Any, x: torch.Tensor) -> torch.Tensor:
    z = self.net(x)
    return z - self.settings["share"] * z.mean(0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 4])
def test_samples_that_later_steps_combine_are_refused(way: str, size: int) -> None:
    """From step 6 on; the look after step 8 sees it, tells since when, and leaves nothing."""
    torch.manual_seed(0)
    model = Calls(warm_up, net=nn.Linear(6, 5), seen=torch.zeros(())).double()
    model.settings = {"share": 0.0}
    one = steps(way, model, micro_batch_size=size)
    for number in range(1, 8):
        if number == 6:
            model.settings["share"] = 0.5
        model.zero_grad()
        one(X, Y)
    before = {name: each.grad.clone() for name, each in model.named_parameters()}
    with pytest.raises(ib.CouplingError, match="step 8 .* differed in step 4, .* since step 5"):
        one(X, Y)
    assert all(torch.equal(each.grad, before[name]) for name, each in model.named_parameters())


@pytest.mark.parametrize("way", WAYS)
def test_a_smaller_batch_than_any_so_far_is_looked_at(way: str) -> None:
    """A size that no step before had: seven samples are four and three."""
    torch.manual_seed(0)
    model = Calls(lambda self, x: self.net(x) * (2 if len(x) == 7 else 1), net=nn.Linear(6, 5))
    model.double()
    one = steps(way, model, micro_batch_size=4)
    for _ in range(4):
        one(X, Y)
    with pytest.raises(ib.CouplingError, match="step 5 with such batches"):
        one(X[:7], Y[:7])


def as_near_as_can_be(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A choice between two that are as good; larger batches round otherwise."""
    seen = x[:, 0] * (1 - 2.3e-16 * (len(x) > 4))
    return torch.where((seen >= self.edge)[:, None], self.net(x), self.other(x))


def by_last_bits(self: Any, x: torch.Tensor) -> torch.Tensor:
    """The same by a parameter alone, for tokens do not move."""
    h = self.net(x)
    seen = h.detach() * (1 - 2.3e-16 * (len(x) > 4))
    return torch.where((seen * 1e17).sin() > 0, h, -h)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("of", ["inputs", "parameters"])
def test_a_choice_that_rounding_turns_is_no_matter_of_other_samples(way: str, of: str) -> None:
    torch.manual_seed(0)
    if of == "inputs":
        x = X.clone()
        x[10, 0] = 0.7
        model: nn.Module = Calls(
            as_near_as_can_be, net=nn.Linear(6, 5), other=nn.Linear(6, 5), edge=x[10, 0].clone()
        )
    else:
        x = torch.arange(N) % 7
        model = Calls(by_last_bits, net=nn.Embedding(7, 5))
    step(way, model.double(), x, micro_batch_size=4)
    assert any(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("way", WAYS)
def test_what_nobody_could_compare_is_not_said_to_have_been_equal(way: str) -> None:
    """Forward refuses other numbers of rows in the first two steps."""
    torch.manual_seed(0)
    settings = {"strict": True}

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if settings["strict"] and len(x) != 4:
            raise ValueError("four rows, please")
        return self.net(Triple.apply(x - x.mean(0)))

    one = steps(way, Calls(forward, net=nn.Linear(6, 5)).double(), micro_batch_size=4)
    for number in range(3):
        settings["strict"] = number < 2
        one(X, Y)
    with pytest.raises(ib.CouplingError) as raised:
        one(X, Y)
    assert "differed in step" not in str(raised.value)
