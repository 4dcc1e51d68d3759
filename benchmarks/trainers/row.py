"""A row of the table: a trainer as its documentation says, and what is measured of it."""

import importlib.metadata
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from measure import EXACT, worst
from torch import nn

from .cases import CASES, SEED, Case

Step = Callable[[Case, nn.Module], None]


class OneStep(torch.optim.SGD):
    """Takes from the weights the gradient itself; a second step is a mistake of the measurement."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model.parameters(), lr=1.0)
        self.taken = 0

    def step(self, closure: Any = None) -> Any:
        self.taken += 1
        if self.taken > 1:
            raise AssertionError("more than one optimizer step for one logical batch")
        return super().step(closure)


@dataclass(frozen=True)
class Row:
    """One setting of a trainer.

    Args:
        step: trains the model for one optimizer step of learning rate 1 on the case's batch.
        packages: distributions whose versions matter, the peer's own first.
        documentation: where the peer documents this setting.
        cases: by column; a column that is missing is in `not_for`.
        not_for: column to the reason.
        refuses: column to the name of the exception with which the peer says no.
        by_side: random layers draw for all anchors before any positive.
        seeds: the model's forward of the batch's first row sets the seed; else it is set before.
    """

    peer: str
    setting: str
    documentation: str
    step: Step
    packages: tuple[str, ...] = ()
    cases: Mapping[str, Case] = field(default_factory=lambda: CASES)
    not_for: Mapping[str, str] = field(default_factory=dict)
    refuses: Mapping[str, str] = field(default_factory=dict)
    by_side: bool = False
    seeds: bool = True

    def gradient(self, case: Case) -> dict[str, torch.Tensor]:
        """What a step of learning rate 1 takes from the weights.

        Raises:
            AssertionError: where it takes nothing at all.
        """
        model = case.model(self.seeds)
        before = {name: each.detach().clone() for name, each in model.named_parameters()}
        if not self.seeds:
            torch.manual_seed(SEED)
        self.step(case, model)
        taken = {name: before[name] - each.detach() for name, each in model.named_parameters()}
        if not any(each.any() for each in taken.values()):
            raise AssertionError("no optimizer step was taken")
        return taken

    def figure(self, column: str) -> dict[str, Any]:
        """A cell: its relative `error`, a refusal, or why there is none."""
        known = {"contestant": self.peer, "setting": self.setting, "workload": column}
        known |= {"documentation": self.documentation, "versions": self.versions()}
        if column in self.not_for:
            return known | {"n/a": self.not_for[column]}
        case = self.cases[column]
        try:
            found = self.gradient(case)
        except Exception as error:
            # Any other exception is a mistake of the measurement, not the peer's answer.
            if type(error).__name__ != self.refuses.get(column):
                raise
            return known | {"refused": first_sentence(error)}
        known["error"] = worst(found, case.native())
        if known["error"] > EXACT and column == "dropout":
            known["error of another draw"] = worst(found, case.redrawn(self.by_side))
        return known

    def versions(self) -> dict[str, str]:
        """
        Raises:
            PackageNotFoundError: where the peer is not installed.
        """
        return {name: importlib.metadata.version(name) for name in self.packages}


def first_sentence(error: Exception) -> str:
    told: Any = error.args[0] if error.args else ""
    told = told[0] if isinstance(told, list) else told  # all that is wrong, as Opacus says it
    return f"{type(error).__name__}: {' '.join(str(told).split())}".split(". ")[0]
