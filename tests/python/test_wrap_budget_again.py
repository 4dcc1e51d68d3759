"""A step that a wrapped model has done under a budget it can do again: what only the backward pass
runs out of is learned, and no size that timings favour takes the place of one that has fit."""

from typing import Any

import infinitybatch as ib
import pytest
import torch
from torch import nn
from wrap_budget_support import live

ROWS, TOKENS, WORDS = 24, 12, 50


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(WORDS, 32)
        layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(32, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.embed(x)))


X, Y = torch.randint(WORDS, (2, ROWS, TOKENS), generator=torch.Generator().manual_seed(1))


def steps(above: int, count: int) -> list[str]:
    """What each step did: the size of its micro-batches, or that it was refused."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    wrapped = ib.wrap(model, memory_budget=live() + above)
    done = []
    for _ in range(count):
        optimizer.zero_grad()
        loss: Any = None
        try:
            loss = nn.functional.cross_entropy(wrapped(X).flatten(0, 1), Y.flatten())
            loss.backward()
            optimizer.step()
            done.append(str(max(wrapped.last_report.micro_batch_sizes)))
        except ib.BudgetExceeded:
            done.append("refused")
        del loss
    return done


def smallest(low: int, high: int) -> int:
    """The least room in which a first step works, to 4 KiB."""
    while high - low > 4 << 10:
        middle = (low + high) // 2
        if steps(middle, 1) == ["refused"]:
            low = middle
        else:
            high = middle
    return high


@pytest.fixture(scope="module")
def room() -> int:
    return smallest(100_000, 400_000)


# Times under which one sample at a time, as many as fit, and anything between are fastest.
TIMES = [(5e-3, 1e-3, 0.0), (1e-1, 1e-6, 0.0), (1e-5, 1e-3, 0.0)]


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("more", [0.0, 0.02, 0.05, 0.1, 0.12, 0.2])
def test_a_step_that_worked_works_again(more, times, room):
    ib._C._assume_times(times)
    try:
        done = steps(int(room * (1 + more)), 5)
    finally:
        ib._C._assume_times((5e-3, 1e-3, 0.0))
    assert "refused" not in done, done
