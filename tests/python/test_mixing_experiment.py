"""The experiment that finds combined samples: its memory, its random numbers, its limits."""

import copy
import gc

import infinitybatch as ib
import pytest
import torch
from mixing_support import (
    LOOK_ALIKES,
    MIXERS,
    SIZE,
    N,
    mixing,
    spread,
)
from support import Calls, Log, Result, classification, worst_error
from torch import nn


def peaks_of(model, inputs):
    """Of three steps, beside what is live; what other tests left for the collector is no part."""
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=SIZE)
    peaks = []
    for _ in range(3):
        model.zero_grad()
        gc.collect()
        live = ib.memory.stats("cpu").live
        peaks.append(batch.backward(inputs, torch.randint(5, (N,))).peak_bytes - live)
    return peaks


@pytest.mark.parametrize("name", ["LayerNorm", "dropout", "attention mask"])
def test_the_first_step_of_a_tiny_model_needs_hardly_more_memory_than_later_ones(name):
    """Without a budget: so that its rows are looked at in larger batches than one row more."""
    make, data = LOOK_ALIKES[name]
    peaks = peaks_of(make().double(), data())
    assert peaks[0] <= peaks[2] + (256 << 10)


@pytest.mark.parametrize("drops", [0.0, 0.3])
def test_the_first_step_needs_no_more_memory_than_later_ones(drops):
    layers = [nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(drops), nn.Linear(64, 64)]
    model = Calls(lambda self, x: self.net(x).sum(1)[:, :5], net=nn.Sequential(*layers)).double()
    calls = Log()
    model.register_forward_pre_hook(lambda _, x: calls.append(len(x[0])))
    peaks = peaks_of(model, torch.randn(N, 100, 64).double())
    assert max(calls) > SIZE and calls[-2 * N // SIZE :] == [SIZE] * (2 * N // SIZE)
    assert peaks[0] <= peaks[2] and peaks[2] > 1 << 19


@pytest.mark.parametrize("coupled", [False, True])
def test_a_budget_without_room_for_the_experiment_is_kept_and_enough(coupled):
    model = nn.Sequential(nn.Linear(600, 8), nn.LayerNorm(8), nn.Linear(8, 5)).double()
    rows, targets = torch.randn(N, 600).double(), torch.randint(5, (N,))
    inputs = ib.BatchSource(N, lambda begin, end: rows[begin:end].clone())
    loss = ib.losses.coupled(spread) if coupled else nn.CrossEntropyLoss()
    options = {"micro_batch_size": SIZE, "batch_coupling": "per_micro_batch"}
    unlooked = copy.deepcopy(model)
    peaks = []
    for _ in range(2):
        unlooked.zero_grad()
        peaks.append(
            ib.VirtualBatch(unlooked, loss, **options).backward(inputs, targets).peak_bytes
        )
    unlooked.zero_grad()
    live = ib.memory.stats().live
    for more in range(0, 8192, 512):
        model.zero_grad()
        budget = max(peaks) + more + ib.memory.stats().live - live
        batch = ib.VirtualBatch(model, loss, micro_batch_size=SIZE, memory_budget=budget)
        assert batch.backward(inputs, targets).peak_bytes <= budget


def test_samples_that_are_all_alike_tell_nothing_and_later_ones_do():
    model = mixing(MIXERS["centred"][0])
    inputs, targets = classification(N)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=SIZE)
    batch.backward(inputs[:1].expand(N, 6), targets)
    with pytest.raises(ib.CouplingError):
        batch.backward(inputs, targets)


@pytest.mark.parametrize("autocast", [False, True])
def test_random_numbers_and_casts_go_on_as_if_nobody_had_looked(autocast):
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 5))
    inputs, targets = classification(N)
    inputs = inputs.float()
    results = []
    for coupling in ("exact", "per_micro_batch"):
        torch.manual_seed(3)
        other = copy.deepcopy(model)
        batch = ib.VirtualBatch(
            other, nn.CrossEntropyLoss(), micro_batch_size=SIZE, batch_coupling=coupling
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            batch.backward(inputs, targets)
            loss = batch.backward(inputs, targets).loss
        results.append(Result(loss, {n: p.grad for n, p in other.named_parameters()}, {}, other))
        results[-1].buffers["state"] = torch.get_rng_state()
    assert worst_error(*results) == 0
    assert torch.equal(results[0].buffers["state"], results[1].buffers["state"])


def test_samples_along_another_dimension_are_exchanged_along_it():
    model = Calls(lambda self, x: self.head((h := x.T) - h.mean(0)), head=nn.Linear(6, 5)).double()
    inputs, targets = classification(N)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=SIZE)
    with pytest.raises(ib.CouplingError, match="aten::mean"):
        batch.backward(ib.batch_dim(inputs.T.contiguous(), 1), targets)
