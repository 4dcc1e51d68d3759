"""Every micro-batch size that fits, timed against the one that the planner chose."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import infinitybatch as ib
from contestants import Ours
from harness.clock import Sample, interleave
from harness.ratios import Ratio, median, paired

STRETCH = 512  # rows of a larger batch that each size is timed on, about
GRID = 1.3  # between neighbouring sizes of a larger batch
HOPELESS = 1.5
FIRST_ROUNDS = 2


@dataclass
class Sweep:
    tried: list[int]  #: sizes that fit and were timed
    dropped: list[int]  #: after the first rounds
    largest: int  #: that fits
    fastest: int
    wall: Ratio  #: chosen ÷ fastest, per sample
    cpu: Ratio
    seconds_per_sample: dict[int, float]


def rows_of(batch: Any, count: int) -> Any:
    """The first `count` rows of tensors or of a source."""
    if isinstance(batch, ib.BatchSource):
        return ib.BatchSource(count, batch.rows)
    return batch[:count]


def even_sizes(batch_size: int) -> list[int]:
    """Every size that splits the batch evenly in a way of its own."""
    return sorted({-(-batch_size // count) for count in range(1, batch_size + 1)})


def grid_sizes(batch_size: int) -> list[int]:
    sizes, size = [], 1.0
    while size <= min(batch_size, STRETCH):
        sizes.append(round(size))
        size = max(size * GRID, size + 1)
    return sizes


class Runner:
    """Steps of fixed sizes under the budget, all of them on one model."""

    def __init__(self, ours: Ours, budget: int) -> None:
        self.ours, self.budget = ours, budget
        self.batch_size = len(ours.targets)

    def rows(self, size: int) -> int:
        """A whole batch where it is small, else whole micro-batches of about STRETCH rows."""
        if self.batch_size <= STRETCH:
            return self.batch_size
        return size * max(1, round(STRETCH / size))

    def step(self, size: int) -> Callable[[], object]:
        model = self.ours.model
        batch = ib.VirtualBatch(
            model, self.ours.loss, memory_budget=self.budget, micro_batch_size=size
        )
        rows = self.rows(size)
        inputs, targets = rows_of(self.ours.inputs, rows), rows_of(self.ours.targets, rows)

        def run() -> None:
            model.zero_grad(set_to_none=True)
            batch.backward(inputs, targets)

        return run

    def fits(self, size: int) -> bool:
        try:
            self.step(size)()
        except ib.BudgetExceeded:
            return False
        return True

    def largest(self, sizes: list[int]) -> int:
        """The largest size that fits, by bisection between the sizes."""
        low = max((size for size in sizes if self.fits(size)), default=0)
        high = min((size for size in sizes if size > low), default=low + 1)
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.fits(middle) else (low, middle)
        return low


def sweep(ours: Ours, budget: int, chosen: int, rounds: int) -> Sweep:
    runner = Runner(ours, budget)
    small = runner.batch_size <= STRETCH
    sizes = even_sizes(runner.batch_size) if small else grid_sizes(runner.batch_size)
    largest = runner.largest(sizes)
    # An uneven end would make the largest that fits slower than the plan, which splits evenly.
    sizes = [size for size in sizes if size <= largest]
    sizes = sorted({*sizes, chosen, *([] if small else [largest])})
    steps = {size: runner.step(size) for size in sizes}

    def per_sample(taken: list[Sample], size: int, clock: str) -> list[float]:
        return [getattr(sample, clock) / runner.rows(size) for sample in taken]

    first = timed(steps, FIRST_ROUNDS, 1)
    best = min(median(first[size], "wall") / runner.rows(size) for size in sizes)
    slow = HOPELESS * best
    kept = [s for s in sizes if s == chosen or median(first[s], "wall") / runner.rows(s) <= slow]
    taken = timed({size: steps[size] for size in kept}, 2 * max(2, rounds // 2), 0)
    walls = {size: per_sample(taken[size], size, "wall") for size in kept}
    cpus = {size: per_sample(taken[size], size, "cpu") for size in kept}
    fastest = min(kept, key=lambda size: sorted(walls[size][::2])[len(walls[size]) // 4])
    return Sweep(
        tried=sizes,
        dropped=[size for size in sizes if size not in kept],
        largest=largest,
        fastest=fastest,
        wall=paired(walls[chosen][1::2], walls[fastest][1::2]),
        cpu=paired(cpus[chosen][1::2], cpus[fastest][1::2]),
        seconds_per_sample={size: sorted(walls[size])[len(walls[size]) // 2] for size in kept},
    )


def timed(
    steps: dict[int, Callable[[], object]], rounds: int, warm_up: int
) -> dict[int, list[Sample]]:
    named = {str(size): step for size, step in steps.items()}
    return {int(name): taken for name, taken in interleave(named, rounds, warm_up).items()}
