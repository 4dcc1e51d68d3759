"""Recognises torch.nn's criteria and torch.nn.functional's functions, and makes losses of them."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from . import _coupled
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
    linear_cross_entropy,
    margin_ranking,
    mse,
    multi_margin,
    multilabel_margin,
    multilabel_soft_margin,
    nll,
    poisson_nll,
    separable,
    smooth_l1,
    soft_margin,
    triplet_margin,
    triplet_margin_with_distance,
)
from .errors import InvalidArgument, InvalidType

# torch.nn's criteria: the attributes that decide what they compute, and the loss that does the same.
_Maker = Callable[..., SeparableLoss]
_CRITERIA: dict[type, tuple[_Maker, tuple[str, ...]]] = {}
_FUNCTIONS: dict[Any, tuple[_Maker, tuple[str, ...]]] = {}


def _register(maker: _Maker, criteria: tuple[type, ...], function: Any, *options: str) -> None:
    """A criterion's attributes, its function's keywords and our options have one name each."""
    for criterion in criteria:
        _CRITERIA[criterion] = (maker, options)
    _FUNCTIONS[function] = (maker, options)


_register(
    cross_entropy,
    (nn.CrossEntropyLoss,),
    functional.cross_entropy,
    "weight",
    "ignore_index",
    "label_smoothing",
    "reduction",
)
_register(
    nll, (nn.NLLLoss, nn.NLLLoss2d), functional.nll_loss, "weight", "ignore_index", "reduction"
)
_register(
    multi_margin,
    (nn.MultiMarginLoss,),
    functional.multi_margin_loss,
    "p",
    "margin",
    "weight",
    "reduction",
)
_register(mse, (nn.MSELoss,), functional.mse_loss, "reduction")
_register(l1, (nn.L1Loss,), functional.l1_loss, "reduction")
_register(smooth_l1, (nn.SmoothL1Loss,), functional.smooth_l1_loss, "beta", "reduction")
_register(huber, (nn.HuberLoss,), functional.huber_loss, "delta", "reduction")
_register(
    poisson_nll,
    (nn.PoissonNLLLoss,),
    functional.poisson_nll_loss,
    "log_input",
    "full",
    "eps",
    "reduction",
)
_register(
    gaussian_nll, (nn.GaussianNLLLoss,), functional.gaussian_nll_loss, "full", "eps", "reduction"
)
_register(kl_div, (nn.KLDivLoss,), functional.kl_div, "log_target", "reduction")
_register(
    binary_cross_entropy,
    (nn.BCELoss,),
    functional.binary_cross_entropy,
    "weight",
    "reduction",
)
_register(
    binary_cross_entropy_with_logits,
    (nn.BCEWithLogitsLoss,),
    functional.binary_cross_entropy_with_logits,
    "weight",
    "pos_weight",
    "reduction",
)
_register(soft_margin, (nn.SoftMarginLoss,), functional.soft_margin_loss, "reduction")
_register(
    multilabel_margin, (nn.MultiLabelMarginLoss,), functional.multilabel_margin_loss, "reduction"
)
_register(
    multilabel_soft_margin,
    (nn.MultiLabelSoftMarginLoss,),
    functional.multilabel_soft_margin_loss,
    "weight",
    "reduction",
)
_register(
    hinge_embedding,
    (nn.HingeEmbeddingLoss,),
    functional.hinge_embedding_loss,
    "margin",
    "reduction",
)
_register(
    cosine_embedding,
    (nn.CosineEmbeddingLoss,),
    functional.cosine_embedding_loss,
    "margin",
    "reduction",
)
_register(
    margin_ranking,
    (nn.MarginRankingLoss,),
    functional.margin_ranking_loss,
    "margin",
    "reduction",
)
_register(
    triplet_margin,
    (nn.TripletMarginLoss,),
    functional.triplet_margin_loss,
    "margin",
    "p",
    "eps",
    "swap",
    "reduction",
)
_register(
    triplet_margin_with_distance,
    (nn.TripletMarginWithDistanceLoss,),
    functional.triplet_margin_with_distance_loss,
    "distance_function",
    "margin",
    "swap",
    "reduction",
)
_register(ctc, (nn.CTCLoss,), functional.ctc_loss, "blank", "zero_infinity", "reduction")


def _adaptive_log_softmax(criterion: nn.AdaptiveLogSoftmaxWithLoss) -> SeparableLoss:
    """Its loss is the mean over the samples; its own parameters get their gradients too."""

    def sum(outputs: Any, targets: Any) -> torch.Tensor:
        return criterion(outputs, targets).loss * targets.shape[0]

    return separable(sum, lambda targets, samples: samples)


def _linear_cross_entropy(criterion: Any) -> SeparableLoss:
    """Its linear layer is its own; the weight is read anew for each micro-batch."""
    nothing_ignored = -(2**62)  # no class index

    def now() -> SeparableLoss:
        linear = criterion.linear
        shape = (criterion.num_classes, *criterion.out_features)
        ignore_index = criterion.ignore_index
        return linear_cross_entropy(
            linear.weight.reshape(*shape, linear.in_features),
            None if linear.bias is None else linear.bias.reshape(shape),
            criterion.weight,
            nothing_ignored if ignore_index is None else ignore_index,
            criterion.label_smoothing,
            criterion.reduction,
            0.0,  # no cap
            None,  # the tile is ours to choose
        )

    return separable(
        lambda outputs, targets: now().sum(outputs, targets),
        lambda targets, samples: (
            now().denominator(targets, samples) if criterion.reduction == "mean" else None
        ),
    )


def resolve(loss: Any) -> SeparableLoss | CoupledLoss:
    """The loss that computes what `loss` computes; coupled where nobody knows it to be separable.

    Raises:
        InvalidType: for what is no callable.
        InvalidArgument: for reduction="none".
    """
    if isinstance(loss, (SeparableLoss, CoupledLoss)):
        return loss
    if isinstance(loss, nn.Module):
        return _resolve_criterion(loss)
    if isinstance(loss, type):
        raise InvalidType(
            f"loss is the class {loss.__name__} itself, not an instance of it: {loss.__name__}()"
        )
    options: dict[str, Any] = {}
    function = loss
    while isinstance(function, functools.partial):
        if function.args:
            raise InvalidType(
                f"{loss!r} fixes positional arguments of the loss; fix options by keyword only"
            )
        options = {**function.keywords, **options}
        function = function.func
    try:
        known = _FUNCTIONS.get(function)
    except TypeError:  # not hashable
        known = None
    if known is None:
        return _unknown(loss)
    maker, names = known
    strange = sorted(set(options) - set(names))
    if strange:
        raise InvalidArgument(
            f"{function.__name__} was given {', '.join(strange)}, which cannot be used here; it "
            f"takes {', '.join(names)}"
        )
    return maker(**options)


def _from_attributes(
    criterion: nn.Module, *, maker: _Maker, options: tuple[str, ...]
) -> SeparableLoss:
    return maker(**{name: getattr(criterion, name) for name in options})


def _if_unchanged(
    criterion: nn.Module, base: type[nn.Module], make: Callable[[Any], SeparableLoss]
) -> SeparableLoss | CoupledLoss:
    """The separable loss of a criterion as torch wrote it; of a changed one nobody knows."""
    changed = _changed(criterion, base)
    if changed is None:
        return make(criterion)
    _coupled.tell(changed, _WAY_OUT)
    return _coupled.make_criterion(criterion)


def _resolve_criterion(criterion: nn.Module) -> SeparableLoss | CoupledLoss:
    for base, (maker, options) in _CRITERIA.items():
        if isinstance(criterion, base):
            make = functools.partial(_from_attributes, maker=maker, options=options)
            return _if_unchanged(criterion, base, make)
    if isinstance(criterion, nn.AdaptiveLogSoftmaxWithLoss):
        return _if_unchanged(criterion, nn.AdaptiveLogSoftmaxWithLoss, _adaptive_log_softmax)
    linear = getattr(nn, "LinearCrossEntropyLoss", None)  # since torch 2.13
    if linear is not None and isinstance(criterion, linear):
        return _if_unchanged(criterion, linear, _linear_cross_entropy)
    return _unknown(criterion)


def _changed(criterion: nn.Module, base: type[nn.Module]) -> str | None:
    """What makes the criterion another one than torch's, which C++ computes; None: nothing."""
    kind = type(criterion)
    patched, hooks = _put_on(criterion)
    if patched is not None:
        return f"{kind.__name__}, whose forward was replaced,"
    if kind.forward is not base.forward or kind.__call__ is not nn.Module.__call__:
        return f"{kind.__name__}, which overrides the forward of {base.__name__},"
    return f"{kind.__name__} with its hooks" if hooks else None


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _put_on(criterion: nn.Module) -> tuple[Any, bool]:
    """A forward of this object alone, and whether it has hooks."""
    own = criterion.__dict__
    return own.get("forward"), any(own[name] for name in _HOOKS)


