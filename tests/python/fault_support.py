"""Steps that fail on purpose, and what has to be as before afterwards."""

import gc
import os
import random
import resource
import signal
import subprocess
import sys

import infinitybatch as ib
import numpy as np
import pytest
import torch
from support import Tally
from torch.utils._python_dispatch import TorchDispatchMode

LONG = os.environ.get("INFINITYBATCH_LONG_TESTS") == "1"
#: Of a family of cases, those that say little beside the others.
in_long_tests = pytest.mark.skipif(not LONG, reason="one of a family, in make test-long")


class MyError(Exception):
    pass


class FailingOps(TorchDispatchMode):
    """Raises at the n-th op, whoever calls it: the model, the engine or the step itself; with
    `stays` at all that follow, too, so that nothing can be put back by ops that it sees."""

    def __init__(self, n=None, error=None, stays=False):
        super().__init__()
        self.n, self.error, self.stays, self.names = n, error, stays, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        here = len(self.names)
        if self.n is not None and (here == self.n or (self.stays and here > self.n)):
            raise self.error
        return func(*args, **(kwargs or {}))


class FailingBackward(torch.autograd.Function):
    """The identity, which no tape can replay; its backward raises `error` where one is set."""

    error = None

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if FailingBackward.error is not None:
            raise FailingBackward.error
        return gradient.clone()


class State:
    """Everything that a step could change, as bits."""

    def __init__(self, model):
        self.model = model
        self.values = {n: t.detach().clone() for n, t in self.tensors(model)}
        self.grads = {n: p.grad for n, p in model.named_parameters()}
        self.grad_values = {n: g.clone() for n, g in self.grads.items() if g is not None}
        self.random = (torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False))

    @staticmethod
    def tensors(model):
        yield from model.named_parameters()
        yield from model.named_buffers()

    def check(self):
        for name, tensor in self.tensors(self.model):
            assert torch.equal(tensor, self.values[name]), f"{name} changed"
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is self.grads[name], f"{name}.grad is another tensor"
            if parameter.grad is not None:
                assert torch.equal(parameter.grad, self.grad_values[name]), f"{name}.grad changed"
        assert torch.equal(torch.get_rng_state(), self.random[0]), "torch's random state changed"
        assert random.getstate() == self.random[1], "Python's random state changed"
        before, now = self.random[2], np.random.get_state(legacy=False)
        assert now["state"]["pos"] == before["state"]["pos"]
        assert (now["state"]["key"] == before["state"]["key"]).all()


def after(calls, raise_this):
    """A function that raises at its `calls`-th call."""
    tally = Tally()  # attempts that failed leave no number in a closure

    def function(*_):
        tally()
        if tally.count == calls:
            raise raise_this

    return function


@pytest.fixture(autouse=True)
def no_error_is_only_logged(capfd):
    """No callback lets an error of its own go to torch, which would only log it."""
    yield
    assert "Exception in RecordFunction callback" not in capfd.readouterr().err


class Watched:
    """Model, its loss's parameters and the bytes that are alive."""

    def __init__(self, model, loss):
        self.states = State(model), State(loss)
        gc.collect()  # what earlier tests left in cycles may go at any time
        self.live = ib.memory.stats().live

    def check(self):
        for state in self.states:
            state.check()
        assert ib.memory.stats().live == self.live, "bytes were left behind"


def step_bits(model, loss, batch, inputs):
    """The bits that a step gives from a fixed random state; everything is put back."""
    held = (torch.get_rng_state(), random.getstate(), np.random.get_state())
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    owners = [*model.parameters(), *loss.parameters()]
    grads = [p.grad for p in owners]
    buffers = [(b, b.clone()) for b in model.buffers()]
    for parameter in owners:
        parameter.grad = None
    report = batch.backward(inputs)
    bits = [report.loss.clone(), *(p.grad for p in owners), *(b.clone() for b, _ in buffers)]
    for parameter, grad in zip(owners, grads, strict=True):
        parameter.grad = grad
    for buffer, value in buffers:
        buffer.copy_(value)
    torch.set_rng_state(held[0])
    random.setstate(held[1])
    np.random.set_state(held[2])
    return bits


def assert_same(found, wanted, where):
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), where


def fail_in_user_code(model, loss, inputs, batch, wanted, places, kind):
    """An error of `kind` at each of the places where the model's tripwires are met."""
    for place, name in enumerate(places, 1):
        watched = Watched(model, loss)
        model.places.clear()
        model.fatal, model.error = [place], kind(name)
        with pytest.raises(kind) as raised:
            batch.backward(inputs)
        assert raised.value is model.error
        where = f"{place} of {len(places)}: {name}"
        model.fatal, error, model.error = [], model.error, None
        error.__traceback__ = None
        del raised, error
        try:
            watched.check()
        except AssertionError as failure:
            raise AssertionError(f"{where}: {failure}") from None
        del watched
        if place % 5 == 1 or LONG:
            assert_same(step_bits(model, loss, batch, inputs), wanted, where)


def fail_in_allocations(model, loss, inputs, batch, wanted, places):
    """A refused allocation at each of the places."""
    for place in places:
        watched = Watched(model, loss)
        with ib.memory.fail_allocation(place) as failure:
            with pytest.raises(torch.OutOfMemoryError) as raised:
                batch.backward(inputs)
        raised.value.__traceback__ = None
        del raised
        where = f"allocation {place}"
        assert failure.failed, where
        try:
            watched.check()
        except AssertionError as problem:
            raise AssertionError(f"{where}: {problem}") from None
        del watched
        if place % 3 == 0 or LONG:
            assert_same(step_bits(model, loss, batch, inputs), wanted, where)


def assert_a_full_disk_leaves_everything(model, batch, plain, inputs, targets):
    """Steps of `batch` that find no room, early and later, raise OffloadError and change nothing;
    one that finds room gives the gradients of `plain`, which does not offload, bit for bit."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    state = torch.get_rng_state()
    live = ib.memory.stats("cpu").live
    try:
        for room in (2**12, 10 * 2**12):
            resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
            with pytest.raises(ib.OffloadError):
                batch.backward(inputs, targets)
            assert ib.memory.stats("cpu").live == live
            assert torch.equal(torch.get_rng_state(), state)
            assert all(parameter.grad is None for parameter in model.parameters())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    batch.backward(inputs, targets)
    found = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    torch.set_rng_state(state)
    plain.backward(inputs, targets)
    assert all(map(torch.equal, found, (parameter.grad for parameter in model.parameters())))


def assert_a_kill_leaves_nothing(script, folder):
    """`script` kills itself while something is offloaded in the folder that is its argument."""
    done = subprocess.run(
        [sys.executable, "-c", script, str(folder)],
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert list(folder.iterdir()) == []
