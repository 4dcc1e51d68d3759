"""How often the host waits for the device in a step whose plan is settled: never for each
micro-batch."""

import infinitybatch as ib
import pytest
import simulated_device as sim
import torch
import torch.nn.functional as F
from torch import nn

ROWS = 48
SETTLED = 5  # steps in a row: one may be lucky
OFFLOAD = {"offload": ib.Offload("always", host_budget="64MiB")}
NORM, DRAWS = {"norm": True}, {"draws": True}
CHECKPOINT, STATIC = {"checkpoint_segments": 2}, {"static_graph": True}

# What the model has, whether the loss is coupled, options, waits of a step: one for numbers of all
# micro-batches together, some more for what each BatchNorm compares at the end.
STEPS = {
    "streamed": ({}, False, {}, 0),
    "coupled": ({}, True, {}, 1),
    "static graph": ({}, False, STATIC, 0),
    "native's numbers": (DRAWS, False, {"match_native_rng": True}, 0),
    "native's numbers, coupled": (DRAWS, True, {"match_native_rng": True}, 1),
    "BatchNorm": (NORM, False, {}, 3),
    "BatchNorm, static graph": (NORM, False, STATIC, 1),
    "BatchNorm, coupled": (NORM, True, {}, 7),
    "BatchNorm, offload": (NORM, False, OFFLOAD, 3),
    "checkpoint": ({}, False, CHECKPOINT, 1),
    "checkpoint, coupled": ({}, True, CHECKPOINT, 1),
    "checkpoint, offload": ({}, False, CHECKPOINT | OFFLOAD, 1),
    "offload": ({}, True, {"retained_micro_batches": 0} | OFFLOAD, 1),
    "offload of graphs": ({}, True, {"retained_micro_batches": 2} | OFFLOAD, 1),
}

WRAPPED = {
    "plain": ({}, {}, 1),
    "graphs kept": ({}, {"retained_micro_batches": 2}, 1),
    "offload": ({}, {"retained_micro_batches": 3} | OFFLOAD, 1),
    "static graph": ({}, STATIC, 1),
    "native's numbers": (DRAWS, {"match_native_rng": True}, 1),
    "BatchNorm": (NORM, {}, 4),
}


def model_of(norm=False, draws=False):
    middle = [nn.BatchNorm1d(32)] if norm else []
    middle += [nn.Tanh()] + ([nn.Dropout(0.3)] if draws else [])
    return nn.Sequential(nn.Linear(8, 32), *middle, nn.Linear(32, 3)).double()


def data():
    return tuple(torch.randn(ROWS, size, dtype=torch.float64) for size in (8, 3))


def waits_of(step, model, most):
    """Of the settled steps: the last `SETTLED` of at most 300 that wait at most `most` times in a
    row; of the last that there are where none do."""
    counts = []
    for _ in range(300):
        model.zero_grad()
        sim.reset()
        step()
        counts.append(sim.waits())
        if len(counts) >= SETTLED and max(counts[-SETTLED:]) <= most:
            break
    return counts[-SETTLED:]


@pytest.mark.parametrize("way", STEPS)
def test_no_wait_for_each_micro_batch(way):
    has, coupled, options, most = STEPS[way]
    loss = ib.losses.coupled(F.mse_loss) if coupled else nn.MSELoss()
    counts = []
    for size in (16, 4):
        model, (inputs, targets) = model_of(**has), data()
        batch = ib.VirtualBatch(model, loss, micro_batch_size=size, **options)
        counts.append(waits_of(lambda b=batch, x=inputs, y=targets: b.backward(x, y), model, most))
    assert counts[0] == counts[1] and max(counts[0]) <= most, counts


@pytest.mark.parametrize("way", WRAPPED)
def test_no_wait_for_each_micro_batch_of_a_wrapped_model(way):
    has, options, most = WRAPPED[way]
    counts = []
    for size in (16, 4):
        model, (inputs, targets) = model_of(**has), data()
        wrapped = ib.wrap(model, micro_batch_size=size, **options)
        counts.append(
            waits_of(
                lambda w=wrapped, x=inputs, y=targets: F.mse_loss(w(x), y).backward(), model, most
            )
        )
    assert counts[0] == counts[1] and max(counts[0]) <= most, counts


@pytest.mark.parametrize("coupled", [False, True])
def test_no_wait_for_each_micro_batch_under_a_budget(coupled):
    loss = ib.losses.coupled(F.mse_loss) if coupled else nn.MSELoss()
    counts, model, (inputs, targets) = [], model_of(), data()
    for room in (60_000, 30_000):
        budget = torch.accelerator.memory_allocated() + room
        batch = ib.VirtualBatch(model, loss, memory_budget=budget)
        counts.append(waits_of(lambda b=batch: b.backward(inputs, targets), model, 1))
    assert max(map(max, counts)) <= 1, counts


def test_a_wait_for_each_micro_batch_is_found():
    class Reads(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = model_of()

        def forward(self, x):
            x.sum().item()
            return self.body(x)

    model, (inputs, targets) = Reads(), data()
    batch = ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=16)
    counts = waits_of(lambda: batch.backward(inputs, targets), model, 0)
    assert min(counts) >= 3
