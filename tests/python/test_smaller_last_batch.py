"""A last batch of an odd number of samples ends with a micro-batch of one, which takes other kernels
and more workspace. What that teaches refuses no step of the full batch, which has fit before."""

import gc

import infinitybatch as ib
import pytest
import torch
from torch import nn

ROWS, FEWER = 48, 37


def model():
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def batch(rows):
    generator = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 3, 32, 32, generator=generator)
    return x, torch.randint(10, (rows,), generator=generator)


def needed(net, size):
    """The peak of a step of all rows."""
    virtual = ib.VirtualBatch(net, nn.CrossEntropyLoss(), micro_batch_size=size)
    x, y = batch(ROWS)
    peaks = []
    for _ in range(3):
        net.zero_grad()
        peaks.append(virtual.backward(x, y).peak_bytes)
    return max(peaks)


@pytest.mark.parametrize("coupling", ["exact", "per_micro_batch"])
@pytest.mark.parametrize("before", [1, 5])
def test_the_full_batch_still_fits_after_a_smaller_one(coupling, before):
    net = model()
    gc.collect()
    two, one = needed(net, 2), needed(net, 1)
    if one - two > (ROWS - FEWER) * 3 * 32 * 32 * 4:
        pytest.skip("the kernels of one sample take so much here that the smaller batch fits not")
    virtual = ib.VirtualBatch(
        net, nn.CrossEntropyLoss(), memory_budget=two + 2048, batch_coupling=coupling
    )
    gc.collect()
    for rows in [ROWS] * before + [FEWER] + [ROWS] * 3:
        x, y = batch(rows)
        net.zero_grad()
        report = virtual.backward(x, y)
        assert sum(report.micro_batch_sizes) == rows
        assert report.peak_bytes <= two + 2048
        del report, x, y
