"""The micro-batch size of a peer, chosen as ours is: the fastest that stays inside some memory."""

from collections.abc import Callable

from contestants import Contestant
from harness.clock import interleave
from harness.ratios import median

FACTORS, ROUNDS = (0.25, 0.5, 1, 1.5, 2), 3


def fastest_that_fits(make: Callable[[int], Contestant], size: int, room: int) -> Contestant:
    """Of the sizes from a quarter of `size` to twice as many: the fastest that needs no more than
    `room` bytes above what was there."""
    tried = {}
    for each in sorted({max(1, round(size * factor)) for factor in FACTORS}):
        contestant = make(each)
        contestant()
        if contestant.peak_bytes() <= room:
            tried[each] = contestant
    if len(tried) < 2:
        return next(iter(tried.values()), make(size))
    samples = interleave(tried, ROUNDS, warm_up=1)
    return tried[min(tried, key=lambda each: median(samples[each], "cpu"))]
