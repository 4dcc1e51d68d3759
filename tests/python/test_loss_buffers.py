"""Coupled losses that change buffers of the model: a teacher's centre, a queue of keys."""

import copy
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
from support import Calls
from torch import nn
from wrap_support import close, contrastive, grads

X = torch.randn(11, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
Loss = Callable[[torch.Tensor], torch.Tensor]


def plain(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.net(x)


def reads(self: Any, x: torch.Tensor) -> torch.Tensor:
    return (self.net(x) - self.centre).tanh()


def writes(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.centre.add_(1)
    return self.net(x)


def model(forward: Callable[..., torch.Tensor]) -> nn.Module:
    made = Calls(forward, net=nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)))
    made.register_buffer("centre", torch.zeros(5))
    made.register_buffer("untouched", torch.ones(2))
    return made.double()


def in_place(owner: Any) -> Loss:
    def loss(outputs: torch.Tensor) -> torch.Tensor:
        owner.centre.mul_(0.9).add_(0.1 * outputs.detach().mean(0))
        return contrastive(outputs - owner.centre)

    return loss


def rebound(owner: Any) -> Loss:
    def loss(outputs: torch.Tensor) -> torch.Tensor:
        owner.centre = owner.centre * 0.9 + 0.1 * outputs.detach().mean(0)
        return contrastive(outputs - owner.centre)

    return loss


def through_data(owner: Any) -> Loss:
    def loss(outputs: torch.Tensor) -> torch.Tensor:
        owner.centre.data.add_(outputs.detach().mean(0))
        return contrastive(outputs - owner.centre)

    return loss


LOSSES = {f.__name__: f for f in (in_place, rebound, through_data)}
WAYS: dict[str, dict[str, Any]] = {
    "replayed": {"micro_batch_size": 4},
    "whole": {"micro_batch_size": 11},
    "some kept": {"micro_batch_size": 4, "retained_micro_batches": 1},
    "all kept": {"micro_batch_size": 4, "retained_micro_batches": 9},
    "offloaded": {
        "micro_batch_size": 4,
        "retained_micro_batches": 2,
        "offload": ib.Offload("always", host_budget="16MiB"),
    },
    "run again": {"micro_batch_size": 4, "use_tapes": False},
    "static": {"micro_batch_size": 4, "static_graph": True},
    "checkpoints": {"micro_batch_size": 4, "checkpoint_segments": 2},
    "planned": {"memory_budget": "64MiB"},
    "batch by batch": {"micro_batch_size": 11, "batch_coupling": "per_micro_batch"},
}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("forward", [plain, reads, writes])
@pytest.mark.parametrize("name", LOSSES)
def test_what_the_loss_writes_is_kept_once(
    name: str, forward: Callable[..., torch.Tensor], options: dict[str, Any]
) -> None:
    native = model(forward)
    ours = copy.deepcopy(native)
    native_loss, loss = LOSSES[name](native), LOSSES[name](ours)
    batch = ib.VirtualBatch(ours, ib.losses.coupled(loss), **options)
    for step in range(3):
        native.zero_grad()
        ours.zero_grad()
        value = native_loss(native(X + step))
        value.backward()
        close(batch.backward(X + step).loss, value)
        close(grads(ours), grads(native))
        assert torch.allclose(ours.centre, native.centre, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("options", [WAYS["replayed"], WAYS["static"], WAYS["planned"]])
def test_a_step_that_fails_undoes_it(options: dict[str, Any]) -> None:
    ours = model(reads)
    writing = in_place(ours)
    centre = ours.centre

    def loss(outputs: torch.Tensor) -> torch.Tensor:
        writing(outputs)
        raise ValueError("the loss fails")

    with pytest.raises(ValueError, match="the loss fails"):
        ib.VirtualBatch(ours, ib.losses.coupled(loss), **options).backward(X)
    assert ours.centre is centre
    assert torch.equal(centre, torch.zeros_like(centre))


def test_a_separable_loss_that_counts_counts_once() -> None:
    ours = model(plain)

    def total(outputs: torch.Tensor, _: Any) -> torch.Tensor:
        ours.centre.add_(1)
        return outputs.square().sum()

    ib.VirtualBatch(ours, ib.losses.separable(total, None), micro_batch_size=4).backward(X)
    assert torch.equal(ours.centre, torch.ones_like(ours.centre))


def test_verify_sees_the_same_buffers() -> None:
    ours = model(reads)
    assert ib.verify(ours, ib.losses.coupled(in_place(ours)), X, micro_batch_size=4).exact
