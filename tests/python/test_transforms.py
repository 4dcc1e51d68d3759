"""Transforms of torch.func and forward-mode AD around a step: nothing is lost without a word."""

import infinitybatch as ib
import pytest
import torch
from measure import assert_within
from support import mlp
from torch import nn
from torch.autograd import forward_ad

X = torch.randn(12, 6, dtype=torch.float64)


def make(width=6):
    return nn.Linear(width, 4).double()


TRANSFORMS = {
    "jvp": (lambda f: torch.func.jvp(f, (X,), (torch.ones_like(X),)), r"torch.func.jvp"),
    "jacfwd": (lambda f: torch.func.jacfwd(f)(X), "torch.func"),
    "vmap": (lambda f: torch.func.vmap(f)(X.reshape(2, 6, 6)), "torch.func.vmap"),
    "grad": (
        lambda f: torch.func.grad(lambda x: f(x).sum())(X),
        r"grad, vjp, jacrev.*torch.autograd.grad",
    ),
    "vjp": (lambda f: torch.func.vjp(f, X), "grad, vjp, jacrev"),
}


@pytest.mark.parametrize("size", [3, 99])
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_wrap(transform, size):
    run, message = TRANSFORMS[transform]
    module = make()
    with pytest.raises(ib.Unsupported, match=message):
        run(ib.wrap(module, micro_batch_size=size))
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize("transform", ["jvp", "vmap"])
def test_virtual_batch(transform):
    run, _ = TRANSFORMS[transform]
    step = ib.VirtualBatch(make(), nn.MSELoss(), micro_batch_size=3)
    with pytest.raises(ib.Unsupported, match="torch.func|tangent"):
        run(lambda x: step.backward(x, torch.zeros(len(x), 4).double()).loss)


def test_tangents_of_inputs():
    module = make()
    step = ib.VirtualBatch(module, nn.MSELoss(), micro_batch_size=3)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(X, torch.ones_like(X))
        with pytest.raises(ib.Unsupported, match="inputs.* carries a tangent"):
            ib.wrap(module, micro_batch_size=3)(dual)
        with pytest.raises(ib.Unsupported, match="inputs carries a tangent"):
            step.backward(dual, torch.zeros(12, 4).double())
        with pytest.raises(ib.Unsupported, match="targets carries a tangent"):
            step.backward(X, forward_ad.make_dual(torch.zeros(12, 4).double(), X[:, :4]))
        step.backward(X, torch.zeros(12, 4).double())


@pytest.mark.parametrize("way", ["wrap", "VirtualBatch"])
def test_tangents_of_parameters(way):
    model = mlp()
    step = ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=3)
    module = ib.wrap(model, micro_batch_size=3)
    weight = model[0].weight
    x = torch.randn(12, weight.shape[1], dtype=weight.dtype)
    with forward_ad.dual_level():
        del model[0]._parameters["weight"]
        dual = forward_ad.make_dual(weight.detach(), torch.ones_like(weight))
        model[0]._parameters["weight"] = dual
        with pytest.raises(ib.Unsupported, match="parameter '0.weight' carries a tangent"):
            module(x) if way == "wrap" else step.backward(x, torch.zeros_like(model(x)))


@pytest.mark.parametrize("options", [dict(micro_batch_size=3), dict(memory_budget="64MiB")])
def test_many_gradients_at_once(options):
    module = make()
    wrapped = ib.wrap(module, **options)
    basis = torch.eye(4).double().repeat(3, 1)[None]
    with pytest.raises(ib.Unsupported, match="is_grads_batched"):
        torch.autograd.grad(wrapped(X), module.weight, basis, is_grads_batched=True)
    with pytest.raises(ib.Unsupported, match="vectorize"):
        torch.autograd.functional.jacobian(wrapped, X, vectorize=True)
    wanted = torch.autograd.functional.jacobian(module, X)
    found = torch.autograd.functional.jacobian(wrapped, X)
    assert_within({"jacobian": found}, {"jacobian": wanted})
