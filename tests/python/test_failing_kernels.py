"""An op that fails in a step that is cut, in segments or offloaded, and in the forward of a wrapped
model that is, leaves everything as it was."""

import random

import infinitybatch as ib
import pytest
import torch
from failing_kernels import FailingKernel, kernels
from fault_support import LONG, State, Watched, assert_same, no_error_is_only_logged, step_bits
from support import classification
from test_cut_transaction import WAYS, set_up
from test_wrap_transaction import put_back
from torch import nn

__all__ = ["kernels", "no_error_is_only_logged"]  # fixtures

pytestmark = pytest.mark.usefixtures("kernels")


def places(count, seed, sample):
    """All, or a seeded sample with both ends in it."""
    if LONG:
        return range(1, count + 1)
    return sorted({1, count, *random.Random(seed).sample(range(2, count), sample)})


class AtOp:
    """A batch one of whose ops fails."""

    def __init__(self, batch, place=0):
        self.batch, self.failing = batch, FailingKernel(place)

    def backward(self, inputs):
        with self.failing:
            return self.batch.backward(inputs)


@pytest.mark.parametrize("with_grads", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_an_exception_at_any_op_of_a_cut_step(way, with_grads):
    model, loss, inputs, batch = set_up(way, with_grads)
    step_bits(model, loss, batch, inputs)  # checks its recordings
    wanted = step_bits(model, loss, batch, inputs)
    counting = AtOp(batch)
    step_bits(model, loss, counting, inputs)
    count = counting.failing.seen
    assert batch.strategy == ("checkpoint" if "segments" in way else "cut")
    assert count > 2500
    # Existing gradients are added to in place, which fails nowhere but in a test: left out.
    owners = len([*model.parameters(), *loss.parameters()])
    raised = 0
    for place in places(count - owners * with_grads, f"{way} {with_grads}", 20):
        watched = Watched(model, loss)
        error = None
        at_op = AtOp(batch, place)
        try:
            at_op.backward(inputs)
        except NotImplementedError as caught:
            error = caught
            error.__traceback__ = None
        failing = at_op.failing
        where = f"op {place} of {count}: {failing.name}"
        assert failing.failed, where
        if error is None:
            # The function of all samples was tried on one micro-batch, where it may fail.
            put_back_both(watched)
            assert_same(step_bits(model, loss, at_op, inputs), wanted, where)
        else:
            assert f"failed on purpose: {failing.name}" in str(error), where
            raised += 1
            error = None
            try:
                watched.check()
            except AssertionError as failure:
                raise AssertionError(f"{where}: {failure}") from None
        del watched
        if place % 5 == 1:
            assert_same(step_bits(model, loss, batch, inputs), wanted, where)
    # Of that there are some 20 ops in each of four micro-batches.
    assert raised > (count - 200 if LONG else 10)


def put_back_both(watched):
    for state in watched.states:
        with torch.no_grad():
            put_back(state.model, state)


class Normed(nn.Module):
    """Sees the whole batch, writes a buffer, draws random numbers."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.rest = nn.Sequential(nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 5))
        self.register_buffer("steps", torch.zeros(3))
        self.double()

    def forward(self, x):
        self.steps += 1
        return self.rest(self.norm(self.first(x + 0.1 * random.random())))


WRAPPED = {
    "cut": {"micro_batch_size": 3},
    "cut under a budget": {"memory_budget": "64MiB", "micro_batch_size": 3},
    "offloaded": {"micro_batch_size": 3, "offload": "always"},
    "native's numbers": {"micro_batch_size": 3, "match_native_rng": True},
}


@pytest.mark.parametrize("with_grads", [False, True])
@pytest.mark.parametrize("way", WRAPPED)
def test_an_exception_at_any_op_of_a_wrapped_forward(way, with_grads):
    model = Normed()
    if with_grads:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
    inputs, targets = classification(12)
    wrapped = ib.wrap(model, **WRAPPED[way])
    start = State(model)

    def bits():
        torch.manual_seed(5)
        random.seed(5)
        for parameter in model.parameters():
            parameter.grad = None
        nn.functional.cross_entropy(wrapped(inputs), targets).backward()
        found = [*(p.grad for p in model.parameters()), *(b.clone() for b in model.buffers())]
        put_back(model, start)
        return found

    bits()  # checks its recording
    wanted = bits()
    assert wrapped.last_report.strategy == "cut"
    with FailingKernel() as counter:
        wrapped(inputs)
    put_back(model, start)
    assert counter.seen > 300
    for place in places(counter.seen, f"{way} {with_grads}", 25):
        state = State(model)
        live = ib.memory.stats().live
        with pytest.raises(NotImplementedError) as raised, FailingKernel(place) as failing:
            wrapped(inputs)
        where = f"op {place} of {counter.seen}: {failing.name}"
        assert f"failed on purpose: {failing.name}" in str(raised.value), where
        raised.value.__traceback__ = None
        del raised
        try:
            state.check()
        except AssertionError as failure:
            raise AssertionError(f"{where}: {failure}") from None
        assert ib.memory.stats().live == live, f"{where}: bytes were left behind"
        if place % 3 == 0:
            assert_same(bits(), wanted, where)
        del state
