"""Calls that wait for their backward beside each other under a budget, of one wrapped model or of
two: what they keep they let go of where another finds no room, and leave it room from then on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
from batch_norm_models import Residual
from test_kept_boundaries import KEPT
from test_wrap_kept_boundaries import SIZE, made, peak_of, step
from torch import nn
from wrap_support import close, contrastive, grads
from wrap_whole_batch_support import buffers, live


def settled(run: Callable[[], Any], put_back: Callable[[], None]) -> Any:
    """What the last of six steps leaves. What a call that waits keeps it lets go of where another
    finds no room; what the loss takes no plan knows in first steps."""
    done = 0
    for _ in range(6):
        try:
            found = run()
            done += 1
        except ib.BudgetExceeded as error:
            assert str(error).startswith("What comes between forward and backward")
            done = 0
        put_back()
    assert done >= 2
    return found


@pytest.mark.parametrize("share", [78, 60, 54, 46, 40])
def test_calls_that_wait_leave_room_for_each_other(share: int) -> None:
    inner, x = made(lambda: Residual(8), rows=64)
    wanted = step(copy.deepcopy(inner), x, calls=2)
    native = peak_of(inner, lambda module: step(module, x, calls=2))
    model = copy.deepcopy(inner)
    budget = live() + native * share // 100
    wrapped = ib.wrap(model, memory_budget=budget, offload="never")
    found = settled(
        lambda: step(wrapped, x, calls=2), lambda: model.load_state_dict(inner.state_dict())
    )
    close(found, wanted)
    assert wrapped.last_report.peak_bytes <= budget and wrapped.last_report.restarts == 0


@pytest.mark.parametrize(
    ("share", "given"),
    [(77, {}), (53, {}), (47, {}), (41, {}), (55, {"micro_batch_size": 8}),
     (45, {"micro_batch_size": 8}), (35, {"micro_batch_size": 8})],
)  # fmt: skip
def test_wrapped_models_leave_room_for_each_other(share: int, given: dict[str, int]) -> None:
    """As the two towers of CLIP, each with a budget that the other's activations count in."""
    inner, x = made(lambda: Residual(8), rows=64)

    def both(towers: list[nn.Module]) -> list[Any]:
        for tower in towers:
            tower.zero_grad(set_to_none=True)
        contrastive(torch.cat([tower(x * (1 + i)) for i, tower in enumerate(towers)])).backward()
        return [(grads(tower), buffers(tower)) for tower in towers]

    def put_back() -> None:
        for tower in towers:
            tower.load_state_dict(inner.state_dict())

    towers: list[nn.Module] = [copy.deepcopy(inner) for _ in range(2)]
    before = live()
    with ib.memory.peak() as scope:
        wanted = copy.deepcopy(both(towers))
    native = scope.peak - before
    put_back()
    for tower in towers:
        tower.zero_grad(set_to_none=True)
    budget = live() + native * share // 100
    options: dict[str, Any] = {"memory_budget": budget, "offload": "never", **given}
    wrapped = [ib.wrap(each, **options) for each in towers]
    found = settled(lambda: copy.deepcopy(both(wrapped)), put_back)
    close(found, wanted, tolerance=4e-12)
    reports = [each.last_report for each in wrapped]
    assert all(each.peak_bytes <= budget and each.restarts == 0 for each in reports)


def test_a_backward_without_room_makes_others_go_forward_again() -> None:
    inner, x = made(lambda: Residual(8))
    towers = [copy.deepcopy(inner) for _ in range(2)]
    contrastive(torch.cat([tower(x) for tower in towers])).backward()
    wanted = [grads(tower) for tower in towers]
    native = peak_of(copy.deepcopy(inner), lambda module: step(module, x, calls=2))
    for tower in towers:
        tower.load_state_dict(inner.state_dict())
        tower.zero_grad(set_to_none=True)
    budget = live() + 2 * native
    wrapped = [ib.wrap(each, memory_budget=budget, offload="never") for each in towers]
    loss = contrastive(torch.cat([each(x) for each in wrapped]))
    ballast = torch.empty(budget - live() - native // 20, dtype=torch.uint8)
    loss.backward()
    del ballast
    close([grads(tower) for tower in towers], wanted, tolerance=4e-12)
    reports = [each.last_report for each in wrapped]
    assert all(each.strategy_reason.startswith(KEPT) for each in reports)
    assert all(each.peak_bytes <= budget for each in reports) and reports[1].restarts > 0


def test_a_refused_backward_leaves_nothing_in_the_engine() -> None:
    """What was ready to run when it failed waits in torch's queue, until the model is called."""
    inner, x = made(lambda: Residual(8))
    native = peak_of(inner, lambda module: step(module, x, calls=2))
    budget = live() + 2 * native
    wrapped = ib.wrap(inner, memory_budget=budget, micro_batch_size=SIZE, offload="never")
    step(wrapped, x)
    inner.zero_grad(set_to_none=True)
    before = live()
    outputs = [wrapped(x) for _ in range(2)]
    waiting = live() - before
    loss = outputs[0].sum() + outputs[1].sum()
    ballast = torch.empty(budget - live(), dtype=torch.uint8)
    del outputs
    with pytest.raises(ib.BudgetExceeded):
        loss.backward()
    del loss, ballast
    assert live() - before > waiting / 4  # torch's own habit, without which this shows nothing
    with torch.no_grad():
        wrapped(x[:1])
    assert live() - before < waiting / 50
