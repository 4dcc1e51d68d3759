"""The hypotheses: with which weights a loop may have summed the gradients of its micro-batches.

One more is one more line of HYPOTHESES.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .gradients import shares
from .report import Cause

Weights = list[float]


@dataclass(frozen=True)
class Facts:
    """What a hypothesis may use."""

    #: Samples of each micro-batch.
    sizes: list[int]
    #: The factors of the micro-batches' gradients in the whole batch's; where that is no such sum
    #: their shares of the samples.
    right: Weights
    #: The factors that come nearest to what was summed, where that can be measured.
    measured: Weights | None = None

    @property
    def count(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True)
class Hypothesis:
    code: str
    #: None where it says nothing about these micro-batches.
    weights: Callable[[Facts], Weights | None]
    says: str
    fix: str

    def cause(self, facts: Facts, weights: Weights) -> Cause:
        words = {
            "count": facts.count,
            "sizes": brief(facts.sizes),
            "right": brief(facts.right),
            "weights": brief(weights),
            "divisor": f"{1 / weights[0]:.6g}" if weights[0] else "0",
            "factor": f"{weights[0] / facts.right[0]:.6g}" if facts.right[0] else "?",
        }
        return Cause(self.code, self.says.format(**words), self.fix.format(**words))


def brief(numbers: Sequence[float]) -> str:
    shown = [f"{n:.4g}" for n in numbers[:8]]
    return "[" + ", ".join(shown + ["…"] * (len(numbers) > 8)) + "]"


def _equal(facts: Facts) -> Weights | None:
    """All the same, whatever it is."""
    if facts.measured is None:
        return None
    mean = sum(facts.measured) / facts.count
    divisor = round(1 / mean) if mean else 0
    if divisor and abs(mean * divisor - 1) < 1e-2:  # half precision measures it roughly
        mean = 1 / divisor
    return [mean] * facts.count


def _multiple(facts: Facts) -> Weights | None:
    """A multiple of the right ones."""
    if facts.measured is None:
        return None
    square = sum(r * r for r in facts.right)
    by = sum(m * r for m, r in zip(facts.measured, facts.right, strict=True)) / square
    return [by * r for r in facts.right]


def _over(divisor: Callable[[Facts], float]) -> Callable[[Facts], Weights | None]:
    """The sum of all samples' losses over a divisor in units of samples."""
    return lambda f: [r * sum(f.sizes) / divisor(f) for r in f.right]


_MEAN = "sum the losses of all samples (or tokens) and divide by how many the whole batch has"
_DIVIDE = "divide each micro-batch's loss by its share: loss * len(micro) / len(batch)"

HYPOTHESES = (
    Hypothesis("", lambda f: f.right, "", ""),
    Hypothesis(
        "mean_of_means",
        lambda f: [1 / f.count] * f.count,
        "the mean losses of the micro-batches are divided by their number, {count}, though they weigh "
        "{right} in the whole batch's mean (samples {sizes}; with ignored labels or padding their "
        "tokens count)",
        _MEAN,
    ),
    Hypothesis(
        "no_division",
        lambda f: [1.0] * f.count,
        "the losses of the {count} micro-batches are summed and not divided: the gradient is about "
        "{count} times too large",
        _DIVIDE,
    ),
    Hypothesis(
        "divided_by_last",
        _over(lambda f: f.sizes[-1]),
        "the sum is divided by the size of the last micro-batch (samples {sizes})",
        "divide by the samples of all micro-batches",
    ),
    Hypothesis(
        "divided_by_last",
        lambda f: [r / f.right[-1] for r in f.right] if f.right[-1] else None,
        "the sum is divided by the tokens of the last micro-batch (right weights {right})",
        "divide by the tokens of all micro-batches",
    ),
    Hypothesis(
        "divided_by_nominal",
        _over(lambda f: f.count * max(f.sizes)),
        "the sum is divided as if all {count} micro-batches had as many samples as the largest, "
        "samples {sizes}",
        "divide by the samples that the batch has",
    ),
    Hypothesis(
        "weighted_by_samples",
        lambda f: shares(f.sizes),
        "the micro-batches weigh {weights}, by samples, but {right} in the whole batch's loss, which "
        "counts tokens or class weights",
        _MEAN,
    ),
    Hypothesis(
        "divided_twice",
        lambda f: [r / f.count for r in f.right],
        "the right sum is divided by the number of micro-batches, {count}, once too often",
        "divide once: in your loop, or by your trainer (accelerate's backward() divides already)",
    ),
    Hypothesis(
        "divided_twice",
        lambda f: [1 / f.count**2] * f.count,
        "the losses are divided by the number of micro-batches, {count}, twice",
        "divide once: in your loop, or by your trainer (accelerate's backward() divides already)",
    ),
    Hypothesis(
        "other_divisor",
        _equal,
        "each micro-batch's loss is divided by {divisor}, and {count} micro-batches with weights "
        "{right} were summed",
        "divide by the micro-batches that this step has, or drop the last window",
    ),
    Hypothesis(
        "other_factor",
        _multiple,
        "the gradient is {factor} times the whole batch's",
        "look for a factor on the loss, or a sum where the whole batch's loss is a mean",
    ),
)

