from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

_Reduction = Literal["mean", "sum"]

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

def coupled(value: Callable[[Any, Any], Tensor], device: torch.device | None) -> CoupledLoss: ...
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
    linear_bias: Tensor | None = None,
    *,
    weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    reduction: _Reduction = "mean",
) -> SeparableLoss: ...
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
