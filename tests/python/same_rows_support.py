"""What tests of the look at rows share: data, first steps, models that combine samples."""

from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import torch
import torch.nn.functional as F
from support import Calls, classification
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


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return 3 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 3 * gradient


def attention(_: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.view(-1, 1, 2, 4)
    return F.scaled_dot_product_attention(x, x, x, dropout_p=0.2).reshape(-1, 8)


#: How forward may draw numbers; each gets the model, whose `lstm` drops between its layers.
DRAWS: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "dropout": lambda _, x: F.dropout(x, 0.2),
    "rrelu": lambda _, x: F.rrelu(x, training=True),
    "attention": attention,
    "lstm": lambda model, x: model.lstm(x[:, None])[0][:, 0],
}


def coupled_model(
    mix: Callable[[torch.Tensor], torch.Tensor], draw: str | None = None
) -> nn.Module:
    torch.manual_seed(0)
    drawn = DRAWS[draw] if draw else lambda _, x: x
    more = {"lstm": nn.LSTM(8, 8, 2, dropout=0.2, batch_first=True)} if draw == "lstm" else {}
    return Calls(
        lambda self, x: self.head(drawn(self, mix(torch.tanh(self.body(x))))),
        body=nn.Linear(6, 8),
        head=nn.Linear(8, 5),
        **more,
    ).double()
