"""What an audit found."""

import platform
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch

from ..errors import AuditError

Verdict = Literal["right", "wrong", "undecided"]


@dataclass(frozen=True)
class Cause:
    """Why a gradient is not the whole batch's."""

    #: A name for programs, as "mean_of_means"; `docs/audit.md` lists them.
    code: str
    #: What happens, with numbers.
    says: str
    #: One way out.
    fix: str


@dataclass(frozen=True)
class ParameterError:
    """How far one parameter's gradient is from the whole batch's."""

    name: str
    #: The distance, relative to the norm of the whole batch's (at least a hundredth of all
    #: parameters' norm).
    error: float
    #: The norm of the gradient that reached `step()`, and of the whole batch's.
    found: float
    wanted: float


@dataclass(frozen=True)
class MicroBatchWeight:
    """One micro-batch in the sum."""

    #: Samples, where known.
    rows: int | None
    #: The factor that its own gradient has in the sum that reached `step()`; None where unknown.
    weight: float | None
    #: The factor that it has in the whole batch's gradient; None where it is no such sum.
    right: float | None


@dataclass(frozen=True)
class AuditReport:
    """One step's gradient beside the whole batch's. Prints itself as text for an issue."""

    #: "right", "wrong", or "undecided" where the loop's random numbers could not be drawn again.
    verdict: Verdict
    #: The number of the step, from 0.
    step: int
    causes: tuple[Cause, ...]
    #: What is worth knowing and no error: clipping after the sum, dropout.
    notes: tuple[str, ...]
    #: The largest relative error of a parameter, and what counts as rounding.
    error: float
    allowed: float
    #: Each parameter, worst first.
    parameters: tuple[ParameterError, ...]
    micro_batches: tuple[MicroBatchWeight, ...]
    #: How the whole batch's gradient was computed.
    reference: str
    model: str
    dtype: str
    versions: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether the gradient is the whole batch's."""
        return self.verdict == "right"

    def as_dict(self) -> dict[str, Any]:
        """Plain lists, dicts, strings and numbers."""
        return {"ok": self.ok, **asdict(self)}

    def raise_if_wrong(self) -> None:
        """Raises AuditError, with this report, if the verdict is "wrong"."""
        if self.verdict == "wrong":
            raise AuditError(str(self), self)

    def __str__(self) -> str:
        verdict = {"right": "right", "wrong": "WRONG", "undecided": "undecided"}[self.verdict]
        lines = [f"infinitybatch audit: the gradient of step {self.step} is {verdict}"]
        lines.append(
            f"  error: {self.error:.2g} of the whole batch's gradient (rounding: {self.allowed:.0e})"
            + (f", worst in {self.parameters[0].name}" if self.parameters else "")
        )
        for cause in self.causes:
            lines += [f"  cause: {cause.code}: {cause.says}", f"    fix: {cause.fix}"]
        lines += [f"  note: {note}" for note in self.notes]
        if len(self.micro_batches) > 1 and self.verdict != "right":
            lines.append("  micro-batch  samples  weight in your sum  right weight")
            for i, each in enumerate(self.micro_batches[:16]):
                rows = "?" if each.rows is None else each.rows
                lines.append(
                    f"  {i:>11}  {rows:>7}  {_number(each.weight):>18}  {_number(each.right):>12}"
                )
            if len(self.micro_batches) > 16:
                lines.append(f"  … {len(self.micro_batches) - 16} more")
        if self.verdict != "right" and self.parameters:
            lines.append("  error of the worst parameters:")
            lines += [f"    {e.error:.2e}  {e.name}" for e in self.parameters[:5]]
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        lines.append(
            f"  {self.model}, {len(self.parameters)} parameters, {self.dtype}; reference: "
            f"{self.reference}; {versions}"
        )
        return "\n".join(lines)


def _number(value: float | None) -> str:
    return "?" if value is None else f"{value:.6g}"


def versions() -> dict[str, str]:
    from .. import __version__

    return {
        "infinitybatch": __version__,
        "torch": torch.__version__,
        "Python": platform.python_version(),
    }
