"""`static_graph` where what decides the program is in no attribute, and changes from step to step."""

import copy
import types
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from torch import nn

N, STEPS = 12, 17
FACTOR = 1.0


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 3)
        self.space = types.SimpleNamespace(factor=1.0)
        self.double()

    def scaled(self, h: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.scaled(torch.tanh(self.a(x))))


class InAGlobal(Base):
    def scaled(self, h: torch.Tensor) -> torch.Tensor:
        return h * FACTOR

    def change(self, to: float) -> None:
        global FACTOR
        FACTOR = to


class InANamespace(Base):
    def scaled(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.space.factor

    def change(self, to: float) -> None:
        self.space.factor = to


class WhetherItTrains(Base):
    def scaled(self, h: torch.Tensor) -> torch.Tensor:
        return h * 2 if self.a.weight.requires_grad else h.sin()

    def change(self, to: float) -> None:
        self.a.requires_grad_(to == 1.0)


class InAFlagOfTorch(Base):
    def scaled(self, h: torch.Tensor) -> torch.Tensor:
        return h * 2 if torch.are_deterministic_algorithms_enabled() else h

    def change(self, to: float) -> None:
        torch.use_deterministic_algorithms(to != 1.0)


class InAProperty(Base):
    def scaled(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.factor  # type: ignore[operator]

    def change(self, to: float) -> None:
        type(self).factor = property(lambda _: to)  # type: ignore[attr-defined]


class InASlice(Base):
    def scaled(self, h: torch.Tensor) -> torch.Tensor:
        return F.pad(h[:, self.part], (0, 6 - self.part.stop))  # type: ignore[index, operator]

    def change(self, to: float) -> None:
        self.part = slice(0, 3 + int(to) % 3)


KINDS: list[Callable[[], Any]] = [
    InAGlobal,
    InANamespace,
    WhetherItTrains,
    InAFlagOfTorch,
    InAProperty,
    InASlice,
]
#: What is no setting of the model's: a change is noticed where forward runs beside its recording.
UNTOLD = (InAGlobal, InAFlagOfTorch)


@pytest.fixture(autouse=True)
def as_before():
    yield
    torch.use_deterministic_algorithms(False)


def outcomes(made: Callable[[], Any], way: str, size: int, to: Callable[[int], float]) -> str:
    """A letter for each step: e(xact), w(rong), r(efused)."""
    native = made()
    model = copy.deepcopy(native)
    options: dict[str, Any] = {"micro_batch_size": size, "static_graph": True}
    if way == "wrap":
        wrapped = ib.wrap(model, **options)
    else:
        loss = ib.losses.coupled(F.mse_loss) if way == "coupled" else F.mse_loss
        step = ib.VirtualBatch(model, loss, **options)
    found = ""
    for number in range(STEPS):
        torch.manual_seed(number)
        x, y = torch.randn(N, 6).double(), torch.randn(N, 3).double()
        native.zero_grad()
        model.zero_grad()
        native.change(to(number))
        F.mse_loss(native(x), y).backward()
        model.change(to(number))
        try:
            if way == "wrap":
                F.mse_loss(wrapped(x), y).backward()
            else:
                step.backward(x, y)
        except ib.Unsupported:
            found += "r"
            continue
        same = all(
            p.grad is None
            if q.grad is None
            else p.grad is not None and torch.allclose(p.grad, q.grad, rtol=1e-10, atol=1e-13)
            for p, q in zip(model.parameters(), native.parameters(), strict=True)
        )
        found += "e" if same else "w"
    return found


@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("way", ["wrap", "streamed", "coupled"])
@pytest.mark.parametrize("made", KINDS)
def test_what_alternates_is_noticed_at_once(made: Callable[[], Any], way: str, size: int) -> None:
    """All steps that ran beside their recording had the same of two programs."""
    assert "w" not in outcomes(made, way, size, lambda step: 1.0 + step % 2)


@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("way", ["wrap", "streamed", "coupled"])
@pytest.mark.parametrize("made", KINDS)
def test_what_changes_once_is_told(made: Callable[[], Any], way: str, size: int) -> None:
    """With micro-batches of 5, 5 and 2 the last one ran, and what it said of the others was lost."""
    found = outcomes(made, way, size, lambda step: 1.0 + (step >= 2))
    if made in UNTOLD:
        assert "w" not in found[3:]  # docs/limits.md
        assert "w" not in found or found[found.index("w") + 1] == "r"
    else:
        assert "w" not in found
