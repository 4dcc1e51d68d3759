"""A look at rows raises no false alarm, and says so where it could compare nothing."""

from collections.abc import Callable
from functools import partial
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from same_rows_support import DRAWS, WAYS, N, Triple, X, Y, coupled_model, spread, step, steps
from support import Calls, native, result_of, worst_error
from torch import nn


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


def drawn_in_front_of_attention(self: Any, x: torch.Tensor) -> torch.Tensor:
    """By rejection, which nobody can fix, in front of an op that could have drawn."""
    h = self.net(x)
    h = h + torch.poisson(h.detach().abs())
    q = h.unflatten(1, (1, 5))
    return h + F.scaled_dot_product_attention(q, q, q).flatten(1)


INNOCENT: dict[str, Callable[[], nn.Module]] = {
    **{f"draws by {draw}": partial(coupled_model, nn.Identity(), draw) for draw in DRAWS},
    "linear": lambda: nn.Linear(6, 5),
    "chaotic": Chaotic,
    "drawn": Drawn,
    "drawn in front of attention": lambda: Calls(drawn_in_front_of_attention, net=nn.Linear(6, 5)),
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
    # cuDNN draws by a state of its own, so that no second forward gives what the first one gave.
    twice = way != "streaming" and name == "draws by lstm"
    if twice and torch.get_default_device().type == "cuda":
        with pytest.raises(ib.Unsupported, match=r"cudnn\.flags\(enabled=False\)"):
            step(way, model, X.to(dtype), micro_batch_size=size)
    with torch.backends.cudnn.flags(enabled=not twice):
        step(way, model, X.to(dtype), micro_batch_size=size)
    assert all(p.grad is not None for p in model.parameters())


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


def rounded_more_often(self: Any, tokens: torch.Tensor) -> torch.Tensor:
    """As a device adds products in another order, and so in other pieces, for larger batches."""
    h = self.embedding(tokens)
    pieces = 8 if len(tokens) > 1 else 1
    for layer in self.layers:
        parts = zip(h.chunk(pieces, 1), layer.weight.chunk(pieces, 1), strict=True)
        h = sum((a @ w.T for a, w in parts), start=torch.zeros(())).tanh()
    return self.head(h)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 4])
def test_half_precision_of_tokens(way: str, size: int) -> None:
    """Tokens have no last bits. Most of a thousand outputs are as near as two roundings, and some
    are further apart."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(6))
    model = Calls(
        rounded_more_often, embedding=nn.Embedding(7, 64), layers=layers, head=nn.Linear(64, 500)
    ).bfloat16()
    with torch.no_grad():
        for layer in layers:
            layer.weight.mul_(2)
    tokens = torch.arange(N) % 7
    with torch.no_grad():
        whole, first = model(tokens), model(tokens[:1])
    apart = float((whole[:1] - first).abs().max() / first.abs().median())
    assert apart > 3e-2
    step(way, model, tokens, micro_batch_size=size)
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
