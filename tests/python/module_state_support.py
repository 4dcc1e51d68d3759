"""What tests of state that forward leaves behind share: models around a forward of one's own."""

from typing import Any

import torch
from support import Calls
from torch import nn

CRITERION = nn.CrossEntropyLoss()


def layers(forward: Any) -> nn.Module:
    layer, slow = nn.Linear(6, 8), nn.Linear(6, 8).requires_grad_(False)
    return Calls(forward, layer=layer, slow=slow, head=nn.Linear(8, 5)).double()


def from_first_batch(forward: Any) -> nn.Module:
    shift, scale = nn.Parameter(torch.zeros(6)), nn.Parameter(torch.ones(6))
    return Calls(
        forward, shift=shift, scale=scale, head=nn.Linear(6, 5), ready=torch.tensor(False)
    ).double()
