"""A step with ops that see the whole batch fails, wherever it is, and leaves everything as it was."""

import copy
import random

import infinitybatch as ib
import numpy as np
import pytest
import torch
import torch.nn.functional as F
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
    "separable": {"coupled": False, "retained_micro_batches": 0},
    "coupled": {"coupled": True, "retained_micro_batches": 0},
    "separable, some retained": {"coupled": False, "retained_micro_batches": 2},
    "coupled, all retained": {"coupled": True, "retained_micro_batches": 4},
    "separable, offloaded to disk": {"coupled": False, "offload": "always"},
    "coupled, offloaded to the host": {
        "coupled": True,
        "offload": ib.Offload("always", host_budget="64MiB", disk=False),
    },
    "separable, in segments": {"coupled": False, "checkpoint_segments": 3},
    "coupled, in segments, offloaded to the host": {
        "coupled": True,
        "checkpoint_segments": 3,
        "offload": ib.Offload("always", host_budget="64MiB", disk=False),
    },
}


class Fussy(nn.Module):
    """Whole-batch ops of three kinds; user code runs in many places, each a tripwire."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.norm = nn.BatchNorm1d(6)
        self.dropout = nn.Dropout(0.2)
        self.words = nn.Embedding(7, 6, scale_grad_by_freq=True)
        self.deep = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)))
        self.last_norm = nn.BatchNorm1d(7)
        self.head = nn.Linear(7, 4)
        self.places = Log()
        self.fatal = []  # a list: another number would be another program
        self.error = None
        self.double()

    def trip(self, place):
        self.places.append(place)
        if self.fatal == [len(self.places)]:
            raise self.error

    def spread(self, x):
        self.trip("function")
        return x.std(0, unbiased=False).mean().expand(len(x), 1)

    def forward(self, x):
        self.trip("begin")
        y = self.dropout(self.norm(self.first(x + 0.1 * (random.random() + np.random.rand()))))
        y = y + self.deep(self.words(x[:, 0].abs().mul(3).long() % 7) * y)
        self.trip("middle")
        y = torch.cat([y, ib.across_batch(self.spread, y)], 1)
        y = self.head(F.relu(self.last_norm(y), inplace=True))
        self.trip("end")
        return y


class TrippingLoss(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.3, dtype=torch.float64))
        self.model = [model]

    def forward(self, outputs):
        self.model[0].trip("loss")
        return ((outputs @ outputs.T) * self.scale).logsumexp(1).mean()

    def sum(self, outputs, _):
        self.model[0].trip("loss")
        return (outputs * self.scale).logsumexp(1).sum()


def set_up(way, with_grads):
    random.seed(0)
    np.random.seed(0)
    options = dict(WAYS[way])
    model = Fussy()
    loss = TrippingLoss(model)
    if with_grads:
        for parameter in (*model.parameters(), *loss.parameters()):
            parameter.grad = torch.randn_like(parameter)
    inputs = torch.randn(12, 5, dtype=torch.float64)
    ours = (
        ib.losses.coupled(loss)
        if options.pop("coupled")
        else ib.losses.separable(loss.sum, lambda targets: torch.tensor(12.0, dtype=torch.float64))
    )
    batch = ib.VirtualBatch(
        model, ours, micro_batch_size=3, on_micro_batch=lambda _: model.trip("callback"), **options
    )
    return model, loss, inputs, Targeted(batch)


class Targeted:
    """Steps with targets that only count the samples."""

    def __init__(self, batch):
        self.batch = batch

    def backward(self, inputs):
        report = self.batch.backward(inputs, torch.zeros(len(inputs)))
        self.strategy = report.strategy
        return report


@pytest.mark.parametrize("kind", [MyError, KeyboardInterrupt])
@pytest.mark.parametrize("way", WAYS)
def test_an_exception_wherever_user_code_runs(way, kind):
    model, loss, inputs, batch = set_up(way, with_grads=True)
    step_bits(model, loss, batch, inputs)  # checks its recordings
    wanted = step_bits(model, loss, batch, inputs)
    model.places.clear()
    step_bits(model, loss, batch, inputs)
    assert batch.strategy == ("checkpoint" if "segments" in way else "cut")
    places = list(model.places)
    assert places.count("begin") == 4 and places.count("function") == 5
    fail_in_user_code(model, loss, inputs, batch, wanted, places, kind)


@pytest.mark.parametrize("with_grads", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_a_failed_allocation_anywhere(way, with_grads):
    model, loss, inputs, batch = set_up(way, with_grads)
    step_bits(model, loss, batch, inputs)
    wanted = step_bits(model, loss, batch, inputs)
    with ib.memory.fail_allocation() as counter:
        step_bits(model, loss, batch, inputs)
    # Beside those of the step are copies of the buffers and of the loss made here.
    count = counter.seen - 20
    assert count > 500
    places = range(1, count + 1)
    if not LONG:
        places = sorted(random.Random(1).sample(places, 40))
    fail_in_allocations(model, loss, inputs, batch, wanted, places)


def test_an_exception_in_hooks_of_the_hand_out():
    model, loss, inputs, batch = set_up("separable", with_grads=True)
    step_bits(model, loss, batch, inputs)
    wanted = step_bits(model, loss, batch, inputs)
    error = MyError("hook")
    for name in ("norm.weight", "first.weight"):
        watched = Watched(model, loss)
        handle = model.get_parameter(name).register_hook(after(1, error))
        with pytest.raises(MyError) as raised:
            batch.backward(inputs)
        assert raised.value is error
        handle.remove()
        error.__traceback__ = None
        del raised
        watched.check()
        del watched
        assert_same(step_bits(model, loss, batch, inputs), wanted, name)


def test_a_failed_allocation_in_a_planned_step_is_answered():
    inputs = torch.randn(40, 5, dtype=torch.float64)
    plain = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 4)).double()
    native = copy.deepcopy(plain)
    targets = torch.randint(4, (40,))
    F.cross_entropy(native(inputs), targets).backward()
    batch = ib.VirtualBatch(plain, nn.CrossEntropyLoss(), memory_budget="64MiB")
    state = copy.deepcopy(plain.state_dict())
    batch.backward(inputs, targets)
    answered = 0
    for place in (1, 40, 90, 200, 400, 700):
        plain.zero_grad()
        plain.load_state_dict(state)
        with ib.memory.fail_allocation(place) as failure:
            try:
                report = batch.backward(inputs, targets)
            except torch.OutOfMemoryError:
                assert all(p.grad is None for p in plain.parameters())
                continue
        # Less where a look at rows has found no room, and looked at fewer.
        assert report.restarts <= int(failure.failed)
        answered += report.restarts
        for a, b in zip(plain.parameters(), native.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-14)
    assert answered >= 1
