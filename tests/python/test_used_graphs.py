"""Graphs that more than one micro-batch would use up, or spoil for each other."""

from typing import Any

import infinitybatch as ib
import pytest
import torch
from support import Calls
from torch import nn
from wrap_support import close, contrastive, grads

X = torch.randn(11, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("separable", [False, True])
@pytest.mark.parametrize("options", [{"micro_batch_size": 4}, {"memory_budget": "64MiB"}])
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_graph_from_before_the_step(wrapped: bool, options: Any, separable: bool) -> None:
    scale = torch.ones(8, requires_grad=True, dtype=torch.float64)
    model = Calls(lambda self, x: self.layer(x) * self.__dict__["scale"], layer=nn.Linear(6, 8))
    model.double().__dict__["scale"] = scale.exp()
    squares = ib.losses.separable(lambda outputs, _: outputs.square().sum(), None)
    if separable and options == {"memory_budget": "64MiB"}:
        return  # the whole batch goes backward once
    with pytest.raises(ib.Unsupported, match="computed before"):
        if wrapped:
            contrastive(ib.wrap(model, **options)(X)).backward()
        else:
            loss = squares if separable else ib.losses.coupled(contrastive)
            ib.VirtualBatch(model, loss, **options).backward(X)
    assert all(p.grad is None for p in model.parameters())


def written() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x[:, 0] = 3.0
        return self.layer(x)

    return Calls(forward, layer=nn.Linear(6, 8)).double()


@pytest.mark.parametrize("retained", [2, 9])
@pytest.mark.parametrize("more", [{}, {"offload": ib.Offload("always", host_budget="16MiB")}])
def test_inputs_that_are_written_under_kept_graphs(retained: int, more: Any) -> None:
    options = {"micro_batch_size": 4, "retained_micro_batches": retained, **more}
    batch = ib.VirtualBatch(written(), ib.losses.coupled(contrastive), **options)
    with pytest.raises(ib.Unsupported, match="changes its inputs in place"):
        batch.backward(X.clone())


@pytest.mark.parametrize("retained", [0, 1, 2, 9])
def test_a_wrapped_model_replays_them(retained: int) -> None:
    model = written()
    contrastive(model(X.clone())).backward()
    expected = grads(model)
    model.zero_grad()
    wrapped = ib.wrap(model, micro_batch_size=4, retained_micro_batches=retained)
    contrastive(wrapped(X.clone())).backward()
    close(grads(model), expected)


def test_without_tapes_the_reason_is_the_option() -> None:
    model = Calls(lambda self, x: (self.layer(x), self.layer.weight), layer=nn.Linear(6, 8))
    loss = ib.losses.coupled(lambda o: contrastive(o[0]) + o[1].norm())
    batch = ib.VirtualBatch(model, loss, micro_batch_size=4, use_tapes=False)
    with pytest.raises(ib.BatchError, match="use_tapes=false was given"):
        batch.backward(X.float())
