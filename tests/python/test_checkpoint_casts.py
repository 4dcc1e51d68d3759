"""Autocast keeps casts of leaves. What waits at a cut is none in forward, so each use of it has a cast,
and a gradient in half precision, of its own: a segment that is played must not share them."""

import infinitybatch as ib
import pytest
import torch
from torch import nn


class Branches(nn.Module):
    """Blocks that hand on one value in single precision, which three layers cast each for itself."""

    def __init__(self, blocks: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleList(nn.Linear(16, 64) for _ in range(3)) for _ in range(blocks)
        )
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for query, key, value in self.blocks:
            wide = torch.tanh(query(x) + key(x) * value(x))
            x = wide.float().unflatten(1, (16, 4)).sum(2)  # the narrowest place
        return self.head(x)


def gradients(offload: str, **options: object) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Branches()
    batch = ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=4, offload=offload, **options)
    for _ in range(2):
        model.zero_grad()
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16):
            batch.backward(torch.randn(8, 16), torch.randn(8, 1))
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("offload", ["never", "always"])
@pytest.mark.parametrize("segments", [4, 8])
def test_segments_cast_as_forward_does(segments: int, offload: str) -> None:
    """Bit for bit: kernels and their order are those of a micro-batch as a whole."""
    found = gradients(offload, checkpoint_segments=segments)
    assert all(map(torch.equal, found, gradients("never")))
