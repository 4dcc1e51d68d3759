"""Offload of saved boundary activations under a budget, on a device."""

import copy

import infinitybatch as ib
import pytest
import simulated_device as sim
import torch
from support import live_bytes
from test_training import assert_same, gradients
from torch import nn

HOST = {"host_budget": "1GiB", "disk": False}


def network():
    layers = [nn.Linear(8, 64)]
    for _ in range(2):
        layers += [nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 64)]
    return nn.Sequential(*layers, nn.Linear(64, 3)).double()


def convolutions():
    layers = [nn.Conv2d(3, 8, 3, padding=1)]
    for _ in range(8):
        layers += [nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


@pytest.mark.parametrize("coupled", [False, True])
def test_what_layers_of_the_whole_batch_are_given_leaves_the_device(coupled):
    inputs, targets = (torch.randn(256, size, dtype=torch.float64) for size in (8, 3))
    model = network()
    whole = copy.deepcopy(model)
    nn.functional.mse_loss(whole(inputs), targets).backward()
    wanted = gradients(whole)
    del whole
    loss = ib.losses.coupled(nn.functional.mse_loss) if coupled else nn.MSELoss()
    # All boundary activations are 256 KiB: 256 samples with 64 numbers at two layers. Sums of
    # gradients are 70 KiB. Without a loss of all, one layer's would do: the other can be computed
    # again.
    budget = live_bytes() + (280 if coupled else 180) * 1024
    with pytest.raises(ib.BudgetExceeded):
        ib.VirtualBatch(model, loss, memory_budget=budget, offload="never").backward(
            inputs, targets
        )
    batch = ib.VirtualBatch(model, loss, memory_budget=budget, offload=ib.Offload(**HOST))
    for _ in range(4):
        model.zero_grad()
        report = batch.backward(inputs, targets)
        assert_same(gradients(model), wanted, 1e-11)
    assert report.restarts == 0 and report.peak_bytes <= budget and report.offloaded_bytes > 0


def test_what_may_not_leave_is_computed_again():
    """Blocks are large beside what a device rounds them to, so that predictions are near."""
    layers = [nn.Conv1d(3, 8, 1)]
    for _ in range(6):
        layers += [nn.BatchNorm1d(8), nn.Tanh(), nn.Conv1d(8, 8, 1)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 3)).double()
    inputs = torch.randn(256, 3, 64, dtype=torch.float64)
    targets = torch.randn(256, 3, dtype=torch.float64)
    whole = copy.deepcopy(model)
    nn.functional.mse_loss(whole(inputs), targets).backward()
    wanted = gradients(whole)
    del whole
    # 1 MiB in front of each of six layers: all kept would be 6, with their gradients.
    budget = live_bytes() + 5 * 2**20
    batch = ib.VirtualBatch(model, nn.MSELoss(), memory_budget=budget, offload="never")
    for _ in range(4):
        model.zero_grad()
        report = batch.backward(inputs, targets)
        assert_same(gradients(model), wanted, 1e-11)
    assert report.restarts == 0 and report.peak_bytes <= budget
    assert report.strategy_reason.startswith("boundary activations are kept at")


@pytest.mark.parametrize("share", [0.45, 0.35])
def test_kernels_whose_memory_depends_on_the_batch(share):
    """As cuDNN's convolutions: plans have bounds alone, and compare what they bound all the same."""
    model = convolutions()
    inputs, targets = torch.randn(64, 3, 24, 24), torch.randn(64, 3)
    rows = []
    model[0].register_forward_pre_hook(lambda _, given: rows.append(len(given[0])))
    with sim.settings(conv_workspaces=1):
        torch.accelerator.reset_peak_memory_stats()
        live = live_bytes()
        nn.functional.mse_loss(model(inputs), targets).backward()
        peak = torch.accelerator.max_memory_allocated() - live
        model.zero_grad()
        budget = live_bytes() + int(share * peak)
        batch = ib.VirtualBatch(model, nn.MSELoss(), memory_budget=budget)
        rows.clear()
        for step in range(3):
            model.zero_grad()
            report = batch.backward(inputs, targets)
            # Nobody tries single samples where what waits of all may not fit beside them; where it
            # fits, they are the first plan, until larger ones have been rehearsed.
            fit = step == 0 and report.restarts == 0
            assert rows.count(1) <= 1 or fit, rows
            rows.clear()
    assert report.restarts == 0 and report.peak_bytes <= budget
    # At the larger share a device may have room for all.
    compared = "rehearsals of a step took" in report.strategy_reason
    assert compared or share > 0.4, report.strategy_reason


@pytest.mark.parametrize("offload", ["auto", "never"])
def test_one_sample_beyond_the_device(offload):
    layers = [layer for _ in range(60) for layer in (nn.Linear(8, 8), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(8, 1)).double()
    inputs, targets = (torch.randn(2, 512, size, dtype=torch.float64) for size in (8, 1))
    whole = copy.deepcopy(model)
    nn.functional.mse_loss(whole(inputs), targets).backward()
    wanted = gradients(whole)
    del whole
    # Of each sample 60 layers of 32 KiB, twice.
    budget = live_bytes() + sum(p.nbytes for p in model.parameters()) + 120 * 512 + 480 * 1024
    batch = ib.VirtualBatch(
        model, nn.MSELoss(), memory_budget=budget, offload=ib.Offload(offload, **HOST)
    )
    for _ in range(3):
        model.zero_grad()
        report = batch.backward(inputs, targets)
        assert_same(gradients(model), wanted, 1e-11)
    assert report.restarts == 0 and report.peak_bytes <= budget
    assert report.strategy == "checkpoint"
