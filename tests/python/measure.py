"""The one measure of all tests and benchmarks: how far named tensors are from those that are right.

It says "infinitely far" wherever a maximum of Python numbers would say nothing: NaN that native does
not have, a gradient on one side only, another shape or type, a name that is missing or too much.
Integers and booleans are compared exactly, infinities by place and sign.
"""

import math
from collections.abc import Iterable, Mapping

import torch

Named = Mapping[str, torch.Tensor | None]

#: Contract 1 in float64: this, or so many times what native itself moves when the batch is reversed.
EXACT, TIMES_NATIVE = 1e-12, 10
#: A gradient this much smaller than the largest is rounding around a true zero: a bias in front of a
#: normalisation, say. It is measured by the largest norm.
TRUE_ZERO = 1e-12


def wide(tensor: torch.Tensor) -> torch.Tensor:
    """Its values in double precision; complex numbers as pairs."""
    tensor = tensor.detach()
    tensor = (tensor.to_dense() if tensor.layout != torch.strided else tensor).resolve_conj()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.to(torch.complex128))
    return tensor.double()


def size(tensor: torch.Tensor | None) -> float:
    """The norm of what is finite."""
    if tensor is None:
        return 0.0
    values = wide(tensor)
    return float(values.where(values.isfinite(), 0.0).norm())


def apart(found: torch.Tensor | None, wanted: torch.Tensor | None, any_type: bool = False) -> float:
    """The norm of the difference; infinite where the two have nothing to do with each other."""
    if found is None or wanted is None:
        return 0.0 if found is wanted else math.inf
    if found.shape != wanted.shape or not (any_type or found.dtype == wanted.dtype):
        return math.inf
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return 0.0 if torch.equal(found, wanted) else math.inf
    a, b = wide(found), wide(wanted)
    special = ~b.isfinite()
    if not torch.equal(~a.isfinite(), special) or not torch.equal(
        a[special].nan_to_num(nan=0.0), b[special].nan_to_num(nan=0.0)
    ):
        return math.inf
    if not torch.equal(a.isnan(), b.isnan()):
        return math.inf
    return float((a - b).masked_fill(special, 0.0).norm())


def errors(
    found: Named, wanted: Named, *, any_type: bool = False, true_zero: float = TRUE_ZERO
) -> dict[str, float]:
    """Relative error of each tensor by its own norm, or by the largest where it is truly zero.

    Args:
        any_type: types may differ: float32 beside its truth in float64.
        true_zero: relative to the largest norm.
    """
    norms = {name: size(tensor) for name, tensor in wanted.items()}
    largest = max(norms.values(), default=0.0)
    result = dict.fromkeys(found.keys() - wanted.keys(), math.inf)
    for name, tensor in wanted.items():
        distance = apart(found[name], tensor, any_type) if name in found else math.inf
        scale = norms[name] if norms[name] > true_zero * largest else largest
        error = 0.0 if distance == 0 else distance / scale if scale > 0 else math.inf
        result[name] = math.inf if math.isnan(error) else error
    return result


def worst(found: Named, wanted: Named, **options: float) -> float:
    """The largest of `errors`; 0 where there is nothing to compare."""
    return max(errors(found, wanted, **options).values(), default=0.0)


def allowed(
    wanted: Named,
    moved: Iterable[Named] = (),
    least: float = EXACT,
    times: float = TIMES_NATIVE,
    **options: float,
) -> dict[str, float]:
    """Contract 1's room for each tensor.

    Args:
        moved: what native gives in other ways that round otherwise, the batch reversed above all; a
            value that becomes infinite or NaN there gives no room.
        least: allowed whatever native does.
        times: how far beyond native's own movement.
    """
    room = dict.fromkeys(wanted, least)
    for way in moved:
        for name, error in errors(way, wanted, **options).items():
            if name in room and math.isfinite(error):
                room[name] = max(room[name], times * error)
    return room


def excess(
    found: Named,
    wanted: Named,
    moved: Iterable[Named] = (),
    least: float = EXACT,
    times: float = TIMES_NATIVE,
    **options: float,
) -> dict[str, tuple[float, float]]:
    """What lies outside of contract 1, with its error and what is `allowed`."""
    room = allowed(wanted, moved, least, times, **options)
    return {
        name: (error, room.get(name, 0.0))
        for name, error in errors(found, wanted, **options).items()
        if not error <= room.get(name, 0.0)
    }


def assert_within(found: Named, wanted: Named, least: float = EXACT, **options: float) -> None:
    """Nothing lies outside of contract 1; `least` is for types coarser than float64."""
    outside = excess(found, wanted, least=least, **options)
    assert not outside, f"error and what is allowed: {outside}"


def numbered(tensors: Iterable[torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
    """Tensors without names, by their place."""
    return {str(place): tensor for place, tensor in enumerate(tensors)}


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def same_bits(found: Named, wanted: Named) -> bool:
    """Whether all are equal to the last bit; NaN is equal to NaN in the same place."""
    return worst(found, wanted) == 0
