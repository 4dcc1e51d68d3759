"""Gradients as lists of tensors, one for each parameter, and sums of them in double precision."""

from collections.abc import Sequence

import torch
from torch import Tensor

Gradients = list[Tensor]

#: Parameters whose gradient is less than this share of the whole one are measured against the share.
_FLOOR = 1e-2


def norm(gradients: Gradients) -> float:
    return float(sum(float(g.double().square().sum()) for g in gradients)) ** 0.5


def dot(one: Gradients, other: Gradients) -> float:
    return sum(float((a.double() * b.double()).sum()) for a, b in zip(one, other, strict=True))


def errors(found: Gradients, wanted: Gradients, scale: float = 1.0) -> list[float]:
    """Of each parameter: the distance of `found` from `scale * wanted`, over the latter's norm."""
    floor = _FLOOR * abs(scale) * norm(wanted)
    tiny = torch.finfo(torch.float64).tiny
    result = []
    for a, b in zip(found, wanted, strict=True):
        b = b.double() * scale
        result.append(float((a.double() - b).norm()) / max(float(b.norm()), floor, tiny))
    return result


def error(found: Gradients, wanted: Gradients, scale: float = 1.0) -> float:
    each = errors(found, wanted, scale)
    return float("nan") if any(e != e for e in each) else max(each, default=0.0)


def factor(found: Gradients, wanted: Gradients) -> float:
    """The number c for which `c * wanted` is nearest to `found`."""
    square = dot(wanted, wanted)
    return dot(found, wanted) / square if square else 0.0


def combine(
    pieces: Sequence[Gradients],
    weights: Sequence[float],
    start: Gradients | None = None,
    factors: Sequence[Sequence[float]] | None = None,
) -> Gradients:
    """The weighted sum, from `start` on, with `factors[p][i]` on parameter p after piece i."""

    def of(place: int) -> Tensor:
        total = torch.zeros_like(pieces[0][place], dtype=torch.float64)
        if start is not None:
            total += start[place].double()
        for i, (piece, weight) in enumerate(zip(pieces, weights, strict=True)):
            total += weight * piece[place].double()
            if factors is not None and i < len(factors[place]):
                total *= factors[place][i]
        return total

    return [of(place) for place in range(len(pieces[0]))]


def regress(target: Gradients, pieces: Sequence[Gradients]) -> tuple[list[float], float] | None:
    """The weights with which the pieces come nearest to `target`, and the error that is left.

    None where there are too few numbers to tell anything.
    """
    if sum(t.numel() for t in target) < 4 * len(pieces):
        return None
    gram = torch.tensor(
        [[dot(a, b) for b in pieces] for a in pieces], dtype=torch.float64, device="cpu"
    )
    right = torch.tensor([dot(p, target) for p in pieces], dtype=torch.float64, device="cpu")
    if not bool(torch.isfinite(gram).all() and torch.isfinite(right).all()):
        return None
    # The normal equations square the condition number: where pieces nearly repeat each other the
    # weights are not told apart, which pinv answers with the smallest ones.
    weights = (torch.linalg.pinv(gram, hermitian=True, rtol=1e-13) @ right).tolist()
    return weights, error(target, combine(pieces, weights))


def shares(sizes: Sequence[float]) -> list[float]:
    return [size / sum(sizes) for size in sizes]


def clipped_to(found: Gradients, of: Gradients, rounding: float) -> float | None:
    """The limit that `found` looks like `of` clipped to; None where it does not.

    A limit is a number that somebody has written: it has three digits.
    """
    largest = max((float(g.abs().max()) for g in found if g.numel()), default=0.0)
    limit = _written(largest, rounding)
    if limit and error(found, [g.clamp(-limit, limit) for g in of]) <= rounding:
        return limit
    by = factor(found, of)
    if 0 < by < 1 and error(found, of, by) <= rounding:
        return _written(norm(found), rounding, norm(of))
    limits = set()
    for one, other in zip(found, of, strict=True):
        own = factor([one], [other])
        if not norm([other]) or abs(own - 1) <= rounding and error([one], [other]) <= rounding:
            continue
        limit = _written(norm([one]), rounding, norm([other]))
        if not 0 < own < 1 or error([one], [other], own) > rounding or not limit:
            return None
        limits.add(limit)
    return limits.pop() if len(limits) == 1 else None


def _written(number: float, rounding: float, before: float = float("inf")) -> float | None:
    """`number` with three digits, if it is that, or is so but for torch's 1e-6 in its divisor."""
    for exact in (number, number * (1 + 1e-6 / before) if before else number):
        limit = float(f"{exact:.3g}")
        if limit and abs(exact - limit) <= rounding * limit:
            return limit
    return None
