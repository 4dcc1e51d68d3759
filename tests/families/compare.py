"""Gradients of a model by streaming and by `wrap`, beside those of the native whole batch."""

import copy
from collections.abc import Mapping
from typing import Any

import infinitybatch as ib
import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

N, SIZE, DRAWS = 5, 2, 8


class First(nn.Module):
    """The model's largest output that has a row for each sample."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> torch.Tensor:
        return largest(self.model(**inputs))


def largest(outputs: Any) -> torch.Tensor:
    leaves = tree_leaves(dict(outputs) if isinstance(outputs, Mapping) else outputs)
    tensors = [t for t in leaves if isinstance(t, torch.Tensor)]
    return max((t for t in tensors if t.dim() > 1 and t.requires_grad), key=torch.Tensor.numel)


def coupled(outputs: torch.Tensor) -> torch.Tensor:
    """Compares every sample with every other."""
    rows = nn.functional.normalize(outputs.flatten(1), dim=1)
    return nn.functional.cross_entropy(rows @ rows.T / 0.3, torch.arange(len(rows)).roll(1))


def taken(model: nn.Module) -> list[torch.Tensor | None]:
    found = [p.grad for p in model.parameters()]
    model.zero_grad(set_to_none=True)
    return found


def distances(found: list[Any], wanted: list[Any]) -> list[float]:
    """Of each gradient, by its norm; by the largest norm where it is a true zero."""
    norms = [0.0 if w is None else float(w.norm()) for w in wanted]
    result = []
    for f, w, norm in zip(found, wanted, norms, strict=True):
        if (f is None) != (w is None):
            # A gradient of zeros and none at all come to the same for any optimizer's sum.
            result.append(float("inf") if float((w if f is None else f).norm()) > 0 else 0.0)
        elif w is not None:
            scale = norm if norm > 1e-12 * max(norms) else max(norms)
            result.append(float((f - w).norm()) / (scale or 1.0))
        else:
            result.append(0.0)
    return result


def statistics(found: nn.Module, wanted: dict[str, torch.Tensor]) -> float:
    """How far the model's buffers are from those that native leaves."""
    buffers = {name: value for name, value in found.named_buffers() if value.is_floating_point()}
    apart = [
        float((value - wanted[name]).abs().max()) / max(1.0, float(wanted[name].abs().max()))
        for name, value in buffers.items()
        if value.numel() > 0 and value.isfinite().all()
    ]
    return max(apart, default=0.0)


def beside_native(given: nn.Module, inputs: dict[str, Any]) -> dict[str, str]:
    """streaming and wrap.

    Args:
        given: in training mode, nothing random in it, in float64.
        inputs: N samples, its arguments by name.
    """
    model = First(given)
    start = copy.deepcopy(model.state_dict())
    draws = [(torch.randperm(N), 1 + float(torch.rand(()))) for _ in range(DRAWS)]
    try:
        outputs = model(**inputs)
    except Exception as error:  # whatever the model's own code raises
        reason = f"native fails: {type(error).__name__}: {str(error).splitlines()[0]}"
        return {"streaming": reason, "wrap": reason}
    targets = torch.randn_like(outputs)
    del outputs
    criterion = nn.MSELoss()

    def native(loss: Any, inputs: Any, *targets: Any) -> list[Any]:
        model.load_state_dict(start)
        loss(model(**inputs), *targets).backward()
        return taken(model)

    def stream() -> None:
        ib.VirtualBatch(model, criterion, micro_batch_size=SIZE).backward(inputs, targets)

    def wrap() -> None:
        wrapped = ib.wrap(model.model, micro_batch_size=SIZE)
        coupled(largest(wrapped(**inputs))).backward()

    def native_again(order: torch.Tensor, scale: float, loss: Any, *targets: Any) -> list[Any]:
        """The same gradient: samples go through the model in another order, all products round
        otherwise."""
        moved = tree_map(lambda t: t[order] if isinstance(t, torch.Tensor) else t, inputs)
        found = native(lambda outputs: loss(outputs[order.argsort()], *targets) * scale, moved)
        return [None if gradient is None else gradient / scale for gradient in found]

    found = {}
    for name, run, loss, own in (
        ("streaming", stream, criterion, (targets,)),
        ("wrap", wrap, coupled, ()),
    ):
        moved = [native_again(*draw, loss, *own) for draw in draws]
        wanted = native(loss, inputs, *own)
        left = {name: buffer.clone() for name, buffer in model.named_buffers()}
        moved = [distances(each, wanted) for each in moved]
        model.load_state_dict(start)
        try:
            run()
        except ib.Error as error:
            found[name] = f"refused: {type(error).__name__}: {str(error).split(';')[0]}"
            taken(model)
            continue
        noise = [max(1e-12, 10 * max(each)) for each in zip(*moved, strict=True)]
        far = [(d, n) for d, n in zip(distances(taken(model), wanted), noise, strict=True) if d > n]
        found[name] = "exact" if not far else f"WRONG: {max(far)[0]:.2g} of {max(far)[1]:.2g}"
        if statistics(model, left) > 1e-10:
            found[name] = f"WRONG: buffers are {statistics(model, left):.2g} apart"
    return found
