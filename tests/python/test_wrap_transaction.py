"""A wrapped model's forward in which something fails leaves everything as it was."""

import copy
import random

import infinitybatch as ib
import pytest
import torch
from fault_support import LONG, FailingOps, MyError, State, no_error_is_only_logged
from support import classification
from torch import nn

__all__ = ["no_error_is_only_logged"]  # a fixture

# Layers that see the whole batch are not cut under a dispatch mode, which is how these ops fail:
# test_failing_kernels.py lets those fail below Python.
WAYS = {
    "replay": {"micro_batch_size": 3},
    "budget": {"memory_budget": "64MiB", "micro_batch_size": 3},
}


class Fussy(nn.Module):
    """Writes a buffer and draws random numbers."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 5))
        self.register_buffer("steps", torch.zeros(3))
        self.double()

    def forward(self, x):
        self.steps += 1
        return self.net(x + 0.1 * random.random())


def step(wrapped, inputs, targets):
    nn.functional.cross_entropy(wrapped(inputs), targets).backward()


def bits(model, options, inputs, targets):
    twin = copy.deepcopy(model)
    for parameter, original in zip(twin.parameters(), model.parameters(), strict=True):
        parameter.grad = None if original.grad is None else original.grad.clone()
    torch.manual_seed(5)
    random.seed(5)
    step(ib.wrap(twin, **options), inputs, targets)
    return [*(p.grad for p in twin.parameters()), *twin.buffers()]


def past_the_first_steps(wrapped, inputs, targets):
    """It knows the batch from now on; calls 1, 2 and 4 look for mixed samples."""
    for _ in range(2):
        step(wrapped, inputs, targets)


def count_ops(model, options, inputs, targets):
    """In one call: of forward, and of forward, loss and backward."""
    wrapped = ib.wrap(copy.deepcopy(model), **options)
    past_the_first_steps(wrapped, inputs, targets)
    for parameter, original in zip(wrapped.parameters(), model.parameters(), strict=True):
        parameter.grad = None if original.grad is None else original.grad.clone()
    with FailingOps() as counter:
        outputs = wrapped(inputs)
        forward = len(counter.names)
        nn.functional.cross_entropy(outputs, targets).backward()
    return forward, counter.names


@pytest.mark.parametrize(
    ("kind", "stays"), [(MyError, False), (KeyboardInterrupt, False), (MyError, True)]
)
@pytest.mark.parametrize("with_grads", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_an_exception_at_any_op_of_forward(way, with_grads, kind, stays):
    options = WAYS[way]
    model = Fussy()
    inputs, targets = classification(12)
    if with_grads:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
    forward, names = count_ops(model, options, inputs, targets)
    last = forward
    assert forward > 40 and len(names) - forward > 40
    places = range(1, last + 1)
    if not LONG:
        places = sorted(random.Random(way).sample(places, 14)) + [last]
    wrapped = ib.wrap(model, **options)
    state = State(model)
    past_the_first_steps(wrapped, inputs, targets)
    put_back(model, state)
    wanted = bits(model, options, inputs, targets)
    put_back(model, state)
    for place in places:
        state = State(model)
        live = ib.memory.stats().live
        error = kind(place)
        with pytest.raises(kind) as raised, FailingOps(place, error, stays):
            wrapped(inputs)
        where = f"op {place} of {len(names)}: {names[place - 1]}"
        assert raised.value is error, where
        error.__traceback__ = None
        del raised
        state.check()
        assert ib.memory.stats().live == live, f"{where}: bytes were left behind"
        found = bits(model, options, inputs, targets)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), where
        put_back(model, state)
        del found
    step(wrapped, inputs, targets)  # and this very object works, too


def put_back(model, state):
    """As `state` was taken."""
    with torch.no_grad():
        for name, tensor in State.tensors(model):
            tensor.copy_(state.values[name])
    for name, parameter in model.named_parameters():
        parameter.grad = state.grads[name]
        if parameter.grad is not None:
            parameter.grad.copy_(state.grad_values[name])
    torch.set_rng_state(state.random[0])
    random.setstate(state.random[1])
