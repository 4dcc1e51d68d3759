"""A step with a coupled loss that fails, in whichever pass, leaves everything as it was."""

import copy
import gc
import random

import infinitybatch as ib
import numpy as np
import pytest
import torch
from coupled_support import Headed, InfoNCE, mlp_body
from fault_support import (
    LONG,
    MyError,
    Watched,
    after,
    assert_same,
    fail_in_allocations,
    fail_in_user_code,
    no_error_is_only_logged,
    step_bits,
)
from support import Log
from torch import nn

__all__ = ["no_error_is_only_logged"]  # a fixture

WAYS = {  # four micro-batches of 3
    "replay": {"opaque": False, "retained_micro_batches": 0},
    "rerun": {"opaque": True, "retained_micro_batches": 0},
    "some retained": {"opaque": False, "retained_micro_batches": 2},
    "rerun, some retained": {"opaque": True, "retained_micro_batches": 2},
    "all retained": {"opaque": False, "retained_micro_batches": 4},
    "all offloaded": {"opaque": False, "retained_micro_batches": 4, "offload": "always"},
    "rerun, some offloaded": {"opaque": True, "retained_micro_batches": 2, "offload": "always"},
}


class Tripwire(torch.autograd.Function):
    """The identity, which calls the model's functions in forward and in backward."""

    @staticmethod
    def forward(ctx, x, model):
        ctx.model = model
        model.trip("function")
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.model.trip("backward")
        return gradient, None


class Fussy(nn.Module):
    """Draws random numbers of three kinds; user code runs in many places, each a tripwire."""

    def __init__(self, opaque, buffer):
        super().__init__()
        self.opaque = opaque
        self.net = Headed(nn.Sequential(mlp_body(), nn.Dropout(0.2)), "towers")
        if buffer:
            self.register_buffer("steps", torch.zeros(3))
        self.places = Log()
        self.fatal = []  # a list: another number would be another program
        self.error = None

    def trip(self, place):
        self.places.append(place)
        if self.fatal == [len(self.places)]:
            raise self.error

    def forward(self, x):
        self.trip("begin")
        if hasattr(self, "steps"):
            self.steps += 1
        x = x + 0.1 * (random.random() + np.random.rand())
        left, right = self.net(x)
        if self.opaque:
            left = Tripwire.apply(left, self)
        self.trip("end")
        return left, right


class TrippingLoss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.info_nce = InfoNCE()
        self.model = [model]

    def forward(self, outputs):
        (model,) = self.model
        model.trip("loss")
        value = self.info_nce(tuple(Tripwire.apply(output, model) for output in outputs), None)
        model.trip("loss done")
        return value


def set_up(way, with_grads, buffer=False):
    np.random.seed(0)
    options = dict(WAYS[way])
    model = Fussy(options.pop("opaque"), buffer)
    loss = TrippingLoss(model)
    if with_grads:
        for parameter in (*model.parameters(), *loss.parameters()):
            parameter.grad = torch.randn_like(parameter)
    inputs = torch.randn(12, 5, dtype=torch.float64)
    batch = ib.VirtualBatch(
        model,
        ib.losses.coupled(loss),
        micro_batch_size=3,
        on_micro_batch=lambda _: model.trip("callback"),
        **options,
    )
    return model, loss, inputs, batch


@pytest.mark.parametrize("kind", [MyError, KeyboardInterrupt])
@pytest.mark.parametrize("buffer", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_an_exception_wherever_user_code_runs(way, buffer, kind):
    model, loss, inputs, batch = set_up(way, with_grads=True, buffer=buffer)
    wanted = step_bits(model, loss, batch, inputs)
    to_a_step_without_a_look(model, loss, batch, inputs)
    model.places.clear()
    step_bits(model, loss, batch, inputs)
    places = list(model.places)
    forwards = places.count("begin")
    kept = 0 if buffer else batch_kept(way)
    assert forwards == (4 + 4 - kept if WAYS[way]["opaque"] else 4)
    assert places.count("backward") == 2 + (4 if WAYS[way]["opaque"] else 0)
    fail_in_user_code(model, loss, inputs, batch, wanted, places, kind)


def batch_kept(way):
    return WAYS[way]["retained_micro_batches"]


def to_a_step_without_a_look(model, loss, batch, inputs):
    """Behind the look of step 16: what refuses room to a look is no error of the step's."""
    for _ in range(16):
        step_bits(model, loss, batch, inputs)


@pytest.mark.parametrize("with_grads", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_failed_allocation_anywhere(way, with_grads):
    model, loss, inputs, batch = set_up(way, with_grads, buffer=way == "replay")
    wanted = step_bits(model, loss, batch, inputs)
    to_a_step_without_a_look(model, loss, batch, inputs)
    gc.collect()
    with ib.memory.fail_allocation() as counter:
        step_bits(model, loss, batch, inputs)
    # Beside those of the step are copies of the buffers and of the loss made here.
    count = counter.seen - 8
    assert count > 150
    places = range(1, count + 1)
    if not LONG:
        places = sorted(random.Random(1).sample(places, 30))
    fail_in_allocations(model, loss, inputs, batch, wanted, places)


def test_a_failed_allocation_in_a_planned_step_is_answered():
    """The planner begins again with less; the result is as good."""
    model, loss, inputs, _ = set_up("replay", with_grads=False)
    model.net.body[1].p = 0.0
    model.forward = lambda x: model.net(x)
    batch = ib.VirtualBatch(model, ib.losses.coupled(loss), memory_budget="64MiB")
    inputs = torch.randn(40, 5, dtype=torch.float64)
    native = copy.deepcopy(model.net)
    value = InfoNCE()
    value(native(inputs), None).backward()
    batch.backward(inputs)
    answered = 0
    for place in (1, 40, 90, 200, 400, 700):
        model.zero_grad()
        with ib.memory.fail_allocation(place) as failure:
            try:
                report = batch.backward(inputs)
            except torch.OutOfMemoryError:
                assert all(p.grad is None for p in model.parameters())
                continue
        assert report.restarts == int(failure.failed)
        answered += report.restarts
        for a, b in zip(model.net.parameters(), native.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-15)
    assert answered >= 2


@pytest.mark.parametrize("kind", [MyError, KeyboardInterrupt])
def test_an_exception_in_the_rehearsal(kind):
    model, loss, inputs, _ = set_up("rerun", with_grads=True)
    batch = ib.VirtualBatch(model, ib.losses.coupled(loss), memory_budget="64MiB")
    for place in (1, 2, 3, 5, 6, 9):
        watched = Watched(model, loss)
        model.places.clear()
        model.fatal, model.error = [place], kind(place)
        with pytest.raises(kind) as raised:
            batch.backward(inputs)
        assert raised.value is model.error
        raised.value.__traceback__ = None
        model.fatal, model.error = [], None
        del raised
        watched.check()
        del watched
    batch.backward(inputs)


def test_an_exception_in_hooks_of_the_hand_out():
    model, loss, inputs, batch = set_up("replay", with_grads=True)
    wanted = step_bits(model, loss, batch, inputs)
    error = MyError("hook")
    for name in ("net.left.weight", "net.body.0.0.weight"):
        for register in ("register_hook", "register_post_accumulate_grad_hook"):
            watched = Watched(model, loss)
            handle = getattr(model.get_parameter(name), register)(after(1, error))
            with pytest.raises(MyError) as raised:
                batch.backward(inputs)
            assert raised.value is error
            handle.remove()
            error.__traceback__ = None
            del raised
            watched.check()
            del watched
            assert_same(step_bits(model, loss, batch, inputs), wanted, name)
