"""Wrapped modules with ops that see the whole batch: failures, abandoned calls, what changes from
forward to backward, what is refused."""

import copy
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from support import Calls, Square, Tally, mlp
from test_across_batch import discriminator, minibatch_deviation
from torch import nn
from wrap_support import X, close, contrastive, grads
from wrap_whole_batch_support import across_beside_batch_norm, buffers, live, small


def test_nothing_stays_behind():
    torch.manual_seed(13)
    inner = across_beside_batch_norm()
    wrapped = ib.wrap(inner, micro_batch_size=4)
    contrastive(wrapped(X)).backward()
    inner.zero_grad(set_to_none=True)
    before = live()
    outputs = wrapped(X)
    assert live() > before
    del outputs  # never differentiated
    assert live() == before
    outputs = wrapped(X)
    contrastive(outputs).backward(retain_graph=True)
    contrastive(outputs).backward()
    inner.zero_grad(set_to_none=True)
    waiting = live()
    assert waiting - before <= outputs.nbytes + 64  # what a node held is gone with its backward
    del outputs
    assert live() == before


def test_an_abandoned_call_does_not_disturb_a_later_one():
    """Functions that across_batch was given are known by numbers, for the time of a recording."""
    torch.manual_seed(14)
    native = discriminator()
    held: dict[str, Any] = {}

    def forward(self, x):
        x = F.leaky_relu(self.first(x), 0.2)
        x = torch.cat([x, ib.across_batch(minibatch_deviation, x)], 1)
        held.pop("outputs", None)  # the node of the call before dies in the midst of this one
        return self.last(x)

    inner = Calls(forward, first=nn.Linear(6, 8), last=nn.Linear(9, 5)).double()
    inner.load_state_dict(native.state_dict())
    wrapped = ib.wrap(inner, micro_batch_size=4)
    for _ in range(3):
        outputs = wrapped(X)
        held["outputs"] = wrapped(X)
        contrastive(outputs).backward()
        del outputs
        contrastive(native(X)).backward()
        close(grads(inner), grads(native))


class Fault(Exception):
    pass


def test_a_forward_that_fails_half_way():
    torch.manual_seed(15)
    calls = Tally()

    def forward(self, x):
        x = F.dropout(self.last(self.norm(self.first(x))), 0.0, True)
        calls()
        if calls.count == 0:  # statistics are written by then
            raise Fault
        return x

    inner = Calls(
        forward, first=nn.Linear(6, 8), norm=nn.BatchNorm1d(8), last=nn.Linear(8, 5)
    ).double()
    native = copy.deepcopy(inner)
    wrapped = ib.wrap(inner, micro_batch_size=4)
    before = copy.deepcopy(inner.state_dict())
    # The watch's own micro-batch, the recordings, the check of the first one.
    for left in (1, 2, 3, 4, 6):
        state = torch.get_rng_state()
        calls.count = -left
        with pytest.raises(Fault):
            wrapped(X)
        assert torch.equal(torch.get_rng_state(), state)
        for name, value in inner.state_dict().items():
            assert torch.equal(value, before[name]), name
        assert all(p.grad is None for p in inner.parameters())
    for _ in range(2):
        contrastive(wrapped(X)).backward()
        contrastive(native(X)).backward()
        close(grads(inner), grads(native))
        close(buffers(inner), buffers(native))


def test_a_backward_that_fails_half_way():
    """By a function of across_batch's whose gradient fails: nothing arrives, the next step works."""
    torch.manual_seed(16)
    fault = {"raise": False}

    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if fault["raise"]:
                raise Fault
            return gradient

    def forward(self, x):
        h = self.norm(self.first(x))
        return self.last(h + ib.across_batch(lambda h: Failing.apply(h.mean(0)).expand_as(h), h))

    inner = Calls(
        forward, first=nn.Linear(6, 8), norm=nn.BatchNorm1d(8), last=nn.Linear(8, 5)
    ).double()
    native = copy.deepcopy(inner)
    wrapped = ib.wrap(inner, micro_batch_size=4)
    outputs = wrapped(X)
    fault["raise"] = True
    with pytest.raises(Fault):
        contrastive(outputs).backward(retain_graph=True)
    assert all(p.grad is None for p in inner.parameters())
    fault["raise"] = False
    contrastive(outputs).backward(retain_graph=True)  # the graph was to be kept
    contrastive(native(X)).backward()
    close(grads(inner), grads(native))
    fault["raise"] = True
    with pytest.raises(Fault):
        contrastive(outputs).backward()
    fault["raise"] = False
    with pytest.raises(ib.StateError, match="failed half way"):
        contrastive(outputs).backward()
    close(grads(inner), grads(native))
    close(buffers(inner), buffers(native))
    contrastive(wrapped(X)).backward()
    contrastive(native(X)).backward()
    close(grads(inner), grads(native))


