"""Wrapped modules inside a budget: several calls, other batches, inputs that forward writes."""

import copy

import infinitybatch as ib
import pytest
import torch
from measure import assert_within
from support import Calls, mlp
from torch import nn
from torch.nn import functional as F
from wrap_budget_support import conv, live, needs, peak_of, wide
from wrap_support import X, close, contrastive, grads


def test_several_calls_share_it():
    torch.manual_seed(0)
    need = needs(wide, 8, calls=2)
    model, x = wide()
    y = torch.randn_like(x)
    native = copy.deepcopy(model)

    def step(net):
        a, b = net(x), net(y)
        F.cross_entropy(a @ b.T, torch.arange(len(a))).backward()

    step(native)
    budget = live() + 2 * need
    wrapped = ib.wrap(model, memory_budget=budget)
    for at in range(8):
        model.zero_grad(set_to_none=True)
        peak = peak_of(lambda: step(wrapped))
        assert peak <= budget
        close(grads(model), grads(native))
        if at >= 4:
            assert wrapped.last_report.restarts == 0


def test_without_gradients_only_the_forward_has_to_fit():
    model, x = conv()
    wanted = copy.deepcopy(model)(x).detach()
    before = live()
    budget = before + (3 << 17)  # less than the loss needs
    wrapped = ib.wrap(model, memory_budget=budget)
    with torch.no_grad():
        for _ in range(3):
            peak = peak_of(lambda: close(wrapped(x), wanted))
            assert wrapped.last_report.peak_bytes <= budget
    assert wrapped.last_report.strategy == "forward"
    assert len(wrapped.last_report.micro_batch_sizes) > 1
    assert peak > before
    with pytest.raises(ib.BudgetExceeded):
        contrastive(wrapped(x)).backward()
    model.eval()
    with torch.inference_mode():
        close(wrapped(x), wanted)


def test_inputs_twice_and_what_autograd_grad_gives():
    inner = mlp()
    wrapped = ib.wrap(inner, memory_budget="1GiB")
    for _ in range(2):
        x, same = (X.clone().requires_grad_() for _ in range(2))
        loss, wanted = contrastive(wrapped(x)), contrastive(inner(same))
        of = [x, *inner.parameters()]
        for keep in (True, False):
            found = torch.autograd.grad(loss, of, retain_graph=keep)
            close(
                found, torch.autograd.grad(wanted, [same, *inner.parameters()], retain_graph=keep)
            )


def test_an_output_that_is_changed_in_place():
    """As natively: the graph that is kept notices what it has saved."""
    inner = mlp()
    native = copy.deepcopy(inner)
    contrastive(native(X).mul_(2)).backward()
    wrapped = ib.wrap(inner, memory_budget="1GiB")
    for _ in range(3):
        inner.zero_grad(set_to_none=True)
        contrastive(wrapped(X).mul_(2)).backward()
        close(grads(inner), grads(native))


def test_one_batch_that_couples_its_samples():
    """BatchNorm is exact where the whole batch is one micro-batch."""
    inner = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5)).double()
    native = copy.deepcopy(inner)
    wrapped = ib.wrap(inner, memory_budget="1GiB")
    for _ in range(3):
        inner.zero_grad(set_to_none=True)
        native.zero_grad(set_to_none=True)
        contrastive(wrapped(X)).backward()
        contrastive(native(X)).backward()
        close(grads(inner), grads(native))
        close(dict(inner.named_buffers()), dict(native.named_buffers()))


def test_batches_of_other_sizes_and_copies():
    inner = mlp()
    wrapped = ib.wrap(inner, memory_budget=live() + (4 << 20))
    for module in (wrapped, copy.deepcopy(wrapped)):
        for n in (13, 7, 2, 1, 13):
            native = copy.deepcopy(inner)
            native.zero_grad(set_to_none=True)
            native(X[:n]).square().sum().backward()
            module.zero_grad(set_to_none=True)
            module(X[:n]).square().sum().backward()
            close([p.grad for p in module.parameters()], [p.grad for p in native.parameters()])


@pytest.mark.parametrize("n", [10, 32, 64])
def test_outputs_that_stand_once_in_training_and_evaluation_by_turns(n):
    """The sizes that are tried without gradients are of one length in later calls, too."""

    def forward(self, x):
        return self.body(x), self.scale.exp()

    model = Calls(forward, body=nn.Linear(6, 4), scale=nn.Parameter(torch.zeros(())))
    wrapped = ib.wrap(model, memory_budget="512MiB")
    for _ in range(6):
        x = torch.randn(n, 6)
        z, scale = wrapped(x)
        (z.sum() * scale).backward()
        with torch.no_grad():
            z, scale = wrapped(x)
        assert scale.dim() == 0
        assert_within({"z": z}, {"z": model.body(x)}, least=1e-6)  # float32


@pytest.mark.parametrize("rows", [1, 2, 8])
def test_inputs_that_forward_writes_are_not_tried_with(rows):
    """Sizes were tried on the caller's own rows, and the call then ran on what that had left."""
    model = Calls(lambda self, x: self.net(x.mul_(2)), net=mlp()).double()
    x = torch.randn(rows, 6, dtype=torch.float64)
    twin = copy.deepcopy(model)
    twin(x.clone()).square().mean().backward()
    wrapped = ib.wrap(model, memory_budget="64MiB")
    try:
        wrapped(x).square().mean().backward()
    except ib.Unsupported as error:
        assert "in place" in str(error)
        assert all(g is None for g in grads(model).values())
    else:
        close(grads(model), grads(twin))


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_a_batch_of_one_micro_batch_may_be_as_long_as_another_dimension(rows):
    """Nothing is joined, so nobody need know along which dimension the samples lie."""

    class Grid(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 25)

        def forward(self, x):
            return self.first(x).view(-1, 5, 5)[:, :rows, :1].transpose(0, 1)

    torch.manual_seed(0)
    model = Grid().double()
    x = torch.randn(rows, 4).double()
    model(x).square().sum().backward()
    wanted = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    wrapped = ib.wrap(model, memory_budget=ib.memory.stats("cpu").live + (1 << 24))
    for _ in range(2):
        model.zero_grad()
        wrapped(x).square().sum().backward()
        found = [parameter.grad for parameter in model.parameters()]
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("size", [None, 2])
def test_inputs_that_forward_writes_are_not_run_on_twice(size):
    """To be measured under a budget they would be: a typed error, or as natively."""
    torch.manual_seed(0)
    model = Calls(
        lambda self, x, z: self.last(self.first(x) + z.mul_(1.5)),
        first=nn.Linear(4, 3),
        last=nn.Linear(3, 2),
    ).double()
    x, z = torch.randn(8, 4).double(), torch.randn(8, 3).double()
    wanted = model(x, z.clone())
    budget = ib.memory.stats("cpu").live + (1 << 24)
    wrapped = ib.wrap(model, memory_budget=budget, micro_batch_size=size)
    for _ in range(2):
        given = z.clone()
        try:
            found = wrapped(x, given)
        except ib.Unsupported as error:
            assert "in place" in str(error)
            assert size is None
        else:
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
            torch.testing.assert_close(given, 1.5 * z, rtol=0, atol=0)
