"""The gradient of the whole batch in ordinary loops: hooks, leaves, compiled models, optimizers that
are made anew."""

import warnings

import infinitybatch as ib
import pytest
import torch
from support import (
    Log,
    classification,
    mlp,
    native,
    ours,
)
from torch import nn
from torch.nn import functional as F


def test_gradients_are_added_to_those_that_are_there():
    model = mlp()
    inputs, targets = classification()
    once = native(model, nn.CrossEntropyLoss(), inputs, targets)
    kept = {}
    for name, parameter in model.named_parameters():
        parameter.grad = torch.ones_like(parameter)
        kept[name] = parameter.grad
    ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=3).backward(inputs, targets)
    for name, parameter in model.named_parameters():
        assert parameter.grad is kept[name]  # in place, as natively
        torch.testing.assert_close(parameter.grad, 1 + once.gradients[name], rtol=1e-13, atol=0)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = classification()
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=3)
    for _ in range(3):
        wanted = native(model, nn.CrossEntropyLoss(), inputs, targets)
        optimizer.zero_grad(set_to_none=set_to_none)
        batch.backward(inputs, targets)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                parameter.grad, wanted.gradients[name], rtol=1e-12, atol=1e-15
            )
        optimizer.step()


def test_hooks_see_the_full_gradient_once():
    model = mlp()
    inputs, targets = classification()
    wanted = native(model, nn.CrossEntropyLoss(), inputs, targets).gradients["0.weight"]
    seen = {"tensor": [], "after": []}
    weight = model[0].weight
    weight.register_hook(lambda gradient: seen["tensor"].append(gradient.clone()) or 2 * gradient)
    weight.register_post_accumulate_grad_hook(lambda p: seen["after"].append(p.grad.clone()))
    ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=3).backward(inputs, targets)
    (before,), (after,) = seen["tensor"], seen["after"]
    torch.testing.assert_close(before, wanted, rtol=1e-12, atol=1e-16)
    torch.testing.assert_close(after, 2 * wanted, rtol=1e-12, atol=1e-16)
    torch.testing.assert_close(weight.grad, 2 * wanted, rtol=1e-12, atol=1e-16)


def test_module_hooks_run_for_each_micro_batch():
    model = mlp()
    inputs, targets = classification(12)
    calls = Log()
    model[0].register_forward_hook(lambda *_: calls.append("forward"))
    model[0].register_full_backward_hook(lambda *_: calls.append("backward"))
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=3)
    for _ in range(3):  # the first two look at rows
        calls.clear()
        batch.backward(inputs, targets)
    assert calls == ["forward", "backward"] * 4


def test_leaves_that_the_module_does_not_list():
    hidden = torch.randn(8, 5, dtype=torch.float64, requires_grad=True)
    net = nn.Linear(6, 8).double()

    def forward(x):
        return net(x) @ hidden

    inputs, targets = classification()
    F.cross_entropy(forward(inputs), targets).backward()
    wanted, hidden.grad = hidden.grad, None
    net.zero_grad()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return forward(x)

    ib.VirtualBatch(Model(), nn.CrossEntropyLoss(), micro_batch_size=3).backward(inputs, targets)
    torch.testing.assert_close(hidden.grad, wanted, rtol=1e-12, atol=1e-16)


def test_inputs_that_require_grad():
    model = mlp()
    inputs, targets = classification()
    inputs.requires_grad_()
    F.cross_entropy(model(inputs), targets).backward()
    wanted, inputs.grad = inputs.grad, None
    ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=3).backward(inputs, targets)
    torch.testing.assert_close(inputs.grad, wanted, rtol=1e-12, atol=1e-16)


def test_a_model_of_any_callable():
    weight = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    inputs, targets = classification()
    F.cross_entropy(inputs @ weight, targets).backward()
    wanted, weight.grad = weight.grad, None
    model = ib.make_model(lambda x: x @ weight, [weight])
    ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4).backward(inputs, targets)
    torch.testing.assert_close(weight.grad, wanted, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("method", ["script", "trace"])
def test_torchscript(method):
    model = mlp()
    inputs, targets = classification()
    wanted = native(model, nn.CrossEntropyLoss(), inputs, targets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = (
            torch.jit.script(model) if method == "script" else torch.jit.trace(model, inputs[:2])
        )
    batch = ib.VirtualBatch(scripted, nn.CrossEntropyLoss(), micro_batch_size=3)
    for _ in range(3):  # the profiling executor changes the graph in its first runs
        scripted.zero_grad()
        batch.backward(inputs, targets)
        for name, parameter in scripted.named_parameters():
            torch.testing.assert_close(
                parameter.grad, wanted.gradients[name], rtol=1e-12, atol=1e-15
            )


def test_compiled_model():
    model = mlp()
    inputs, targets = classification(12)
    wanted = native(model, nn.CrossEntropyLoss(), inputs, targets)
    compiled = torch.compile(model, backend="aot_eager")
    ib.VirtualBatch(compiled, nn.CrossEntropyLoss(), micro_batch_size=4).backward(inputs, targets)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted.gradients[name], rtol=1e-12, atol=1e-15)


def test_the_optimizer_and_parameters_may_be_rebuilt_between_steps():
    model = mlp()
    inputs, targets = classification()
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=3)
    batch.backward(inputs, targets)
    model[2] = nn.Linear(8, 5).double()
    model[0].weight = nn.Parameter(torch.randn(8, 6, dtype=torch.float64))
    model.zero_grad()
    wanted = native(model, nn.CrossEntropyLoss(), inputs, targets)
    batch.backward(inputs, targets)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted.gradients[name], rtol=1e-12, atol=1e-15)


def test_same_seed_and_same_plan_give_the_same_bits():
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 5))
    inputs, targets = classification(24)
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(
            ours(model, nn.CrossEntropyLoss(), inputs.float(), targets, micro_batch_size=5)
        )
    assert all(
        torch.equal(found[0].gradients[n], found[1].gradients[n]) for n in found[0].gradients
    )
    assert torch.equal(found[0].loss, found[1].loss)
