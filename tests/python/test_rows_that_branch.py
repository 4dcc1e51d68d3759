"""Python decides for each row in front of a layer that sees the whole batch: whether that layer has
a gradient is a matter of all rows, not of those of a micro-batch."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from batch_norm_support import contrastive
from same_rows_support import spread
from support import classification, live_bytes, native, result_of, worst_error
from torch import nn

N = 16
torch.manual_seed(2)
X, Y = classification(N)
X = X.double()

Branch = Callable[[Any, torch.Tensor], torch.Tensor]


def without_gradient(m: Any, row: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return m.other(row)


#: What becomes of a row whose sum is not positive; others go through a layer.
BRANCHES: dict[str, Branch] = {
    "as it is": lambda m, row: row,
    "without a gradient": without_gradient,
    "detached": lambda m, row: m.other(row).detach(),
    "a constant": lambda m, row: torch.full_like(row, 0.5),
    "another layer": lambda m, row: m.other(row),
    "frozen": lambda m, row: m.frozen(row),
}


def standardised(z: torch.Tensor) -> torch.Tensor:
    return (z - z.mean(0)) / (z.var(0) + 0.1).sqrt()


#: The layer of the whole batch behind it.
LAYERS: dict[str, Branch] = {
    "BatchNorm": lambda m, z: m.norm(z),
    "BatchNorm without parameters": lambda m, z: m.plain(z),
    "BatchNorm of frozen parameters": lambda m, z: m.still(z),
    "two of them": lambda m, z: m.plain(torch.tanh(m.norm(z))),
    "across_batch": lambda m, z: ib.across_batch(standardised, z),
    "across_batch of two": lambda m, z: ib.across_batch(
        lambda a, b: standardised(a) + standardised(b), z, z.detach() + m.scale * 0
    ),
    "batch_norm across_batch": lambda m, z: ib.across_batch(
        lambda t: F.batch_norm(t, None, None, training=True), z
    ),
    "a parameter across_batch": lambda m, z: ib.across_batch(lambda t: t * t.mean() * m.scale, z),
}


class Branches(nn.Module):
    def __init__(self, branch: str, layer: str) -> None:
        super().__init__()
        self.branch, self.layer = BRANCHES[branch], LAYERS[layer]
        self.first, self.other, self.frozen = (nn.Linear(6, 6) for _ in range(3))
        self.frozen.requires_grad_(False)
        self.norm, self.still = nn.BatchNorm1d(6), nn.BatchNorm1d(6).requires_grad_(False)
        self.plain = nn.BatchNorm1d(6, affine=False)
        self.scale = nn.Parameter(torch.ones(6))
        self.head = nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = [self.first(row) if row.sum() > 0 else self.branch(self, row) for row in x]
        return self.head(torch.tanh(self.layer(self, torch.stack(rows))))


def model_of(branch: str, layer: str) -> nn.Module:
    torch.manual_seed(0)
    return Branches(branch, layer).double()


def virtual(loss: Any) -> Callable[..., None]:
    return lambda model, x, **options: (
        ib.VirtualBatch(model, loss, **options).backward(x, Y) and None
    )


def wrapped(model: nn.Module, x: torch.Tensor, **options: Any) -> None:
    contrastive(ib.wrap(model, **options)(x), Y).backward()


WAYS: dict[str, tuple[Callable[..., None], Any]] = {
    "streaming": (virtual(nn.CrossEntropyLoss()), nn.CrossEntropyLoss()),
    "coupled": (virtual(ib.losses.coupled(contrastive)), contrastive),
    "wrap": (wrapped, contrastive),
}


def check(way: str, model: nn.Module, x: torch.Tensor = X, **options: Any) -> None:
    run, criterion = WAYS[way]
    wanted = native(model, criterion, x, Y)
    model = copy.deepcopy(model)
    run(model, x, **options)
    assert worst_error(result_of(model, wanted.loss), wanted) <= 1e-11
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, wanted.buffers[name], rtol=1e-12, atol=1e-14)


#: Each branch in front of each layer, and over them each way in micro-batches of each size.
PAIRS = list(itertools.product(BRANCHES, LAYERS))
SPLITS = list(itertools.product(WAYS, (1, 3, 8)))


@pytest.mark.parametrize("number", range(len(PAIRS)))
def test_branches_are_exact(number: int) -> None:
    branch, layer = PAIRS[number]
    way, size = SPLITS[number % 9]
    check(way, model_of(branch, layer), micro_batch_size=size)


#: A budget is so many bytes beside what is live.
OPTIONS: dict[str, dict[str, Any]] = {
    "a budget": {"memory_budget": 64 << 10},
    "a tight budget": {"memory_budget": 20 << 10},
    "recomputed": {"memory_budget": 20 << 10, "offload": "never"},
    "offloaded": {"micro_batch_size": 2, "offload": "always"},
    "kept graphs": {"micro_batch_size": 4, "retained_micro_batches": 2},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("branch", ["as it is", "without a gradient"])
def test_in_any_way(branch: str, way: str, options: str) -> None:
    given = dict(OPTIONS[options])
    if "memory_budget" in given:
        given["memory_budget"] += live_bytes()
    check(way, model_of(branch, "two of them"), **given)


def test_other_batches_of_one_model() -> None:
    """Steps in which other rows have a gradient, or none."""
    model = model_of("as it is", "BatchNorm without parameters")
    for step in range(3):
        x = X.roll(5 * step, 0) * (1 if step < 2 else -1)
        check("coupled", model, x, micro_batch_size=4)
    batch = ib.VirtualBatch(model, ib.losses.coupled(contrastive), micro_batch_size=2)
    call = ib.wrap(copy.deepcopy(model), micro_batch_size=2)
    for x in (X, X.flip(0), -X, X.abs(), X):
        wanted = native(model, contrastive, x, Y)
        model.zero_grad()
        batch.backward(x, Y)
        assert worst_error(result_of(model, wanted.loss), wanted) <= 1e-11
        call.zero_grad()
        contrastive(call(x), Y).backward()
        found = [p.grad for p in call.parameters()]
        kept = [p.grad for p in model.parameters()]
        for a, b in zip(found, kept, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_several_backwards_behind_wrap() -> None:
    model = model_of("detached", "two of them")
    wanted = native(model, contrastive, X, Y)
    call = ib.wrap(model, micro_batch_size=2)
    loss = contrastive(call(X), Y)
    loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    assert worst_error(result_of(model, wanted.loss), wanted) <= 1e-11


@pytest.mark.parametrize("way", ["coupled", "wrap"])
def test_inputs_that_require_grad(way: str) -> None:
    """Rows that go round the layer, and inputs whose gradient is wanted."""
    model = model_of("detached", "BatchNorm without parameters")
    native_model, x = copy.deepcopy(model), X.clone().requires_grad_()
    spread(native_model(x), Y).backward()
    mine = X.clone().requires_grad_()
    if way == "wrap":
        spread(ib.wrap(model, micro_batch_size=2)(mine), Y).backward()
    else:
        ib.VirtualBatch(model, ib.losses.coupled(spread), micro_batch_size=2).backward(mine, Y)
    torch.testing.assert_close(mine.grad, x.grad, rtol=1e-10, atol=1e-12)


class GradModes(nn.Module):
    """The layer itself runs without gradients for some micro-batches: natively it is asked once."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.norm, self.head = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.set_grad_enabled(bool(x[0, 0] > 0)):
            h = self.norm(self.net(x))
        return self.head(torch.tanh(h))


@pytest.mark.parametrize("way", WAYS)
def test_a_layer_that_has_gradients_for_some_is_refused(way: str) -> None:
    torch.manual_seed(0)
    x = X.clone()
    x[:, 0] = x[:, 0].abs() * (1 - 2 * (torch.arange(N) // 4 % 2)).double()
    with pytest.raises(ib.CouplingError, match="without gradients"):
        WAYS[way][0](GradModes().double(), x, micro_batch_size=4)
