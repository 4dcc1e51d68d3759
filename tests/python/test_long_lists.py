"""Tensors that forward leaves in a container which is too long for its items to be kept."""

import infinitybatch as ib
import pytest
import torch
from torch import nn


class Recurrent(nn.Module):
    """Leaves a tensor for its next call, among `length` items."""

    def __init__(self, kind, length):
        super().__init__()
        self.layer = nn.Linear(3, 2)
        self.kept = [0] * length if kind is list else dict.fromkeys(range(length), 0)
        if kind is tuple:
            self.kept = (self.kept,)

    def forward(self, x):
        h = self.layer(x)
        kept = self.kept[0] if isinstance(self.kept, tuple) else self.kept
        if isinstance(kept[3], torch.Tensor):
            h = h + kept[3].mean()
        kept[3] = h.detach()
        return h


@pytest.mark.parametrize("kind", [list, dict, tuple])
@pytest.mark.parametrize("length", [8, 2000])
def test_what_the_next_micro_batch_reads_is_refused_by_name(kind, length):
    torch.manual_seed(0)
    model = Recurrent(kind, length)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=2)
    x, y = torch.randn(6, 3), torch.randint(2, (6,))
    with pytest.raises(ib.CouplingError, match="kept"):
        batch.backward(x, y)
    assert all(parameter.grad is None for parameter in model.parameters())
