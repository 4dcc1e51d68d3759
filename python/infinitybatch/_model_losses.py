"""Losses that are computed together with a model's outputs, as shares of the whole batch's loss."""

import contextlib
import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from . import _random_state
from ._sample_values import Values, size_of
from .errors import Unsupported

#: Two entries of the inputs, seen whole by every micro-batch: the number of items that the loss of
#: the whole batch is divided by, and what the micro-batches' weights add up to.
ITEMS, TOTAL = "num_items_in_batch", "infinitybatch_total"

#: What a loss may be: a sum over samples, or a mean with one weight for each sample.
KINDS = ("sum", "labels", "shifted labels", "samples")

Inputs = dict[str, Any]


class Shares(nn.Module):
    """A model whose forward gives its share of the whole batch's loss, and the outputs on request.

    Args:
        compute_loss: `compute_loss(model, inputs, return_outputs=True, num_items_in_batch=...)`.
        rough: whether losses are computed in half precision somewhere.
    """

    def __init__(self, model: nn.Module, compute_loss: Callable[..., Any], rough: bool) -> None:
        super().__init__()
        self.model = model
        self.with_outputs = False
        self._compute_loss = compute_loss
        self._rough = rough
        self._kinds: dict[bool, list[str]] = {}  # those that are left, with and without ITEMS
        self._steps: dict[bool, int] = {}
        self._spreads: dict[bool, float] = {}  # of lengths of samples, the largest that was tried
        self._values: dict[bool, Values] = {}  # that samples had which were tried
        self._kind = ""

    def forward(self, **inputs: Any) -> Any:
        total, items = inputs.pop(TOTAL), inputs.pop(ITEMS, None)
        weights = _weights(self._kind, inputs)  # compute_loss may take labels out of the inputs
        loss, outputs = self._loss_and_outputs(inputs, items)
        if weights is not None:
            part = weights.sum().to(loss)
            # The mean over no label is NaN, and its share nothing.
            loss = torch.where(part == 0, torch.zeros_like(loss), loss * (part / total.to(loss)))
        if not self.with_outputs:
            return loss
        return {**_named(outputs), "loss": loss}

    def prepare(self, pieces: list[Inputs], items: torch.Tensor | None) -> Inputs:
        """What `forward` needs beside the rows of a micro-batch, for the batch of all `pieces`.

        Raises:
            Unsupported: where the loss is no sum or mean over samples, as far as a few rows show it.
        """
        self._kind = self._kind_of(pieces, items)
        weights = _weights_of(self._kind, pieces)
        more = {TOTAL: torch.ones(()) if weights is None else weights.sum().double()}
        return more if items is None else {**more, ITEMS: items}

    def _loss_and_outputs(self, inputs: Inputs, items: torch.Tensor | None) -> tuple[Any, Any]:
        loss, outputs = self._compute_loss(
            self.model, dict(inputs), return_outputs=True, num_items_in_batch=items
        )
        if getattr(outputs, "aux_loss", None) is not None:
            raise Unsupported(
                f"{type(self.model).__name__} adds aux_loss, which compares the samples of a batch: "
                f"set output_router_logits=False in its config, or give compute_loss_func="
            )
        return loss, outputs

    def _kind_of(self, pieces: list[Inputs], items: torch.Tensor | None) -> str:
        """What the loss is. That is tried on the shortest and the longest samples, in steps 1, 2, 4,
        8, ... and whenever these differ more than any so far; on samples with labels that none had
        so far, which it may weigh otherwise; and where kinds that are left would give different
        losses."""
        _refuse_positions_past_the_end(pieces)
        key = items is None
        step = self._steps[key] = self._steps.get(key, 0) + 1
        left = self._kinds.get(key, list(KINDS))
        first, second, spread = _shortest_and_longest(pieces)
        widest = self._spreads.get(key, 0.0)
        if first and (spread > widest or step & (step - 1) == 0):
            left = self._matching(left, pieces, items, first, second)
            self._kinds[key], self._spreads[key] = left, max(spread, widest)
        for rows in self._values.setdefault(key, Values()).unlike(
            pieces, _weights_of("shifted labels", pieces)
        ):
            left = self._matching(left, pieces, items, *([row] for row in rows))
            self._kinds[key] = left
        if key not in self._kinds:  # no two samples that have labels
            return "labels" if "labels" in pieces[0] else "sum"
        for pair in _pairs_that_differ(left, pieces):
            left = self._matching(left, pieces, items, *pair)
        self._kinds[key] = left
        return left[0]

    def _matching(
        self,
        kinds: list[str],
        pieces: list[Inputs],
        items: torch.Tensor | None,
        *groups: list[int],
    ) -> list[str]:
        """Those by which the losses of some groups of rows give that of all of them, the best
        first."""
        parts = [_rows(pieces, rows) for rows in (*groups, sum(groups, []))]
        with torch.no_grad(), _evaluating(self.model):
            losses = [self._loss_and_outputs(part, items)[0] for part in parts]
        *each, both = (float(loss) for loss in losses)
        if not math.isfinite(sum(each) + both):  # a training that diverges tells nothing
            return kinds
        errors = {}
        for kind in kinds:
            weights = [_weights(kind, part) for part in parts[:-1]]
            if kind == "sum":
                errors[kind] = abs(sum(each) - both)
            elif weights[0] is not None:
                sums = [float(one.sum()) for one in weights]
                mean = math.fsum(m * a for m, a in zip(sums, each, strict=True))
                errors[kind] = abs(mean / sum(sums) - both) if sum(sums) else 0.0
        allowed = self._rounding(losses[0]) * max(map(abs, (*each, both)))
        left = sorted((kind for kind in errors if errors[kind] <= allowed), key=errors.__getitem__)
        if not left:
            values = " and ".join(f"{value:.6g}" for value in (min(each), max(each)))
            raise Unsupported(
                f"{type(self.model).__name__} gives a loss of {both:.6g} for {len(sum(groups, []))} "
                f"samples, and between {values} for {len(each)} parts of them: that is no sum or mean "
                f"over samples or labels. Compute it from the outputs of the whole batch: "
                f"Trainer(..., compute_loss_func=function); or give a micro_batch_size, or a budget, "
                f"that holds the whole batch"
            )
        return left

    def _rounding(self, loss: torch.Tensor) -> float:
        """What losses may differ by in batches of other sizes, relative to their size."""
        if self._rough:
            return 0.02
        if loss.device.type != "cpu":  # where convolutions take TF32 for fp32
            return 1e-3
        return max(100 * torch.finfo(loss.dtype).eps, 1e-6)


