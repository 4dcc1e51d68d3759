"""What forward makes or writes past torch's operators, lists of outputs, settings under
`static_graph`: messages, and what they say to do."""

from typing import Any

import infinitybatch as ib
import torch
from followed_support import CRITERION, Case, X, Y, exact, gradients
from torch import nn

FACTOR = [1.0]


class Net(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(X.shape[1], 8), nn.Linear(8, 5)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.register_buffer("scale", torch.ones(8))
        self.to(X.dtype)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.hidden(torch.tanh(self.norm(self.first(x)))))

    def hidden(self, h: torch.Tensor) -> torch.Tensor:
        return h


class FirstDeviation(Net):
    def hidden(self, h: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "gain"):
            self.gain = nn.Parameter(1 / h.detach().std(0))
        return h * self.gain


class ThroughNumPy(Net):
    def hidden(self, h: torch.Tensor) -> torch.Tensor:
        self.scale.numpy()[:] += 0.1
        return h * self.scale


class PerSample(Net):
    def forward(self, x: torch.Tensor) -> Any:
        return list(super().forward(x).split(1))


class Scaled(Net):
    """By what no module leads to."""

    def hidden(self, h: torch.Tensor) -> torch.Tensor:
        return h * FACTOR[0]


class ScaledByAttribute(Net):
    factor = 1.0

    def hidden(self, h: torch.Tensor) -> torch.Tensor:
        return h * self.factor


def deviated_once_over_all() -> None:
    model = FirstDeviation()
    with torch.no_grad():
        model(X)
    exact(model, micro_batch_size=1)


def joined(outputs: Any) -> torch.Tensor:
    return torch.cat(outputs)


def list_of_samples(**options: Any) -> None:
    model = PerSample()
    native = Net()
    CRITERION(joined(ib.wrap(model, **options)(X)), Y).backward()
    CRITERION(native(X), Y).backward()
    for one, wanted in zip(gradients(model), gradients(native), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-10, atol=1e-12)


def steps_with_another_factor(model: Net, change: Any) -> None:
    step = ib.VirtualBatch(
        model, nn.CrossEntropyLoss(), micro_batch_size=len(X) // 3, static_graph=True
    )
    try:
        for number in range(8):
            if number == 4:
                change(model)
            step.backward(X, Y)
    finally:
        FACTOR[0] = 1.0


CASES: list[Case] = [
    (
        "and the samples of one micro-batch give NaN in it",
        lambda: exact(FirstDeviation(), micro_batch_size=1),
        lambda: (deviated_once_over_all(), exact(FirstDeviation(), memory_budget="1GiB")),
    ),
    (
        "by what is no operator of torch's (NumPy, a pointer), so that a recording does not tell which values its ops have read",
        lambda: exact(ThroughNumPy(norm=True), micro_batch_size=4),
        lambda: exact(ThroughNumPy(norm=True), memory_budget="1GiB"),
    ),
    (
        "which micro-batches do not give as the whole batch does. Return one tensor with a row for each sample, as in torch.stack(outputs)",
        lambda: list_of_samples(micro_batch_size=1),
        lambda: (
            exact(Net(), wrapped=True, micro_batch_size=1),
            list_of_samples(memory_budget="1GiB"),
        ),
    ),
    (
        "What decides it has to be an argument of forward, or an attribute of a module",
        lambda: steps_with_another_factor(Scaled(), lambda model: FACTOR.__setitem__(0, 2.0)),
        lambda: steps_with_another_factor(
            ScaledByAttribute(), lambda model: setattr(model, "factor", 2.0)
        ),
    ),
]
