"""Batches of other sizes than the first step's: a ragged last one, a larger one later, images and
sequences that change, back and forth."""

from typing import Any

import infinitybatch as ib
import pytest
import torch
from torch import nn
from wrap_support import close, grads


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.conv = nn.Conv2d(2, 3, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.conv(x)).tanh().mean((2, 3)))


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.embed = nn.Embedding(11, 6)
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.head = nn.Linear(6, 4)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.embed(x)))


def images(n: int, height: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 2, height, width, dtype=torch.float64), torch.randint(4, (n,))


def tokens(n: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(11, (n, length)), torch.randint(4, (n, length))


def kinds() -> dict[str, tuple[type[nn.Module], list[Any]]]:
    torch.manual_seed(6)
    shapes = [(12, 5), (7, 5), (20, 5), (12, 9), (3, 2), (12, 5), (40, 7)]
    return {
        "images": (Images, [images(n, m, m + n % 2) for n, m in shapes]),
        "tokens": (Tokens, [tokens(n, m) for n, m in [*shapes, (1, 4)]]),
    }


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Each sample with all others, beside a loss of its own."""
    rows = nn.functional.normalize(outputs.flatten(1), dim=1)
    own = nn.functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
    return own + (rows @ rows.T).exp().mean().log()


OPTIONS: list[dict[str, Any]] = [
    {"memory_budget": "64MiB"},
    {"micro_batch_size": 12},
    {"micro_batch_size": 5},
    {"micro_batch_size": 5, "static_graph": True},
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("entry", ["wrap", "VirtualBatch", "Trainer"])
@pytest.mark.parametrize("kind", ["images", "tokens"])
def test_each_batch_is_natives(kind, entry, options):
    make, batches = kinds()[kind]
    native, model = make(), make()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.01) for each in (native, model)]
    coupled = ib.losses.coupled(loss_of)
    if entry == "Trainer":
        for x, y in batches:
            optimizers[0].zero_grad()
            loss_of(native(x), y).backward()
            optimizers[0].step()
        ib.Trainer(model, coupled, optimizers[1], batches, **options)(1)
    else:
        wrapped = ib.wrap(model, **options)
        batch = ib.VirtualBatch(model, coupled, **options)
        for x, y in batches:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_of(native(x), y).backward()
            loss_of(wrapped(x), y).backward() if entry == "wrap" else batch.backward(x, y)
            close(grads(model), grads(native), 1e-11)
            for optimizer in optimizers:
                optimizer.step()
    close(dict(model.state_dict()), dict(native.state_dict()), 1e-11)
