"""Compares what reached `step()` with the whole batch's gradient, and says why they differ."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from . import causes
from .causes import HYPOTHESES, Facts, Hypothesis, cause
from .experiment import Experiment, Micro
from .gradients import (
    Gradients,
    clipped_to,
    combine,
    error,
    errors,
    factor,
    norm,
    regress,
    shares,
)
from .mixing import first_mixing
from .report import AuditReport, Cause, MicroBatchWeight, ParameterError, Verdict, versions
from .window import Window

#: What rounding may move, relative to a parameter's gradient.
ROUNDING = {
    torch.float64: 1e-8,
    torch.float32: 1e-4,
    torch.float16: 1e-2,
    torch.bfloat16: 6e-2,
}


@dataclass
class Right:
    """The whole batch's gradient."""

    gradient: Gradients
    #: As a sum of the micro-batches'; None where it is none, or nobody can tell.
    weights: list[float] | None
    allowed: float
    #: Whether `gradient` is under the random numbers that the loop drew.
    known: bool = True
    #: Whether no sum of the micro-batches' gradients is the whole batch's.
    coupled: bool = False


class Examination:
    """One step, looked at inside `untouched(model)`."""

    def __init__(self, window: Window, experiment: Experiment, same_random_numbers: bool) -> None:
        self.window = window
        self.experiment = experiment
        self.same_random_numbers = same_random_numbers
        self.strict = max(ROUNDING.get(p.dtype, 1e-4) for p in experiment.parameters)
        self.notes: list[str] = []
        self.random = False
        self.weights: list[float] | None = None
        #: What `run` has found.
        self.right = Right([], None, self.strict)
        self._prepared: tuple[Gradients, list[Gradients], Right] | None = None

    def prepare(self) -> None:
        """Computes what `run` may need, while parameters are where they were."""
        whole = self.experiment.whole(self.window.whole)
        self.random = self.experiment.drew
        pieces = self._pieces(self.window.pieces, whole)
        self._prepared = whole, pieces, self._right(whole, pieces)

    def of(self, places: list[int]) -> "Examination":
        """The same of some of the parameters, after `prepare`."""

        def some(gradients: Any) -> Any:
            return None if gradients is None else [gradients[i] for i in places]

        w, e = self.window, self.experiment
        names = ("names", "reached", "stepped", "last", "start", "factors")
        window = replace(w, **{name: some(getattr(w, name)) for name in names})
        experiment = Experiment(e.model, some(e.parameters), e.loss, e.memory_budget)
        experiment.reached, experiment.coarsest = e.reached, e.coarsest
        other = Examination(window, experiment, self.same_random_numbers)
        other.random = self.random
        assert self._prepared is not None
        whole, pieces, right = self._prepared
        other._prepared = (
            some(whole),
            [some(piece) for piece in pieces],
            replace(right, gradient=some(right.gradient)),
        )
        return other

    def run(self) -> AuditReport:
        window = self.window
        if self._prepared is None:
            whole = self.experiment.whole(window.whole)
            self.random = self.experiment.drew
        else:
            whole = self._prepared[0]
        self.right = Right(whole, None, self.strict)
        if not all(bool(torch.isfinite(g).all()) for g in whole):
            self.notes.append("the whole batch's own gradient is not finite")
            return self.report("undecided", self.right)
        if window.is_clipped:
            self._note_clipping()
        if window.unseen:
            early = cause(causes.EARLY, seen=window.rows - window.unseen, rows=window.rows)
            return self.report("wrong", self.right, [early])
        if error(window.reached, whole) <= self.strict:
            return self.report("right", self.right)
        if self._prepared is None:
            pieces = self._pieces(window.pieces, whole)
            right = self._right(whole, pieces)
        else:
            _, pieces, right = self._prepared
        self.right = right
        if right.known and self._is_right(right) and not self._another_is_nearer(right, pieces):
            return self._right_but(right, whole)
        if right.known and self._looks_clipped(right):
            return self.report("undecided", right)
        found = self._causes(right, pieces)
        if found:
            return self.report("wrong", right, found)
        if self.random and window.other_pieces:
            # The loop draws random numbers before its forward.
            window.pieces, window.other_pieces = window.other_pieces, None
            window.whole = Micro(window.whole.batch, window.pieces[0].conditions)
            return self.run()
        if self.random:
            self.weights = self._measured(pieces)
            self.notes.append(
                "the random numbers of this step cannot be drawn again, or its loss cannot be "
                "computed without them, so the right weights are not known: set dropout to 0 for an "
                "audit"
            )
            return self.report("undecided", right)
        best = factor(window.reached, right.gradient)
        left = error(window.reached, right.gradient, best)
        return self.report("wrong", right, [cause(causes.UNKNOWN, factor=best, error=left)])

    # What would be right.

    def _pieces(self, micros: list[Micro], whole: Gradients) -> list[Gradients]:
        if len(micros) == 1 and self.experiment.native is self.experiment.model:
            return [whole]
        found = []
        for micro in micros:
            found.append(self.experiment.gradient(micro))
            self.random |= self.experiment.drew
        return found

    def _right(self, whole: Gradients, pieces: list[Gradients]) -> Right:
        window, experiment = self.window, self.experiment
        loose = self.loose()
        if not self.random and not window.whole.conditions.autocast:
            weights = self._weights(whole, pieces, loose)
            return Right(whole, weights, loose, coupled=weights is None)
        for evaluated in ((_DropoutNd,), _all_but_batch_norm(experiment.model)):
            experiment.coarsest = torch.float64
            try:
                at_once = experiment.whole(window.whole, quiet=True, evaluated=evaluated)
                if experiment.drew:
                    continue
                quiet = [
                    experiment.gradient(m, quiet=True, evaluated=evaluated) for m in window.pieces
                ]
            except (RuntimeError, TypeError, ValueError):
                continue  # a model that is another one in evaluation
            weights = self._weights(at_once, quiet, self.loose())
            if weights is None:
                return Right(whole, None, loose, known=not self.random, coupled=True)
            summed = combine(pieces, weights)
            if loose > self.strict:
                # With the weights before the backward, as the loop has them, to the same bits.
                scaled = zip(window.pieces, weights, strict=True)
                own = [experiment.gradient(m, weight=weight) for m, weight in scaled]
                summed = combine(own, [1.0] * len(own))
            return Right(summed, weights, loose)
        return Right(whole, None, loose, known=not self.random)

    def _weights(
        self, whole: Gradients, pieces: list[Gradients], allowed: float
    ) -> list[float] | None:
        """With which the pieces sum to the whole; None where they do not."""
        count = len(pieces)
        simple = [shares(self.window.sizes), [1 / count] * count, [1.0] * count]
        tried = [(error(combine(pieces, weights), whole), weights) for weights in simple]
        measured = regress(whole, pieces)
        if measured:
            # Of what rounding alone tells apart the simple one is meant.
            tried.append((2 * measured[1] + self.strict / 100, measured[0]))
        least, weights = min(tried, key=lambda each: each[0])
        return weights if least <= 2 * allowed else None

    def loose(self) -> float:
        """What the types that the model computes in may round."""
        return max(self.strict, ROUNDING.get(self.experiment.coarsest, 1e-4))

    # Is it?

    def _is_right(self, right: Right) -> bool:
        return error(self.window.reached, right.gradient) <= right.allowed

    def _note_clipping(self) -> None:
        window = self.window
        if not window.is_written_after_clipping:
            by = norm(window.stepped) / max(norm(window.reached), 1e-300)
            if by != 1:
                self.notes.append(f"clipped after the sum, to {by:.4g} of its norm")

    def _looks_clipped(self, right: Right) -> bool:
        """Whether the loop changes the right sum as clipping does, by code that is not known."""
        window = self.window
        if window.is_written_after_clipping:
            return False
        if not self._is_sum(right.gradient, window.last, right.allowed):
            return False
        limit = clipped_to(window.reached, window.last, self.strict)
        if limit is None:
            return False
        self.notes.append(
            f"the sum is right, and your loop then limits it to {limit:.4g} as clipping does, by code "
            f"of its own: tell its name, watch(..., clip=my_clip), or use torch.nn.utils'"
        )
        return True

    def _another_is_nearer(self, right: Right, pieces: list[Gradients]) -> bool:
        """Whether rounding hides which weights were summed, and others than the right ones fit."""
        if right.weights is None or right.allowed <= self.strict:
            return False
        own = self._distance(right.gradient, self.window.last)
        facts = Facts(self.window.sizes, right.weights)
        others = [h.weights(facts) for h in HYPOTHESES]
        return any(
            self._distance(combine(pieces, weights), self.window.last) < own / 4
            for weights in others
            if weights is not None and all(map(math.isfinite, weights))
        )

    def _is_multiple(self, of: Gradients) -> bool:
        return error(self.window.reached, of, factor(self.window.reached, of)) <= self.strict

    def _right_but(self, right: Right, whole: Gradients) -> AuditReport:
        if self.random and self.same_random_numbers:
            return self.report(
                "wrong", Right(whole, right.weights, right.allowed), [cause(causes.OTHER_DROPOUT)]
            )
        if self.random:
            self.notes.append(
                "random layers: each micro-batch drew its own numbers, not the whole batch's, and is "
                "compared under those"
            )
        return self.report("right", right)

    # Why not?

    def _causes(self, right: Right, pieces: list[Gradients]) -> list[Cause]:
        window = self.window
        if 0 < window.before_the_end < len(window.pieces):
            return [self._never_stepped()]
        found = self._evidence()
        by = factor(window.reached, right.gradient)
        is_sum = right.known and self._is_sum(right.gradient, window.last, right.allowed)
        if is_sum and error(window.reached, window.last) > self.strict:
            return [*found, self._after(by, right)]
        if not right.known and not right.coupled:
            return found
        facts = Facts(window.sizes, right.weights or shares(window.sizes))
        named = None
        if self._is_multiple(window.last):  # the loop may divide after the sum
            named = self._first(facts, pieces, right.allowed, window.reached)
        if named is None:
            facts = replace(facts, measured=self._measured(pieces))
            named = self._first(facts, pieces, right.allowed, window.last)
        if named is None:
            return found
        hypothesis, self.weights = named
        if hypothesis.code:
            found.append(hypothesis.cause(facts, self.weights))
        if not self._is_multiple(window.last):
            found.append(self._after(by, right))
        return found + (self._coupled() if right.coupled else [])

    def _after(self, by: float, right: Right) -> Cause:
        """What was done to the sum before step()."""
        window = self.window
        if window.is_written_after_clipping:
            return cause(causes.AFTER_CLIPPING, factor=by)
        if by and error(window.reached, right.gradient, by) <= right.allowed:
            return cause(causes.AFTER, factor=by, inverse=1 / by)
        each = zip(window.names, errors(window.reached, window.last), strict=True)
        changed = [name for name, e in each if e > self.strict]
        names = ", ".join(changed[:3]) + (", …" if len(changed) > 3 else "")
        return cause(causes.CHANGED, count=len(changed), names=names)

    def _first(
        self, facts: Facts, pieces: list[Gradients], allowed: float, target: Gradients
    ) -> tuple[Hypothesis, list[float]] | None:
        """The first hypothesis that explains `target`."""
        for hypothesis in HYPOTHESES:
            weights = hypothesis.weights(facts)
            if weights is None or not all(map(math.isfinite, weights)):
                continue
            if self._explains(pieces, weights, allowed, target):
                return hypothesis, weights
        return None

    def _explains(
        self, pieces: list[Gradients], weights: list[float], allowed: float, target: Gradients
    ) -> bool:
        """Whether the pieces with these weights are what was summed, on top of what `.grad` held, and
        with what the loop did to it in between."""
        factors = self._factors(len(pieces))
        if factors is None:
            return False
        if self.window.start is not None:
            kept = [g * math.prod(f) for g, f in zip(self.window.start, factors, strict=True)]
            target = combine([target, kept], [1.0, -1.0])
        return self._is_sum(combine(pieces, weights, factors=factors), target, allowed)

    def _is_sum(self, summed: Gradients, target: Gradients, allowed: float) -> bool:
        return self._distance(summed, target) <= allowed

    def _distance(self, summed: Gradients, target: Gradients) -> float:
        """The error of `target` from this sum, or from a GradScaler's multiple of it."""
        by = factor(target, summed)
        scale = 2.0 ** round(math.log2(by)) if by >= 2**6 and self._may_be_scaled() else 1.0
        return error(target, summed, scale)

    def _may_be_scaled(self) -> bool:
        """Whether the loop divides the sum, as a GradScaler does."""
        return error(self.window.reached, self.window.last) > self.strict

    def _factors(self, count: int) -> list[list[float]] | None:
        """By what `.grad` was multiplied after each piece; None where that was no factor."""
        factors: list[list[float]] = []
        for each in self.window.factors:
            if any(f is None for f in each):
                return None
            known = [f for f in each if f is not None]
            if len(known) != count - 1:
                if any(f != 1.0 for f in known):
                    return None
                known = [1.0] * (count - 1)
            factors.append(known)
        return factors

    def _measured(self, pieces: list[Gradients]) -> list[float] | None:
        """The weights that come nearest to what was summed, where nothing happened in between."""
        window = self.window
        if any(f != 1.0 for each in window.factors for f in each):
            return None
        target = window.last
        if window.start is not None:
            target = combine([window.last, window.start], [1.0, -1.0])
        found = regress(target, pieces)
        if found is None or found[1] > self.loose():
            return None
        largest = max(map(abs, found[0]))
        is_scaled = largest >= 2**6 and self._may_be_scaled()
        scale = 2.0 ** round(math.log2(largest * len(pieces))) if is_scaled else 1.0
        return [weight / scale for weight in found[0]]

    def _evidence(self) -> list[Cause]:
        """What was seen to happen to `.grad` that a right sum needs not."""
        window, found = self.window, []
        if window.start is not None:
            found.append(cause(causes.STALE, norm=norm(window.start)))
        longest = max(window.factors, key=len, default=[])
        changes: dict[int, float | None] = {}
        for each in window.factors:
            if len(each) == len(longest):
                changes.update({i + 1: f for i, f in enumerate(each) if f != 1.0})
        zeroed = sorted(i for i, f in changes.items() if f == 0.0)
        if zeroed:
            found.append(cause(causes.ZEROED, places=", ".join(map(str, zeroed))))
        others = {i: f for i, f in sorted(changes.items()) if f != 0.0}
        if others:
            by = ["no factor" if f is None else f"times {f:.4g}" for f in others.values()]
            places = ", ".join(map(str, others))
            found.append(cause(causes.CLIPPED, places=places, factors=", ".join(by)))
        return found

    def _never_stepped(self) -> Cause:
        left = self.window.before_the_end
        at = [f[left - 1] for f in self.window.factors if len(f) >= left]
        dropped = bool(at) and all(f == 0.0 for f in at)
        what = "zero_grad() dropped them" if dropped else "the next epoch's first step has them too"
        return cause(causes.NEVER_STEPPED, rows=left, what=what)

    def _coupled(self) -> list[Cause]:
        """What keeps the sum of micro-batches from being the whole batch's gradient."""
        window, experiment = self.window, self.experiment
        sizes = causes.brief(window.sizes)
        share = sum(n * n for n in window.sizes) / sum(window.sizes) ** 2
        negatives = cause(causes.NEGATIVES, sizes=sizes, share=share)
        found = first_mixing(experiment, window.whole, window.pieces, self.random, self.loose())
        if found is None:
            return [negatives]
        name, module = found
        told = f"{type(module).__name__} '{name}'"
        if not isinstance(module, _BatchNorm):
            return [cause(causes.MODEL_COUPLES, module=told, sizes=sizes)]
        result = [cause(causes.BATCH_NORM, module=told, sizes=sizes)]
        still = {"quiet": True, "evaluated": (_BatchNorm, _DropoutNd)}
        pieces = [experiment.gradient(m, **still) for m in window.pieces]
        if self._weights(experiment.whole(window.whole, **still), pieces, self.loose()) is None:
            result.append(negatives)
        return result

    def report(self, verdict: Verdict, right: Right, found: Sequence[Cause] = ()) -> AuditReport:
        window, experiment = self.window, self.experiment
        wanted = right.gradient
        each = [
            ParameterError(name, e, norm([a]), norm([b]))
            for name, e, a, b in zip(
                window.names, errors(window.reached, wanted), window.reached, wanted, strict=True
            )
        ]
        each.sort(key=lambda p: -p.error if p.error == p.error else -math.inf)
        unknown = [None] * len(window.pieces)
        return AuditReport(
            verdict=verdict,
            step=window.step,
            causes=tuple(found),
            notes=tuple(self.notes),
            error=each[0].error,
            allowed=right.allowed,
            parameters=tuple(each),
            micro_batches=tuple(
                MicroBatchWeight(*each)
                for each in zip(
                    window.sizes, self.weights or unknown, right.weights or unknown, strict=True
                )
            ),
            reference=experiment.way,
            model=type(experiment.native).__name__,
            dtype=", ".join(sorted({str(p.dtype)[6:] for p in experiment.parameters})),
            versions=versions(),
        )


def _is_loss_scale(number: float) -> bool:
    steps = math.log2(number)
    return abs(steps - round(steps)) < 1e-5 and round(steps) >= 6


def _all_but_batch_norm(model: nn.Module) -> tuple[type, ...]:
    return tuple({type(m) for m in model.modules() if not isinstance(m, _BatchNorm)})
