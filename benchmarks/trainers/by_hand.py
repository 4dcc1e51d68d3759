"""Accumulation in plain PyTorch."""

from torch import nn

from .cases import IGNORED, Case
from .row import OneStep, Row

NOTES = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation"
LOSS = "https://docs.pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html"


def mean_of_means(case: Case, model: nn.Module) -> None:
    optimizer = OneStep(model)
    for inputs, targets in case.parts():
        (case.loss(model(inputs), targets) / case.steps).backward()
    optimizer.step()


def sum_over_count(case: Case, model: nn.Module) -> None:
    optimizer = OneStep(model)
    count = (case.targets != IGNORED).sum()
    for inputs, targets in case.parts():
        (case.loss(model(inputs), targets, reduction="sum") / count).backward()
    optimizer.step()


ROWS = [
    Row("PyTorch by hand", "mean loss `/ k`", NOTES, mean_of_means, ("torch",)),
    Row("PyTorch by hand", "sum of sample losses `/ N`", LOSS, sum_over_count, ("torch",)),
]
