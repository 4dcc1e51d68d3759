"""Training loops for audits: right ones, and the same with a bug planted."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import infinitybatch as ib
import torch
from support import Calls
from torch import nn
from torch.nn import functional as F

N = 26
X = torch.randn(
    N, 6, dtype=torch.float64, generator=torch.Generator(torch.get_default_device()).manual_seed(1)
)
Y = torch.randint(5, (N,), generator=torch.Generator(torch.get_default_device()).manual_seed(2))
CRITERION = nn.CrossEntropyLoss()


def loss(model: Any, batch: Any) -> torch.Tensor:
    return CRITERION(model(batch[0]), batch[1])


def loader(batch_size: int = 4, samples: int = 24, x: Any = X, y: Any = Y) -> Any:
    data = torch.utils.data.TensorDataset(x[:samples], y[:samples])
    return torch.utils.data.DataLoader(data, batch_size=batch_size)


def net(*inner: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *inner, nn.Tanh(), nn.Linear(8, 5)).double()


def with_dropout() -> nn.Sequential:
    """Two layers that draw: in one alone slices draw what the whole batch draws."""
    return net(nn.Dropout(0.3), nn.Linear(8, 8), nn.Dropout(0.3))


def sgd(model: nn.Module, rate: float = 0.1) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=rate)


def windows(batches: Iterable[Any], count: int) -> Iterator[list[Any]]:
    """Micro-batches of one step; the last window may be shorter."""
    window = []
    for batch in batches:
        window.append(batch)
        if len(window) == count:
            yield window
            window = []
    if window:
        yield window


def accumulate(
    model: nn.Module,
    optimizer: Any,
    batches: Iterable[Any],
    weight: Callable[[list[int], int], float],
    *,
    count: int = 3,
    criterion: Any = CRITERION,
    between: Callable[[], Any] = lambda: None,
    before: Callable[[], Any] = lambda: None,
    zero: bool = True,
) -> None:
    """Accumulation by hand: `weight(sizes, i)` is the factor of micro-batch i's own loss."""
    for window in windows(batches, count):
        sizes = [len(x) for x, _ in window]
        for i, (x, y) in enumerate(window):
            (criterion(model(x), y) * weight(sizes, i)).backward()
            between()
        before()
        optimizer.step()
        if zero:
            optimizer.zero_grad()


def share(sizes: list[int], i: int) -> float:
    return sizes[i] / sum(sizes)


def each(sizes: list[int], i: int) -> float:
    return 1 / len(sizes)


def codes(report: Any) -> list[str]:
    return [cause.code for cause in report.causes]


def watched(
    run: Callable[[Any, Any, Any], Any], model: Any = None, batches: Any = None, **options: Any
) -> Any:
    """The watch after `run(model, optimizer, loader)`."""
    model = net() if model is None else model
    optimizer = options.pop("optimizer", None) or sgd(model)
    batches = loader() if batches is None else batches
    with ib.audit.watch(model, optimizer, batches, **options) as watch:
        run(model, optimizer, watch.loader)
    return watch


def contrastive(outputs: torch.Tensor) -> torch.Tensor:
    z = F.normalize(outputs, dim=-1)
    return F.cross_entropy(z @ z.roll(1, 1).T / 0.2, torch.arange(len(z)))


def centred() -> nn.Module:
    """Combines samples by hand."""
    return Calls(lambda self, x: self.net(x - x.mean(0)), net=net())
