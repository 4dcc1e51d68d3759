"""Metrics of class scores, as the command line has them: slice by slice, no outputs kept."""

import math
from typing import Any

import torch
from torch.nn.functional import cross_entropy

from ._command_flags import UsageError
from ._command_parts import named

NAMES = ("top5", "balanced-accuracy", "macro-f1", "perplexity")


class _Counts:
    """Of scores [n, classes, ...] and classes [n, ...], what all metrics are made of."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._names = names
        self.reset()

    def reset(self) -> None:
        self._samples = self._in_five = self._loss = 0.0
        self._by_class: torch.Tensor | None = None  # actual, predicted, right

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        classes = outputs.shape[1]
        best = outputs.argmax(1)
        if "top5" in self._names:
            five = outputs.topk(min(5, classes), 1).indices
            self._in_five += float((five == targets.unsqueeze(1)).sum())
        if "perplexity" in self._names:
            self._loss += float(cross_entropy(outputs, targets, reduction="sum"))
        self._samples += targets.numel()
        parts = (targets, best, best[best == targets])
        more = torch.stack([p.flatten().bincount(minlength=classes).double().cpu() for p in parts])
        self._by_class = more if self._by_class is None else self._by_class + more

    def value(self, name: str) -> float:
        assert self._by_class is not None
        actual, predicted, right = self._by_class
        if name == "top5":
            return self._in_five / self._samples
        if name == "perplexity":
            return math.exp(self._loss / self._samples)
        if name == "balanced-accuracy":
            return float((right / actual)[actual > 0].mean())
        if name == "macro-f1":
            either = actual + predicted
            return float((2 * right / either)[either > 0].mean())
        return float(right.sum()) / self._samples


class _Value:
    """One metric of shared counts, which the first one of them updates."""

    def __init__(self, counts: _Counts, name: str, updates: bool) -> None:
        self._counts, self._name, self._updates = counts, name, updates

    def reset(self) -> None:
        self._counts.reset()

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        if self._updates:
            self._counts.update(outputs, targets)

    def compute(self) -> float:
        return self._counts.value(self._name)


def metrics_of(text: str, of_classes: bool) -> Any:
    """Metrics as `Trainer.evaluate` takes them; accuracy and those that were asked for."""
    if ":" in text:
        return named("--metrics", text)()
    asked = tuple(part.strip() for part in text.split(",") if part.strip())
    for name in asked:
        if name not in NAMES:
            raise UsageError(
                f"--metrics {name} is not known; use {', '.join(NAMES[:-1])} or {NAMES[-1]}, or "
                f"package.module:factory"
            )
    if not of_classes:
        if asked:
            raise UsageError(
                f"--metrics {text} needs class scores, which --loss CrossEntropyLoss and NLLLoss "
                f"have; leave it out, or give package.module:factory"
            )
        return None
    counts = _Counts(asked)
    return {name: _Value(counts, name, not i) for i, name in enumerate(("accuracy", *asked))}
