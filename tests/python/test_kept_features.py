"""Losses that read features which forward has kept, in an attribute or by a hook, where the batch is one
micro-batch: native's, with BatchNorm too, whose statistics the step puts back and commits."""

from typing import Any

import infinitybatch as ib
import pytest
import torch
from torch import nn
from wrap_support import X, Y, close, contrastive, grads


class Keeps(nn.Module):
    def __init__(self, norm: bool, how: str) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first = nn.Linear(6, 5).double()
        self.norm = (nn.BatchNorm1d(5) if norm else nn.Tanh()).double()
        self.last = nn.Linear(5, 5).double()
        self.how = how
        self.features: Any = None
        self.kept: list[torch.Tensor] = []
        if how == "hook":
            kept = self.kept  # of no module's
            self.norm.register_forward_hook(lambda _, __, output: kept.append(output))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.first(x))
        if self.how == "attribute":
            self.features = h
        return self.last(h)

    def loss(self, outputs: torch.Tensor) -> torch.Tensor:
        h = self.features if self.how == "attribute" else self.kept[-1]
        self.kept.clear()
        assert len(h) == len(X)
        return nn.functional.cross_entropy(outputs, Y) + contrastive(h)


def native_of(norm: bool, how: str, steps: int) -> nn.Module:
    native = Keeps(norm, how)
    for _ in range(steps):
        native.zero_grad()
        native.loss(native(X)).backward()
    return native


OPTIONS: list[dict[str, Any]] = [
    {"memory_budget": "64MiB"},
    {"micro_batch_size": 13},
    {"micro_batch_size": 40, "retained_micro_batches": 1},
    {"micro_batch_size": 13, "use_tapes": False},
]


@pytest.mark.parametrize("how", ["attribute", "hook"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
def test_a_coupled_loss_reads_them(options, norm, how):
    model = Keeps(norm, how)
    loss = ib.losses.coupled(lambda outputs, _: model.loss(outputs))
    batch = ib.VirtualBatch(model, loss, **options)
    for steps in (1, 2, 3):
        model.zero_grad()
        batch.backward(X, Y)
        native = native_of(norm, how, steps)
        close(grads(model), grads(native), 1e-11)
        close(dict(model.named_buffers()), dict(native.named_buffers()))


@pytest.mark.parametrize("how", ["attribute", "hook"])
@pytest.mark.parametrize("options", OPTIONS)
def test_behind_wrap_from_the_first_step_on(options, how):
    model = Keeps(False, how)
    wrapped = ib.wrap(model, **options)
    for _ in range(4):
        model.zero_grad()
        model.loss(wrapped(X)).backward()
        close(grads(model), grads(native_of(False, how, 1)), 1e-11)


@pytest.mark.parametrize("how", ["attribute", "hook"])
def test_behind_wrap_with_batch_norm_the_message_is_obeyed(how):
    model = Keeps(True, how)
    for _ in range(2):  # in any step
        with pytest.raises(ib.Unsupported, match="micro_batch_size as large as the batch"):
            model.loss(ib.wrap(model, memory_budget="64MiB")(X)).backward()
    model = Keeps(True, how)
    wrapped = ib.wrap(model, micro_batch_size=len(X))
    for steps in (1, 2):
        model.zero_grad()
        model.loss(wrapped(X)).backward()
        close(grads(model), grads(native_of(True, how, steps)))


class Reads(Keeps):
    """Forward reads the statistics that its BatchNorm has just moved, past any version."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.first(x))
        self.features = h * self.norm.running_var
        return self.last(h)


@pytest.mark.parametrize("options", OPTIONS)
def test_a_graph_that_keeps_moved_statistics_finds_them(options):
    model, native = Reads(True, "attribute"), Reads(True, "attribute")
    batch = ib.VirtualBatch(model, ib.losses.coupled(lambda o, _: model.loss(o)), **options)
    for _ in range(3):
        for each in (model, native):
            each.zero_grad()
        batch.backward(X, Y)
        native.loss(native(X)).backward()
        close(grads(model), grads(native), 1e-11)
        close(dict(model.named_buffers()), dict(native.named_buffers()))