def test_what_changes_between_forward_and_backward():
    torch.manual_seed(17)
    inner = small()
    wrapped = ib.wrap(inner, micro_batch_size=4)
    for change in (inner[0].weight, inner[1].weight):
        loss = contrastive(wrapped(X))
        with torch.no_grad():
            change.mul_(1.5)
        with pytest.raises(ib.StateError, match="changed in place"):
            loss.backward()
        assert all(p.grad is None for p in inner.parameters())
    x = X.clone()
    loss = contrastive(wrapped(x))
    x.mul_(2)
    with pytest.raises(ib.StateError, match="changed in place"):
        loss.backward()
    # Buffers that no gradient needs may, and modes.
    native = copy.deepcopy(inner)
    outputs, wanted = wrapped(X), native(X)
    for module in (inner, native):
        module[1].num_batches_tracked.fill_(7)
        module[1].eval()
    contrastive(outputs).backward()
    contrastive(wanted).backward()
    close(grads(inner), grads(native))
    close(buffers(inner), buffers(native))


def test_a_buffer_and_a_weight_that_change_behind_the_graph_s_back():
    """Natively a term's value is not asked for again; a replay would see it."""
    torch.manual_seed(23)
    inner = Calls(
        lambda self, x: self.last(self.norm(self.net(x)) + self.shift),
        net=mlp(),
        norm=nn.BatchNorm1d(5),
        last=nn.Linear(5, 4),
        shift=torch.rand(5),
    ).double()
    native = copy.deepcopy(inner)
    wrapped = ib.wrap(inner, micro_batch_size=4)
    outputs, wanted = wrapped(X), native(X)
    for module in (inner, native):
        module.shift.add_(1)
    contrastive(outputs).backward()
    contrastive(wanted).backward()
    close(grads(inner), grads(native))
    assert torch.equal(inner.shift, native.shift)
    loss = contrastive(wrapped(X))
    inner.last.bias.data.add_(1)  # raises no version
    with pytest.raises(ib.Unsupported, match="other outputs"):
        loss.backward()
    close(grads(inner), grads(native))


def opaque_beside() -> nn.Module:
    return Calls(
        lambda self, x: self.norm(Square.apply(self.net(x))), net=mlp(), norm=nn.BatchNorm1d(5)
    ).double()


def read_on_the_host() -> nn.Module:
    def forward(self, x):
        x = self.norm(self.net(x))
        return x * 2 if float(x.detach().mean()) > 0 else x

    return Calls(forward, net=mlp(), norm=nn.BatchNorm1d(5)).double()


@pytest.mark.parametrize("make_model", [opaque_beside, read_on_the_host])
def test_what_cannot_be_cut(make_model):
    """A typed error in micro-batches; exact where one holds all."""
    inner = make_model()
    native = copy.deepcopy(inner)
    before = copy.deepcopy(inner.state_dict())
    for options in ({"micro_batch_size": 4}, {"micro_batch_size": 4, "memory_budget": "1GiB"}):
        wrapped = ib.wrap(inner, **options)
        for _ in range(2):
            with pytest.raises(ib.CouplingError, match="batch_norm"):
                wrapped(X)
            assert all(torch.equal(v, before[n]) for n, v in inner.state_dict().items())
    wrapped = ib.wrap(inner, memory_budget="1GiB")
    for _ in range(2):
        contrastive(wrapped(X)).backward()
        contrastive(native(X)).backward()
        close(grads(inner), grads(native))
        close(buffers(inner), buffers(native))


def test_inputs_that_forward_changes_are_refused():
    inner = Calls(
        lambda self, x: self.norm(self.net(x.mul_(2))), net=mlp(), norm=nn.BatchNorm1d(5)
    ).double()
    x = X.clone()
    with pytest.raises(ib.Unsupported, match="in place"):
        ib.wrap(inner, micro_batch_size=4)(x)
    assert torch.equal(x, torch.cat([X[:4] * 2, X[4:]]))  # it ran on these once


def test_weights_that_forward_rewrites_are_refused_and_put_back():
    inner = Calls(
        lambda self, x: self.norm(
            self.words((x.abs() * 9).long() % 20).mean(1) + self.words.weight.mean()
        ),
        words=nn.Embedding(20, 6),
        norm=nn.BatchNorm1d(6),
    ).double()
    wrapped = ib.wrap(inner, micro_batch_size=4)
    wrapped(X)
    inner.words.max_norm = 0.5
    before = copy.deepcopy(inner.state_dict())
    for _ in range(2):
        with pytest.raises(ib.CouplingError, match="max_norm"):
            wrapped(X)
        assert all(torch.equal(v, before[n]) for n, v in inner.state_dict().items())
