from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

_Reduction = Literal["mean", "sum"]
_Learnable = float | Tensor | Callable[[], Tensor]

class SeparableLoss:
    """A sum over samples divided by a denominator known from the targets."""

    @property
    def name(self) -> str: ...
    @property
    def has_penalty(self) -> bool: ...
    def sum(self, outputs: Any, targets: Any) -> Tensor: ...
    def denominator(self, targets: Any, samples: int) -> float | Tensor | None: ...

class CoupledLoss:
    """A loss that sees the outputs of the whole logical batch at once."""

    @property
    def name(self) -> str: ...

def coupled(
    value: Callable[[Any, Any], Tensor], device: torch.device | None, name: str
) -> CoupledLoss: ...
def separable(
    sum: Callable[[Any, Any], Tensor],
    denominator: Callable[[Any, int], float | Tensor | None] | None,
) -> SeparableLoss: ...
def with_penalty(loss: SeparableLoss, penalty: Callable[[], Tensor]) -> SeparableLoss: ...
def cross_entropy(
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: _Reduction = "mean",
) -> SeparableLoss: ...
def linear_cross_entropy(
    linear_weight: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: _Reduction,
    softcap: float,
    tile: int | None,
) -> SeparableLoss: ...
def linear_cross_entropy_value(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    linear_bias: Tensor | None,
    weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    reduction: _Reduction,
    softcap: float,
    tile: int | None,
) -> Tensor: ...
def info_nce(
    temperature: _Learnable,
    normalize: bool,
    symmetric: bool,
    reduction: _Reduction,
    tile: int | None,
    device: torch.device | None,
) -> CoupledLoss: ...
def info_nce_value(
    a: Tensor,
    b: Tensor,
    temperature: _Learnable,
    normalize: bool,
    symmetric: bool,
    reduction: _Reduction,
    tile: int | None,
) -> Tensor: ...
def sup_con(
    temperature: _Learnable,
    normalize: bool,
    reduction: _Reduction,
    tile: int | None,
    device: torch.device | None,
) -> CoupledLoss: ...
def sup_con_value(
    embeddings: Tensor,
    labels: Tensor | None,
    temperature: _Learnable,
    normalize: bool,
    reduction: _Reduction,
    tile: int | None,
) -> Tensor: ...
def siglip(
    temperature: _Learnable,
    bias: _Learnable,
    normalize: bool,
    reduction: _Reduction,
    tile: int | None,
    device: torch.device | None,
) -> CoupledLoss: ...
def siglip_value(
    a: Tensor,
    b: Tensor,
    temperature: _Learnable,
    bias: _Learnable,
    normalize: bool,
    reduction: _Reduction,
    tile: int | None,
) -> Tensor: ...
def pairwise(
    function: Callable[[Tensor, Tensor, Tensor, Any], Tensor],
    reduction: _Reduction,
    tile: int | None,
    device: torch.device | None,
) -> CoupledLoss: ...
def pairwise_value(
    a: Tensor,
    b: Tensor,
    function: Callable[[Tensor, Tensor, Tensor, Any], Tensor],
    targets: Any,
    reduction: _Reduction,
    tile: int | None,
) -> Tensor: ...
def nll(
    *, weight: Tensor | None = None, ignore_index: int = -100, reduction: _Reduction = "mean"
) -> SeparableLoss: ...
def multi_margin(
    *,
    p: int = 1,
    margin: float = 1.0,
    weight: Tensor | None = None,
    reduction: _Reduction = "mean",
) -> SeparableLoss: ...
def mse(*, reduction: _Reduction = "mean") -> SeparableLoss: ...
def l1(*, reduction: _Reduction = "mean") -> SeparableLoss: ...
def smooth_l1(*, beta: float = 1.0, reduction: _Reduction = "mean") -> SeparableLoss: ...
def huber(*, delta: float = 1.0, reduction: _Reduction = "mean") -> SeparableLoss: ...
def poisson_nll(
    *,
    log_input: bool = True,
    full: bool = False,
    eps: float = 1e-8,
    reduction: _Reduction = "mean",
) -> SeparableLoss: ...
def gaussian_nll(
    *, full: bool = False, eps: float = 1e-6, reduction: _Reduction = "mean"
) -> SeparableLoss: ...
def kl_div(
    *, log_target: bool = False, reduction: Literal["mean", "sum", "batchmean"] = "mean"
) -> SeparableLoss: ...
def binary_cross_entropy(
    *, weight: Tensor | None = None, reduction: _Reduction = "mean"
) -> SeparableLoss: ...
def binary_cross_entropy_with_logits(
    *,
    weight: Tensor | None = None,
    pos_weight: Tensor | None = None,
    reduction: _Reduction = "mean",
) -> SeparableLoss: ...
def soft_margin(*, reduction: _Reduction = "mean") -> SeparableLoss: ...
def multilabel_margin(*, reduction: _Reduction = "mean") -> SeparableLoss: ...
def multilabel_soft_margin(
    *, weight: Tensor | None = None, reduction: _Reduction = "mean"
) -> SeparableLoss: ...
def hinge_embedding(*, margin: float = 1.0, reduction: _Reduction = "mean") -> SeparableLoss: ...
def cosine_embedding(*, margin: float = 0.0, reduction: _Reduction = "mean") -> SeparableLoss: ...
def margin_ranking(*, margin: float = 0.0, reduction: _Reduction = "mean") -> SeparableLoss: ...
def triplet_margin(
    *,
    margin: float = 1.0,
    p: float = 2.0,
    eps: float = 1e-6,
    swap: bool = False,
    reduction: _Reduction = "mean",
) -> SeparableLoss: ...
def triplet_margin_with_distance(
    *,
    distance_function: Callable[[Tensor, Tensor], Tensor] | None = None,
    margin: float = 1.0,
    swap: bool = False,
    reduction: _Reduction = "mean",
) -> SeparableLoss: ...
def ctc(
    *, blank: int = 0, zero_infinity: bool = False, reduction: _Reduction = "mean"
) -> SeparableLoss: ...
def pad_ctc_targets(concatenated: Tensor, target_lengths: Tensor) -> Tensor: ...
