"""What stands once beside outputs with a row for each sample: a temperature of one element, lists as
long as a micro-batch."""

import copy
from typing import Any

import infinitybatch as ib
import pytest
import torch
from support import Calls, ours, result_of, worst_error
from torch import nn
from wrap_support import X, close, grads


def clip(shape: tuple[int, ...], log: bool = True) -> nn.Module:
    """Two towers, and what their products are multiplied by, as CLIP returns it."""
    torch.manual_seed(2)
    scale = nn.Parameter(torch.full(shape, 1.3, dtype=torch.float64))

    def forward(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        a, b = self.image(x), self.text(x)
        return (
            a / a.norm(dim=1, keepdim=True),
            b / b.norm(dim=1, keepdim=True),
            self.scale.exp() if log else self.scale,
        )

    model = Calls(forward, image=nn.Linear(6, 4).double(), text=nn.Linear(6, 4).double())
    model.scale = scale
    return model


def by_hand(a: torch.Tensor, b: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    assert scale.numel() == 1
    logits, own = scale * a @ b.T, torch.arange(len(a))
    return (
        nn.functional.cross_entropy(logits, own) + nn.functional.cross_entropy(logits.T, own)
    ) / 2


SHAPES = [(), (1,), (1, 1)]
OPTIONS: list[dict[str, Any]] = [
    {"micro_batch_size": 1},
    {"micro_batch_size": 4},
    {"memory_budget": "64MiB"},
]


@pytest.mark.parametrize("log", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_a_temperature_beside_outputs(shape, options, log):
    model = clip(shape, log)
    native = copy.deepcopy(model)
    loss = by_hand(*native(X))
    loss.backward()
    wanted = result_of(native, loss)
    for coupled in (
        ib.losses.coupled(lambda outputs, _: by_hand(*outputs)),
        ib.losses.info_nce(),
        ib.losses.coupled(lambda outputs, _: ib.losses.info_nce(*outputs)),
    ):
        assert worst_error(ours(model, coupled, X, None, **options), wanted) <= 1e-11
    wrapped = ib.wrap(model, **options)
    for _ in range(3):
        model.zero_grad()
        outputs = wrapped(X)
        assert outputs[2].shape == shape
        ib.losses.info_nce(*outputs).backward()
        close(grads(model), wanted.gradients, tolerance=1e-11)


def test_info_nce_takes_what_clip_returns():
    a, b, scale = clip(())(X)
    close(ib.losses.info_nce(a, b, scale), by_hand(a, b, scale))
    close(ib.losses.info_nce(a, b, float(scale)), by_hand(a, b, scale.detach()))
    for wrong in (a, torch.tensor(3), "100"):
        with pytest.raises(ib.InvalidArgument, match="takes .a, b, logit_scale."):
            ib.losses.info_nce(a, b, wrong)
    with pytest.raises(ib.InvalidArgument, match="logit_scale must be above 0"):
        ib.losses.info_nce(a, b, 0.0)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", [list, tuple])
def test_as_many_outputs_as_a_micro_batch_has_samples(kind, size):
    """Heads in a list, three of them, in micro-batches of three."""
    torch.manual_seed(3)
    heads = nn.ModuleList(nn.Linear(6, 5) for _ in range(3)).double()
    model = Calls(lambda self, x: kind(head(x) for head in self.heads), heads=heads)
    native = copy.deepcopy(model)

    def loss(outputs: Any) -> torch.Tensor:
        z = torch.stack(list(outputs))
        return (z @ z.mT).tanh().sum()

    loss(native(X)).backward()
    wrapped = ib.wrap(model, micro_batch_size=size)
    for _ in range(2):
        model.zero_grad()
        loss(wrapped(X)).backward()
        close(grads(model), grads(native))
    model.zero_grad()
    coupled = ib.losses.coupled(lambda outputs, _: loss(outputs))
    ib.VirtualBatch(model, coupled, micro_batch_size=size, keep_outputs=True).backward(X)
    close(grads(model), grads(native))
