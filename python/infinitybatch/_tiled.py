"""Losses that never hold the matrix of all their scores, for VirtualBatch and as functions."""

import inspect
from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor

from . import _C, _checks
from .errors import InvalidArgument, InvalidType

Learnable = float | Tensor | Callable[[], Tensor]
Reduction = Literal["mean", "sum"]
Device = torch.device | str | None
CoupledLoss = _C.losses.CoupledLoss
SeparableLoss = _C.losses.SeparableLoss


@overload
def info_nce(
    *,
    temperature: Learnable = ...,
    normalize: bool = ...,
    symmetric: bool = ...,
    reduction: Reduction = ...,
    tile: int | None = ...,
    loss_device: Device = ...,
) -> CoupledLoss: ...
@overload
def info_nce(
    a: Tensor,
    b: Tensor,
    logit_scale: Tensor | float = ...,
    /,
    *,
    temperature: Learnable = ...,
    normalize: bool = ...,
    symmetric: bool = ...,
    reduction: Reduction = ...,
    tile: int | None = ...,
) -> Tensor: ...
def info_nce(
    *embeddings: Tensor,
    temperature: Learnable = 0.07,
    normalize: bool = True,
    symmetric: bool = True,
    reduction: Reduction = "mean",
    tile: int | None = None,
    loss_device: Device = None,
) -> CoupledLoss | Tensor:
    """InfoNCE (van den Oord et al. 2018); symmetric as in CLIP (Radford et al. 2021).

        -log(exp(s_ii) / sum_j exp(s_ij)),   s_ij = a_i · b_j / temperature

    The matrix of scores is walked in tiles of rows, which give value and gradients together:
    memory O(B * (D + tile)) where the plain formula takes O(B * B). Exact, the temperature
    included. Half precision embeddings are computed in float32.

    Without tensors this is a loss for `VirtualBatch`, whose outputs are (a, b) of shapes (N, D), or
    one tensor (N, 2, D), or as CLIP's (a, b, logit_scale). With tensors it is the value for them,
    in any torch code:

        batch = ib.VirtualBatch(two_towers, ib.losses.info_nce(temperature=0.05))
        loss = ib.losses.info_nce(images, texts, temperature=lambda: log_temperature.exp())
        loss = ib.losses.info_nce(*clip(pixels, tokens))  # images, texts, logit_scale

    Args:
        embeddings: a (N, D) and b (M, D). b_i belongs to a_i; where not symmetric, more b may
            follow, which are negatives. A third one, of one element, is what scores are multiplied
            by, 1 / temperature, and counts in its place.
        temperature: scores are divided by it. A number, a tensor of one element (a parameter), or a
            function that returns such a tensor anew each time.
        normalize: embeddings are divided by their length (at least 1e-12) first.
        symmetric: rows against columns and columns against rows, half each.
        reduction: "mean" over the pairs, or "sum".
        tile: rows whose scores are held at once. None: as many as take the bytes of b, or 1 MiB
            where that is more; at most 256.
        loss_device: as in `coupled`.

    Raises:
        InvalidArgument: shapes, types or devices that do not fit; a tile below 1; a temperature
            that is not above 0 (of a tensor only where it is on the host).
        InvalidType: an option that is no number, or no truth value.
        Unsupported: backward with create_graph=True.
    """
    normalize = _checks.truth("normalize", normalize)
    symmetric = _checks.truth("symmetric", symmetric)
    tile = _tile(tile)
    if not embeddings:
        device = _device(loss_device)
        return _C.losses.info_nce(temperature, normalize, symmetric, reduction, tile, device)
    if len(embeddings) == 3:
        *embeddings, scale = embeddings  # type: ignore[assignment]
        if not isinstance(scale, (Tensor, int, float)) or (
            isinstance(scale, Tensor) and (scale.numel() != 1 or not scale.is_floating_point())
        ):
            raise InvalidArgument(
                f"info_nce takes (a, b, logit_scale), and the third must be one floating point "
                f"number, not {_described(scale)}"
            )
        if not isinstance(scale, Tensor) and scale <= 0:
            raise InvalidArgument(f"info_nce: logit_scale must be above 0, not {scale}")
        temperature = 1 / scale
    a, b = _tensors("info_nce", tuple(embeddings), 2, loss_device)
    return _C.losses.info_nce_value(a, b, temperature, normalize, symmetric, reduction, tile)


