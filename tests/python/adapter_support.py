"""A training of 200 steps for the loops of others: data, an encoder, and how near weights have to be."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from wrap_support import contrastive

STEPS, PER_EPOCH, BATCH = 200, 40, 12
#: Where a weight of one sample is infinite, and with it every gradient of the step.
OVERFLOWS = 37
#: Wrapped modules get it; batches are not whole multiples.
MICRO_BATCH = 5


class Rows(Dataset[Any]):
    """Pairs of features and a weight."""

    def __init__(self, count: int = PER_EPOCH * BATCH, overflows: bool = False) -> None:
        made = torch.Generator().manual_seed(3)
        self.x = torch.randn(count, 6, generator=made, dtype=torch.float64)
        self.weight = torch.ones(count, dtype=torch.float64)
        if overflows:
            self.weight[OVERFLOWS] = float("inf")

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], self.weight[index]


def loader(workers: int = 2, **rows: Any) -> DataLoader[Any]:
    return DataLoader(Rows(**rows), batch_size=BATCH, num_workers=workers)


def encoder() -> nn.Sequential:
    """With a layer that sees the whole batch."""
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 4)).double()


def loss_of(z: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Couples all samples."""
    return contrastive(z) * weight.mean()


def same_weights(found: Any, wanted: Any, tolerance: float = 1e-9) -> None:
    """Largest difference over largest value, of each tensor of two state dicts."""
    assert list(found) == list(wanted)
    for name, right in wanted.items():
        assert torch.isfinite(right).all(), name
        torch.testing.assert_close(
            found[name],
            right,
            rtol=0,
            atol=tolerance * max(1.0, float(right.abs().max())),
            msg=name,
        )


def moved_away(found: Any, start: Any) -> None:
    """The training has done something."""
    moved = [float((found[name] - start[name]).abs().max()) for name in start if "weight" in name]
    assert max(moved) > 0.05, moved
