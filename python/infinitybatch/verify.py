"""Comparing a step's gradients with those of the native whole batch."""

from typing import Any, Unpack

from . import _coupled, _criteria
from ._C import VerifyReport
from ._C.losses import CoupledLoss, SeparableLoss
from .virtual_batch import VirtualBatch, VirtualBatchOptions


def verify(
    model: Any,
    loss: Any,
    inputs: Any,
    targets: Any = None,
    **options: Unpack[VirtualBatchOptions],
) -> VerifyReport:
    """Is the gradient of this model, loss and batch exact?

    Computes it as `VirtualBatch(model, loss, **options)` does and natively, in one piece, in fp64
    and in the model's own precision, compares what both leave in buffers (running statistics,
    counters; in fp64), and looks for outputs in which one sample depends on another
    without anybody having said so (`x - x.mean(0)` written by hand). Parameters, `.grad`, buffers
    and random state are as before afterwards.

        report = ib.verify(model, criterion, images, labels, micro_batch_size=8)
        assert report.exact, report.explain()

    Args:
        model, loss: as for VirtualBatch. A criterion of torch.nn is itself the native loss.
        inputs, targets: a batch. Where native does not fit into memory its first half is compared,
            or its first quarter, and so on; `report.rows` says so.
        options: of VirtualBatch: `memory_budget`, `micro_batch_size`, ...

    Raises:
        Unsupported: where forward draws random numbers, for micro-batches draw others: call
            `eval()`, set dropout to 0, or hand in `match_native_rng=True`. And where gradients
            differ and native itself gives others on the same batch a second time: forward draws
            from a generator of its own, or keeps state that is no buffer.

        And whatever VirtualBatch raises.
    """
    return VirtualBatch(model, loss, **options)._verify(inputs, targets, native_form(loss))


def native_form(loss: Any) -> CoupledLoss | None:
    """A criterion of torch.nn as native code calls it; None for what is itself the native loss."""
    if isinstance(loss, (SeparableLoss, CoupledLoss)):
        return None
    # Criteria are called on the elements of tuples.
    is_criterion = isinstance(_criteria.resolve(loss), SeparableLoss)
    return _coupled.make_criterion(loss, needs_targets=True) if is_criterion else None
