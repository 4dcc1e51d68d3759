"""Rows are looked at in steps 1, 2, 4, 8, 16 and in smaller batches than any so far."""

from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from same_rows_support import WAYS, N, X, Y, steps
from support import LOOKS, Calls, Log, looks
from torch import nn


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
