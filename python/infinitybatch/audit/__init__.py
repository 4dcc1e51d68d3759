"""Is the gradient that reaches `optimizer.step()` the whole batch's? See `ib.audit`."""

from .entry import Audit, audit
from .report import AuditReport, Cause, MicroBatchWeight, ParameterError
from .watch import Watch

__all__ = [
    "Audit",
    "AuditReport",
    "Cause",
    "MicroBatchWeight",
    "ParameterError",
    "Watch",
    "audit",
]
