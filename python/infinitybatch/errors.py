"""Every error of this library. Each message carries numbers and a way out.

Exceptions of the model, the loss, hooks and callbacks are no concern of these classes: they come
back as the very objects that were raised. `docs/errors.md` is made of these docstrings: what it is,
when it comes, "Way out:".
"""

from typing import Any

import torch

__all__ = [
    "AccumulationNotice",
    "AuditError",
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
    """Base of every error that this library raises.

    Comes as one of the classes below.

    Way out: `except ib.Error` catches them all and nothing else.
    """


class InvalidArgument(Error, ValueError):
    """An argument whose value cannot be used.

    Comes where the call is made, before anything runs: a size below 1, a text that is not a valid
    memory budget, options that contradict each other.

    Way out: the message names the argument, the value and what is expected.
    """


class InvalidType(Error, TypeError):
    """An argument of a type that cannot be used.

    Comes where the call is made, before anything runs: a class in place of a module, an optimizer
    that is none of torch.optim.

    Way out: the message names the argument, its type and what is expected.
    """


class BatchError(InvalidArgument):
    """A batch that cannot be split; the message names the leaf, as in `inputs['mask']`.

    Comes where inputs, targets or outputs have no dimension that is known to be the samples', or
    differ in their number of samples: a list with one entry for each sample, a mask that all
    samples share, outputs that are one number.

    Way out: `ib.batch_dim(mask, 1)` says where samples lie, `ib.shared(mask)` that all samples see
    it whole, `reduce="mean"` of `wrap` what one number is.
    """


class CouplingError(Error):
    """An op combines samples, so that micro-batches alone cannot give the exact gradient.

    Comes where one sample's output depends on others in the batch and the budget does not hold the
    whole batch at once: `x - x.mean(0)`, BatchNorm beside an `autograd.Function`. `op` names it.

    Way out: `ib.across_batch(fn, x)` around the op, a budget that holds the whole batch, or
    `batch_coupling="per_micro_batch"` to accept another gradient.
    """

    #: What couples the samples: an operator ("aten::batch_norm") or a buffer's name.
    op: str

    def __init__(self, message: str, op: str = "") -> None:
        super().__init__(message)
        self.op = op


class Unsupported(Error):
    """A model or a call for which no exact way is known yet.

    Comes for transforms of torch.func, FSDP or DDP inside of the model, a forward that gives other
    values when it runs again, `create_graph=True` in several micro-batches.

    Way out: the message has the one for each case; docs/limits.md lists them.
    """


class StateError(Error):
    """A call at the wrong moment.

    Comes under `torch.no_grad()`, while another step runs on the same model, where parameters were
    changed between forward and backward, or where an optimizer belongs to another model.

    Way out: move the call to where the message says.
    """


class BudgetExceeded(Error, torch.OutOfMemoryError):
    """No plan stays inside the memory budget.

    Comes before any observable change, where parameters, gradients and the smallest step need more
    than is allowed. `needed` and `limit` are bytes, `smallest_feasible` a budget that works, about
    the least; None where something that the step takes has not been seen, as in a first step whose
    loss sees the whole batch.

    Way out: the `memory_budget` that the message names, or `offload="always"`.
    """

    #: Bytes that the request needs; a lower bound if `smallest_feasible` is None.
    needed: int
    #: Bytes that were allowed.
    limit: int
    #: A budget in bytes that works, about the least, where it is known.
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
    """Host memory and disk cannot hold what is offloaded, or the disk failed.

    Comes where `offload` needs more than `host_budget` and the file system of `directory` have.
    `needed` and `available` are bytes.

    Way out: `offload=ib.Offload(host_budget="16GiB", directory="/mnt/large")`, or a larger budget.
    """

    #: Bytes that had to be offloaded.
    needed: int
    #: Bytes that there was room for, as far as that is known.
    available: int

    def __init__(self, message: str, needed: int = 0, available: int = 0) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available


class AuditError(Error):
    """A gradient that reached `optimizer.step()` is not the whole batch's; see `ib.audit`.

    Comes at the end of an audit that was asked to raise. `report` names the cause and the sizes.

    Way out: what the report says of its cause.
    """

    #: The AuditReport.
    report: Any

    def __init__(self, message: str, report: Any = None) -> None:
        super().__init__(message)
        self.report = report


class CoupledLossNotice(UserWarning):
    """IB101: a loss is taken as coupled because nobody declared it separable.

    Comes once for each loss that is neither a criterion of torch.nn nor of `ib.losses`. The gradient
    is exact; it takes a second pass.

    Way out: `ib.losses.separable(sum, denominator)` where it is a sum over samples,
    `ib.losses.coupled(loss)` where it is not.
    """


class LeftTensorNotice(UserWarning):
    """IB102: a wrapped module leaves a tensor on itself that a loss must not read.

    Comes once for each attribute whose tensor cannot be joined from micro-batches: it has no row for
    each sample. Whoever reads it finds the last micro-batch's alone.

    Way out: return it as an output; `reduce="mean"` says what becomes of one number.
    """


class UncompiledNotice(UserWarning):
    """IB103: compiled code runs uncompiled, for the step needs a recording of it.

    Comes once for a compiled model with BatchNorm in training mode or its like, with
    `match_native_rng`, and where one sample is cut for memory. The gradient is exact.

    Way out: compile the parts without such layers, or `model.eval()` where the layer needs no
    training.
    """


class DroppedCacheNotice(UserWarning):
    """IB104: a cache of keys and values is left out of the outputs of a wrapped module.

    Comes once for a language model that returns a cache while it is trained.

    Way out: `model.config.use_cache = False`.
    """


class UnwrappedMethodNotice(UserWarning):
    """IB105: a method of a wrapped module computes a batch past its micro-batches.

    Comes at the first call with gradients of a method that runs submodules. The gradient is exact;
    no budget applies.

    Way out: `ib.wrap(model, methods=("encode",))`.
    """


class MovedModelNotice(UserWarning):
    """IB106: a trainer's model was moved or cast between two epochs; its optimizer's state follows.

    Comes at the first epoch after `model.to(...)` or `model.half()`.

    Way out: move the model before the optimizer and the trainer are made.
    """


class AccumulationNotice(UserWarning):
    """IB109: a training loop accumulates gradients of a module whose budget holds the whole batch.

    Comes once where accelerate, Lightning or Hugging Face's Trainer accumulates over batches of a
    wrapped module; of the Trainer not where the model is given `labels` and `num_items_in_batch`.

    Way out: `gradient_accumulation_steps=1`, `accumulate_grad_batches=1`, and whole batches from the
    loader.
    """
