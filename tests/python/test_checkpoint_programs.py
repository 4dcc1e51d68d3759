"""Cuts for memory where forward is another program from step to step, and from sample to sample."""

from __future__ import annotations

import copy
import random

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from fault_support import LONG
from measure import gradients
from support import gradient_error
from torch import nn

TOLERANCE = 1e-12
WIDTH = 6
LAYERS = 8
TOKENS = 40  # what a layer keeps is more than its weights


class Doubled(torch.autograd.Function):
    """No tape can hold it."""

    @staticmethod
    def forward(context, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(context, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class Interrupted(Exception):
    """Of user code, in the middle of forward."""


def in_place_on_a_part(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    y = x * 1.5
    y[..., ::2].mul_(layer.bias[::2])
    return y


def beside_a_graph(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    with torch.no_grad():
        scale = x.abs().amax(-1, keepdim=True) * 0 + 1.25
    return x * scale


def by_views_of_a_weight(x: torch.Tensor, layer: nn.Linear) -> torch.Tensor:
    first, second = layer.weight.t().chunk(2, 1)
    return x + torch.cat([x @ first, x @ second.contiguous()], -1)


DETOURS = [
    lambda x, layer: x * 1.5,
    lambda x, layer: x.relu() + x.sin(),
    lambda x, layer: F.layer_norm(x, (WIDTH,)),
    lambda x, layer: x.mT.contiguous().mT,
    lambda x, layer: x.clone().mul_(2),
    lambda x, layer: layer(x),
    lambda x, layer: (x * 0.5).sigmoid_(),
    lambda x, layer: torch.cat(x.split([2, 4], -1)[::-1], -1),
    lambda x, layer: x + layer.bias,
    lambda x, layer: x.detach() + x,
    in_place_on_a_part,
    beside_a_graph,
    by_views_of_a_weight,
]


class Wandering(nn.Module):
    """Its program follows flags, and with `by_sample` what the first row holds."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 1) for _ in range(2)])
        self.begin_step(code=0)

    def begin_step(
        self, *, code: int, depth: int = LAYERS, by_sample: bool = False, skips: bool = False
    ) -> None:
        self.code, self.depth, self.by_sample, self.skips = code, depth, by_sample, skips
        self.hook_at = self.opaque_at = self.interrupted_at = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.by_sample and len(x) > 1:
            return torch.cat([self.forward(row) for row in x.split(1)])
        code = int(x[0, 0, 0].item()) if self.by_sample else self.code
        x = first = x[..., 1:] * 1.0
        for place, layer in enumerate(self.layers[: self.depth]):
            x = layer(x).tanh()
            if code >> place & 1:
                x = DETOURS[(code + place) % len(DETOURS)](x, layer)
            if place == self.hook_at:
                x.register_hook(lambda gradient: 3 * gradient)
            if place == self.opaque_at:
                x = Doubled.apply(x)
            if place == self.interrupted_at:
                raise Interrupted
        if self.skips:
            x = x + first
        return self.heads[code & 1](x).mean(1)


def contrast(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.softplus(-(outputs @ targets.T)).mean() + outputs.var()


def wanted_gradients(model: nn.Module, loss, inputs, targets) -> dict[str, torch.Tensor]:
    """Of all rows, each by its own way, with the whole batch's loss."""
    whole = copy.deepcopy(model)
    rows = [whole(inputs[i : i + 1]) for i in range(len(inputs))]
    for parameter in whole.parameters():
        parameter.grad = torch.zeros_like(parameter)
    loss(torch.cat(rows), targets).backward()
    return gradients(whole)


def check_step(model: nn.Module, batch, loss, inputs, targets, refused: bool) -> None:
    for parameter in model.parameters():
        parameter.grad = None
    if refused:
        before = [parameter.detach().clone() for parameter in model.parameters()]
        with pytest.raises((ib.Unsupported, Interrupted)):
            batch.backward(inputs, targets)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert all(map(torch.equal, before, model.parameters()))
    else:
        wanted = wanted_gradients(model, loss, inputs, targets)
        batch.backward(inputs, targets)
        for parameter in model.parameters():  # of a head that nobody used
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        assert gradient_error(model, wanted) <= TOLERANCE
    assert all(parameter.is_leaf for parameter in model.parameters())


@pytest.mark.parametrize("coupled", [False, True], ids=["separable", "coupled"])
@pytest.mark.parametrize("offload", ["never", "always"])
@pytest.mark.parametrize("seed", range(100 if LONG else 5))
def test_every_step_is_exact_whatever_ways_were_taken_before(
    seed: int, offload: str, coupled: bool
) -> None:
    torch.manual_seed(seed)
    chance = random.Random(f"{seed} {offload} {coupled}")
    model = Wandering().double()
    loss = contrast if coupled else F.mse_loss
    size = chance.choice([1, 1, 2, 3])
    batch = ib.VirtualBatch(
        model,
        ib.losses.coupled(contrast) if coupled else nn.MSELoss(),
        micro_batch_size=size,
        checkpoint_segments=chance.randint(2, 5),
        offload=offload,
    )
    codes = [chance.randrange(2**LAYERS) for _ in range(3)]
    # Two that differ behind the last cut only.
    codes.append(codes[0] ^ 2 ** (LAYERS - 1))
    codes.append(0)
    for _ in range(12):
        rows = chance.choice([3, 4, 6])
        inputs = torch.randn(rows, TOKENS, 1 + WIDTH, dtype=torch.float64)
        inputs[:, 0, 0] = torch.tensor([chance.choice(codes) for _ in range(rows)])
        targets = torch.randn(rows, 1, dtype=torch.float64)
        model.begin_step(
            code=chance.choice(codes),
            depth=chance.choice([LAYERS, LAYERS, LAYERS - 1, LAYERS - 3]),
            by_sample=size == 1 and chance.random() < 0.6,
            skips=chance.random() < 0.2,
        )
        trouble = chance.choice([None] * 6 + ["hook_at", "opaque_at", "interrupted_at"])
        if trouble is not None:
            setattr(model, trouble, chance.randrange(model.depth))
        check_step(model, batch, loss, inputs, targets, refused=trouble is not None)
    copy.deepcopy(model)


def test_what_user_code_keeps_has_the_history_that_it_has_natively() -> None:
    """Also what waits at the last cut, behind which graphs begin at leaves of their own."""
    torch.manual_seed(0)
    model = Wandering().double()
    inputs, targets = torch.randn(4, TOKENS, 1 + WIDTH).double(), torch.randn(4, 1).double()
    kept: list[torch.Tensor] = []
    for layer in model.layers:
        layer.register_forward_hook(lambda _module, given, made: kept.extend([*given, made]))

    def histories() -> list:
        nodes = [value.grad_fn for value in kept]
        kept.clear()
        return [
            (type(node).__name__, [type(before).__name__ for before, _ in node.next_functions])
            for node in nodes
            if node is not None
        ]

    batch = ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=4, checkpoint_segments=3)
    changed = 2 ** (LAYERS - 1)  # behind the last cut
    for code, interrupted_at in [(0, -1), (0, -1), (0, LAYERS - 1), (0, -1), (changed, -1)]:
        model.begin_step(code=code)
        model(inputs)
        wanted = histories()
        model.interrupted_at = interrupted_at
        if interrupted_at >= 0:
            with pytest.raises(Interrupted):
                batch.backward(inputs, targets)
        else:
            batch.backward(inputs, targets)
        found = histories()
        # Accumulators are the step's own.
        names = {name for node, before in wanted for name in [node, *before]}
        assert "TanhBackward0" in names
        assert [node for node, _ in found] == [node for node, _ in wanted][: len(found)]
        assert all(
            ours == natively or {"AccumulateGrad"} >= {*natively} - {*ours}
            for (_, ours), (_, natively) in zip(found, wanted, strict=False)
        )


class EarlyExit(nn.Module):
    """Each sample leaves where it says."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.one(sample) for sample in x.split(1)])

    def one(self, x: torch.Tensor) -> torch.Tensor:
        depth = int(x[0, 0, 0].item())
        for layer in self.layers[:depth]:
            x = layer(x).tanh()
        return self.head(x).mean(1)


@pytest.mark.parametrize("offload", ["never", "always"])
@pytest.mark.parametrize("seed", range(20 if LONG else 2))
def test_samples_of_other_depth_stay_inside_the_budget(seed: int, offload: str) -> None:
    torch.manual_seed(seed)
    chance = random.Random(seed)
    model = EarlyExit(60, 8).double()
    live = ib.memory.stats("cpu").live
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    activation = 512 * 8 * 8
    budget = live + parameters + 12 * activation + 2**14
    batch = ib.VirtualBatch(model, nn.MSELoss(), memory_budget=budget, offload=offload)
    depths = [60, 60, 55, 30, 57]
    for step in range(8):
        inputs = torch.randn(3, 512, 8, dtype=torch.float64)
        inputs[:, 0, 0] = torch.tensor([chance.choice(depths) for _ in range(3)])
        targets = torch.randn(3, 1, dtype=torch.float64)
        wanted = wanted_gradients(model, F.mse_loss, inputs, targets)
        for parameter in model.parameters():
            parameter.grad = None
        report = batch.backward(inputs, targets)
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        assert report.strategy == "checkpoint"
        assert report.peak_bytes <= budget
        assert step < 4 or report.restarts == 0
        assert gradient_error(model, wanted) <= TOLERANCE
        assert all(parameter.is_leaf for parameter in model.parameters())


def test_a_graph_that_leads_astray_is_let_go_of_at_once() -> None:
    """Its part behind the last cut was kept until the programs parted, near the end."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(24)]).double()
    seen: list[int] = []
    live = 0
    parts = False

    def end(_module: nn.Module, _given: object, made: torch.Tensor) -> torch.Tensor:
        if parts:
            made = made * 2
            seen.append(ib.memory.stats("cpu").live - live)
        return made

    model.register_forward_hook(end)
    inputs, targets = torch.randn(2, 1, 4096, 8, dtype=torch.float64)
    batch = ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=1, checkpoint_segments=2)
    for step in range(3):
        parts = step == 2
        model.zero_grad()
        live = ib.memory.stats("cpu").live
        batch.backward(inputs, targets)
    # Results that are still in use, not those of the layers behind the cut.
    assert seen[0] <= 5 * inputs.nbytes
