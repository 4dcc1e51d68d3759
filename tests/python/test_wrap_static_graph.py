"""`wrap(static_graph=True)`: user code leaves the loop once its tape is confirmed."""

import copy

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from batch_norm_models import images, make, single_layer
from measure import assert_within
from random_models import make as make_random
from support import Calls, Square, classification, mlp
from torch import nn
from wrap_support import close, contrastive, grads


def buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.double() for name, buffer in module.named_buffers()}


class Counted(nn.Module):
    """How many samples user code has run on."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.rows: list[int] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.rows.append(len(x))
        return self.net(x)


WAYS = {
    "size": {"micro_batch_size": 4},
    "size, offloaded": {"micro_batch_size": 4, "offload": "always"},
    "budget": {"memory_budget": "64MiB"},
    "budget and size": {"memory_budget": "64MiB", "micro_batch_size": 3},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["residual, 6 layers", "used twice", "no BatchNorm"])
def test_steps_follow_the_native_ones(name: str, way: str) -> None:
    inner = mlp() if name == "no BatchNorm" else make(name)
    same = copy.deepcopy(inner)
    wrapped = ib.wrap(inner, static_graph=True, **WAYS[way])
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (inner, same)]
    for _ in range(4):
        x = (classification if name == "no BatchNorm" else images)(11)[0]
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        for optimizer in optimizers:
            optimizer.zero_grad()
        found, wanted = wrapped(inputs[0]), same(inputs[1])
        close(found, wanted, 1e-9)
        contrastive(found).backward()
        contrastive(wanted).backward()
        close(grads(inner), grads(same), 1e-9)
        close(inputs[0].grad, inputs[1].grad, 1e-9)
        close(buffers(inner), buffers(same), 1e-9)
        assert wrapped.last_report.strategy == "cut"
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("way", ["size", "budget"])
def test_user_code_leaves_the_loop(way: str) -> None:
    inner = Counted(single_layer()).double()
    same = copy.deepcopy(inner)
    wrapped = ib.wrap(inner, static_graph=True, **WAYS[way])
    x = images(12)[0]
    for step in range(8):
        inner.zero_grad()
        same.zero_grad()
        inner.rows.clear()
        for module in (wrapped, same):
            contrastive(module(x)).backward()
        close(grads(inner), grads(same))
        assert step > 0 or inner.rows, "the first step records"
    assert inner.rows == []
    # Other kinds of calls record for themselves: what wants a gradient, and whether anything does.
    of_inputs = []
    for module in (wrapped, same):
        module.zero_grad()
        module.requires_grad_(False)
        inputs = x.clone().requires_grad_()
        contrastive(module(inputs)).backward()
        of_inputs.append(inputs.grad)
        module.requires_grad_(True)
        with torch.no_grad():
            assert not module(x).requires_grad
    close(*of_inputs)
    assert inner.rows and all(p.grad is None for p in inner.parameters())
    for training in (False, True):
        for module in (wrapped, same):
            module.train(training)
        for _ in range(3):
            close(wrapped(x), same(x))
    for module in (wrapped, same):
        contrastive(module(x)).backward()
    close(grads(inner), grads(same))


@pytest.mark.parametrize("first", ["frozen", "no_grad"])
def test_what_calls_without_gradients_leave_is_not_used_by_others(first: str) -> None:
    inner = single_layer().double()
    same = copy.deepcopy(inner)
    wrapped = ib.wrap(inner, micro_batch_size=4, static_graph=True)
    x = images(12)[0]
    for module in (wrapped, same):
        module.requires_grad_(first != "frozen")
        with torch.set_grad_enabled(first == "frozen"):
            for _ in range(2):
                assert not module(x).requires_grad
        module.requires_grad_(True)
        contrastive(module(x)).backward()
    close(grads(inner), grads(same))


def test_several_calls_before_one_backward_and_a_graph_that_is_kept() -> None:
    inner = make("residual, 6 layers")
    same = copy.deepcopy(inner)
    wrapped = ib.wrap(inner, micro_batch_size=4, static_graph=True)
    for _ in range(3):
        a, b = images(11)[0], images(9)[0]
        for module in (wrapped, same):
            module.zero_grad()
            u, v = module(a), module(b)
            for power in (2, 3):
                loss = (u.T @ u).sub(v.T @ v).pow(power).mean()
                loss.backward(retain_graph=power == 2)
        close(grads(inner), grads(same))
        close(buffers(inner), buffers(same))


def test_leaves_that_are_no_parameters_and_lasting_outputs() -> None:
    """Nobody asks forward for them again."""

    def forward(self, x):
        return {"z": self.net(x) * self.extra[0], "temperature": self.extra[0].exp()}

    found = []
    for wrap in (lambda m: ib.wrap(m, micro_batch_size=4, static_graph=True), lambda m: m):
        torch.manual_seed(0)
        model = Calls(forward, net=mlp())
        extra = torch.full((5,), 2.0, dtype=torch.float64, requires_grad=True)
        model.extra = (extra,)
        module = wrap(model)
        x = classification(11)[0]
        for _ in range(4):
            out = module(x)
            (contrastive(out["z"]) * out["temperature"].sum()).backward()
        found.append([extra.grad, *grads(model).values()])
    close(*found)


@pytest.mark.parametrize("name", ["three dropouts", "sequence first", "BatchNorm"])
def test_with_native_random_numbers(name: str) -> None:
    inner = make_random(name)
    same = copy.deepcopy(inner)
    wrapped = ib.wrap(inner, micro_batch_size=3, static_graph=True, match_native_rng=True)
    x = classification(11)[0]
    for step in range(4):
        ends = []
        for module in (wrapped, same):
            torch.manual_seed(step)
            contrastive(F.dropout(module(x), 0.2)).backward()
            ends.append(torch.get_rng_state())
        assert torch.equal(*ends)
        close(grads(inner), grads(same))


def test_dropout_draws_anew_in_every_call_and_keeps_its_masks_between_passes() -> None:
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.4)).double()
    wrapped = ib.wrap(model, micro_batch_size=4, static_graph=True)
    x, seen = torch.ones(12, 6, dtype=torch.float64), []
    for _ in range(6):
        model.zero_grad()
        out = wrapped(x)
        torch.rand(3)
        out.sum().backward()
        # Of a sum: how often each output was kept.
        kept = (out.detach() != 0).double().sum(0) / 0.6
        assert_within({"bias": model[0].bias.grad}, {"bias": kept})
        seen.append(out.detach())
    assert not any(torch.equal(a, b) for a, b in zip(seen, seen[1:], strict=False))
    parts = seen[-1].split(4)
    assert not torch.equal(parts[0] != 0, parts[1] != 0)


def test_what_has_changed_since_forward_is_noticed() -> None:
    model = single_layer().double()
    wrapped = ib.wrap(model, micro_batch_size=4, static_graph=True)
    x = images(12)[0]
    for _ in range(3):
        loss = contrastive(wrapped(x))
        with torch.no_grad():
            next(model.parameters()).mul_(1.1)
        with pytest.raises(ib.StateError, match="changed in place"):
            loss.backward()
    # Other parameters than those that were recorded.
    layer = next(child for child in model.modules() if hasattr(child, "weight"))
    layer.weight = nn.Parameter(layer.weight.detach() * 2)
    same = copy.deepcopy(model)
    for _ in range(3):
        for module in (wrapped, same):
            module.zero_grad()
            contrastive(module(x)).backward()
        close(grads(model), grads(same))


def test_another_program_is_refused() -> None:
    by_values = Calls(lambda self, x: self.net(x * float(x.abs().max())), net=mlp())
    for options in WAYS.values():
        x, state = classification(12)[0], torch.get_rng_state()
        with pytest.raises(ib.Unsupported, match="static_graph says .* value"):
            ib.wrap(by_values, static_graph=True, **options)(x)
        assert torch.equal(torch.get_rng_state(), state)
    opaque = Calls(lambda self, x: Square.apply(self.net(x)), net=mlp())
    for options in WAYS.values():
        with pytest.raises(ib.Unsupported, match="cannot be used again as a tape"):
            ib.wrap(opaque, static_graph=True, **options)(classification(12)[0])


def test_misuse() -> None:
    with pytest.raises(ib.InvalidArgument, match="per_micro_batch"):
        ib.wrap(mlp(), static_graph=True, batch_coupling="per_micro_batch")
