"""How outputs follow the samples in micro-batches of one, in flattened outputs, and in one number."""

from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from support import Calls
from torch import nn
from wrap_support import close, grads

N = 6


def twins(forward: Callable[..., Any], **modules: Any) -> tuple[nn.Module, nn.Module]:
    import copy

    torch.manual_seed(0)
    model = Calls(forward, **modules).double()
    return model, copy.deepcopy(model)


SHAPES = {
    "segmentation": (
        lambda self, x: self.conv(x),
        {"conv": nn.Conv2d(2, 1, 3, padding=1)},
        (N, 2, 5, 5),
        (1, 1, 5, 5),
    ),
    "one channel": (
        lambda self, x: self.conv(x).mean(2, keepdim=True),
        {"conv": nn.Conv1d(2, 4, 3)},
        (N, 2, 5),
        (1, 4, 1),
    ),
    "samples second": (
        lambda self, x: self.net(x)[None, :, None, :],
        {"net": nn.Linear(3, 1)},
        (N, 3),
        (1, 1, 1, 1),
    ),
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("way", ["coupled", "wrap", "wrap, static graph"])
@pytest.mark.parametrize("name", SHAPES)
def test_dimensions_of_size_one(name: str, way: str, size: int) -> None:
    forward, modules, shape, of_one = SHAPES[name]
    model, twin = twins(forward, **modules)
    torch.manual_seed(1)
    x = torch.randn(shape).double()
    assert model(x[:1]).shape == of_one
    target = torch.rand_like(model(x))

    def loss(z: torch.Tensor) -> torch.Tensor:
        assert z.shape == target.shape
        return F.binary_cross_entropy_with_logits(z, target) + z.std()

    for _ in range(2):
        model.zero_grad(), twin.zero_grad()
        if way.startswith("wrap"):
            static = way.endswith("graph")
            wrapped = ib.wrap(model, micro_batch_size=size, static_graph=static)
            loss(wrapped(x)).backward()
        else:
            ib.VirtualBatch(model, ib.losses.coupled(loss), micro_batch_size=size).backward(x)
        loss(twin(x)).backward()
        close(grads(model), grads(twin))


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("once", [False, True])
def test_what_is_no_sample_s_but_has_a_row_for_each(once: bool, static: bool) -> None:
    """Two samples beside each other tell whether a constant has as many rows as there are."""
    model, twin = twins(
        lambda self, x: (self.net(x), torch.ones(1 if once else len(x), 4, 1, 1)),
        net=nn.Linear(3, 4),
    )
    x = torch.randn(N, 3).double()
    wrapped = ib.wrap(model, micro_batch_size=1, static_graph=static)
    for of in (wrapped, twin):
        z, weights = of(x)
        assert weights.shape == (1 if once else N, 4, 1, 1)
        (z.pow(2) * weights.flatten(1)).sum().backward()
    close(grads(model), grads(twin))


@pytest.mark.parametrize("retained", [0, 2])
@pytest.mark.parametrize("size", [1, 2, 4])
def test_flattened_outputs_are_joined_where_rows_stay_together(size: int, retained: int) -> None:
    model, twin = twins(
        lambda self, x: self.head(torch.tanh(self.words(x))).view(-1, 7),
        words=nn.Embedding(11, 8),
        head=nn.Linear(8, 7),
    )
    torch.manual_seed(1)
    x, y = torch.randint(11, (N, 5)), torch.randint(7, (N * 5,))
    wrapped = ib.wrap(model, micro_batch_size=size, retained_micro_batches=retained)
    for _ in range(2):
        model.zero_grad(), twin.zero_grad()
        F.cross_entropy(wrapped(x), y, ignore_index=3).backward()
        F.cross_entropy(twin(x), y, ignore_index=3).backward()
        close(grads(model), grads(twin))


@pytest.mark.parametrize("size", [1, 2, 4])
def test_flattened_outputs_with_time_first_come_in_native_order(size: int) -> None:
    model, twin = twins(
        lambda self, x: self.head(self.words(x).transpose(0, 1)).reshape(-1, 7),
        words=nn.Embedding(11, 8),
        head=nn.Linear(8, 7),
    )
    x = torch.randint(11, (N, 5))
    wrapped = ib.wrap(model, micro_batch_size=size)
    for _ in range(2):
        close(wrapped(x).detach(), twin(x).detach())


def test_flattened_outputs_whose_order_nobody_can_tell_are_refused() -> None:
    model, _ = twins(lambda self, x: (self.net(x) * 0).view(-1, 2), net=nn.Linear(3, 10))
    with pytest.raises(ib.BatchError, match="cannot be joined.*where time and batch are flattened"):
        ib.wrap(model, micro_batch_size=2)(torch.randn(N, 3).double())


CLAIMS = {
    "a sum of squares said to be a mean": (lambda z: z.pow(2).sum(), "mean"),
    "a mean said to be a sum": (lambda z: z.mean(), "sum"),
    "a root": (lambda z: z.pow(2).mean().sqrt(), "mean"),
    "a largest": (lambda z: z.max(), "mean"),
    "a mean over tokens": (lambda z: z.flatten()[torch.arange(z.numel()) % 3 > 0].mean(), "mean"),
}


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("claim", CLAIMS)
def test_a_wrong_claim_of_a_reduction_is_refused(claim: str, size: int) -> None:
    reduce, said = CLAIMS[claim]
    model, _ = twins(lambda self, x: reduce(self.net(x)), net=nn.Linear(3, 4))
    torch.manual_seed(1)
    x = torch.randn(N, 3).double()
    wrapped = ib.wrap(model, micro_batch_size=size, reduce=said)
    for _ in range(2):
        with pytest.raises(ib.BatchError, match=rf"is not a {said} over samples"):
            wrapped(x)


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("said", ["mean", "sum"])
def test_a_right_claim_is_exact(said: str, size: int) -> None:
    model, twin = twins(
        lambda self, x: getattr(F.dropout(self.net(x), 0.0).pow(2), said)(), net=nn.Linear(3, 4)
    )
    torch.manual_seed(1)
    x = torch.randn(N, 3).double()
    wrapped = ib.wrap(model, micro_batch_size=size, reduce=said)
    for _ in range(2):
        model.zero_grad(), twin.zero_grad()
        wrapped(x).backward()
        twin(x).backward()
        close(grads(model), grads(twin))


def test_similarities_of_one_sample_each_are_refused() -> None:
    model, _ = twins(lambda self, x: (h := self.net(x)) @ h.T, net=nn.Linear(3, 4))
    loss = ib.losses.coupled(lambda z: z.exp().sum(1).log().mean())
    with pytest.raises(ib.BatchError, match="several dimensions that follow the micro-batch"):
        ib.VirtualBatch(model, loss, micro_batch_size=1).backward(torch.randn(N, 3).double())


def test_a_random_reduction_is_no_broken_claim() -> None:
    model, _ = twins(lambda self, x: F.dropout(self.net(x), 0.5).mean(), net=nn.Linear(3, 4))
    ib.wrap(model, micro_batch_size=2, reduce="mean")(torch.randn(N, 3).double()).backward()


def test_meta_tensors_are_refused_by_name() -> None:
    model = nn.Linear(3, 4)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=2)
    with pytest.raises(ib.Unsupported, match="targets.* is on the meta device"):
        batch.backward(torch.randn(N, 3), torch.empty(N, dtype=torch.long, device="meta"))
    with pytest.raises(ib.Unsupported, match="inputs.* is on the meta device"):
        batch.backward(torch.empty(N, 3, device="meta"), torch.zeros(N, dtype=torch.long))
