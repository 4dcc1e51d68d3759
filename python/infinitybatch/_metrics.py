"""Metrics of an evaluation that keep no outputs."""

from collections.abc import Mapping
from typing import Any

import torch

from ._options import MicroBatch
from .errors import InvalidType


class Metrics:
    """Updated with each slice; objects with update and compute, or callables of one slice."""

    def __init__(self, metrics: Any) -> None:
        if metrics is None:
            metrics = {}
        elif not isinstance(metrics, Mapping):
            given = metrics if isinstance(metrics, list | tuple) else [metrics]
            metrics = {_name_of(metric): metric for metric in given}
        self._objects: dict[str, Any] = {}
        self._callables: dict[str, Any] = {}
        self._sums: dict[str, float] = {}
        self._samples = 0
        for name, metric in metrics.items():
            if callable(getattr(metric, "update", None)) and callable(
                getattr(metric, "compute", None)
            ):
                self._objects[name] = metric
                if callable(getattr(metric, "reset", None)):
                    metric.reset()
            elif callable(metric) and not isinstance(metric, type):
                self._callables[name] = metric
                self._sums[name] = 0.0
            else:
                raise InvalidType(
                    f"metric '{name}' must be callable as metric(outputs, targets), or have update "
                    f"and compute as torchmetrics have, not be {_described(metric)}"
                )

    def __call__(self, part: MicroBatch) -> None:
        rows = part.end - part.begin
        self._samples += rows
        for metric in self._objects.values():
            metric.update(part.outputs, part.targets)
        for name, metric in self._callables.items():
            value = metric(part.outputs, part.targets)
            if isinstance(value, torch.Tensor) and value.numel() != 1:
                raise InvalidType(
                    f"metric '{name}' gave a tensor of shape {tuple(value.shape)} for one slice of "
                    f"{rows} samples; reduce it with .mean()"
                )
            self._sums[name] += rows * float(value)

    def results(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, metric in self._objects.items():
            value = metric.compute()
            is_number = isinstance(value, torch.Tensor) and value.numel() == 1
            # NumPy's numbers are no part of a checkpoint.
            is_number |= type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0
            found[name] = value.item() if is_number else value
        for name, total in self._sums.items():
            found[name] = total / self._samples if self._samples else float("nan")
        return found


def _name_of(metric: Any) -> str:
    name = getattr(metric, "__name__", None)
    return name if isinstance(name, str) else type(metric).__name__


def _described(metric: Any) -> str:
    if isinstance(metric, type):
        return f"the class {metric.__name__} itself"
    return f"a {type(metric).__name__}"
