"""Leaves that forward makes and that get gradients, wherever they lie: an attribute, a container, an
object, a module of its own. The first micro-batch's stay for all of them, and what lies beside them
in Python (flags, counters, logs) is as one native forward leaves it."""

import copy
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
from absent_slots_support import Base, line
from torch import nn

CRITERION = nn.CrossEntropyLoss()
WAYS = ["streamed", "coupled", "wrapped"]
ONE = [{"micro_batch_size": 12}, {"memory_budget": "64MiB"}]
SEVERAL = [{"micro_batch_size": 4}, {"micro_batch_size": 5}]


class Kept(Base):
    """Counts its calls and keeps a log of them."""

    def make(self) -> None:
        self.calls = 0
        self.log: list[int] = []
        self.found: dict[str, Any] = {}

    def between(self, h: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.log.append(self.calls)
        return self.scaled(h) * (1 + 0.1 * self.calls)

    def scaled(self, h: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def leaves(self) -> list[torch.Tensor]:
        """Those that are no registered parameters."""
        return []


class OfName(Kept):
    def make(self) -> None:
        super().make()
        self.register_parameter("scale", None)

    def scaled(self, h: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale = nn.Parameter(line())
        return h * self.scale


class BehindFlag(OfName):
    def make(self) -> None:
        super().make()
        self.ready = False

    def scaled(self, h: torch.Tensor) -> torch.Tensor:
        if not self.ready:
            self.scale, self.ready = nn.Parameter(line()), True
        return h * self.scale


class NewModule(Kept):
    def make(self) -> None:
        super().make()
        self.layer: Any = None

    def scaled(self, h: torch.Tensor) -> torch.Tensor:
        if self.layer is None:
            torch.manual_seed(3)
            self.layer = nn.Sequential(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6))).double()
        return self.layer(h)


class InList(Kept):
    def make(self) -> None:
        super().make()
        self.scales: list[torch.Tensor] = []

    def scaled(self, h: torch.Tensor) -> torch.Tensor:
        if not self.scales:
            self.scales.append(nn.Parameter(line()))
        return h * self.scales[0]

    def leaves(self) -> list[torch.Tensor]:
        return self.scales


class InDict(Kept):
    """No parameter, and beside a log."""

    def scaled(self, h: torch.Tensor) -> torch.Tensor:
        if "scale" not in self.found:
            self.found["scale"] = line().requires_grad_()
        return h * self.found["scale"]

    def leaves(self) -> list[torch.Tensor]:
        return [each for each in self.found.values() if isinstance(each, torch.Tensor)]


ALIKE: list[Callable[..., Kept]] = [OfName, BehindFlag, NewModule, InList, InDict]


class OfSamples(InList):
    def scaled(self, h: torch.Tensor) -> torch.Tensor:
        if not self.scales:
            self.scales.append(nn.Parameter(h.detach().abs().mean(0)))
        return h * self.scales[0]


class ModuleOfSamples(NewModule):
    def scaled(self, h: torch.Tensor) -> torch.Tensor:
        new = self.layer is None
        h = super().scaled(h) if not new else h
        if new:
            super().scaled(h)
            with torch.no_grad():
                self.layer[1][0].bias.copy_(h.mean(0))
            h = self.layer(h)
        return h


class OneOfSamples(Kept):
    """One is made of no samples, the other of them, and neither is of use alone."""

    def make(self) -> None:
        super().make()
        self.register_parameter("scale", None)
        self.register_parameter("shift", None)

    def scaled(self, h: torch.Tensor) -> torch.Tensor:
        if self.scale is None:
            self.scale, self.shift = nn.Parameter(line()), nn.Parameter(h.detach().mean(0))
        return h * self.scale + self.shift


class AnotherEachCall(InList):
    def scaled(self, h: torch.Tensor) -> torch.Tensor:
        self.scales.append(nn.Parameter(line()))
        return h * self.scales[-1]


class ModuleOfEachCall(NewModule):
    def scaled(self, h: torch.Tensor) -> torch.Tensor:
        self.layer = None
        return super().scaled(h)


REFUSED: list[Callable[..., Kept]] = [
    OfSamples,
    ModuleOfSamples,
    OneOfSamples,
    AnotherEachCall,
    ModuleOfEachCall,
]


def make(kind: Callable[..., Kept]) -> Kept:
    torch.manual_seed(0)
    return kind()


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(12, 6, generator=generator, dtype=torch.float64) + 0.3 * i,
            torch.randint(0, 4, (12,), generator=generator),
        )
        for i in range(3)
    ]


def step_of(model: nn.Module, way: str, options: dict[str, Any]) -> Callable[..., Any]:
    if way == "wrapped":
        wrapped = ib.wrap(model, **options)
        return lambda x, y: CRITERION(wrapped(x), y).backward()
    loss = CRITERION if way == "streamed" else ib.losses.coupled(CRITERION)
    return ib.VirtualBatch(model, loss, **options).backward


def with_gradients(model: Kept) -> list[torch.Tensor]:
    return [*model.parameters(), *(each for each in model.leaves())]


def assert_exact(kind: Callable[..., Kept], way: str, options: dict[str, Any]) -> None:
    model, native = make(kind), make(kind)
    step = step_of(model, way, options)
    for x, y in batches():
        step(x, y)
        CRITERION(native(x), y).backward()
        assert (model.calls, model.log) == (native.calls, native.log)
        pairs = list(zip(with_gradients(model), with_gradients(native), strict=True))
        for mine, theirs in pairs:
            assert (mine.grad is None) == (theirs.grad is None)
            if theirs.grad is not None:
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-11, atol=1e-13)
        with torch.no_grad():
            for each in (leaf for pair in pairs for leaf in pair):
                if each.grad is not None:
                    each -= 0.05 * each.grad
                    each.grad = None


@pytest.mark.parametrize("options", [*ONE, *SEVERAL], ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ALIKE)
def test_what_is_made_of_no_samples_is_exact(kind, way, options):
    assert_exact(kind, way, options)


@pytest.mark.parametrize("options", ONE, ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", REFUSED)
def test_where_the_whole_batch_fits_it_is_natives(kind, way, options):
    assert_exact(kind, way, options)


@pytest.mark.parametrize("options", SEVERAL, ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", REFUSED)
def test_what_each_micro_batch_would_make_is_refused_and_undone(kind, way, options):
    model = make(kind)
    before = copy.deepcopy((vars(model)["calls"], model.log, model.found, list(vars(model))))
    names = [name for name, _ in model.named_parameters()]
    step = step_of(model, way, options)
    for x, y in batches()[:2]:
        with pytest.raises(ib.CouplingError):
            step(x, y)
        assert (model.calls, model.log, model.found, list(vars(model))) == before
        assert [name for name, _ in model.named_parameters()] == names
        assert not model.leaves()
        assert all(parameter.grad is None for parameter in model.parameters())
