"""Ways to get the gradient of a logical batch, each as a callable that leaves it in `.grad`."""

import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path

import infinitybatch as ib
import numpy as np
import torch
from torch import nn
from torch.nn import functional

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests" / "python"))
from measure import numbered, worst  # noqa: E402

Gradients = list[np.ndarray]  # NumPy's memory does not count against a budget
TOLERANCE = 1e-3  # of the largest gradient's norm, in float32


class Contestant(ABC):
    """A model of its own, so that no contestant finds another's gradients in the cache."""

    def __init__(self, model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.model = deepcopy(model)
        self.inputs, self.targets = inputs, targets

    def __call__(self) -> object:
        self.model.zero_grad(set_to_none=True)
        return self.backward()

    @abstractmethod
    def backward(self) -> object:
        """Leaves the whole batch's gradient in `.grad`."""

    def gradients(self) -> Gradients:
        self()
        return [parameter.grad.numpy().copy() for parameter in self.model.parameters()]

    def peak_bytes(self) -> int:
        """The most that tensors occupied at once while it ran, above what was there before."""
        self.model.zero_grad(set_to_none=True)
        before = ib.memory.stats().live
        with ib.memory.peak() as scope:
            self.backward()
        return scope.peak - before


class Native(Contestant):
    """The whole batch at once."""

    def backward(self) -> None:
        functional.cross_entropy(self.model(self.inputs), self.targets).backward()


class Loop(Contestant):
    """What people write by hand, with the right denominator."""

    def __init__(self, *args: object, micro_batch_size: int) -> None:
        super().__init__(*args)
        self.size = micro_batch_size

    def backward(self) -> None:
        count = len(self.targets)
        for inputs, targets in zip(
            self.inputs.split(self.size), self.targets.split(self.size), strict=True
        ):
            total = functional.cross_entropy(self.model(inputs), targets, reduction="sum")
            (total / count).backward()


class Ours(Contestant):
    """infinitybatch; options as for VirtualBatch."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args)
        self.loss = nn.CrossEntropyLoss()
        self.batch = ib.VirtualBatch(self.model, self.loss, **options)

    def backward(self) -> ib.StepReport:
        return self.batch.backward(self.inputs, self.targets)

    def settle(self, at_most: int = 200) -> tuple[ib.StepReport, int]:
        """Steps until the plan will not change any more: (the first settled step's report, steps)."""
        for step in range(1, at_most + 1):
            report = self()
            if report.predicted_peak_bytes is not None and report.restarts == 0:
                return report, step
        raise RuntimeError(f"the plan has not settled in {at_most} steps")


def check_agreement(contestants: Mapping[str, Contestant]) -> None:
    """Raises ArithmeticError unless all give the gradient of the first: else times say nothing."""
    (first, reference), *others = (
        (name, numbered(map(torch.from_numpy, contestant.gradients())))
        for name, contestant in contestants.items()
    )
    for name, gradients in others:
        error = worst(gradients, reference, true_zero=1.0)  # all by the largest norm
        if not error <= TOLERANCE:
            raise ArithmeticError(
                f"{name} gives another gradient than {first}: off by {error:.1e}, more than "
                f"{TOLERANCE:.0e} of the largest; there is no point in timing it"
            )
