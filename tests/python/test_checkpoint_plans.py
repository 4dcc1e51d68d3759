"""What the planner of cuts makes of a budget that a single sample's graph does not fit into."""

from __future__ import annotations

import gc

import infinitybatch as ib
import pytest
import torch
from fault_support import LONG
from support import gradient_error, native_gradients
from torch import nn

TOLERANCE = 1e-12


class Attention(nn.Module):
    """A block of a transformer; what its matrix products are given is what its backward keeps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.before = nn.LayerNorm(width)
        self.attend = nn.MultiheadAttention(width, 4, batch_first=True)
        self.between = nn.LayerNorm(width)
        self.feed = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU())
        self.back = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.before(x)
        x = x + self.attend(y, y, y, need_weights=False)[0]
        return x + self.back(self.feed(self.between(x)))


class Convolutions(nn.Module):
    """A residual block whose sums nothing keeps."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, 2 * channels, 3, padding=1)
        self.norm = nn.GroupNorm(2, 2 * channels)
        self.second = nn.Conv2d(2 * channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(torch.relu(self.norm(self.first(x))))


NETWORKS = {
    "transformer": (lambda: nn.Sequential(*[Attention(48) for _ in range(5)]), (160, 48)),
    "residual net": (lambda: nn.Sequential(*[Convolutions(6) for _ in range(6)]), (6, 24, 24)),
}


@pytest.mark.parametrize("share", [0.6, 0.75, 0.9])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_budget_is_used(name: str, share: float) -> None:
    make, shape = NETWORKS[name]
    torch.manual_seed(0)
    model = make().double()
    inputs, targets = torch.randn(2, 1, *shape, dtype=torch.float64)
    loss = nn.MSELoss()
    wanted = native_gradients(model, loss, inputs, targets)
    model.zero_grad()
    gc.collect()  # of other tests: what goes away meanwhile would be room
    live = ib.memory.stats("cpu").live
    fixed = ib.VirtualBatch(model, loss, micro_batch_size=1)
    for _ in range(2):  # what torch makes once and keeps is not the step's
        model.zero_grad()
        whole = fixed.backward(inputs, targets).peak_bytes
    del fixed
    model.zero_grad()
    budget = live + int(share * (whole - live))
    batch = ib.VirtualBatch(model, loss, memory_budget=budget)
    for _ in range(3):
        model.zero_grad()
        report = batch.backward(inputs, targets)
        assert report.strategy == "checkpoint"
        assert gradient_error(model, wanted) <= TOLERANCE
        assert report.peak_bytes <= budget
    assert report.restarts == 0
    # What is left unused would have been graph that need not be computed again.
    assert report.peak_bytes - live >= 0.85 * (budget - live)


class OneLayer(nn.Module):
    """The same weights again and again: parameters do not grow with depth."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.depth = depth

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.depth):
            x = torch.tanh(self.layer(x))
        return x


# Without offloading time grows with the square of depth.
@pytest.mark.parametrize(
    ("depth", "offload"),
    [
        (25, "never"),
        (200, "never"),
        (1000, "always"),
        *([(400, "never"), (1000, "never")] if LONG else []),
    ],
)
def test_the_smallest_budget_does_not_grow_with_depth(depth: int, offload: str) -> None:
    """From the first step on, also where there are more ops than places to weigh."""
    torch.manual_seed(0)
    model = OneLayer(depth).double()
    inputs, targets = torch.randn(2, 1, 512, 8, dtype=torch.float64)
    loss = nn.MSELoss()
    wanted = native_gradients(model, loss, inputs, targets)
    gc.collect()
    budget = ib.memory.stats("cpu").live + 5 * inputs.nbytes + 8 * 2**10
    batch = ib.VirtualBatch(model, loss, memory_budget=budget, offload=offload)
    report = batch.backward(inputs, targets)
    assert report.strategy == "checkpoint"
    assert report.peak_bytes <= budget
    assert gradient_error(model, wanted) <= TOLERANCE
