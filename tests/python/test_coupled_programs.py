"""What is known of a program whose samples are coupled says nothing of another one, and an
experiment on a function of `across_batch` swallows nothing that the user throws."""

import infinitybatch as ib
import pytest
import torch
from support import Calls, Tally
from torch import nn
from torch.nn import functional as F


class Switched(nn.Module):
    """Mixes its samples by an ordinary op, which no cut helps with, or does not."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(8, 64), nn.Linear(64, 1)
        self.mixes = True
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        if self.mixes:
            hidden = hidden - hidden.mean(0)
        return self.last(torch.relu(hidden) * hidden)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("way", ["step", "wrap"])
@pytest.mark.parametrize("room", [40_000, 60_000])
def test_another_program_runs_in_micro_batches(way: str, room: int) -> None:
    """With and without room for the mixing program's 16 samples; all 64 fit in neither."""
    model = Switched()
    x, target = torch.randn(64, 8).double(), torch.randn(64, 1).double()
    model.mixes = False
    F.mse_loss(model(x), target).backward()
    wanted = gradients(model)
    model.zero_grad()
    budget = ib.memory.stats("cpu").live + room
    wrapped = ib.wrap(model, memory_budget=budget)
    batch = ib.VirtualBatch(model, nn.MSELoss(), memory_budget=budget)

    def step(count: int) -> None:
        model.zero_grad()
        if way == "wrap":
            F.mse_loss(wrapped(x[:count]), target[:count]).backward()
        else:
            batch.backward(x[:count], target[:count])

    for mixes in (True, False, True, False):
        model.mixes = mixes
        if not mixes:
            step(64)
            torch.testing.assert_close(gradients(model), wanted, rtol=1e-12, atol=1e-14)
            continue
        try:
            step(16)
        except (ib.CouplingError, ib.BudgetExceeded):
            assert room == 40_000
        else:
            found = gradients(model)
            model.zero_grad()
            F.mse_loss(model(x[:16]), target[:16]).backward()
            torch.testing.assert_close(found, gradients(model), rtol=1e-12, atol=1e-14)
        with pytest.raises((ib.CouplingError, ib.BudgetExceeded)):
            step(64)


ENDS = [KeyboardInterrupt(), SystemExit(1), torch.OutOfMemoryError("mine"), MemoryError("mine")]


@pytest.mark.parametrize("error", ENDS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("way", ["step", "wrap"])
def test_what_ends_a_step_comes_out_of_any_call_of_a_function(
    error: BaseException, way: str
) -> None:
    fatal, calls = [-1], Tally()  # numbers in plain state would be put back

    def centre(x: torch.Tensor) -> torch.Tensor:
        calls()
        if [calls.count] == fatal:
            raise error
        return x.mean(0).expand_as(x)

    torch.manual_seed(0)
    model = Calls(
        lambda self, x: self.last((h := self.first(x)) - ib.across_batch(centre, h)),
        first=nn.Linear(4, 3),
        last=nn.Linear(3, 1),
    ).double()
    x, target = torch.randn(8, 4).double(), torch.randn(8, 1).double()

    def step() -> None:
        calls.count = 0
        model.zero_grad()
        if way == "wrap":
            F.mse_loss(ib.wrap(model, micro_batch_size=4)(x), target).backward()
        else:
            ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=4).backward(x, target)

    step()
    wanted = gradients(model)
    for place in range(1, calls.count + 1):
        fatal[0] = place
        with pytest.raises(type(error)) as raised:
            step()
        assert raised.value is error
        assert calls.count == place
        assert all(gradient is None for gradient in gradients(model))
    fatal[0] = -1
    step()
    torch.testing.assert_close(gradients(model), wanted, rtol=0, atol=0)
