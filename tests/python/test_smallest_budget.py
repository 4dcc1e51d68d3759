"""The budget that a refusal names as the smallest that works does work when it is given."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
from torch import nn
from wrap_budget_support import live, peak_of


def named(run: Callable[[int], Any], room: int) -> int:
    """What the refusal of `room` bytes beside what is live names."""
    budget = live() + room
    with pytest.raises(ib.BudgetExceeded) as raised:
        run(budget)
    smallest = raised.value.smallest_feasible
    assert smallest is not None and smallest > budget
    del raised  # its traceback leads to the model
    live()
    return smallest


class Feature(nn.Module):
    """Leaves a tensor beside its outputs, some numbers of which a rehearsal holds."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.norm, self.out = nn.Linear(5, 9), nn.BatchNorm1d(9), nn.Linear(9, 3)
        self.feature: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inlet(x)
        self.feature = h.detach()
        return self.out(self.norm(h))


class Shifted(nn.Module):
    """Adds a number, which a recording holds: with `static_graph` a rehearsal holds one of each
    size."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.norm, self.out = nn.Linear(5, 9), nn.BatchNorm1d(9), nn.Linear(9, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.norm(self.inlet(x) + 0.1))


@pytest.mark.parametrize(
    ("make", "offload", "static_graph"),
    [(Feature, "never", False), (Feature, "auto", False), (Shifted, "auto", True)],
)
@pytest.mark.filterwarnings("ignore::infinitybatch.LeftTensorNotice")
def test_beside_a_rehearsal_that_holds_tensors(
    make: type[nn.Module], offload: str, static_graph: bool
) -> None:
    """Beside a rehearsal other bytes are live than beside the step: only the step is refused."""
    torch.manual_seed(0)
    inner = make().double()
    x = torch.randn(80, 5, dtype=torch.float64)

    def run(budget: int) -> None:
        options: dict[str, Any] = {"offload": offload, "static_graph": static_graph}
        ib.wrap(copy.deepcopy(inner), memory_budget=budget, **options)(x)

    before = live()
    native = peak_of(lambda: copy.deepcopy(inner)(x).square().mean().backward()) - before
    run(named(run, native // 4))


class Together(nn.Module):
    """Takes least as one micro-batch of all."""

    def __init__(self) -> None:
        super().__init__()
        self.inlet, self.norm, self.out = nn.Linear(5, 6), nn.BatchNorm2d(2), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.inlet(x).unflatten(1, (2, 3, 1))).flatten(1)
        a, b = (h * 1.0).split(3, 1)
        h = torch.cat([a * b, b], 1)
        h = h + ib.across_batch(lambda rows: rows.softmax(0) * len(rows), h)
        return self.out(h)


def test_with_a_rehearsal_that_takes_more_than_the_step() -> None:
    """Before a size is planned it goes through a rehearsal, where its outputs have a gradient."""
    torch.manual_seed(0)
    inner = Together().double()
    x = torch.randn(201, 5, dtype=torch.float64)

    def run(budget: int) -> None:
        ib.wrap(copy.deepcopy(inner), memory_budget=budget, offload="never")(x)

    run(named(run, 50 << 10))


class Wide(nn.Module):
    """Outputs that take far more than all else."""

    def __init__(self, outputs: int, norm: bool) -> None:
        super().__init__()
        self.inlet = nn.Linear(4, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.out = nn.ModuleList(nn.Linear(8, 512) for _ in range(outputs))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        h = self.norm(self.inlet(x))
        return [out(h) for out in self.out]


@pytest.mark.parametrize(
    ("norm", "gradients"),
    [(False, True), (True, True), (False, False)],
    ids=["whole tapes", "cut", "without gradients"],
)
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("offload", ["never", "auto"])
def test_with_outputs_to_join(offload: str, outputs: int, norm: bool, gradients: bool) -> None:
    """Parts and what is joined from them are live at once, one output after the other."""
    torch.manual_seed(0)
    inner = Wide(outputs, norm)
    x = torch.randn(256, 4)

    def run(budget: int) -> int:
        wrapped = ib.wrap(copy.deepcopy(inner), memory_budget=budget, offload=offload)
        with torch.set_grad_enabled(gradients):
            wrapped(x)
        peak = wrapped.last_report.peak_bytes
        assert peak is not None
        return peak

    smallest = named(run, 200 << 10)
    assert run(smallest) == pytest.approx(smallest, rel=0.02)
