"""Losses of all outputs that change them in place, which they natively may."""

import copy
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
from support import Calls, mlp
from torch import nn
from wrap_support import close, contrastive, grads, opaque

X = torch.randn(11, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def scaled(outputs: Any, _: Any = None) -> torch.Tensor:
    """Reads what it writes, before and after."""
    z, other = outputs
    before = z.sum() - other.sum()
    z.mul_(2).sin_()
    other += z
    return contrastive(z) + 0.1 * before + contrastive(other)


def through_views(outputs: Any, _: Any = None) -> torch.Tensor:
    z, other = outputs
    z[:, 0] = 0
    z[1:3].mul_(other[1:3])
    return contrastive(z + other)


def without_grad(outputs: Any, _: Any = None) -> torch.Tensor:
    z, other = outputs
    with torch.no_grad():
        z.clamp_(-0.3, 0.3)
        torch._foreach_mul_([other], 0.5)
    return contrastive(z) + other.pow(2).sum()


LOSSES = {f.__name__: f for f in (scaled, through_views, without_grad)}


def two(net: nn.Module) -> nn.Module:
    return Calls(
        lambda self, x: (self.net(x), self.other(x) + self.bias),
        net=net,
        other=nn.Linear(6, 5),
        bias=nn.Parameter(torch.zeros(5)),
    ).double()


def normed() -> nn.Module:
    return nn.Sequential(mlp(), nn.BatchNorm1d(5), nn.Linear(5, 5))


BODIES: dict[str, Callable[[], nn.Module]] = {"mlp": mlp, "opaque": opaque, "normed": normed}
WAYS: dict[str, dict[str, Any]] = {
    "replayed": {"micro_batch_size": 4},
    "some kept": {"micro_batch_size": 4, "retained_micro_batches": 1},
    "all kept": {"micro_batch_size": 4, "retained_micro_batches": 99},
    "at once": {"micro_batch_size": 11},
    "at once, kept": {"micro_batch_size": 11, "retained_micro_batches": 99},
    "budget": {"memory_budget": "64MiB"},
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_and_kept_outputs_are_what_native_leaves(loss, body, way):
    model = two(BODIES[body]())
    native = copy.deepcopy(model)
    wanted = native(X)
    value = LOSSES[loss](wanted)
    value.backward()
    step = ib.VirtualBatch(model, ib.losses.coupled(LOSSES[loss]), keep_outputs=True, **WAYS[way])
    report = step.backward(X)
    close(grads(model), grads(native))
    close(report.outputs, wanted)
    torch.testing.assert_close(report.loss, value.detach(), rtol=1e-12, atol=0)
    assert report.restarts == 0
    all_kept = WAYS[way].get("retained_micro_batches") == 99
    assert (report.strategy == "rerun") == (body == "opaque" and not all_kept)


def test_segments_are_as_exact():
    model = two(mlp())
    native = copy.deepcopy(model)
    scaled(native(X)).backward()
    options = {"micro_batch_size": 4, "checkpoint_segments": 3}
    ib.VirtualBatch(model, ib.losses.coupled(scaled), **options).backward(X)
    close(grads(model), grads(native))


def test_the_loss_is_given_tensors_like_those_of_a_model():
    """No leaves; hooks and `retain_grad` do what they do natively."""
    seen: dict[str, Any] = {}

    def loss(z: torch.Tensor, _: Any = None) -> torch.Tensor:
        assert not z.is_leaf and z.requires_grad
        seen["z"] = z
        z.retain_grad()
        z.register_hook(lambda g: seen.setdefault("hooked", g) * 2)
        return contrastive(z)

    model = mlp()
    native = copy.deepcopy(model)
    loss(native(X)).backward()
    wanted = (seen["z"].grad, seen["hooked"])
    seen.clear()
    ib.VirtualBatch(model, ib.losses.coupled(loss), micro_batch_size=4).backward(X)
    close((seen["z"].grad, seen["hooked"]), wanted)
    close(grads(model), grads(native))


def test_a_replay_is_still_compared_with_what_the_model_gave():
    """A parameter that changes behind the tape's back makes the outputs of a replay others."""
    model = two(mlp())

    def loss(outputs: Any, _: Any = None) -> torch.Tensor:
        value = scaled(outputs)
        model.bias.detach().numpy()[0] += 1  # no version tells of it
        return value

    with pytest.raises(ib.Unsupported, match="other outputs when it ran again"):
        ib.VirtualBatch(model, ib.losses.coupled(loss), micro_batch_size=4).backward(X)
    assert all(p.grad is None for p in model.parameters())


def test_the_copy_counts_against_the_budget():
    """What the loss changes in place is kept for comparison."""
    model = nn.Linear(6, 4096)
    native, x = copy.deepcopy(model), torch.randn(256, 6)
    outputs = 256 * 4096 * 4

    def loss(z: torch.Tensor, _: Any = None) -> torch.Tensor:
        with torch.no_grad():
            z.mul_(2)
        return (z.sum(1) * torch.arange(256.0)).std()

    loss(native(x)).backward()
    budget = int(5.5 * outputs)
    step = ib.VirtualBatch(model, ib.losses.coupled(loss), memory_budget=budget)
    assert step.backward(x).peak_bytes <= budget
    close(grads(model), grads(native), 1e-5)
    budget = int(1.6 * outputs)
    step = ib.VirtualBatch(model, ib.losses.coupled(loss), memory_budget=budget)
    with pytest.raises(ib.BudgetExceeded):
        step.backward(x)


VIEWS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a part": lambda h: (h, h[:, :2]),
    "crossing": lambda h: (h[:, :3], h[:, 2:]),
    "alias": lambda h: (h, h.view_as(h)),
}


def writes_first(outputs: Any, _: Any = None) -> torch.Tensor:
    first, second = outputs
    first.mul_(2)
    return contrastive(first) + second.pow(2).sum()


def reads_both(outputs: Any, _: Any = None) -> torch.Tensor:
    first, second = outputs
    return contrastive(first) + second.pow(2).sum()


def returns(view: Callable[[torch.Tensor], Any]) -> nn.Module:
    return Calls(lambda self, x: view(self.net(x)), net=mlp()).double()


def as_native(model: nn.Module, loss: Callable[..., torch.Tensor], **options: Any) -> None:
    native = copy.deepcopy(model)
    wanted = native(X)
    value = loss(wanted)
    value.backward()
    step = ib.VirtualBatch(model, ib.losses.coupled(loss), keep_outputs=True, **options)
    report = step.backward(X)
    close(grads(model), grads(native))
    close(report.outputs, wanted)
    close(report.loss, value)


@pytest.mark.parametrize("loss", [writes_first, reads_both])
@pytest.mark.parametrize("way", [*WAYS, "static", "offloaded"])
def test_an_output_that_is_returned_twice(way, loss):
    offloaded = {"micro_batch_size": 4, "offload": ib.Offload("always", host_budget="16MiB")}
    more = {"static": {"micro_batch_size": 4, "static_graph": True}, "offloaded": offloaded}
    as_native(returns(lambda h: (h, h)), loss, **{**WAYS, **more}[way])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("view", VIEWS)
def test_outputs_that_share_memory_are_read_and_not_written(view, way):
    model = returns(VIEWS[view])
    as_native(model, reads_both, **WAYS[way])
    with pytest.raises(ib.Unsupported, match=r"clone\(\)"):
        ib.VirtualBatch(model, ib.losses.coupled(writes_first), **WAYS[way]).backward(X)


@pytest.mark.parametrize("way", WAYS)
def test_parts_of_one_tensor_that_do_not_meet_may_be_written(way):
    as_native(returns(lambda h: (h[:, :3], h[:, 3:])), writes_first, **WAYS[way])
    as_native(returns(lambda h: (h[:, ::2], h[:, 1::2])), writes_first, **WAYS[way])


def test_a_copy_that_single_rows_do_not_need():
    """`contiguous` gives one row of a transposed tensor itself."""
    model = returns(lambda h: (h, h[:, :, None].expand(-1, -1, 2).transpose(0, 1).contiguous()))
    as_native(model, lambda o, _=None: contrastive(o[0].mul_(2)) + o[1].sum(), micro_batch_size=4)