@overload
def sup_con(
    *,
    temperature: Learnable = ...,
    normalize: bool = ...,
    reduction: Reduction = ...,
    tile: int | None = ...,
    loss_device: Device = ...,
) -> CoupledLoss: ...
@overload
def sup_con(
    embeddings: Tensor,
    labels: Tensor | None = ...,
    /,
    *,
    temperature: Learnable = ...,
    normalize: bool = ...,
    reduction: Reduction = ...,
    tile: int | None = ...,
) -> Tensor: ...
def sup_con(
    embeddings: Tensor | None = None,
    labels: Tensor | None = None,
    *,
    temperature: Learnable = 0.07,
    normalize: bool = True,
    reduction: Reduction = "mean",
    tile: int | None = None,
    loss_device: Device = None,
) -> CoupledLoss | Tensor:
    """Supervised contrastive loss (Khosla et al. 2020, equation 2, L_out), in tiles as `info_nce`.

        -1/|P(i)| sum_{p in P(i)} log(exp(s_ip) / sum_{j != i} exp(s_ij))

    P(i) are all others of i's label; an embedding without any counts 0, and counts in the mean, as
    in the authors' code. Outputs (N, D), or (N, V, D) with V views of each sample; targets (N)
    integer labels, or None: each sample is a class of its own, as in SimCLR.

    Args:
        embeddings, labels: for the value of tensors instead of a loss for `VirtualBatch`.
        temperature, normalize, reduction, tile, loss_device: as in `info_nce`.

    Raises:
        InvalidArgument: as in `info_nce`, and labels of another shape or type.
    """
    normalize = _checks.truth("normalize", normalize)
    tile = _tile(tile)
    if embeddings is None:
        device = _device(loss_device)
        return _C.losses.sup_con(temperature, normalize, reduction, tile, device)
    (embeddings,) = _tensors("sup_con", (embeddings,), 1, loss_device)
    return _C.losses.sup_con_value(embeddings, labels, temperature, normalize, reduction, tile)


@overload
def siglip(
    *,
    temperature: Learnable = ...,
    bias: Learnable = ...,
    normalize: bool = ...,
    reduction: Reduction = ...,
    tile: int | None = ...,
    loss_device: Device = ...,
) -> CoupledLoss: ...
@overload
def siglip(
    a: Tensor,
    b: Tensor,
    /,
    *,
    temperature: Learnable = ...,
    bias: Learnable = ...,
    normalize: bool = ...,
    reduction: Reduction = ...,
    tile: int | None = ...,
) -> Tensor: ...
def siglip(
    *embeddings: Tensor,
    temperature: Learnable = 0.1,
    bias: Learnable = -10.0,
    normalize: bool = True,
    reduction: Reduction = "mean",
    tile: int | None = None,
    loss_device: Device = None,
) -> CoupledLoss | Tensor:
    """Sigmoid loss of pairs (Zhai et al. 2023), in tiles as `info_nce`.

        -sum_j log sigmoid(y_ij (a_i · b_j / temperature + bias)),   y_ij = 1 where i = j, else -1

    `temperature` divides: the paper's t is 1 / temperature.

    Args:
        embeddings: a (N, D) and b (M, D), M at least N, for the value of tensors instead of a loss
            for `VirtualBatch`.
        bias: added to scores; a number, a tensor or a function, as `temperature`.
        temperature, normalize, reduction, tile, loss_device: as in `info_nce`.
    """
    normalize = _checks.truth("normalize", normalize)
    tile = _tile(tile)
    if not embeddings:
        device = _device(loss_device)
        return _C.losses.siglip(temperature, bias, normalize, reduction, tile, device)
    a, b = _tensors("siglip", embeddings, 2, loss_device)
    return _C.losses.siglip_value(a, b, temperature, bias, normalize, reduction, tile)


