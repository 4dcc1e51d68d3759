"""Statistics of a training in files: JSON lines, CSV, TensorBoard.

trainer = ib.Trainer(..., callbacks=ib.statistics.JsonLines("run.jsonl"))
"""

import os
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from . import _checks
from ._row_files import CsvRows, JsonRows, plain
from .callbacks import (
    BatchBegin,
    BatchEnd,
    Callback,
    CheckpointSaved,
    EpochEnd,
    EvaluationEnd,
    Failure,
    RunBegin,
    RunEnd,
)
from .errors import Unsupported

__all__ = ["Csv", "JsonLines", "Statistics", "TensorBoard"]

Kind = Literal["batch", "epoch", "evaluation"]
AnyPath = str | os.PathLike[str]


class Statistics(Callback, ABC):
    """Makes a row of each event; a subclass writes it somewhere.

    Columns of a batch: epoch, step, batch, loss, samples, seconds, learning_rate (of the first
    group), peak_bytes, micro_batch_size, restarts. Of an epoch: epoch, step, loss, samples, batches,
    seconds, learning_rate. Of an evaluation: epoch, step, loss, samples, seconds, and its metrics.
    """

    _began = 0.0

    @abstractmethod
    def write(self, kind: str, row: Mapping[str, Any]) -> None:
        """`kind`: "batch", "epoch", "evaluation", or what happens rarely: "run", "end",
        "checkpoint", "failure"."""

    def on_batch_begin(self, event: BatchBegin) -> None:
        self._began = time.perf_counter()

    def on_batch_end(self, event: BatchEnd) -> None:
        sizes = event.report.micro_batch_sizes if event.report else []
        self.write(
            "batch",
            {
                "epoch": event.epoch,
                "step": event.step,
                "batch": event.batch,
                "loss": event.loss,
                "samples": event.samples,
                "seconds": time.perf_counter() - self._began,
                "learning_rate": _first(event.learning_rates),
                "peak_bytes": event.report.peak_bytes if event.report else None,
                "micro_batch_size": max(sizes, default=None),
                "restarts": event.report.restarts if event.report else None,
            },
        )

    def on_epoch_end(self, event: EpochEnd) -> None:
        self.write(
            "epoch",
            {
                "epoch": event.epoch,
                "step": event.step,
                "loss": event.loss,
                "samples": event.samples,
                "batches": event.batches,
                "seconds": event.seconds,
                "learning_rate": _first(event.learning_rates),
            },
        )

    def on_evaluation_end(self, event: EvaluationEnd) -> None:
        own = {
            "epoch": event.epoch,
            "step": event.step,
            "loss": event.loss,
            "samples": event.samples,
            "seconds": event.seconds,
        }
        metrics = {
            f"metric_{name}" if name in own else name: value
            for name, value in event.metrics.items()
        }
        self.write("evaluation", own | metrics)

    def on_run_begin(self, event: RunBegin) -> None:
        self.write("run", {"epoch": event.epoch, "step": event.step, "epochs": event.epochs})

    def on_run_end(self, event: RunEnd) -> None:
        self.write("end", {"epoch": event.epoch, "step": event.step, "stopped": event.stopped})

    def on_checkpoint_saved(self, event: CheckpointSaved) -> None:
        self.write(
            "checkpoint", {"epoch": event.epoch, "step": event.step, "path": str(event.path)}
        )

    def on_failure(self, event: Failure) -> None:
        exception = f"{type(event.exception).__name__}: {event.exception}"
        self.write(
            "failure", {"epoch": event.epoch, "step": event.step, "exception": exception[:1000]}
        )


class JsonLines(Statistics):
    """One JSON object a line for each batch, epoch, evaluation, checkpoint, run and failure; its
    "event" says which, its "time" when (seconds since 1970).

    Each line is handed to the system as a whole when it happens, so that a killed run leaves whole
    lines. A run that goes on from a checkpoint appends: of two rows of one step the later counts.

    Args:
        path: of the file; its folder is made.
        batches: whether batches are written, or only what is rarer.
        append: False replaces a file that is there.

    Raises:
        InvalidType: no path. OSError, later: the file cannot be written.
    """

    def __init__(self, path: AnyPath, *, batches: bool = True, append: bool = True) -> None:
        self._rows = JsonRows(
            Path(_checks.path("path", path)), append=_checks.truth("append", append)
        )
        self._batches = _checks.truth("batches", batches)

    def write(self, kind: str, row: Mapping[str, Any]) -> None:
        if self._batches or kind != "batch":
            self._rows.write({"event": kind, "time": time.time(), **row})


class Csv(Statistics):
    """Comma separated values under a line of names: one row for each batch, epoch or evaluation.

    Whole lines and appended runs as with `JsonLines`. Metrics that come later become columns of
    their own, empty above.

    Args:
        path: of the file; its folder is made.
        rows: "batch", "epoch" or "evaluation".
        append: False replaces a file that is there.

    Raises:
        InvalidType, InvalidArgument: no path, other rows. OSError, later: the file cannot be written.
    """

    def __init__(self, path: AnyPath, rows: Kind = "epoch", *, append: bool = True) -> None:
        self._kind = _checks.one_of("rows", rows, "batch", "epoch", "evaluation")
        self._rows = CsvRows(
            Path(_checks.path("path", path)), append=_checks.truth("append", append)
        )

    def write(self, kind: str, row: Mapping[str, Any]) -> None:
        if kind == self._kind:
            self._rows.write(row)


class TensorBoard(Statistics):
    """Scalars of batches, epochs and evaluations for TensorBoard, under their steps.

    Args:
        folder: for event files; a run that goes on appends to it, and hides what an earlier one
            wrote for the same steps.
        batches: whether batches are written, or only epochs and evaluations.

    Raises:
        Unsupported: the package tensorboard is not installed.
    """

    def __init__(self, folder: AnyPath, *, batches: bool = True) -> None:
        self._folder = _checks.path("folder", folder)
        self._batches = _checks.truth("batches", batches)
        try:
            self._make = import_module("torch.utils.tensorboard").SummaryWriter
        except ImportError as error:
            raise Unsupported(
                f"TensorBoard needs a package that is missing ({error}): pip install tensorboard"
            ) from error
        self._writer: Any = None

    def on_run_begin(self, event: RunBegin) -> None:
        if self._writer is None:
            self._writer = self._make(self._folder, purge_step=event.step or None)

    def write(self, kind: str, row: Mapping[str, Any]) -> None:
        if kind not in ("batch", "epoch", "evaluation") or kind == "batch" and not self._batches:
            return
        if self._writer is None:  # an evaluation before any run
            self._writer = self._make(self._folder)
        for name, value in row.items():
            number = plain(value)
            if name in ("epoch", "step", "batch") or not isinstance(number, int | float):
                continue
            # Of the last step before it: what is purged later are the steps that are done again.
            step = row["step"] if kind == "batch" else max(0, row["step"] - 1)
            self._writer.add_scalar(f"{kind}/{name}", number, step)
        self._writer.flush()


def _first(rates: tuple[float, ...]) -> float | None:
    return rates[0] if rates else None
