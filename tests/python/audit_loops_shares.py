"""Wrong loops that give slices other shares than they have of the loss."""

from typing import Any

import torch
from audit_loops import IGNORING, WEIGHTED, Loop, N, X, Y, accumulate, clip_value, each, net, of
from audit_support import contrastive
from torch import nn


def contrast(model: Any, batch: Any) -> torch.Tensor:
    return contrastive(model(batch[0]))


SHARES: dict[str, Loop] = {
    "a wrong sum that is clipped": Loop(
        accumulate(weight=lambda p, b: 1.0, then=of(clip_value)), "no_division mean_of_means"
    ),
    "mean of means": Loop(accumulate(weight=each), "mean_of_means"),
    "not divided": Loop(accumulate(weight=lambda p, b: 1.0), "no_division", batch=(X[:12], Y[:12])),
    "divided as if all were full": Loop(
        accumulate(weight=lambda p, b: len(p[0]) / 16), "divided_by_nominal"
    ),
    "divided twice": Loop(accumulate(weight=lambda p, b: len(p[0]) / N / 4), "divided_twice"),
    "ignored labels, by samples": Loop(accumulate(), "weighted_by_samples", batch=(X, IGNORING)),
    "class weights, by samples": Loop(
        accumulate(criterion=WEIGHTED),
        "weighted_by_samples",
        true_loss=lambda m, b: WEIGHTED(m(b[0]), b[1]),
    ),
    "BatchNorm of each slice": Loop(
        accumulate(), "batch_norm", model=lambda: net(nn.BatchNorm1d(8))
    ),
    "negatives of each slice": Loop(
        accumulate(criterion=lambda z, y: contrastive(z)),
        "fraction_of_negatives",
        loss=contrast,
        true_loss=contrast,
    ),
    "a scale that is not undone": Loop(
        accumulate(weight=lambda p, b: 1024 * len(p[0]) / N), "other_factor"
    ),
}
