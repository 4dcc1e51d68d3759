"""A batch that is one micro-batch of a given size is native's forward: nothing is asked of its
outputs, and its graph is its own."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from support import Calls, classification
from torch import nn
from wrap_support import close, grads

N, STEPS = 12, 4
WAYS: dict[str, dict[str, Any]] = {
    "given": {"micro_batch_size": N},
}
way = pytest.mark.parametrize("way", WAYS)
norms = pytest.mark.parametrize("norm", [False, True])


def model_of(forward: Callable[..., Any], norm: bool = False) -> nn.Module:
    torch.manual_seed(0)
    first = nn.Linear(6, 8)
    middle = nn.BatchNorm1d(8) if norm else nn.Tanh()
    return Calls(forward, first=first, middle=middle, head=nn.Linear(8, 5)).double()


def compare(
    theirs: nn.Module, step: Callable[[Any], torch.Tensor], options: dict[str, Any]
) -> ib.Wrapped:
    """`step` computes the loss of a model, and reads what it left."""
    inner = copy.deepcopy(theirs)
    wrapped = ib.wrap(inner, **options)
    for _ in range(STEPS):
        theirs.zero_grad()
        inner.zero_grad()
        step(theirs).backward()
        step(wrapped).backward()
        close(grads(inner), grads(theirs), 1e-11)
        close(list(inner.buffers()), list(theirs.buffers()), 1e-11)
    assert wrapped.last_report.strategy == "native"
    return wrapped


def plain(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.head(self.middle(self.first(x)))


@way
@norms
def test_features_that_a_hook_keeps(norm: bool, way: str) -> None:
    theirs = model_of(plain, norm)
    x, y = classification(N)

    def step(model: Any) -> torch.Tensor:
        kept: list[torch.Tensor] = []
        hook = model.middle.register_forward_hook(lambda _m, _a, out: kept.append(out))
        outputs = model(x)
        hook.remove()
        return F.cross_entropy(outputs, y) + kept[-1].square().mean() + kept[-1].std()

    compare(theirs, step, WAYS[way])


@way
@norms
def test_features_in_an_attribute(norm: bool, way: str) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.features = self.middle(self.first(x))
        self.aux = self.features.mean(0).square().sum()
        return self.head(self.features)

    x, y = classification(N)

    def step(model: Any) -> torch.Tensor:
        return F.cross_entropy(model(x), y) + model.aux + model.features.norm()

    compare(model_of(forward, norm), step, WAYS[way])


@dataclass
class Out:
    logits: torch.Tensor
    hidden: list[torch.Tensor]


class Holder:
    def __init__(self, logits: torch.Tensor) -> None:
        self.logits = logits


OUTPUTS: dict[str, tuple[Callable[..., Any], Callable[[Any], torch.Tensor]]] = {
    "distribution": (
        lambda self, x: torch.distributions.Categorical(logits=plain(self, x)),
        lambda out: out.entropy().mean() - out.log_prob(torch.zeros(N, dtype=torch.long)).mean(),
    ),
    "dataclass": (
        lambda self, x: Out(plain(self, x), [self.first(x)]),
        lambda out: out.logits.square().mean() + out.hidden[0].mean(),
    ),
    "object": (lambda self, x: Holder(plain(self, x)), lambda out: out.logits.square().mean()),
    "list": (
        lambda self, x: [plain(self, x), [self.first(x), "text", 3, len(x)]],
        lambda out: out[0].square().mean() + out[1][0].mean() * out[1][3],
    ),
    "one for each sample": (
        lambda self, x: list(plain(self, x)),
        lambda out: torch.stack(out).square().mean(),
    ),
    "one number": (lambda self, x: plain(self, x).std(), lambda out: out),
}


CASES = [(kind, "given") for kind in OUTPUTS]


@pytest.mark.parametrize("kind, way", CASES)
def test_outputs_are_what_forward_returns(kind: str, way: str) -> None:
    forward, loss = OUTPUTS[kind]
    x, _ = classification(N)
    compare(model_of(forward), lambda model: loss(model(x)), WAYS[way])


@way
def test_a_loss_over_the_batch_inside_of_forward(way: str) -> None:
    """As SimCSE computes it."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        z = F.normalize(plain(self, x), dim=1)
        return F.cross_entropy(z @ z.T / 0.1, torch.arange(len(x)))

    x, _ = classification(N)
    compare(model_of(forward), lambda model: model(x), WAYS[way])


def test_second_derivatives() -> None:
    theirs = model_of(plain)
    x, y = classification(N)

    def step(model: Any) -> torch.Tensor:
        rows = x.clone().requires_grad_()
        outputs = model(rows)
        (gradient,) = torch.autograd.grad(outputs.sum(), rows, create_graph=True)
        return F.cross_entropy(outputs, y) + (gradient.norm(2, dim=1) - 1).square().mean()

    compare(theirs, step, WAYS["given"])


def test_a_failed_forward_changes_nothing() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        y = plain(self, x)
        if self.calls == 2:
            raise ValueError("mine")
        return y

    for options in WAYS.values():
        model = model_of(forward, norm=True)
        model.calls = 1
        buffers = [each.clone() for each in model.buffers()]
        with pytest.raises(ValueError, match="mine"):
            ib.wrap(model, **options)(torch.randn(N, 6, dtype=torch.float64))
        assert model.calls == 1
        assert all(torch.equal(*pair) for pair in zip(buffers, model.buffers(), strict=True))
