"""What user code keeps past every op (`.data`) and reads while it is offloaded: a typed error."""

from typing import Any

import infinitybatch as ib
import pytest
import torch
from support import Calls
from torch import nn

OPTIONS: dict[str, Any] = {"micro_batch_size": 3, "retained_micro_batches": 99, "offload": "always"}


def model_that_keeps(kept: list[torch.Tensor], how: str) -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x).tanh()
        kept.append(hidden.data if how == "data" else hidden.detach())
        return self.last(hidden)

    torch.manual_seed(0)
    return Calls(forward, first=nn.Linear(6, 800), last=nn.Linear(800, 5)).double()


@pytest.mark.parametrize("how", ["data", "detach"])
def test_a_loss_that_reads_what_is_offloaded(how: str) -> None:
    kept: list[torch.Tensor] = []
    model = model_that_keeps(kept, how)

    def criterion(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return (outputs @ outputs.T).logsumexp(1).mean() + 0 * sum(k.sum() for k in kept)

    batch = ib.VirtualBatch(model, ib.losses.coupled(criterion), **OPTIONS)
    x, y = torch.randn(12, 6, dtype=torch.float64), torch.zeros(12)
    if how == "detach":  # Python holds it, so it stays
        batch.backward(x, y)
        return
    with pytest.raises(ib.StateError, match=r'offloaded until backward .* offload="never"'):
        batch.backward(x, y)
    assert all(p.grad is None for p in model.parameters())
    kept.clear()
    never = ib.VirtualBatch(model, ib.losses.coupled(criterion), **{**OPTIONS, "offload": "never"})
    never.backward(x, y)
    assert all(p.grad is not None for p in model.parameters())


def test_a_wrapped_model_says_what_to_do() -> None:
    """Torch itself raises it there, in the user's own code."""
    kept: list[torch.Tensor] = []
    wrapped = ib.wrap(model_that_keeps(kept, "data"), **OPTIONS)
    outputs = wrapped(torch.randn(12, 6, dtype=torch.float64))
    with pytest.raises(RuntimeError, match=r'offloaded until backward .* offload="never"'):
        kept[0].sum()
    outputs.sum().backward()
