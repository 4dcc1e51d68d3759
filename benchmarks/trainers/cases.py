"""Tiny models, batches and losses in double precision, and the native whole batch's gradient of each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from measure import Named, gradients
from torch import nn
from torch.nn import functional

SIZE, SEED, IGNORED, CLASSES = 4, 5, -100, 5
Loss = Callable[..., torch.Tensor]


def labelled(outputs: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    return functional.cross_entropy(outputs, targets, ignore_index=IGNORED, reduction=reduction)


def contrastive(
    outputs: torch.Tensor, targets: torch.Tensor, reduction: str = "mean"
) -> torch.Tensor:
    """InfoNCE with the negatives in the batch, cosines times 20, of pairs: n × 2 × features. Pairs
    have no labels."""
    anchors, positives = functional.normalize(outputs, dim=-1).unbind(1)
    scores = 20.0 * anchors @ positives.T
    return functional.cross_entropy(scores, torch.arange(len(scores)), reduction=reduction)


class Pairs(nn.Module):
    """One encoder for both sides of n × 2 × features, first all anchors, then all positives."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.encoder(side) for side in inputs.unbind(1)], 1)


class Tokens(nn.Module):
    """Class scores of tokens: n × classes × length."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Embedding(11, 8), nn.Tanh(), nn.Linear(8, CLASSES))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs).transpose(1, 2)


def layers(*between: nn.Module) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Linear(8, CLASSES))


class SeedOnce:
    """Sets the random seed in front of the forward that meets the batch's first row: what loaders and
    trainers draw or try before does not decide which numbers dropout has."""

    def __init__(self, first: torch.Tensor) -> None:
        self.first, self.done = first, False

    def __call__(self, module: nn.Module, inputs: Any) -> None:
        row = inputs[0][0]
        if not self.done and row.device == self.first.device and torch.equal(row, self.first):
            self.done = True
            torch.manual_seed(SEED)


@dataclass(frozen=True)
class Case:
    """A logical batch that is taken in micro-batches of `SIZE`."""

    name: str
    module: Callable[[], nn.Module]
    inputs: torch.Tensor
    targets: torch.Tensor
    loss: Loss = labelled

    @property
    def steps(self) -> int:
        """Micro-batches, the last one of which may be smaller."""
        return -(-len(self.inputs) // SIZE)

    def parts(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return list(zip(self.inputs.split(SIZE), self.targets.split(SIZE), strict=True))

    def model(self, seeds: bool = True) -> nn.Module:
        """The same weights each time. Its first forward of the batch sets the seed, if it `seeds`."""
        torch.manual_seed(0)
        model = self.module().double()
        if seeds and isinstance(model, Pairs):
            model.encoder.register_forward_pre_hook(SeedOnce(self.inputs[0, 0]))
        elif seeds:
            model.register_forward_pre_hook(SeedOnce(self.inputs[0]))
        return model

    def native(self) -> Named:
        """The gradient of the whole batch at once."""
        model = self.model()
        self.loss(model(self.inputs), self.targets).backward()
        return gradients(model)

    def redrawn(self, by_side: bool = False) -> Named:
        """The whole batch's, where random layers draw for one micro-batch after the other; `by_side`:
        for those of all anchors, then for those of all positives."""
        model = self.model()
        if by_side:
            assert isinstance(model, Pairs)
            sides = [
                torch.cat([model.encoder(part) for part in side.split(SIZE)])
                for side in self.inputs.unbind(1)
            ]
            outputs = torch.stack(sides, 1)
        else:
            outputs = torch.cat([model(part) for part in self.inputs.split(SIZE)])
        self.loss(outputs, self.targets).backward()
        return gradients(model)


def _data() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(CLASSES, (12, 6), generator=draw)
    # One to six labels of a sequence count, fewest in the first micro-batch.
    counts = torch.tensor([1, 1, 2, 1, 4, 3, 5, 4, 6, 5, 6, 6])
    labels[torch.arange(6) >= counts[:, None]] = IGNORED
    return {
        "rows": torch.randn(13, 6, generator=draw, dtype=torch.double),
        "classes": torch.randint(CLASSES, (13,), generator=draw),
        "words": torch.randint(11, (12, 6), generator=draw),
        "labels": labels,
        "pairs": torch.randn(13, 2, 6, generator=draw, dtype=torch.double),
        "none": torch.zeros(13, dtype=torch.long),
    }


def _cases() -> tuple[dict[str, Case], dict[str, Case]]:
    data = _data()
    rows, classes = data["rows"], data["classes"]
    pairs, none = data["pairs"], data["none"]

    def dropped() -> nn.Module:
        return layers(nn.Dropout(0.3), nn.Tanh(), nn.Dropout(0.3))

    def normalised() -> nn.Module:
        return layers(nn.BatchNorm1d(8))

    everybody = [
        Case("equal parts", layers, rows[:12], classes[:12]),
        Case("ragged mean", layers, rows, classes),
        Case("ignored labels", Tokens, data["words"], data["labels"]),
        Case("contrastive", lambda: Pairs(layers()), pairs[:12], none[:12], contrastive),
        Case("BatchNorm", normalised, rows[:12], classes[:12]),
        Case("dropout", dropped, rows[:12], classes[:12]),
    ]
    # The same columns, for libraries that have losses of pairs only.
    of_pairs = [
        Case("ragged mean", lambda: Pairs(layers()), pairs, none, contrastive),
        Case("contrastive", lambda: Pairs(layers()), pairs[:12], none[:12], contrastive),
        Case("BatchNorm", lambda: Pairs(normalised()), pairs[:12], none[:12], contrastive),
        Case("dropout", lambda: Pairs(dropped()), pairs[:12], none[:12], contrastive),
    ]
    return {case.name: case for case in everybody}, {case.name: case for case in of_pairs}


CASES, OF_PAIRS = _cases()
