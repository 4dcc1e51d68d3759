"""Are two networks or tensors equal, and if not, where do they differ first and by how much?"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree

from .. import _checks
from ..errors import InvalidArgument, InvalidType, Unsupported

#: What `is_equal_with_error` allows unless told otherwise.
ERROR_TOLERANCE = 1e-7


@dataclass(frozen=True)
class Comparison:
    """What a comparison found. True where it found nothing; prints itself."""

    #: The first parameter or buffer that differs ("" for a tensor), or None.
    first: str | None
    #: In what it differs.
    reason: str
    #: The largest absolute difference of two values; NaN where one is NaN, inf where the shape, the
    #: type or the presence differs.
    largest_error: float
    #: The parameter or buffer with that error, or None.
    worst: str | None

    def __bool__(self) -> bool:
        return self.first is None

    def __str__(self) -> str:
        error = f"largest error {self.largest_error:.3g}"
        if self.worst:
            error += f" in {self.worst}"
        if self:
            return f"equal ({error})"
        return f"{self.first or 'the tensor'} differs: {self.reason} ({error})"


def compare_networks(one: nn.Module, another: nn.Module, *, tolerance: float = 0.0) -> Comparison:
    """Compares all parameters and buffers, those included that no state_dict holds.

    Args:
        tolerance: the largest absolute difference of floating values that counts as none. Integers
            and booleans must be equal.

    Returns:
        A `Comparison`: true if names, shapes, types and values agree. NaN equals nothing. Devices
        may differ.

    Example:
        assert (found := tools.compare_networks(model, native, tolerance=1e-12)), found
    """
    for name, network in (("one", one), ("another", another)):
        if not isinstance(network, nn.Module):
            raise InvalidType(f"{name} must be a torch.nn.Module, not {type(network).__name__}")
    limit = _tolerance(tolerance)
    return _collect(_pairs(_state(one), _state(another)), limit)


def compare_tensors(one: Tensor, another: Tensor, *, tolerance: float = 0.0) -> Comparison:
    """As `compare_networks`, for two tensors."""
    for name, tensor in (("one", one), ("another", another)):
        if not isinstance(tensor, Tensor):
            raise InvalidType(f"{name} must be a torch.Tensor, not {type(tensor).__name__}")
    return _collect(iter([("", one, another)]), _tolerance(tolerance))


def is_equal_network(one: nn.Module, another: nn.Module) -> bool:
    """Whether both have the same parameters and buffers, value by value. `compare_networks` tells
    where they differ."""
    return bool(compare_networks(one, another))


def is_equal_with_error(
    one: Tensor, another: Tensor, detach: bool = True, *, tolerance: float = ERROR_TOLERANCE
) -> bool:
    """Whether shape and type agree and no value differs by more than `tolerance`.

    Args:
        detach: accepted for programs that hand it in; a comparison never builds a graph.
        tolerance: absolute, for floating values; integers must be equal.
    """
    _checks.truth("detach", detach)
    return bool(compare_tensors(one, another, tolerance=tolerance))


def _tolerance(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InvalidType(f"tolerance must be a number, not {type(value).__name__}")
    if not 0 <= value < math.inf:
        raise InvalidArgument(f"tolerance is {value}; it is 0 or more, and finite")
    return float(value)


def _state(network: nn.Module) -> dict[str, Any]:
    tensors = chain(
        network.named_parameters(remove_duplicate=False),
        network.named_buffers(remove_duplicate=False),
    )
    return dict(tensors) | {
        name: value for name, value in network.state_dict().items() if name.endswith("_extra_state")
    }


_MISSING = object()


def _pairs(one: dict[str, Any], another: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in one | another:
        yield name, one.get(name, _MISSING), another.get(name, _MISSING)


def _collect(pairs: Iterator[tuple[str, Any, Any]], tolerance: float) -> Comparison:
    first, reason, largest, worst = None, "", 0.0, None
    for name, one, another in pairs:
        error, why = _difference(one, another, tolerance)
        if why and first is None:
            first, reason = name, why
        if error > largest or (math.isnan(error) and not math.isnan(largest)):
            largest, worst = error, name
    return Comparison(first, reason, largest, worst)


def _difference(one: Any, another: Any, tolerance: float) -> tuple[float, str]:
    """The largest error, and why the two differ, or ""."""
    if one is _MISSING or another is _MISSING:
        return math.inf, f"only the {'second' if one is _MISSING else 'first'} has it"
    if not isinstance(one, Tensor) or not isinstance(another, Tensor):
        return (0.0, "") if _same_state(one, another) else (math.inf, "its extra state")
    if any(tensor.is_meta or is_lazy(tensor) for tensor in (one, another)):
        raise Unsupported(
            "a parameter or buffer has no values yet (a meta tensor or a lazy module): load or run "
            "the model before it is compared"
        )
    if one.shape != another.shape:
        return math.inf, f"shapes {list(one.shape)} and {list(another.shape)}"
    if one.dtype != another.dtype:
        return math.inf, f"types {one.dtype} and {another.dtype}"
    values, others = _values(one), _values(another)
    different = values != others  # true for NaN; inf equals inf
    count = int(different.count_nonzero())
    if count == 0:
        return 0.0, ""
    index = different.nonzero()[0].tolist()
    if values.dtype in (torch.float64, torch.complex128):
        error = float((values[different] - others[different]).abs().max())  # NaN if any is
        allowed = error <= tolerance
    else:  # beyond 2^53 two whole numbers may be one in double
        apart = (values[different].double() - others[different].double()).abs().max()
        error, allowed = max(1.0, float(apart)), False
    if allowed:
        return error, ""
    one_of = f"{count:,} of {values.numel():,} values, first at {index}: "
    here = tuple(index)
    return error, one_of + f"{values[here].item()} and {others[here].item()}"


def _same_state(one: Any, another: Any) -> bool:
    """Of plain objects, and tensors in lists and dicts."""
    leaves, layout = _pytree.tree_flatten(one)
    others, other_layout = _pytree.tree_flatten(another)
    if layout != other_layout:
        return False
    return all(
        _difference(a, b, 0.0)[1] == ""
        if isinstance(a, Tensor) and isinstance(b, Tensor)
        else type(a) is type(b) and bool(a == b)
        for a, b in zip(leaves, others, strict=True)
    )


@torch.no_grad()
def _values(tensor: Tensor) -> Tensor:
    """On the host, dense, and where they are not whole numbers in double precision."""
    dense = tensor.detach().to("cpu")
    if dense.layout != torch.strided:
        dense = dense.to_dense()
    if dense.is_quantized:
        dense = dense.dequantize()
    if dense.is_complex():
        return dense.to(torch.complex128)
    return dense.double() if dense.is_floating_point() else dense
