"""What tests of wrapped modules with ops that see the whole batch share: models, their
buffers, live bytes."""

import gc

import infinitybatch as ib
import torch
from support import Calls
from test_across_batch import minibatch_deviation
from torch import nn


def buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.double() for name, buffer in module.named_buffers()}


def small() -> nn.Module:
    """Two layers, with statistics that are not where a fresh one starts."""
    module = nn.Sequential(
        nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 7), nn.BatchNorm1d(7)
    ).double()
    for norm in (module[1], module[4]):
        nn.init.normal_(norm.weight, 1.0, 0.3)
        nn.init.normal_(norm.running_mean)
    return module


def across_beside_batch_norm() -> nn.Module:
    def forward(self, x):
        x = torch.tanh(self.norm(self.first(x)))
        spread = ib.across_batch(minibatch_deviation, x) * x[:, :1].exp()
        return self.last(self.after(torch.cat([x, spread], 1)).sigmoid())

    return Calls(
        forward,
        first=nn.Linear(6, 8),
        norm=nn.BatchNorm1d(8),
        after=nn.BatchNorm1d(9),
        last=nn.Linear(9, 5),
    ).double()


def live() -> int:
    gc.collect()
    return ib.memory.stats().live
