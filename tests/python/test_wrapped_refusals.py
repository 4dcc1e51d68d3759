"""A refusal of the memory limit that comes out of user code as another exception."""

from typing import Any

import infinitybatch as ib
import pytest
import torch
from measure import gradients, worst
from support import Calls
from torch import nn

ROWS = 48


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 160), nn.Linear(160, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)))


class Pictures(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # No nn.Conv2d: TorchScript takes its list of paddings for a builtin at times.
        self.first = nn.Parameter(torch.randn(12, 1, 3, 3) / 3)
        self.last = nn.Parameter(torch.randn(1, 12, 3, 3) / 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pictures = torch.conv2d(x.view(-1, 1, 4, 4), self.first, None, [1, 1], [1, 1])
        return torch.conv2d(torch.relu(pictures), self.last, None, [1, 1], [1, 1]).flatten(1)


def model(part: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), torch.jit.script(part()), nn.Linear(16, 3)).double()


def spread(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (outputs @ outputs.T).logsumexp(1).mean() + (outputs - targets).square().mean()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(ROWS, 16, dtype=torch.float64, generator=generator),
        torch.randn(ROWS, 3, dtype=torch.float64, generator=generator),
    )


@pytest.mark.parametrize("way", ["step", "wrap"])
@pytest.mark.parametrize("part", [Part, Pictures])
def test_scripted_parts_under_any_budget(part: type[nn.Module], way: str) -> None:
    x, y = data()
    native = model(part)
    spread(native(x), y).backward()
    wanted = gradients(native)
    exact = 0
    for kibibytes in range(90, 330, 48):
        net = model(part)
        budget = ib.memory.stats("cpu").live + kibibytes * 1024
        try:
            if way == "step":
                ib.VirtualBatch(net, ib.losses.coupled(spread), memory_budget=budget).backward(x, y)
            else:
                spread(ib.wrap(net, memory_budget=budget)(x), y).backward()
        except ib.BudgetExceeded:
            assert all(p.grad is None for p in net.parameters())
            continue
        exact += 1
        assert worst(gradients(net), wanted) <= 1e-12
    assert exact > 0


@pytest.mark.parametrize("chained", [True, False])
def test_an_exception_of_the_users_own(chained: bool) -> None:
    """Raised while a refusal is handled: a smaller micro-batch is the answer to both."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        try:
            return self.last(self.first(x).tanh())
        except RuntimeError as error:
            if chained:
                raise ValueError("the layer failed") from error
            raise ValueError("the layer failed")  # noqa: B904

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Calls(forward, first=nn.Linear(16, 400), last=nn.Linear(400, 3)).double()

    x, y = data()
    native, net = make(), make()
    nn.functional.mse_loss(native(x), y).backward()
    ib.VirtualBatch(
        net, nn.MSELoss(), memory_budget=ib.memory.stats("cpu").live + (300 << 10)
    ).backward(x, y)
    assert worst(gradients(net), gradients(native)) <= 1e-12


def test_a_users_own_error_stays_his() -> None:
    """Though an allocation was refused and swallowed in front of it."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        try:
            torch.empty(1 << 40)
        except RuntimeError:
            pass
        raise ValueError("something else")

    net = Calls(forward, first=nn.Linear(16, 4)).double()
    batch = ib.VirtualBatch(
        net, nn.MSELoss(), memory_budget=ib.memory.stats("cpu").live + (1 << 20)
    )
    with pytest.raises(ValueError, match="something else"):
        batch.backward(*data())
