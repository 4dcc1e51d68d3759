"""Memory that others hold for a while, a little more from step to step, then none again: what the
first steps taught of a sample that is cut still holds whenever there is more room."""

import gc

import infinitybatch as ib
import pytest
import torch
from torch import nn

STEPS = 20


class Block(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return x + torch.relu(self.layer(x))


NETS = {
    "conv": (lambda: nn.Conv1d(16, 16, 3, padding=1), (16, 256)),
    "linear": (lambda: nn.Linear(48, 48), (64, 48)),
}


@pytest.mark.parametrize("kind", NETS)
def test_no_step_begins_again_where_room_comes_and_goes(kind):
    layer, shape = NETS[kind]
    net = nn.Sequential(*[Block(layer()) for _ in range(24)])
    x, y = torch.randn(2, 2, *shape).unbind()
    whole = ib.VirtualBatch(net, nn.MSELoss(), micro_batch_size=1)
    whole.backward(x, y)
    gc.collect()
    live = ib.memory.stats("cpu").live
    room = (whole.backward(x, y).peak_bytes - live) // 2
    del whole
    net.zero_grad()
    gc.collect()
    most = room // 2
    budget = ib.memory.stats("cpu").live + room + most
    virtual = ib.VirtualBatch(net, nn.MSELoss(), memory_budget=budget)
    restarts = []
    for step in range(STEPS):
        held = torch.empty(most * ((step + 4) % 5) // 16)
        net.zero_grad()
        report = virtual.backward(x, y)
        assert report.strategy == "checkpoint"
        assert report.peak_bytes <= budget
        restarts.append(report.restarts)
        del report, held
    # Every room has been seen twice; then there is nothing left to learn.
    assert restarts[10:] == [0] * (STEPS - 10), restarts
