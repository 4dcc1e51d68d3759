"""Every error of this library. Each message carries numbers and a way out.

Exceptions of the model, the loss, hooks and callbacks are no concern of these classes: they come
back as the very objects that were raised.
"""

import torch

__all__ = [
    "AccumulationNotice",
    "BatchError",
    "BudgetExceeded",
    "CoupledLossNotice",
    "LeftTensorNotice",
    "CouplingError",
    "DroppedCacheNotice",
    "Error",
    "InvalidArgument",
    "InvalidType",
    "MovedModelNotice",
    "OffloadError",
    "StateError",
    "UncompiledNotice",
    "Unsupported",
    "UnwrappedMethodNotice",
]


def __dir__() -> list[str]:
    """Public names alone, for completion."""
    return __all__


class Error(RuntimeError):
    """Base of every error that this library raises."""


class InvalidArgument(Error, ValueError):
    """An argument whose value cannot be used."""


class InvalidType(Error, TypeError):
    """An argument of a type that cannot be used."""


class BatchError(InvalidArgument):
    """A batch that cannot be split; the message names the leaf, as in ``inputs['mask']``."""


class CouplingError(Error):
    """Something couples samples, so that micro-batches alone cannot give the exact gradient."""

    #: What couples the samples: an operator ("aten::batch_norm") or a buffer's name.
    op: str

    def __init__(self, message: str, op: str = "") -> None:
        super().__init__(message)
        self.op = op


class Unsupported(Error):
    """A model or a call for which no exact way is known yet."""


class StateError(Error):
    """A call at the wrong moment: under ``no_grad``, while another step runs on the same model."""


class BudgetExceeded(Error, torch.OutOfMemoryError):
    """No plan stays inside the memory budget. Raised before any observable change."""

    #: Bytes that the request needs; a lower bound if `smallest_feasible` is None.
    needed: int
    #: Bytes that were allowed.
    limit: int
    #: The smallest budget in bytes that would work, where it is known.
    smallest_feasible: int | None

    def __init__(
        self,
        message: str,
        needed: int = 0,
        limit: int = 0,
        smallest_feasible: int | None = None,
    ) -> None:
        super().__init__(message)
        self.needed = needed
        self.limit = limit
        self.smallest_feasible = smallest_feasible


class OffloadError(Error):
    """Host memory and disk cannot hold what has to wait there, or the disk failed."""

    #: Bytes that had to be offloaded.
    needed: int
    #: Bytes that there was room for, as far as that is known.
    available: int

    def __init__(self, message: str, needed: int = 0, available: int = 0) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available


class CoupledLossNotice(UserWarning):
    """IB101: a loss is taken as coupled because nobody declared it separable."""


class LeftTensorNotice(UserWarning):
    """IB102: a wrapped module leaves a tensor on itself that a loss must not read."""


class UncompiledNotice(UserWarning):
    """IB103: compiled code runs uncompiled, for the step needs a recording of it."""


class DroppedCacheNotice(UserWarning):
    """IB104: a cache of keys and values is left out of the outputs of a wrapped module."""


class UnwrappedMethodNotice(UserWarning):
    """IB105: a method of a wrapped module computes a batch past its micro-batches."""


class MovedModelNotice(UserWarning):
    """IB106: a trainer's model was moved or cast between two epochs; its optimizer's state follows."""


class AccumulationNotice(UserWarning):
    """IB109: a training loop accumulates gradients of a module whose budget holds the whole batch."""