@overload
def pairwise(
    function: Callable[..., Tensor],
    /,
    *,
    reduction: Reduction = ...,
    tile: int | None = ...,
    loss_device: Device = ...,
) -> CoupledLoss: ...
@overload
def pairwise(
    function: Callable[..., Tensor],
    a: Tensor,
    b: Tensor,
    /,
    *,
    targets: Any = ...,
    reduction: Reduction = ...,
    tile: int | None = ...,
) -> Tensor: ...
def pairwise(
    function: Callable[..., Tensor],
    *embeddings: Tensor,
    targets: Any = None,
    reduction: Reduction = "mean",
    tile: int | None = None,
    loss_device: Device = None,
) -> CoupledLoss | Tensor:
    """A loss of your own that is a sum over rows, each of which may look at all columns.

    Each tile of rows runs forward and backward at once and is forgotten, so that the memory is that
    of one tile's graph. Parameters that `function` uses get their gradients (hooks on them see
    each tile's).

    Args:
        function: `function(rows, columns, positions)`, or with `targets` as a fourth argument,
            gives the sum of these rows' losses, a tensor of one number. rows (t, D) are a part of
            the first embeddings, columns (M, D) all of the second, positions (t) int64 say which
            rows these are, targets are all targets as they were given.
        embeddings: a (N, D) and b (M, D) for the value of tensors. Without: a loss for
            `VirtualBatch`, whose outputs are (a, b), one tensor (N, 2, D), or one tensor (N, D)
            that is compared with itself.
        targets: with embeddings, what `function` is given.
        reduction: "mean": divided by the number of rows; or "sum".
        tile, loss_device: as in `info_nce`.

    Example:
        def hardest(rows, columns, positions, labels):  # batch-hard triplets, margin 0.2
            distance = torch.cdist(rows, columns)
            same = labels[positions][:, None] == labels
            far = distance.masked_fill(~same, 0).amax(1)
            near = distance.masked_fill(same, torch.inf).amin(1)
            return (far - near + 0.2).relu().sum()

        batch = ib.VirtualBatch(encoder, ib.losses.pairwise(hardest), memory_budget="8GiB")
        batch.backward(images, labels)
    """
    if not callable(function):
        raise InvalidType(
            f"losses.pairwise needs a function of (rows, columns, positions), not "
            f"{type(function).__name__}"
        )
    call = _four_arguments(function)
    tile = _tile(tile)
    if not embeddings:
        return _C.losses.pairwise(call, reduction, tile, _device(loss_device))
    a, b = _tensors("pairwise", embeddings, 2, loss_device)
    return _C.losses.pairwise_value(a, b, call, targets, reduction, tile)


