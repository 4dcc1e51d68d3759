"""What tests of wrapped modules inside a budget share: models, peaks, live bytes."""

import gc

import infinitybatch as ib
import torch
from torch import nn
from wrap_support import contrastive


def wide():
    body = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 256), nn.Tanh())
    return nn.Sequential(body, nn.Linear(256, 16)).double(), torch.randn(128, 64).double()


def conv():
    net = nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(inplace=True),
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 64, 16),
    )
    return net.double(), torch.randn(128, 3, 16, 16).double()


def peak_of(step):
    """The most that was live while `step` ran, whoever held it."""
    gc.collect()
    ib.memory.reset_peak()
    step()
    return ib.memory.stats().peak


def live():
    gc.collect()
    return ib.memory.stats().live


def needs(make, size, calls=1):
    """Peak of a step in micro-batches of `size`, above what is live before it."""
    model, x = make()
    model = ib.wrap(model, micro_batch_size=size)
    before = live()
    step = lambda: sum(contrastive(model(x)) for _ in range(calls)).backward()  # noqa: E731
    return peak_of(step) - before
