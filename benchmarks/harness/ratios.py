"""Ratios of paired samples, with an interval that says how far to trust them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from .clock import Sample

RESAMPLES = 4000


@dataclass(frozen=True, slots=True)
class Ratio:
    """The median of the rounds' ratios and its 95 % bootstrap interval."""

    median: float
    low: float
    high: float
    rounds: int

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """ours / theirs, round by round.

    The interval is the percentile bootstrap of the median (Efron and Tibshirani, An Introduction to
    the Bootstrap, 1993, chapter 13): rounds are drawn with replacement, always with the same seed.

    Raises:
        ValueError: where the two do not pair.
    """
    if len(ours) != len(theirs) or not len(ours):
        raise ValueError(f"{len(ours)} samples do not pair with {len(theirs)}")
    ratios = np.asarray(ours, float) / np.asarray(theirs, float)
    draws = np.random.default_rng(0).integers(len(ratios), size=(RESAMPLES, len(ratios)))
    medians = np.median(ratios[draws], axis=1)
    low, high = np.percentile(medians, [2.5, 97.5])
    return Ratio(float(np.median(ratios)), float(low), float(high), len(ratios))


def ratio_of(ours: Sequence[Sample], theirs: Sequence[Sample], clock: str) -> Ratio:
    """`paired` of one clock: "cpu" or "wall"."""
    return paired([getattr(s, clock) for s in ours], [getattr(s, clock) for s in theirs])


def median(samples: Sequence[Sample], clock: str) -> float:
    return float(np.median([getattr(sample, clock) for sample in samples]))