_WAY_OUT = (
    "If it is a sum over samples divided by a denominator, "
    "infinitybatch.losses.separable(sum, denominator) takes one pass"
)


def _unknown(loss: Any) -> CoupledLoss:
    if not callable(loss):
        raise InvalidType(
            f"loss must be a callable, a criterion of torch.nn or one of infinitybatch.losses, not "
            f"{name_of(loss)}"
        )
    _coupled.tell(name_of(loss), _WAY_OUT)
    return _coupled.make(loss)


def options_of(loss: Any) -> tuple[Any, ...] | None:
    """What decides what a recognised criterion computes, to notice changes between steps."""
    kind = type(loss)
    names = _option_names(kind)
    if names is None:
        return None
    if kind not in _CRITERIA:  # a subclass, which may have properties
        return (*_put_on(loss), *[getattr(loss, name) for name in names])
    # nn.Module looks for a buffer last, after an AttributeError: asked in each step.
    own = loss.__dict__
    buffers = own["_buffers"]
    return (
        *_put_on(loss),
        *[
            own[name] if name in own else buffers[name] if name in buffers else getattr(loss, name)
            for name in names
        ],
    )


@functools.lru_cache(maxsize=1024)
def _option_names(kind: type) -> tuple[str, ...] | None:
    for base, (_, options) in _CRITERIA.items():
        if issubclass(kind, base):
            return options
    return None


def name_of(value: Any) -> str:
    name = getattr(value, "__qualname__", None)
    return name if isinstance(name, str) else type(value).__name__
