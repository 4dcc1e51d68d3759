"""The budget that a refusal names as the smallest that works does work when it is given. It names
one only where all that a step takes has been seen; else it says what is needed at least, and the
part of the step that it knows of works with that."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from wrap_budget_support import live, peak_of


def named(run: Callable[[int], Any], room: int, whole: bool = False) -> int:
    """What the refusal of `room` bytes beside what is live names: the smallest budget of a `whole`
    step, else what forward needs in front of a loss that nobody has seen."""
    budget = live() + room
    with pytest.raises(ib.BudgetExceeded) as raised:
        run(budget)
    smallest, needed = raised.value.smallest_feasible, raised.value.needed
    assert (smallest is not None) == whole and needed > budget, str(raised.value)
    assert smallest in (None, needed)
    del raised  # its traceback leads to the model
    live()
    return needed


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

    smallest = named(run, 200 << 10, whole=not gradients)
    assert run(smallest) == pytest.approx(smallest, rel=0.02)


class Convolved(nn.Module):
    """Of a single image its convolutions take more workspace than of each of several."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(4))
        self.norms = nn.ModuleList(nn.BatchNorm2d(6) for _ in range(4))
        self.out = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x).relu()
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = (norm(layer(x)) + x).relu()
        return self.out(x.mean((2, 3)))


IMAGES = torch.randn(24, 3, 12, 12, generator=torch.Generator().manual_seed(1))
CLASSES = torch.arange(24) % 5


def normed() -> nn.Module:
    layers: list[nn.Module] = [nn.Flatten(), nn.Linear(432, 64)]
    for _ in range(3):
        layers += [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(64, 5))


def contrastive(z: torch.Tensor, _: Any = None) -> torch.Tensor:
    z = F.normalize(z, dim=1)
    return F.cross_entropy(z @ z.T / 0.3, torch.arange(len(z)).roll(1))


def step(by: str, make: Callable[[], nn.Module], coupled: bool, offload: str, budget: int) -> None:
    torch.manual_seed(0)
    model = make()
    if by == "wrap":
        outputs = ib.wrap(model, memory_budget=budget, offload=offload)(IMAGES)
        (contrastive(outputs) if coupled else F.cross_entropy(outputs, CLASSES)).backward()
        return
    loss = ib.losses.coupled(contrastive) if coupled else nn.CrossEntropyLoss()
    ib.VirtualBatch(model, loss, memory_budget=budget, offload=offload).backward(IMAGES, CLASSES)


def refused(share: int, *how: Any) -> ib.BudgetExceeded:
    """The refusal of a step with so many percent of what native takes."""
    before = live()
    make = how[1]
    native = peak_of(lambda: F.cross_entropy(make()(IMAGES), CLASSES).backward()) - before
    with pytest.raises(ib.BudgetExceeded) as raised:
        step(*how, budget=live() + native * share // 100)
    return raised.value


def test_of_sizes_that_have_been_seen() -> None:
    """Whatever a single sample is foreseen to take, a budget is named for two."""
    how = ("VirtualBatch", Convolved, False, "never")
    smallest = refused(30, *how).smallest_feasible
    assert smallest is not None
    step(*how, budget=smallest)


@pytest.mark.parametrize(
    ("by", "coupled", "offload"),
    [("VirtualBatch", True, "never"), ("wrap", True, "auto"), ("wrap", False, "never")],
)
def test_none_before_the_loss_has_run(by: str, coupled: bool, offload: str) -> None:
    """A first step is refused before its loss is computed, which takes what nobody knows."""
    error = refused(90, by, normed, coupled, offload)
    assert error.smallest_feasible is None and "at least" in str(error)


def test_in_a_later_step() -> None:
    """Where something else has come to be live, after steps that told what the loss takes: another
    model's first step plans without knowing that."""
    torch.manual_seed(0)
    x, y = torch.randn(64, 20), torch.arange(64) % 5
    layers: list[nn.Module] = [nn.Linear(20, 64), nn.BatchNorm1d(64), nn.ReLU()]
    for _ in range(2):
        layers += [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()]
    inner = nn.Sequential(*layers, nn.Linear(64, 5))

    def steps(wrapped: nn.Module, count: int) -> None:
        for _ in range(count):
            wrapped.zero_grad(set_to_none=True)
            F.cross_entropy(wrapped(x), y).backward()
        wrapped.zero_grad(set_to_none=True)

    before = live()
    native = peak_of(lambda: steps(copy.deepcopy(inner), 1)) - before
    budget = live() + 2 * native
    wrapped = ib.wrap(copy.deepcopy(inner), memory_budget=budget, offload="never")
    steps(wrapped, 2)
    for share in range(60, 20, -4):
        ballast = torch.empty(budget - live() - native * share // 100, dtype=torch.uint8)
        try:
            steps(wrapped, 1)
        except ib.BudgetExceeded as error:
            smallest = error.smallest_feasible
            break
    assert smallest is not None
    more = smallest - budget
    del wrapped
    again = ib.wrap(copy.deepcopy(inner), memory_budget=budget + more, offload="never")
    steps(again, 2)
    del ballast
