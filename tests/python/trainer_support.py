"""Small trainings for the tests of Trainer."""

from typing import Any

import infinitybatch as ib
import torch
from torch import nn

X = torch.randn(50, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
Y = torch.randint(4, (50,), generator=torch.Generator().manual_seed(2))
BATCHES = list(zip(X.split(20), Y.split(20), strict=True))  # 20, 20, 10


def net(dropout: bool = True, batch_norm: bool = False) -> nn.Sequential:
    torch.manual_seed(3)
    layers: list[nn.Module] = [nn.Linear(6, 8), nn.ReLU()]
    if batch_norm:
        layers.append(nn.BatchNorm1d(8))
    if dropout:
        layers.append(nn.Dropout(0.3))
    return nn.Sequential(*layers, nn.Linear(8, 4)).double()


def dataset() -> Any:
    return torch.utils.data.TensorDataset(X, Y)


def shuffled() -> Any:
    return torch.utils.data.DataLoader(dataset(), batch_size=20, shuffle=True)


def trainer(model: nn.Module | None = None, **options: Any) -> ib.Trainer:
    model = net() if model is None else model
    optimizer = options.pop("optimizer", None) or torch.optim.Adam(model.parameters(), lr=0.01)
    loader = options.pop("loader", BATCHES)
    options.setdefault("micro_batch_size", 7)
    return ib.Trainer(model, nn.CrossEntropyLoss(), optimizer, loader, **options)


def bits(model: nn.Module) -> list[torch.Tensor]:
    return [t.detach().clone() for t in model.state_dict().values()]


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))
