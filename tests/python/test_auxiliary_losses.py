"""Models that return auxiliary logits while they train (Inception, segmentation), and losses with weights
of classes, an ignored class, weights of positives: over one micro-batch and over several."""

from collections import namedtuple
from typing import Any

import infinitybatch as ib
import pytest
import torch
from torch import nn
from wrap_support import close, grads

N, CLASSES = 13, 4
WEIGHTS = torch.tensor([0.1, 2.0, 0.5, 1.3], dtype=torch.float64)
Outputs = namedtuple("Outputs", ["logits", "aux_logits"])


class Auxiliary(nn.Module):
    def __init__(self, kind: str, norm: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.trunk = nn.Sequential(nn.Linear(6, 5, bias=False), nn.Tanh())
        if norm:
            self.trunk.insert(1, nn.BatchNorm1d(5))
        self.head, self.aux = nn.Linear(5, CLASSES), nn.Linear(5, CLASSES)
        self.kind = kind
        self.double()

    def forward(self, x: torch.Tensor) -> Any:
        h = self.trunk(x)
        if self.kind == "plain" or not self.training:
            return self.head(h) + self.aux(h)
        both = self.head(h), self.aux(h)
        if self.kind == "dict":
            return dict(zip(("out", "aux"), both, strict=True))
        return Outputs(*both) if self.kind == "named" else both


def auxiliary(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    both = outputs.values() if isinstance(outputs, dict) else outputs
    first, second = (nn.functional.cross_entropy(z, targets, weight=WEIGHTS) for z in both)
    return first + 0.4 * second


draws = torch.Generator().manual_seed(7)
X = torch.randn(N, 6, dtype=torch.float64, generator=draws)
NUMBERS = torch.randint(CLASSES, (N,), generator=draws)
SOME = NUMBERS.where(torch.arange(N) % 5 != 2, -100)
FLAGS = (torch.rand(N, CLASSES, generator=draws) > 0.4).double()
CASES: dict[str, tuple[str, Any, torch.Tensor]] = {
    "tuple": ("tuple", auxiliary, SOME),
    "dict": ("dict", auxiliary, SOME),
    "named": ("named", auxiliary, SOME),
    "weight": ("plain", nn.CrossEntropyLoss(weight=WEIGHTS), SOME),
    "sum": ("plain", nn.CrossEntropyLoss(weight=WEIGHTS, reduction="sum"), SOME),
    "smoothed": ("plain", nn.CrossEntropyLoss(weight=WEIGHTS, label_smoothing=0.1), SOME),
    "ignored": ("plain", nn.CrossEntropyLoss(ignore_index=3), NUMBERS),
    "positives": ("plain", nn.BCEWithLogitsLoss(pos_weight=WEIGHTS), FLAGS),
    "both": ("plain", nn.BCEWithLogitsLoss(weight=WEIGHTS, pos_weight=WEIGHTS.flip(0)), FLAGS),
}
OPTIONS: list[dict[str, Any]] = [
    {"memory_budget": "64MiB"},
    {"micro_batch_size": N},
    {"micro_batch_size": 4},
    {"micro_batch_size": 1},
]
pytestmark = pytest.mark.filterwarnings("ignore::infinitybatch.CoupledLossNotice")


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_natives(case, options, norm):
    kind, loss, targets = CASES[case]
    native = Auxiliary(kind, norm)
    loss(native(X), targets).backward()
    model = Auxiliary(kind, norm)
    wrapped = ib.wrap(model, **options)
    for _ in range(2):
        model.zero_grad()
        loss(wrapped(X), targets).backward()
        close(grads(model), grads(native), 1e-11)
    for each in (loss, ib.losses.coupled(loss)):
        model = Auxiliary(kind, norm)
        ib.VirtualBatch(model, each, **options).backward(X, targets)
        close(grads(model), grads(native), 1e-11)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("case", ["dict", "weight", "positives"])
def test_trainer_trains_as_a_loop(case, options):
    kind, loss, targets = CASES[case]
    native, model = Auxiliary(kind, True), Auxiliary(kind, True)
    sizes = [N, N, 7, 5]  # a last batch, and others that are smaller
    batches = [(X[:n], targets[:n]) for n in sizes]
    optimizer = torch.optim.SGD(native.parameters(), lr=0.1)
    for x, y in batches:
        optimizer.zero_grad()
        loss(native(x), y).backward()
        optimizer.step()
    ib.Trainer(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batches, **options)(1)
    close(dict(model.state_dict()), dict(native.state_dict()), 1e-11)
