"""What a step leaves behind, and how two sides differ in it."""

import math
import random
from typing import Any

import infinitybatch as ib
import numpy as np
import torch
from torch import nn
from torch.utils import _pytree

from .device import generator_state

#: Relative, in fp64; where a case is more sensitive than that, what native itself moves decides.
TOLERANCE = 1e-12

#: Weights, inputs and losses of the cases are near 1, so that rounding is near 1e-16.
LEAST = 1e-3

State = dict[str, Any]


def _plain(value: Any) -> Any:
    """A copy of a plain attribute; None for what is neither numbers, text nor tensors."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value if isinstance(value, (bool, int, float, str)) else None


def state_of(side: Any) -> State:
    """Everything that a step may change, copied."""
    model: nn.Module = side.model
    state: State = {
        "generator torch": torch.get_rng_state(),
        "generator of the device": generator_state(),
        "generator Python": random.getstate(),
        "generator NumPy": [*np.random.get_state()],
    }
    for name, parameter in model.named_parameters():
        state[f"parameter {name}"] = parameter.detach().clone()
        grad = parameter.grad
        state[f"gradient {name}"] = None if grad is None else grad.detach().to_dense().clone()
    state |= {f"buffer {name}": b.detach().clone() for name, b in model.named_buffers()}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            if not name.startswith("_") and name not in ("training",):
                kind = "generator" if isinstance(value, torch.Generator) else "attribute"
                if name.startswith("rows_seen"):  # in pieces: a run that does not count adds none
                    value = sum(value)
                state[f"{kind} {prefix}.{name}"] = _plain(value)
        places = {id(each): each for each in (module, ib.unwrap(module))}.values()
        hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in places)
        state[f"attribute {prefix} number of hooks"] = hooks
    state |= {f"fired {name}": count for name, count in side.space["FIRED"].items()}
    return state


def _read(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.dequantize() if tensor.is_quantized else tensor.to_dense()


def difference(found: Any, wanted: Any, scale: float = 1.0) -> float:
    """0 for the same, NaN included; infinity for what cannot be compared."""
    if isinstance(found, torch.Tensor) and isinstance(wanted, torch.Tensor):
        if found.shape != wanted.shape or found.dtype != wanted.dtype:
            return math.inf
        if found.layout != wanted.layout:
            return math.inf
        found, wanted = _read(found), _read(wanted)
        if torch.equal(found, wanted):
            return 0.0
        if not wanted.is_floating_point() and not wanted.is_complex():
            return math.inf
        odd = ~(torch.isfinite(found) & torch.isfinite(wanted))
        if odd.any():
            if not torch.equal(torch.nan_to_num(found[odd]), torch.nan_to_num(wanted[odd])):
                return math.inf
            if not torch.equal(found[odd].isnan(), wanted[odd].isnan()):
                return math.inf
            found, wanted = found[~odd], wanted[~odd]
        norm = float(wanted.norm())
        error = float((found - wanted).norm()) / (norm if norm > 1e-8 * scale else scale)
        return error if math.isfinite(error) else math.inf
    if isinstance(found, np.ndarray) and isinstance(wanted, np.ndarray):
        return 0.0 if np.array_equal(found, wanted) else math.inf
    if isinstance(found, (list, tuple)) and isinstance(wanted, (list, tuple)):
        if len(found) != len(wanted):
            return math.inf
        pairs = zip(found, wanted, strict=True)
        return max((difference(a, b, scale) for a, b in pairs), default=0.0)
    return 0.0 if type(found) is type(wanted) and found == wanted else math.inf


def scale_of(state: State, kind: str) -> float:
    """The largest norm; gradients that are nothing but rounding all over (a loss over outputs that
    are all alike) are measured as if one of them was a thousandth."""
    norms = [
        float(value.norm())
        for name, value in state.items()
        if name.startswith(kind) and isinstance(value, torch.Tensor) and value.is_floating_point()
    ]
    finite = [norm for norm in norms if math.isfinite(norm)]
    return max(max(finite, default=1.0) or 1.0, LEAST)


def differences(found: State, wanted: State, kinds: tuple[str, ...]) -> dict[str, float]:
    """Of each entry of these kinds that differs at all."""
    scales = {kind: scale_of(wanted, kind) for kind in kinds}
    result = {}
    for name in dict.fromkeys([*wanted, *found]):
        kind = name.split(" ")[0]
        if kind not in kinds:
            continue
        if (name in found) != (name in wanted):
            result[name] = math.inf
            continue
        error = difference(found[name], wanted[name], scales[kind])
        if error > 0:
            result[name] = error
    return result


def skeletons(state: State) -> State:
    """What holds of a state whatever numbers were drawn: types, shapes, what is finite."""

    def of(name: str, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if value.layout != torch.strided:
                value = value.to_dense()
            real = value.is_floating_point() or value.is_complex()
            finite = bool(torch.isfinite(value).all()) if real else None
            kind = name.split(" ")[0]
            # Buffers of integers count; integers elsewhere may have been drawn.
            return (
                value if kind == "buffer" and not real else [*value.shape, str(value.dtype), finite]
            )
        return value if isinstance(value, (bool, int, str, type(None))) else type(value).__name__

    return {name: of(name, value) for name, value in state.items()}


def outputs_of(outputs: Any) -> State:
    """Copies of what a model returned, by place."""
    return {
        f"output {number}": leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
        for number, leaf in enumerate(_pytree.tree_leaves(outputs))
    }