@overload
def linear_cross_entropy(
    linear_weight: Tensor,
    linear_bias: Tensor | None = ...,
    /,
    *,
    weight: Tensor | None = ...,
    ignore_index: int = ...,
    label_smoothing: float = ...,
    reduction: Reduction = ...,
    softcap: float | None = ...,
    tile: int | None = ...,
) -> SeparableLoss: ...
@overload
def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None = ...,
    /,
    *,
    weight: Tensor | None = ...,
    ignore_index: int = ...,
    label_smoothing: float = ...,
    reduction: Reduction = ...,
    softcap: float | None = ...,
    tile: int | None = ...,
) -> Tensor: ...
def linear_cross_entropy(
    *tensors: Tensor | None,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: Reduction = "mean",
    softcap: float | None = None,
    tile: int | None = None,
) -> SeparableLoss | Tensor:
    """Cross entropy of logits that a linear layer of the loss's own makes: a language model's head.

    The logits of all tokens are never held. Tiles of rows are computed together with their
    gradients, with the three matrix products of the plain way. What is held beside a tile are the
    gradients of outputs, linear_weight and linear_bias. Under autocast products are computed in its
    type, all else in float32.

    `linear_cross_entropy(linear_weight, linear_bias)` is a loss for `VirtualBatch`, streamed in one
    pass; `linear_cross_entropy(input, linear_weight, target, linear_bias)` is the value for tensors
    in any torch code:

        head = model.embedding.weight  # tied, if you like
        batch = ib.VirtualBatch(model.trunk, ib.losses.linear_cross_entropy(head))
        batch.backward(tokens, next_tokens)

    Outputs (N, ..., features); targets class indices (N, ...), or class probabilities (N, ..., C).
    A linear_weight (C, d1, ..., features) takes outputs (N, features) and targets (N, d1, ...) or
    (N, C, d1, ...), as torch.nn.LinearCrossEntropyLoss does.

    Args:
        tensors: linear_weight (C, features) and, if there is one, linear_bias (C); or input,
            linear_weight, target and, if there is one, linear_bias. All may require grad.
        weight, ignore_index, label_smoothing, reduction: as in `cross_entropy`.
        softcap: logits are softcap * tanh(logits / softcap), as in Gemma 2.
        tile: rows (tokens) whose logits are held at once. None: as many as take the bytes of the
            linear_weight, or 1 MiB where that is more; at most 256.

    Raises:
        InvalidArgument: shapes, types or devices that do not fit; a tile below 1.
        InvalidType: a tile that is no whole number.
        IndexError: a class index out of bounds, on the CPU.
        Unsupported: backward with create_graph=True.
    """
    given = list(tensors)
    most = len(given) if len(given) in (1, 3) else len(given) - 1
    if linear_bias is not None and len(given) != most:
        raise InvalidArgument("linear_cross_entropy was given linear_bias twice")
    if most not in (1, 3):
        raise InvalidArgument(
            f"linear_cross_entropy takes (linear_weight, linear_bias) or (input, linear_weight, "
            f"target, linear_bias), but was given {len(given)} tensors"
        )
    bias = linear_bias if len(given) == most else given.pop()
    _tensors("linear_cross_entropy", tuple(given), most, None)
    if softcap is not None and not softcap > 0:
        raise InvalidArgument(f"softcap must be above 0, or None, not {softcap}")
    options = (weight, ignore_index, label_smoothing, reduction, softcap or 0.0, _tile(tile))
    if most == 1:
        return _C.losses.linear_cross_entropy(given[0], bias, *options)
    return _C.losses.linear_cross_entropy_value(*given, bias, *options)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {list(value.shape)} and {value.dtype}"
    return type(value).__name__


def _tile(tile: int | None) -> int | None:
    return _checks.optional_whole_number("tile", tile, "rows")


def _device(device: Device) -> torch.device | None:
    return None if device is None else torch.device(device)


def _tensors(name: str, tensors: tuple[Any, ...], count: int, device: Device) -> tuple[Any, ...]:
    if len(tensors) != count:
        raise InvalidArgument(f"{name} takes {count} tensors, or none, not {len(tensors)}")
    for tensor in tensors:
        if not isinstance(tensor, Tensor):
            raise InvalidType(f"{name} takes tensors, not {type(tensor).__name__}")
    if device is not None:
        raise InvalidArgument(f"{name} of tensors is computed where they are: no loss_device")
    return tensors


def _four_arguments(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`function` as (rows, columns, positions, targets), whether it takes the targets or not."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some built-in functions do not tell
        return function
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(positional) >= 4 or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        return function
    if len(positional) != 3:
        raise InvalidArgument(
            f"the function of losses.pairwise takes {len(positional)} arguments; it is called as "
            f"function(rows, columns, positions) or function(rows, columns, positions, targets)"
        )
    return lambda rows, columns, positions, targets: function(rows, columns, positions)
