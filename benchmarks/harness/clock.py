"""Times contestants in turn, so that whatever disturbs the machine disturbs all of them alike."""

import gc
import random
import resource
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

LEAST_ROUNDS = 3


@dataclass(frozen=True, slots=True)
class Sample:
    """One run of one contestant."""

    wall: float  #: seconds
    cpu: float  #: seconds of this process, all of its threads
    page_faults: int  #: pages that the kernel had to hand out


class Stopwatch:
    """Runs from its making on."""

    def __init__(self) -> None:
        self._faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        self._cpu, self._wall = time.process_time(), time.perf_counter()

    def read(self) -> Sample:
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        faults = resource.getrusage(resource.RUSAGE_SELF).ru_minflt - self._faults
        return Sample(wall, cpu, faults)


def measure(run: Callable[[], object]) -> Sample:
    watch = Stopwatch()
    run()
    return watch.read()


def interleave(
    contestants: Mapping[str, Callable[[], object]],
    rounds: int,
    warm_up: int = 2,
    at_most: float = float("inf"),
    measure: Callable[[Callable[[], Any]], Sample] = measure,
) -> dict[str, list[Sample]]:
    """Runs every contestant once a round, in an order that changes from round to round.

    Args:
        contestants: what to run, by name.
        rounds: how many samples each gives; sample i of all of them belongs to round i.
        warm_up: rounds before the first that counts.
        at_most: seconds after which no further round begins, once LEAST_ROUNDS are done.
        measure: runs a contestant and says what that took.
    """
    order = list(contestants)
    shuffle = random.Random(0).shuffle
    samples: dict[str, list[Sample]] = {name: [] for name in order}
    collects = gc.isenabled()
    gc.collect()
    start = time.monotonic()
    gc.disable()  # a collection would hit one contestant and empty the caches for the next
    try:
        for turn in range(-warm_up, rounds):
            if turn >= LEAST_ROUNDS and time.monotonic() - start > at_most:
                break
            shuffle(order)
            for name in order:
                sample = measure(contestants[name])
                if turn >= 0:
                    samples[name].append(sample)
    finally:
        if collects:
            gc.enable()
    return samples
