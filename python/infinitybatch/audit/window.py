"""What was seen between two steps of an optimizer: its gradients and its micro-batches."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from .experiment import Micro
from .gradients import Gradients
from .trace import Trace


@dataclass
class Window:
    """What was seen between two steps."""

    step: int
    names: list[str]
    #: `.grad` as `step()` reads it, but before clipping; as it reads it; right after the last
    #: backward pass.
    reached: Gradients
    stepped: Gradients
    last: Gradients
    #: `.grad` before the first pass, where it was not empty.
    start: Gradients | None
    #: By what each parameter's `.grad` was multiplied between passes.
    factors: list[list[float | None]]
    passes: int
    whole: Micro
    pieces: list[Micro]
    sizes: list[int]
    #: The same pieces with the random state that their loader's batches were given out in.
    other_pieces: list[Micro] | None = None
    #: How many micro-batches came before the loader's end.
    before_the_end: int = 0
    #: Samples of the batch that ib.audit was given, and those that the model was not called on.
    rows: int = 0
    unseen: int = 0
    #: Whether a clipping function was called after the last pass; whether `.grad` was written to
    #: after one that had an effect.
    is_clipped: bool = False
    is_written_after_clipping: bool = False


def seen_gradients(
    trace: Trace, optimizer: Optimizer, parameters: list[nn.Parameter], named: dict[Any, str]
) -> dict[str, Any]:
    """What a Window holds of the gradients of these parameters."""
    slots = [trace.slots[p] for p in parameters]
    pairs = list(zip(slots, parameters, strict=True))
    scale = getattr(optimizer, "grad_scale", None)  # of a fused optimizer, which unscales
    reached = [_dense(s.before_clipping(p.grad), p) for s, p in pairs]
    if scale is not None:
        reached = [g / scale.to(g.device) for g in reached]
    starts = [s.start if s.passes else p.grad for s, p in pairs]
    has_start = any(s is not None and bool(_dense(s, s).any()) for s in starts)
    dense_starts = [_dense(s, p) for s, p in zip(starts, parameters, strict=True)]
    return {
        "names": [named[p] for p in parameters],
        "reached": reached,
        "stepped": [_dense(p.grad, p) for p in parameters],
        "last": [_dense(s.last if s.passes else p.grad, p) for s, p in pairs],
        "start": dense_starts if has_start else None,
        "factors": [slot.factors for slot in slots],
        "is_clipped": any(s.clips for s in slots),
        "is_written_after_clipping": any(s.is_written_after_clipping(p.grad) for s, p in pairs),
    }


def _dense(tensor: Tensor | None, like: Tensor) -> Tensor:
    if tensor is None:
        return torch.zeros_like(like)
    return (tensor if tensor.layout == torch.strided else tensor.to_dense()).detach()
