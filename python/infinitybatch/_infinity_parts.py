"""The parts of an InfinityBatch: its containers, where a loop of the user's own is, its output."""

import io
import sys
from dataclasses import replace
from typing import Any

from torch import Tensor

from .callbacks import BatchEnd, Failure, RunEnd
from .histories import History


class Containers(History):
    """Counts epochs from where they were cleared; leaves no gradients behind a run, which would add
    to those of a loop of the user's own."""

    first = 0

    def on_batch_end(self, event: BatchEnd) -> None:
        super().on_batch_end(replace(event, epoch=event.epoch - self.first))

    def on_run_end(self, event: RunEnd) -> None:
        event.trainer.zero_grad()

    def on_failure(self, event: Failure) -> None:
        super().on_failure(event)
        event.trainer.zero_grad()


class OwnLoop:
    """Where a loop of the user's own is."""

    def __init__(self) -> None:
        self.epoch = self.batch = 0
        self.stepped = False
        self.in_epoch = False  # epochstart_ was called, and no run since
        self.steps = 0  # of this epoch
        self.samples = self.counted = 0  # of the last batch_; that `sum` is of
        self.sum: Any = 0.0
        self.drop()

    def count(self, loss: Tensor | float) -> None:
        value = loss.detach() if isinstance(loss, Tensor) else loss
        if isinstance(value, Tensor):
            self.last = value
        self.sum = self.sum + value * self.samples  # read when a schedule asks for it
        self.counted += self.samples

    def drop(self) -> None:
        self.inputs: Any = None
        self.outputs: Any = None
        self.loss: Tensor | None = None
        self.last: Tensor | None = None  # what a schedule reads


class Switch(io.TextIOBase):
    """Standard error, as long as it is on."""

    on = True

    def write(self, text: str) -> int:
        return sys.stderr.write(text) if self.on else len(text)

    def flush(self) -> None:
        sys.stderr.flush()

    def isatty(self) -> bool:
        return sys.stderr.isatty()
