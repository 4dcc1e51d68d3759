"""Comparing a step's gradients with those of the native whole batch."""

from typing import Any

from . import _coupled, _criteria
from ._C import VerifyReport
from ._C.losses import CoupledLoss, SeparableLoss
from .virtual_batch import VirtualBatch


def verify(model: Any, loss: Any, inputs: Any, targets: Any = None, **options: Any) -> VerifyReport:
    """Is the gradient of this model, loss and batch exact?

    Computes it as `VirtualBatch(model, loss, **options)` does and natively, in one piece, in fp64
    and in the model's own precision, and looks for outputs in which one sample depends on another
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
        Unsupported: where forward draws random numbers, for micro-batches draw others. Call
            `eval()`, or set dropout to 0.

        And whatever VirtualBatch raises.
    """
    native = None
    if not isinstance(loss, (SeparableLoss, CoupledLoss)):
        native = _coupled.make_criterion(loss) if _is_criterion(loss) else None
    return VirtualBatch(model, loss, **options)._verify(inputs, targets, native)


def _is_criterion(loss: Any) -> bool:
    """Whether it is called as torch.nn's criteria are, on the elements of tuples."""
    return isinstance(_criteria.resolve(loss), SeparableLoss)
