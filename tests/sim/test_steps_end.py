"""On an accelerator, too, a step that begins again has changed something each time."""

import itertools
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
from support import Calls
from torch import nn

MiB = 1 << 20
MOST = 1000  #: forwards of a step that ends


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Large blocks that are kept for the next tests would serve them beyond a device's capacity."""
    yield
    torch.accelerator.empty_cache()


def counted(each: Callable[[int], object]) -> nn.Module:
    """A layer that does something else with the number of samples, which no tape shows."""
    calls = itertools.count()

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        assert next(calls) < MOST
        each(len(x))
        return self.linear(x)

    torch.manual_seed(0)
    return Calls(forward, linear=nn.Linear(4, 1))


def stepped(model: Any, way: str, budget: int) -> Any:
    """The report of a step whose gradients are native's."""
    torch.manual_seed(1)
    x, y = torch.randn(64, 4), torch.randn(64, 1)
    if way == "wrap":
        wrapped = ib.wrap(model, memory_budget=budget)
        nn.functional.mse_loss(wrapped(x), y).backward()
        report = wrapped.last_report
    else:
        report = ib.VirtualBatch(model, nn.MSELoss(), memory_budget=budget).backward(x, y)
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    nn.functional.mse_loss(model.linear(x), y).backward()
    torch.testing.assert_close(found, [p.grad for p in model.parameters()], rtol=1e-5, atol=1e-7)
    return report


def live() -> int:
    return ib.memory.stats(torch.get_default_device()).live


@pytest.mark.parametrize("way", ["stream", "wrap"])
def test_a_probe_that_does_not_fit_is_not_tried_again(way: str) -> None:
    """Two samples say little of eight where memory grows with their square."""
    model = counted(lambda samples: torch.empty(samples**2 * MiB, dtype=torch.uint8))
    report = stepped(model, way, live() + 48 * MiB)
    assert max(report.micro_batch_sizes) <= 6


@pytest.mark.parametrize("way", ["stream", "wrap"])
def test_a_look_at_more_rows_than_the_device_has_room_for(way: str) -> None:
    """The budget had the room; plans became smaller for it, until one sample did not fit."""

    def fits(samples: int) -> None:
        if samples > 24:
            raise torch.OutOfMemoryError("the device has no room")

    report = stepped(counted(fits), way, live() + 900 * MiB)
    assert max(report.micro_batch_sizes) > 1
