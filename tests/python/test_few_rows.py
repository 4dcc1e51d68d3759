"""Forwards and losses that fail on a few samples, under a budget: larger micro-batches are tried,
the whole batch first."""

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from support import Calls, Log, classification
from torch import nn
from wrap_support import close, grads

N = 9
X, Y = classification(N)
BY = ["streamed", "coupled", "wrap"]


def in_thirds(self: Any, x: torch.Tensor) -> torch.Tensor:
    first, second, third = self.net(x).chunk(3)
    return torch.cat([first, second, third])


def at_least(count: int) -> Callable[..., torch.Tensor]:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        wide = self.net(x).tanh()
        if len(x) < count:
            raise ValueError(f"{count} samples, please")
        return self.head(wide) if hasattr(self, "head") else wide

    return forward


def asserting(self: Any, x: torch.Tensor) -> torch.Tensor:
    assert len(x) > 4, "more than four"
    return self.net(x)


def made(forward: Callable[..., torch.Tensor]) -> nn.Module:
    torch.manual_seed(0)
    return Calls(forward, net=nn.Linear(6, 5)).double()


def wide(forward: Callable[..., torch.Tensor]) -> nn.Module:
    """Some 8 KiB of activations for each sample."""
    torch.manual_seed(0)
    return Calls(forward, net=nn.Linear(6, 512), head=nn.Linear(512, 5)).double()


def room_for(kibibytes: int) -> int:
    gc.collect()
    return ib.memory.stats().live + kibibytes * 1024


def run(by: str, model: nn.Module, x: Any = X, y: Any = Y, steps: int = 1, **options: Any) -> Any:
    """Gradients of the last of some steps by one object."""
    if by == "wrap":
        wrapped = ib.wrap(model, **options)
        for _ in range(steps):
            model.zero_grad()
            F.cross_entropy(wrapped(x), y).backward()
    else:
        loss = ib.losses.coupled(F.cross_entropy) if by == "coupled" else F.cross_entropy
        step = ib.VirtualBatch(model, loss, **options)
        for _ in range(steps):
            model.zero_grad()
            step.backward(x, y)
    return grads(model)


def native(model: nn.Module, x: torch.Tensor = X, y: torch.Tensor = Y) -> Any:
    model = copy.deepcopy(model)
    F.cross_entropy(model(x), y).backward()
    return grads(model)


@pytest.mark.parametrize("steps", [1, 3])
@pytest.mark.parametrize("forward", [in_thirds, at_least(5), at_least(N), asserting])
@pytest.mark.parametrize("by", BY)
def test_the_whole_batch_is_tried(by: str, forward: Any, steps: int) -> None:
    model = made(forward)
    wanted = native(model)
    close(run(by, model, steps=steps, memory_budget="64MiB"), wanted, 1e-12)


@pytest.mark.parametrize("by", BY)
def test_where_it_does_not_fit_the_largest_that_does(by: str) -> None:
    x, y = classification(100)
    model = wide(at_least(5))
    wanted = native(model, x, y)
    close(run(by, model, x, y, steps=2, memory_budget=room_for(600)), wanted, 1e-11)


@pytest.mark.parametrize("by", BY)
def test_an_error_of_the_whole_batch_is_the_users(by: str) -> None:
    model = made(at_least(N + 1))
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=f"^{N + 1} samples, please$") as caught:
        run(by, model, memory_budget="64MiB")
    assert not isinstance(caught.value, ib.Error)
    assert not hasattr(caught.value, "__notes__")  # of a part of the batch
    assert all(parameter.grad is None for parameter in model.parameters())
    close(model.state_dict(), state, 0)


