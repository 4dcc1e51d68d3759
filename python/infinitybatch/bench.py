"""Timing the ways to compute a batch's gradient against the native whole batch."""

import gc
from typing import Any, Unpack

from . import _checks
from ._C import BenchReport
from .errors import InvalidType
from .verify import native_form
from .virtual_batch import VirtualBatch, VirtualBatchOptions


def bench(
    model: Any,
    loss: Any,
    inputs: Any,
    targets: Any = None,
    *,
    rounds: int = 9,
    seconds: float = 60,
    **options: Unpack[VirtualBatchOptions],
) -> BenchReport:
    """What does this model, loss and batch cost in micro-batches, beside native in one piece?

    Runs each strategy that applies once a round, in an order that changes from round to round:
    native where it fits into the memory that is free, one pass over micro-batches for a separable
    loss, two passes with no, half and all graphs retained, and with the model run again in place of
    replaying. Parameters, `.grad`, buffers and random state are as before afterwards.

        report = ib.bench(model, criterion, images, labels, micro_batch_size=32)
        print(report)
        json.dump(report.as_dict(), file)

    Args:
        model, loss: as for VirtualBatch. A criterion of torch.nn is itself the native loss.
        inputs, targets: a batch.
        rounds: at most as many; each gives one ratio.
        seconds: no further round begins after as many, once three are done.
        options: of VirtualBatch: `memory_budget`, `micro_batch_size`, ... A budget holds for all but
            native.

    Raises:
        InvalidArgument, InvalidType: rounds or seconds that cannot be used; a number of
            `retained_micro_batches`, for all are tried.
        BudgetExceeded: none but native fits the budget.

        And whatever VirtualBatch raises.
    """
    count = _checks.whole_number("rounds", rounds, "rounds")
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)):
        raise InvalidType(f"seconds must be a number of seconds, not {type(seconds).__name__}")
    batch = VirtualBatch(model, loss, **options)
    collects = gc.isenabled()
    gc.collect()
    gc.disable()  # a collection would hit one strategy and not the next
    try:
        return batch._bench(inputs, targets, native_form(loss), count, float(seconds))
    finally:
        if collects:
            gc.enable()
