"""Models whose tapes are cut for memory, and what goes into them."""

from __future__ import annotations

import functools

import torch
from support import Log
from torch import nn

TOLERANCE = 1e-12


class Chain(nn.Module):
    """Equal layers, one after the other, on a sequence."""

    def __init__(self, layers: int, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.dropout(torch.tanh(layer(x)))
        return self.head(x).mean(1)


class Recurrent(nn.Module):
    """A loop over time steps in Python."""

    def __init__(self, hidden: int = 24) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, hidden)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(x.shape[0], self.cell.hidden_size)
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return self.out(state)


class Residual(nn.Module):
    """In-place everywhere, and a value from the beginning that the end needs."""

    def __init__(self, blocks: int = 8, channels: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, channels, 3, padding=1)
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(
                    nn.Conv2d(channels, channels, 3, padding=1),
                    nn.GroupNorm(2, channels),
                    nn.ReLU(inplace=True),
                    nn.Conv2d(channels, channels, 3, padding=1),
                )
                for _ in range(blocks)
            ]
        )
        self.head = nn.Linear(channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.stem(x)
        for block in self.blocks:
            y = block(x)
            y += x
            x = torch.relu_(y)
        return self.head((x + first).mean((2, 3)))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x)).mean(1)


class ChangedLater(nn.Module):
    """What waits at the cuts is changed in place behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(10)])
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.stem(x)
        y = first * 2.0
        for layer in self.layers:
            y = torch.tanh(layer(y))
        first.mul_(0.5)
        return self.head(first + y)


class ViewChangedLater(ChangedLater):
    """The same, of which only a view waits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.stem(x)
        half = first[:, 2:6]
        y = first * 2.0
        for layer in self.layers:
            y = torch.tanh(layer(y))
        half.mul_(0.5)
        return self.head(torch.cat([y[:, :2], half, y[:, 6:]], 1) * y)


class Counting(ChangedLater):
    """A buffer that forward writes, and that what follows the last cut reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.fill_(2.0)
        return super().forward(x) * self.calls


MODELS = {
    "a view changed later": (ViewChangedLater, (6, 5)),
    "changed later": (ChangedLater, (6, 5)),
    "counting": (Counting, (6, 5)),
    "chain": (lambda: Chain(24, 12), (6, 20, 12)),
    "recurrent": (Recurrent, (6, 30, 4)),
    "residual": (Residual, (6, 2, 8, 8)),
    "transformer": (Transformer, (6, 9, 16)),
}


def make(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    build, shape = MODELS[name]
    return (
        build().double(),
        torch.randn(shape, dtype=torch.float64),
        torch.randn(shape[0], 1, dtype=torch.float64),
    )


@functools.cache
def counted_calls() -> list[int]:
    """Defines an operator that notes each of its calls here, by their places."""
    calls = Log()
    library = torch.library.Library("checkpoints_test", "FRAGMENT")
    library.define("counted(Tensor x, int place) -> Tensor")

    def counted(x: torch.Tensor, place: int) -> torch.Tensor:
        calls.append(place)
        return torch.tanh(x)

    library.impl("counted", counted, "CompositeImplicitAutograd")
    KEPT_ALIVE.append(library)
    return calls


KEPT_ALIVE: list[object] = []


class CountedChain(nn.Module):
    """Tells how often each layer is computed."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(layers)])
        self.calls = counted_calls()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            x = torch.ops.checkpoints_test.counted(layer(x), place)
        return x.mean(1)

    def take_counts(self) -> list[int]:
        counts = [self.calls.count(place) for place in range(len(self.layers))]
        self.calls.clear()
        return counts


def contrast(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Each sample against all others."""
    sides = torch.cat([outputs, targets, outputs * targets], 1)
    return nn.functional.cross_entropy(sides @ sides.T, torch.arange(len(sides)).flip(0))