def _weights(kind: str, inputs: Inputs) -> torch.Tensor | None:
    """One for each sample; None for a sum, and where there are no labels to count."""
    if kind == "sum":
        return None
    if kind == "samples":
        return torch.ones(size_of(inputs))
    labels = inputs.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.is_floating_point():
        return None
    if kind == "shifted labels":
        if labels.dim() < 2:
            return None
        labels = labels[..., 1:]
    return labels.ne(-100).reshape(len(labels), -1).sum(1)


def _weights_of(kind: str, pieces: list[Inputs]) -> torch.Tensor | None:
    found = [weights for piece in pieces if (weights := _weights(kind, piece)) is not None]
    return torch.cat(found) if found else None


def _pairs_that_differ(
    kinds: list[str], pieces: list[Inputs]
) -> Iterator[tuple[list[int], list[int]]]:
    """For each two kinds the two samples that they weigh most differently."""
    known = [w.cpu() for kind in kinds if (w := _weights_of(kind, pieces)) is not None]
    for i, one in enumerate(known):
        for other in known[i + 1 :]:
            rows = torch.nonzero((one > 0) & (other > 0)).flatten()
            ratio = one[rows].double() / other[rows].double()
            if len(rows) and ratio.min() < ratio.max():
                yield [int(rows[ratio.argmin()])], [int(rows[ratio.argmax()])]


def _shortest_and_longest(pieces: list[Inputs]) -> tuple[list[int], list[int], float]:
    """Two samples of each, or one, and how many times longer they are; none without labels: the mean
    over no label is NaN."""
    weights = _weights_of("shifted labels", pieces)
    labelled = torch.ones(sum(map(size_of, pieces))) if weights is None else weights.cpu()
    masks = [piece.get("attention_mask") for piece in pieces]
    lengths = labelled
    if all(isinstance(mask, torch.Tensor) and mask.dim() == 2 for mask in masks):
        lengths = torch.cat([mask.sum(1) for mask in masks]).cpu()
    rows = torch.nonzero(labelled).flatten()
    rows = rows[lengths[rows].argsort(stable=True)].tolist()
    half = min(2, len(rows) // 2)
    if half == 0:
        return [], [], 0.0
    return rows[:half], rows[-half:], float(lengths[rows[-1]]) / max(float(lengths[rows[0]]), 1.0)


def _refuse_positions_past_the_end(pieces: list[Inputs]) -> None:
    """Heads for questions leave such samples out of their two means, each by itself."""
    for piece in pieces:
        for name in ("start_positions", "end_positions"):
            positions, ids = piece.get(name), piece.get("input_ids")
            if isinstance(positions, torch.Tensor) and isinstance(ids, torch.Tensor):
                if positions.numel() and int(positions.max()) >= ids.shape[1]:
                    raise Unsupported(
                        f"inputs[{name!r}] has positions past the {ids.shape[1]} tokens, whose samples "
                        f"the model leaves out of its mean: point them at token 0, or leave them out"
                    )


def _rows(pieces: list[Inputs], rows: list[int]) -> Inputs:
    places = [(piece, row) for piece in pieces for row in range(size_of(piece))]
    chosen = [places[row] for row in rows]
    return {
        name: torch.stack([piece[name][row] for piece, row in chosen])
        if isinstance(value, torch.Tensor) and value.dim()
        else value
        for name, value in pieces[0].items()
    }


def _named(outputs: Any) -> dict[str, Any]:
    if isinstance(outputs, dict):  # of a micro-batch's cache nobody asks
        return {name: value for name, value in outputs.items() if name != "past_key_values"}
    return {f"output_{i}": value for i, value in enumerate(outputs[1:])}


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout, with running statistics left alone, and random numbers as before."""
    modes = [(module, module.training) for module in model.modules()]
    random = _random_state.Snapshot()
    model.eval()
    try:
        yield
    finally:
        _random_state.restore(random)
        for module, training in modes:
            module.training = training


__all__ = ["ITEMS", "TOTAL", "Shares"]
