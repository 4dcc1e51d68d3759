"""What a static graph's recordings must not hide: mixing in later steps, sizes that follow values."""

import copy
from typing import Any

import infinitybatch as ib
import pytest
import torch
from support import Calls, classification, mlp
from torch import nn
from wrap_support import close, grads

WAYS = ["streaming", "coupled", "wrap"]


def stepper(model: nn.Module, way: str, **options: Any) -> Any:
    criterion = nn.CrossEntropyLoss()
    if way == "wrap":
        wrapped = ib.wrap(model, static_graph=True, **options)
        return lambda x, y: criterion(wrapped(x), y).backward()
    loss = criterion if way == "streaming" else ib.losses.coupled(criterion)
    return ib.VirtualBatch(model, loss, static_graph=True, **options).backward


@pytest.mark.parametrize("way", WAYS)
def test_mixed_samples_are_an_error_in_each_step(way: str) -> None:
    """Recordings of the step that failed were used by the next, which looked at nothing."""
    model = Calls(lambda self, x: self.net(x * (1 + x.softmax(0))), net=mlp()).double()
    step = stepper(model, way, micro_batch_size=2)
    for _ in range(3):
        with pytest.raises(ib.CouplingError):
            step(*classification(8))
        assert all(g is None for g in grads(model).values())


@pytest.mark.parametrize("way", WAYS)
def test_sizes_that_follow_values_are_a_typed_error(way: str) -> None:
    """The promise is broken: what was recorded does not even run on other samples."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        chosen = x[:, 0] > 0
        made = torch.zeros_like(x)
        made[chosen] = (x[chosen].unflatten(1, (2, -1)) * 2).flatten(1)
        return self.last(made)

    torch.manual_seed(0)
    model = Calls(forward, first=nn.Linear(6, 6), last=nn.Linear(6, 5)).double()
    step = stepper(model, way, micro_batch_size=4)
    refused = 0
    for _ in range(8):
        x, y = classification(12)
        model.zero_grad()
        twin = copy.deepcopy(model)
        nn.functional.cross_entropy(twin(x), y).backward()
        try:
            step(x, y)
        except ib.Error as error:
            assert "static_graph" in str(error) or "forward" in str(error)
            refused += 1
        else:
            close(grads(model), grads(twin))
    assert refused > 0
