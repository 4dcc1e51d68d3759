"""User code that fails at its n-th call by a counter that is put back: it fails at every attempt, so
a step that begins again after memory ran out has to come to an end."""

from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from support import Tally
from torch import nn

WAYS = ["streamed", "coupled", "in the loss", "norm", "wrap", "wrap, norm"]


@pytest.mark.parametrize("at", [1, 3, 7])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_ends(way: str, at: int) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
    if "norm" in way:
        model.insert(1, nn.BatchNorm1d(8).double())
    calls = Tally()  # of all attempts: nobody puts it back
    count = 0

    def hook(*_: Any) -> None:
        nonlocal count
        calls()
        count += 1
        if calls.count > 2000:
            raise SystemExit("the step begins again for ever")
        if count == at:
            torch.empty(10**12, dtype=torch.uint8)

    def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if way == "in the loss":
            hook()
        return F.cross_entropy(outputs, targets)

    if way != "in the loss":
        model[0].register_forward_pre_hook(hook)
    separable = way in ("streamed", "norm")
    loss = nn.CrossEntropyLoss() if separable else ib.losses.coupled(loss_of)
    x, y = torch.randn(500, 6).double(), torch.randint(5, (500,))
    wrapped = ib.wrap(model, memory_budget="64MiB")
    batch = ib.VirtualBatch(model, loss, memory_budget="64MiB")
    for _ in range(3):
        try:
            if "wrap" in way:
                F.cross_entropy(wrapped(x), y).backward()
            else:
                batch.backward(x, y)
        except ib.BudgetExceeded:
            return
    assert count >= 3 or way == "in the loss"
