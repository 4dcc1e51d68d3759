"""Losses: separable ones, which are streamed in one pass, and coupled ones, which are anything.

A separable loss is a sum over samples divided by a denominator known from the targets.
`VirtualBatch` takes, in place of these, any separable criterion of torch.nn, as an instance or as
its function of torch.nn.functional (with options in a functools.partial); and any other callable,
which it computes on the outputs of the whole batch, as `coupled` does. What follows is for
everything else: `separable`, `coupled`, `from_model`, `with_penalty`; and the ready-made ones of
the C++ library under the same names. `info_nce`, `sup_con`, `siglip`, `pairwise` and
`linear_cross_entropy` never hold the matrix of all their scores, and are functions of tensors too.

`reduction` is "mean" or "sum" everywhere; `kl_div` also knows "batchmean". Half precision outputs
are summed in float32.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from . import _checks, _coupled
from ._C.losses import (
    CoupledLoss,
    SeparableLoss,
    binary_cross_entropy,
    binary_cross_entropy_with_logits,
    cosine_embedding,
    cross_entropy,
    ctc,
    gaussian_nll,
    hinge_embedding,
    huber,
    kl_div,
    l1,
    margin_ranking,
    mse,
    multi_margin,
    multilabel_margin,
    multilabel_soft_margin,
    nll,
    pad_ctc_targets,
    poisson_nll,
    smooth_l1,
    soft_margin,
    triplet_margin,
    triplet_margin_with_distance,
)
from ._C.losses import separable as _separable
from ._C.losses import with_penalty as _with_penalty
from ._criteria import name_of, resolve
from ._tiled import info_nce, linear_cross_entropy, pairwise, siglip, sup_con
from .errors import InvalidArgument, InvalidType

__all__ = [
    "CoupledLoss",
    "SeparableLoss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "cosine_embedding",
    "coupled",
    "cross_entropy",
    "ctc",
    "from_model",
    "gaussian_nll",
    "hinge_embedding",
    "huber",
    "info_nce",
    "kl_div",
    "l1",
    "linear_cross_entropy",
    "margin_ranking",
    "mse",
    "multi_margin",
    "multilabel_margin",
    "multilabel_soft_margin",
    "nll",
    "pad_ctc_targets",
    "pairwise",
    "poisson_nll",
    "separable",
    "siglip",
    "smooth_l1",
    "soft_margin",
    "sup_con",
    "triplet_margin",
    "triplet_margin_with_distance",
    "with_penalty",
]


def __dir__() -> list[str]:
    """Public names alone, for completion."""
    return __all__


Number = float | int | torch.Tensor
Denominator = Callable[..., Number]


def separable(
    sum: Callable[[Any, Any], torch.Tensor],
    denominator: Denominator | None,
    penalty: Callable[[], torch.Tensor] | None = None,
) -> SeparableLoss:
    """A loss of your own that is separable.

    The loss of the logical batch is the sum of `sum` over all micro-batches divided by the sum of
    `denominator` over all micro-batches.

    Args:
        sum: `sum(outputs, targets)` gives the sum over the samples it is shown, a tensor of one
            number that carries gradient. It must not compare samples with each other. What forward
            has left on the module (`model.aux`) is that of the same samples: right where it is a
            sum over them, wrong where it is a mean.
        denominator: `denominator(targets)` or `denominator(targets, samples)` gives these targets'
            part of the denominator, a number or a tensor of one. None: nothing is divided.
        penalty: `penalty()` gives a term that depends on parameters only; added once per batch.

    Raises:
        InvalidType: for anything that is not callable.

    Example:
        ib.losses.separable(
            lambda logits, labels: F.cross_entropy(logits, labels, reduction="sum"),
            lambda labels, samples: samples,
        )
    """
    if not callable(sum):
        raise InvalidType(f"sum must be callable as sum(outputs, targets), not {name_of(sum)}")
    _checks.called_with("sum", sum, "outputs", "targets")
    if denominator is not None and not callable(denominator):
        raise InvalidType(
            f"denominator must be callable as denominator(targets), or None where the loss is the "
            f"sum itself, not {name_of(denominator)}"
        )
    loss = _separable(sum, None if denominator is None else _two_arguments(denominator))
    return loss if penalty is None else with_penalty(loss, penalty)


def with_penalty(loss: Any, penalty: Callable[[], torch.Tensor]) -> SeparableLoss:
    """`loss` with a term that depends on parameters only, computed once per logical batch.

    Args:
        loss: whatever `VirtualBatch` takes as a loss.
        penalty: `penalty()` gives a tensor of one number.

    Example:
        ib.losses.with_penalty(nn.MSELoss(), lambda: 1e-4 * model.weight.square().sum())
    """
    if not callable(penalty):
        raise InvalidType(f"penalty must be callable without arguments, not {name_of(penalty)}")
    _checks.called_with("penalty", penalty)
    resolved = resolve(loss)
    if isinstance(resolved, CoupledLoss):
        raise InvalidType(
            f"{name_of(loss)} is coupled and sees the whole batch once: add the penalty inside of it"
        )
    return _with_penalty(resolved, penalty)


def coupled(
    value: Callable[..., torch.Tensor], *, loss_device: torch.device | str | None = None
) -> CoupledLoss:
    """A loss that compares samples with each other: contrastive, batch-hard, ranking, your own.

    Each micro-batch's forward runs once and is recorded; the loss sees what the model would have
    returned for the whole batch; then each micro-batch runs again, without your code, and backward
    from the gradient of its outputs. Exact for every loss.

    Outputs are joined along the dimension that follows the samples. Those that are the same for any
    samples (a temperature, a penalty, prototypes) stand once, as natively; those that mix the
    samples of a micro-batch (a mean over it) raise BatchError.

    A loss over the batches of several ranks gathers their outputs itself, by operations that carry
    gradient (`torch.distributed.nn.functional.all_gather`), and is the same on each rank: the mean
    of the ranks' gradients, as DistributedDataParallel takes it, is then that of the batch of all.
    Each rank computes it once in a step, whatever its plan, or raises Unsupported where memory ran
    out after it had been computed.

    Args:
        value: `value(outputs, targets)`, or `value(outputs)`, gives the loss of the whole batch, a
            tensor of one number. It may use parameters of its own (a temperature): they get their
            gradient once, where the optimizer has them. It may change outputs in place. Without
            targets it is called as `value(outputs)` unless it needs a second argument, which is
            None then: parameters with defaults keep them.
        loss_device: where outputs are assembled and the loss is computed, "cpu" included. None:
            where the model is.

    Raises:
        InvalidType: for what is not callable.

    Example:
        def info_nce(outputs):
            a, b = (F.normalize(x, dim=-1) for x in outputs)
            return F.cross_entropy(a @ b.T * log_scale.exp(), torch.arange(len(a)))

        batch = ib.VirtualBatch(two_towers, ib.losses.coupled(info_nce), memory_budget="8GiB")
        batch.backward((images, texts))
    """
    if not callable(value):
        raise InvalidType(
            f"value must be callable as value(outputs, targets), not {name_of(value)}"
        )
    return _coupled.make(
        value, None if loss_device is None else _checks.device("loss_device", loss_device)
    )


def from_model(denominator: Denominator) -> SeparableLoss:
    """The loss of a model that returns its own mean loss, as Hugging Face's models do.

    The model's outputs are an object or mapping with an entry `loss`, a tuple that begins with the
    loss, or the loss alone.

    Args:
        denominator: what the model's mean is divided by for a micro-batch with these targets:
            `denominator(targets)` or `denominator(targets, samples)` gives a number or a tensor of
            one. Pass as `targets` what it needs, mostly the labels that are among the inputs too.

    Example:
        loss = ib.losses.from_model(lambda labels: (labels[:, 1:] != -100).sum())
        batch = ib.VirtualBatch(language_model, loss, memory_budget="8GiB")
        batch.backward({"input_ids": ids, "labels": labels}, labels)
    """
    if not callable(denominator):
        raise InvalidType(
            f"denominator must be callable as denominator(targets), not {name_of(denominator)}"
        )
    part = _two_arguments(denominator)

    def sum(outputs: Any, targets: Any) -> torch.Tensor:
        loss = _own_loss(outputs)
        count = part(targets, _samples(targets))
        if isinstance(count, torch.Tensor):
            count = count.to(loss.device)
            # The mean over nothing is NaN; its share in the sum is nothing.
            return torch.where(count == 0, torch.zeros_like(loss), loss * count.to(loss.dtype))
        return loss * count if count else torch.zeros_like(loss) * loss.detach().nan_to_num()

    return _separable(sum, part)


def _own_loss(outputs: Any) -> torch.Tensor:
    if isinstance(outputs, torch.Tensor):
        loss: Any = outputs
    elif isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    elif hasattr(outputs, "loss"):
        loss = outputs.loss
    elif isinstance(outputs, (tuple, list)) and outputs:
        loss = outputs[0]
    else:
        loss = None
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise InvalidType(
            f"losses.from_model needs a model that returns its loss, one number, as outputs.loss or "
            f"first; this one returned {name_of(outputs)}; pass it the labels among the inputs, or "
            f"declare the loss with losses.separable"
        )
    return loss.reshape(())


def _samples(targets: Any) -> int:
    """How many rows there are, for denominators that want to know."""
    for leaf in torch.utils._pytree.tree_leaves(targets):
        if isinstance(leaf, torch.Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    raise InvalidArgument(
        "losses.from_model needs targets with one row per sample to know the size of a micro-batch; "
        "pass the labels as targets too"
    )


def _two_arguments(denominator: Denominator) -> Callable[[Any, int], Number]:
    """`denominator` as (targets, samples), whether it takes one or two."""
    try:
        parameters = inspect.signature(denominator).parameters.values()
    except (TypeError, ValueError):  # some built-in functions do not tell
        return lambda targets, samples: denominator(targets)
    positional = [
        p
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty
    ]
    starred = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    if len(positional) == 2 or starred:
        return denominator
    if len(positional) == 1:
        return lambda targets, samples: denominator(targets)
    raise InvalidArgument(
        f"denominator takes {len(positional)} arguments; it is called as denominator(targets) or "
        f"denominator(targets, samples)"
    )
