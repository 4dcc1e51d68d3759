"""How a training goes on, in a terminal, a notebook or a log."""

import sys
import time
from collections.abc import Iterable
from typing import Any, TextIO

from . import _progress_text as text
from .callbacks import (
    BatchBegin,
    BatchEnd,
    Callback,
    EpochBegin,
    EpochEnd,
    EvaluationEnd,
    Failure,
    RunBegin,
    RunEnd,
)
from .errors import Error, InvalidArgument, InvalidType

__all__ = ["Progress"]

DEFAULT_FIELDS = ("plan", "epoch", "batch", "loss", "seconds", "eta")


class Progress(Callback):
    """Shows epoch, batch, loss and what else you ask for as a training runs.

    In a terminal or a notebook one line changes in place (by tqdm: `pip install tqdm`); elsewhere,
    or without tqdm, lines follow each other. Each epoch and evaluation ends with a line that stays.

    Args:
        fields: in this order: "plan" (once, with a memory budget: the micro-batch size that it led
            to, and those that were tried), "epoch", "batch", "step", "loss", "samples", "seconds" (of a batch),
            "rate" (samples a second), "micro_batch_size", "peak" (of a step's memory),
            "learning_rate", "elapsed", "eta" (time left of this run), and names of metrics. What is
            not known, such as an eta before a second batch, is left out.
        interval: seconds from one line to the next within an epoch; by default 0.1 where a line
            changes in place, else 10. 0: each batch has one. None: only epochs and evaluations.
        format: instead of fields a format of your own: "{epoch}/{epochs} {loss:.3f}"; what is not
            known is "?".
        batches: in an epoch, where the trainer's loader has no length.
        file: where to; standard error.

    Raises:
        InvalidArgument, InvalidType: fields, a format or an interval that cannot be used.
    """

    def __init__(
        self,
        fields: Iterable[str] = DEFAULT_FIELDS,
        *,
        interval: float | None | str = "auto",
        format: str | None = None,
        batches: int | None = None,
        file: TextIO | None = None,
    ) -> None:
        if isinstance(fields, str):
            raise InvalidType(f'fields is {fields!r}, one string: Progress(["epoch", "loss"])')
        self._fields = tuple(fields)
        if any(not isinstance(name, str) for name in self._fields):
            raise InvalidType(f"fields must be names, not {self._fields!r}")
        self._format = text.checked_format(format)
        self._file = file
        self._interval = _interval(interval)
        self._batches = batches
        self._values: dict[str, Any] = {}
        self._display: text.PlainLines | text.Bar | None = None
        self._shown = 0.0
        self._times = text.Times()
        self._planned = format is not None
        self._batch: Any = None  # of the first step

    def on_run_begin(self, event: RunBegin) -> None:
        self._values = {"epochs": event.epoch + event.epochs}
        self._times = text.Times()
        file = self._file or sys.stderr
        self._display = text.find_display(file, with_bar=self._format is None)
        length = getattr(getattr(event.trainer, "loader", None), "__len__", None)
        if self._batches is None and length is not None:
            try:
                self._batches = length()
            except TypeError:  # a loader over an iterable dataset, windows of a generator
                pass

    def on_epoch_begin(self, event: EpochBegin) -> None:
        self._values |= {"epoch": event.epoch + 1, "batch": 0, "batches": self._batches}
        self._begin_line()

    def _begin_line(self) -> None:
        if self._display is not None:
            self._display.begin(self._batches)
            self._shown = time.monotonic()

    def on_batch_begin(self, event: BatchBegin) -> None:
        if "plan" in self._fields and not self._planned:
            self._batch = (event.inputs, event.targets)
        self._times.batch_begins()

    def on_batch_end(self, event: BatchEnd) -> None:
        seconds = self._times.batch_ends()
        report = event.report
        self._values |= {
            "epoch": event.epoch + 1,
            "batch": event.batch + 1,
            "batches": self._batches,
            "step": event.step + 1,
            "loss": event.loss,
            "samples": event.samples,
            "seconds": seconds,
            "rate": event.samples / seconds if seconds else None,
            "learning_rate": event.learning_rates[0] if event.learning_rates else None,
            "peak": report.peak_bytes if report else None,
            "micro_batch_size": max(report.micro_batch_sizes, default=None) if report else None,
            "elapsed": self._times.elapsed(),
            "eta": self._times.left(self._batches_left(event)),
        }
        if self._batch is not None:
            self._show_plan(event.trainer, *self._batch)
        self._maybe_show(event.batch + 1)

    def _show_plan(self, trainer: Any, inputs: Any, targets: Any) -> None:
        """After the first step, which has made it: nothing is measured once more."""
        self._planned, self._batch = True, None
        options = getattr(trainer, "_options", {})
        if options.get("memory_budget") is None or options.get("micro_batch_size") is not None:
            return
        try:
            plan = trainer._batch.plan(inputs, targets)
        except Error:  # of a batch that forward or a hook has changed
            return
        if self._display is not None and plan.candidates:
            self._display.say(text.planned(plan))

    def _batches_left(self, event: BatchEnd) -> int | None:
        epochs = self._values.get("epochs")
        if self._batches is None or epochs is None:
            return None
        return (epochs - event.epoch) * self._batches - event.batch - 1

    def _maybe_show(self, done: int) -> None:
        display = self._display
        interval = self._interval
        if interval == "auto":
            interval = 0.1 if isinstance(display, text.Bar) else 10.0
        now = time.monotonic()
        if display is None or interval is None or now - self._shown < interval:
            return
        self._shown = now
        display.show(self._line(self._values), done)

    def _line(self, values: dict[str, Any]) -> str:
        if self._format is not None:
            return text.by_format(self._format, values)
        return text.by_fields(self._fields, values)

    def on_epoch_end(self, event: EpochEnd) -> None:
        self._batches = event.batches
        self._values |= {"batch": event.batches, "batches": event.batches, "loss": event.loss}
        self._values |= {"epoch": event.epoch + 1}
        if self._display is not None:
            self._display.show(self._line(self._values), event.batches)
            self._display.end()

    def on_evaluation_end(self, event: EvaluationEnd) -> None:
        if self._display is None:
            self._display = text.find_display(self._file or sys.stderr, with_bar=False)
        values = {"loss": event.loss, **event.metrics, "epoch": event.epoch or None}
        values["epochs"] = self._values.get("epochs")
        names = ("epoch", "loss", *event.metrics)
        self._display.say("evaluation: " + text.by_fields(names, values))

    def on_run_end(self, event: RunEnd) -> None:
        self._end()

    def on_failure(self, event: Failure) -> None:
        self._end()

    def _end(self) -> None:
        self._batch = None
        if self._display is not None:
            self._display.end()


def _interval(value: Any) -> float | None | str:
    if value is None or value == "auto":
        return value
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InvalidType(f'interval must be seconds, None or "auto", not {value!r}')
    if not value >= 0:
        raise InvalidArgument(f"interval is {value}; it is 0 seconds or more")
    return float(value)
