"""How a coupled loss is called, by what it takes and whether there are targets."""

import functools
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
from torch import nn

X = torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
T = torch.arange(6)
CALLS: list[tuple[Any, ...]] = []


def note(outputs: torch.Tensor, *others: Any) -> torch.Tensor:
    """Tells "targets" from what else a loss was given."""
    CALLS.append(tuple("targets" if torch.is_tensor(o) else o for o in others))
    return torch.logsumexp(outputs @ outputs.T, 1).mean()


class Callable2:
    def __call__(self, outputs: Any, scale: float = 2.0) -> torch.Tensor:
        return note(outputs, scale)


class Module1(nn.Module):
    def forward(self, outputs: Any, *, scale: float = 2.0) -> torch.Tensor:
        return note(outputs, scale)


class Module2(nn.Module):
    def forward(self, outputs: Any, _: Any) -> torch.Tensor:
        return note(outputs, _)


class Criterion(nn.MSELoss):
    def forward(self, outputs: Any, scale: float = 2.0) -> torch.Tensor:  # type: ignore[override]
        return note(outputs, scale)


class CriterionOfTargets(nn.MSELoss):
    def forward(self, outputs: Any, target: Any) -> torch.Tensor:
        return note(outputs, target)


def bound(outputs: Any, scale: float, targets: Any = "default") -> torch.Tensor:
    return note(outputs, scale, targets)


# A loss, what it is given beside outputs without targets, and with them.
TABLE: dict[str, tuple[Callable[..., Any], tuple[Any, ...], tuple[Any, ...]]] = {
    "outputs": (lambda o: note(o), (), ()),
    "both": (lambda o, t: note(o, t), (None,), ("targets",)),
    "option": (lambda o, normalize=True: note(o, normalize), (True,), ("targets",)),
    "both and option": (lambda o, t, m=0.2: note(o, t, m), (None, 0.2), ("targets", 0.2)),
    "all optional": (lambda o=None, t="t": note(o, t), ("t",), ("targets",)),
    "positional only": (lambda o, m=3, /: note(o, m), (3,), ("targets",)),
    "starred": (lambda *all: note(*all), (), ("targets",)),
    "outputs and starred": (lambda o, *more: note(o, *more), (), ("targets",)),
    "both and starred": (lambda o, t, *more: note(o, t, *more), (None,), ("targets",)),
    "by keyword": (lambda o, *, m=3: note(o, m), (3,), (3,)),
    "both and by keyword": (lambda o, t=1, *, m=3: note(o, t, m), (1, 3), ("targets", 3)),
    "keywords": (lambda o, **more: note(o, *more), (), ()),
    "partial by keyword": (functools.partial(bound, scale=5.0), (5.0, "default"), (5.0, "default")),
    "partial by position": (
        functools.partial(lambda m, o, t=4: note(o, m, t), 7),
        (7, 4),
        (7, "targets"),
    ),
    "object": (Callable2(), (2.0,), ("targets",)),
    "method": (Callable2().__call__, (2.0,), ("targets",)),
    "module of outputs": (Module1(), (2.0,), (2.0,)),
    "module of both": (Module2(), (None,), ("targets",)),
}


@pytest.mark.parametrize("name", TABLE)
def test_parameters_with_defaults_are_left_alone(name: str) -> None:
    value, alone, beside = TABLE[name]
    batch = ib.VirtualBatch(nn.Linear(3, 4).double(), ib.losses.coupled(value), micro_batch_size=4)
    for targets, expected in ((None, alone), (T, beside)):
        CALLS.clear()
        batch.backward(X, targets)
        assert [expected] == CALLS


@pytest.mark.parametrize(
    ("criterion", "alone"), [(Criterion(), (2.0,)), (CriterionOfTargets(), (None,))]
)
def test_criteria_that_were_changed(criterion: nn.Module, alone: tuple[Any, ...]) -> None:
    with pytest.warns(ib.CoupledLossNotice):
        batch = ib.VirtualBatch(nn.Linear(3, 4).double(), criterion, micro_batch_size=4)
    for targets, expected in ((None, alone), (T, ("targets",))):
        CALLS.clear()
        batch.backward(X, targets)
        assert [expected] == CALLS


def test_a_function_that_does_not_tell_its_parameters() -> None:
    batch = ib.VirtualBatch(
        nn.Linear(3, 4).double(), ib.losses.coupled(torch.std), micro_batch_size=4
    )
    assert torch.isfinite(batch.backward(X).loss)
