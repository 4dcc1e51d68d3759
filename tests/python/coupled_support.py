"""Losses that couple samples, models for them, and the oracle: the whole batch at once."""

import copy
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import torch
from support import Calls, Result, assert_same_buffers, call, result_of, worst_error
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

WIDTH = 6


class InfoNCE(nn.Module):
    """Two towers; the temperature is a parameter of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))

    def forward(self, outputs: tuple[torch.Tensor, torch.Tensor], _: Any) -> torch.Tensor:
        a, b = (F.normalize(tower, dim=-1) for tower in outputs)
        logits = a @ b.T * self.log_scale.to(a.dtype).exp()
        labels = torch.arange(len(a))
        return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


def batch_hard(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Triplets of each sample with its farthest positive and its nearest negative."""
    squares = outputs.square().sum(1)
    distance = squares[:, None] + squares[None] - 2 * outputs @ outputs.T
    same = labels[:, None] == labels[None]
    positive = distance.masked_fill(~same, -1e9).amax(1)
    negative = distance.masked_fill(same, 1e9).amin(1)
    return F.softplus(positive - negative).mean()


def ranking(scores: torch.Tensor, relevance: torch.Tensor) -> torch.Tensor:
    """Every pair of samples that one ranks above the other."""
    above = relevance[:, None] > relevance[None]
    return F.softplus(scores[None] - scores[:, None])[above].sum() / above.sum()


def several_outputs(outputs: dict[str, Any], labels: torch.Tensor) -> torch.Tensor:
    """A loss of nobody's library: it leaves one output alone and has an auxiliary term."""
    assert outputs["kind"] == "several" and outputs["nothing"] is None
    assert torch.equal(outputs["chosen"], outputs["logits"].argmax(1))
    balance = outputs["logits"].softmax(1).mean(0)
    weight = 1 + (outputs["chosen"][:, None] == outputs["chosen"][None]).double().mean(1)
    own = F.cross_entropy(outputs["logits"], labels, reduction="none") * weight.to(balance.dtype)
    return own.mean() + (balance * balance.log()).sum() + 0.3 * outputs["auxiliary"].var()


LOSSES: dict[str, tuple[str, Callable[[], Any]]] = {
    "info_nce": ("towers", InfoNCE),
    "batch_hard": ("embedding", lambda: batch_hard),
    "ranking": ("score", lambda: ranking),
    "several": ("several", lambda: several_outputs),
}


def targets_for(head: str, n: int) -> torch.Tensor | None:
    if head == "towers":
        return None
    if head == "score":
        return torch.randn(n, dtype=torch.float64)
    return torch.arange(n) % 3


class Headed(nn.Module):
    """A body of (n, WIDTH) features, and what a loss wants on top of it."""

    def __init__(self, body: nn.Module, head: str) -> None:
        super().__init__()
        self.body, self.head = body, head
        self.left, self.right = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> Any:
        features = self.body(x)
        if self.head == "towers":
            return self.left(features), self.right(features.tanh())
        if self.head == "embedding":
            return self.left(features)
        if self.head == "score":
            return self.left(features).sum(1)
        logits = self.left(features)
        return {
            "logits": logits,
            "ignored": self.right(features),
            "chosen": logits.argmax(1),
            "auxiliary": features.square().mean(1),
            "kind": "several",
            "nothing": None,
        }


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 3 * x * x * gradient


def mlp_body():
    return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, WIDTH), nn.Tanh())


def conv_body():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, WIDTH),
    )


def encoder_body():
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    return Calls(
        lambda self, x: self.down(self.layers(x).mean(1)),
        layers=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        down=nn.Linear(8, WIDTH),
    )


def lstm_body():
    return Calls(
        lambda self, x: self.lstm(x)[0][:, -1], lstm=nn.LSTM(8, WIDTH, 2, batch_first=True)
    )


def spectral_body():
    body = mlp_body()
    nn.utils.parametrizations.spectral_norm(body[0])
    return body


def opaque_body():
    return Calls(lambda self, x: Cube.apply(self.net(x)), net=mlp_body())


def checkpoint_body():
    return Calls(
        lambda self, x: checkpoint(self.second, self.first(x), use_reentrant=False),
        first=nn.Linear(5, 7),
        second=nn.Sequential(nn.Tanh(), nn.Linear(7, WIDTH)),
    )


def in_place_body():
    def forward(self, x):
        y = self.net(x) + 0.5
        y.mul_(2).add_(1)
        y[:, 0] = y[:, 1] * 3
        z = torch.empty_like(y)
        z.copy_(y)
        return z.clamp_(min=-1)

    return Calls(forward, net=mlp_body())


BODIES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], str]] = {
    "mlp": (mlp_body, (5,), "replay"),
    "conv": (conv_body, (1, 4, 4), "replay"),
    "encoder": (encoder_body, (3, 8), "replay"),
    "lstm": (lstm_body, (3, 8), "replay"),
    "spectral_norm": (spectral_body, (5,), "replay"),
    "in_place": (in_place_body, (5,), "replay"),
    "opaque": (opaque_body, (5,), "rerun"),
    "checkpoint": (checkpoint_body, (5,), "rerun"),
}


def make_case(body: str, loss: str, n: int) -> tuple[Headed, Any, torch.Tensor, Any]:
    """Model, loss, inputs and targets."""
    make_body, shape, _ = BODIES[body]
    head, make_loss = LOSSES[loss]
    model = Headed(make_body(), head)
    return model, make_loss(), torch.randn(n, *shape, dtype=torch.float64), targets_for(head, n)


class Joined(nn.Module):
    """A model with its loss's parameters, so that all gradients are compared."""

    def __init__(self, model: nn.Module, loss: Any) -> None:
        super().__init__()
        self.model = model
        self.loss = loss if isinstance(loss, nn.Module) else None
        self.value = loss


def joined(model: nn.Module, loss: Any) -> Joined:
    return copy.deepcopy(Joined(model, loss))


def native_coupled(model: nn.Module, loss: Any, inputs: Any, targets: Any) -> Result:
    """One step of a copy, the whole batch at once."""
    both = joined(model, loss)
    value = both.value(call(both.model, copy.deepcopy(inputs)), targets)
    value.backward()
    return result_of(both, value)


def ours_coupled(model: nn.Module, loss: Any, inputs: Any, targets: Any, **options: Any) -> Result:
    """The same step of another copy, by VirtualBatch."""
    both = joined(model, loss)
    declared = ib.losses.coupled(both.value, loss_device=options.pop("loss_device", None))
    report = ib.VirtualBatch(both.model, declared, **options).backward(inputs, targets)
    result = result_of(both, report.loss)
    result.report = report
    return result


def assert_same_step(found: Result, wanted: Result, where: Any, tolerance: float = 1e-12) -> None:
    worst = worst_error(found, wanted)
    assert worst <= tolerance, f"{where}: relative error {worst}"
    assert_same_buffers(found, wanted, tolerance)


def same_bits(a: Result, b: Result) -> bool:
    return (
        torch.equal(a.loss, b.loss)
        and all(
            (a.gradients[n] is None and b.gradients[n] is None)
            or torch.equal(a.gradients[n], b.gradients[n])
            for n in b.gradients
        )
        and all(torch.equal(a.buffers[n], b.buffers[n]) for n in b.buffers)
    )