@pytest.mark.parametrize("by", BY)
def test_one_that_no_size_that_fits_escapes_is_typed(by: str) -> None:
    x, y = classification(100)
    model = wide(at_least(90))
    with pytest.raises(ib.BudgetExceeded) as caught:
        run(by, model, x, y, memory_budget=room_for(600))
    assert isinstance(caught.value.__cause__, ValueError)
    assert str(caught.value.__cause__) == "90 samples, please"
    message = str(caught.value)
    assert "of the 100 samples (ValueError: 90 samples, please)" in message
    assert "a larger one needs" in message and "Raise it, for example to memory_budget=" in message
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("by", BY)
def test_the_next_batch_is_tried_anew(by: str) -> None:
    x, y = classification(100)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        wide = self.net(x).tanh()
        if x.isnan().any():
            raise ValueError("no numbers")
        return self.head(wide)

    model = wide(forward)
    wanted = native(model, x, y)
    budget = room_for(600)
    wrapped = ib.wrap(model, memory_budget=budget)
    loss = ib.losses.coupled(F.cross_entropy) if by == "coupled" else F.cross_entropy
    step = ib.VirtualBatch(model, loss, memory_budget=budget)

    def once(rows: torch.Tensor) -> None:
        if by == "wrap":
            F.cross_entropy(wrapped(rows), y).backward()
        else:
            step.backward(rows, y)

    with pytest.raises((ValueError, ib.BudgetExceeded), match="no numbers"):
        once(torch.full_like(x, torch.nan))
    once(x)
    close(grads(model), wanted, 1e-11)


@pytest.mark.parametrize("by", BY)
def test_errors_let_go_of_everything(by: str) -> None:
    x, y = classification(100)

    def fails() -> weakref.ref[nn.Module]:
        model = wide(at_least(90))
        with pytest.raises(ib.BudgetExceeded):
            run(by, model, x, y, memory_budget=room_for(600))
        return weakref.ref(model)

    alive = fails()
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("by", BY)
def test_what_ends_the_step_is_not_tried_again(by: str) -> None:
    seen = Log()

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        seen.append(len(x))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(by, made(forward), memory_budget="64MiB")
    assert len(seen) == 1 and seen[0] < N


@pytest.mark.parametrize("by", BY)
def test_a_size_that_went_through_before_is_not_too_small(by: str) -> None:
    calls = Log()

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        if calls.count(4) == 2:
            raise ValueError("the second four")
        return self.net(x)

    x, y = classification(40)
    with pytest.raises(ValueError, match="the second four"):
        run(by, made(forward), x, y, memory_budget="64MiB")
    assert calls.count(4) == 2


@pytest.mark.parametrize("forward", [in_thirds, asserting])
@pytest.mark.parametrize("by", BY)
def test_a_fixed_size_says_that_it_was_a_part(by: str, forward: Any) -> None:
    with pytest.raises((ValueError, AssertionError), match="not enough values|four") as caught:
        run(by, made(forward), micro_batch_size=2)
    assert f"a micro-batch of 2 of the {N} samples" in caught.value.__notes__[0]


def test_a_loss_that_compares_samples_sees_all_of_them() -> None:
    def similar(self: Any, x: torch.Tensor) -> torch.Tensor:
        z = self.net(x)
        return z @ z.T

    model = made(similar)
    theirs = copy.deepcopy(model)
    targets = torch.randn(N, N, dtype=torch.float64)
    F.mse_loss(theirs(X), targets).backward()
    ib.VirtualBatch(model, F.mse_loss, memory_budget="64MiB").backward(X, targets)
    close(grads(model), grads(theirs), 1e-12)


@pytest.mark.parametrize("options", [{"micro_batch_size": 3}, {"micro_batch_size": 4}])
@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("by", BY)
def test_comparisons_within_micro_batches_are_typed(
    by: str, static: bool, options: dict[str, int]
) -> None:
    def similar(self: Any, x: torch.Tensor) -> torch.Tensor:
        z = self.net(x)
        return z @ z.T

    model = made(similar)
    targets = torch.randn(N, N, dtype=torch.float64)
    with pytest.raises(ib.BatchError, match=r"several dimensions that follow.*losses\.coupled"):
        if by == "wrap":
            F.mse_loss(ib.wrap(model, static_graph=static, **options)(X), targets).backward()
        else:
            loss = ib.losses.coupled(F.mse_loss) if by == "coupled" else F.mse_loss
            ib.VirtualBatch(model, loss, static_graph=static, **options).backward(X, targets)
    assert all(parameter.grad is None for parameter in model.parameters())