STALE = (
    "stale_gradient",
    "`.grad` still held the gradient of an earlier step (norm {norm:.3g}) when this one began",
    "call optimizer.zero_grad() after each optimizer.step()",
)
ZEROED = (
    "zeroed_between",
    "`.grad` was emptied between the micro-batches of this step, after number {places}",
    "call optimizer.zero_grad() once a step, after optimizer.step()",
)
CLIPPED = (
    "clipped_before_sum",
    "`.grad` was changed between the micro-batches of this step (after number {places}: {factors}), "
    "as clipping each micro-batch does",
    "clip once, after the last backward() and before optimizer.step()",
)
AFTER = (
    "scaled_after_sum",
    "the sum is the whole batch's, and is then multiplied by {factor:.6g} (1/{inverse:.6g}) before "
    "step(), which is no clipping",
    "drop the factor after the sum; clip with torch.nn.utils.clip_grad_norm_, or name your own "
    "function, watch(..., clip=my_clip)",
)
CHANGED = (
    "changed_after_sum",
    "`.grad` of {count} parameters ({names}) is changed between the last backward() and step(), by no "
    "one factor and by no function that is known to clip",
    "drop the change; where it is meant, name the function that makes it, watch(..., clip=my_clip)",
)
AFTER_CLIPPING = (
    "changed_after_clipping",
    "`.grad` is changed after it was clipped, so that {factor:.4g} times the whole batch's gradient "
    "reaches step()",
    "clip last; under a GradScaler call scaler.unscale_(optimizer) before clipping",
)
OTHER_ROWS = (
    "other_rows",
    "the micro-batches are not the batch of {rows} samples: {told}",
    "take each sample once: for x, y in zip(inputs.split(16), targets.split(16))",
)
#: Gradients are left when the loop ends, or belong to two epochs.
NEVER_STEPPED = (
    "never_stepped",
    "{rows} micro-batches at the end of the loader reached no step of their own: {what}",
    "step after the loop too where micro-batches are left: if (i + 1) % k == 0 or i + 1 == len(loader)",
)
EARLY = (
    "stepped_early",
    "optimizer.step() ran after {seen} of the {rows} samples of the batch",
    "call optimizer.step() once, after the last micro-batch's backward()",
)
BATCH_NORM = (
    "batch_norm",
    "{module} normalises each micro-batch by its own mean and variance (samples {sizes}), not by the "
    "whole batch's",
    "ib.wrap(model, memory_budget=...) or ib.VirtualBatch, which give it the whole batch; or a norm "
    "over each sample (GroupNorm)",
)
MODEL_COUPLES = (
    "samples_combined",
    "{module} gives a sample another output in its micro-batch (samples {sizes}) than in the whole "
    "batch: it combines samples",
    "ib.wrap(model, memory_budget=...), with ib.across_batch(fn, x) where the samples are combined",
)
NEGATIVES = (
    "fraction_of_negatives",
    "the loss compares samples with each other, and each micro-batch (samples {sizes}) saw only its "
    "own: {share:.1%} of the pairs of the whole batch",
    "compute the loss once over all outputs: criterion(ib.wrap(model, memory_budget=...)(inputs), "
    "targets), or GradCache",
)
OTHER_DROPOUT = (
    "other_dropout",
    "the micro-batches drew other random numbers than the whole batch draws from the same state; "
    "apart from that the sum is right",
    "expected of dropout; ib.VirtualBatch(..., match_native_rng=True) draws the whole batch's",
)
UNKNOWN = (
    "unknown",
    "no hypothesis explains the gradient that reached step(): it is {factor:.4g} times the whole "
    "batch's at best, with an error of {error:.2g} then",
    "check that loss= computes what your loop computes, on the batches that it trains on",
)


def cause(template: tuple[str, str, str], **words: object) -> Cause:
    code, says, fix = template
    return Cause(code, says.format(**words), fix)
