"""Which batches the gradient of one step belongs to: micro-batches and the whole."""

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn

from .. import _random_state
from ..errors import StateError
from . import losses
from .batches import Given, Join, map_tensors, rows_of, split
from .calls import Call, Conditions
from .experiment import Micro
from .losses import Loss
from .matching import Seen

#: The forward calls before each backward pass.
Groups = list[list[Call]]


@dataclass
class StepBatches:
    loss: Loss
    pieces: list[Micro]
    whole: Micro
    #: The pieces under the random state in which the loader gave them out.
    others: list[Micro] | None
    #: How many of them came before the loader's end.
    before_the_end: int


def of_calls(groups: Groups, model: nn.Module, loss: Loss | None, join: Join) -> StepBatches:
    """Of the arguments that the model was called with."""
    if not all(groups):
        raise StateError(
            f"{type(model).__name__} was not called before each backward(), so its batches are not "
            f"known: give the loader and the loss, watch(model, optimizer, loader, loss=...)"
        )
    if loss is None:
        loss = losses.recorded(groups, model)
        batches = [losses.as_batch(group) for group in groups]
        whole = losses.join_recorded(batches, join)
    else:
        batches = [losses.inputs_of(group) for group in groups]
        whole = join(batches)
    conditions = [group[0].conditions for group in groups]
    pieces = [Micro(b, c) for b, c in zip(batches, conditions, strict=True)]
    ends = sum(group[0].epoch < groups[-1][0].epoch for group in groups)
    return StepBatches(loss, pieces, Micro(whole, conditions[0]), None, ends)


def of_loader(
    given: list[Given], groups: Groups, loss: Loss, join: Join, seen: Seen | None
) -> StepBatches:
    """Of what a loader gave out, one batch for each backward pass, or the loop has split them."""
    batches = [one.batch for one in given]
    whole = join(batches)
    conditions = [g[0].conditions for g in groups if g]
    first = conditions[0] if conditions else Conditions(_random_state.capture(), {}, ())
    others = None
    is_split = len(groups) == 1 and len(groups[0]) > 1 and groups[0][0].rows != rows_of(whole)
    own = None if seen is None else _of_rows(whole, groups, seen)
    if own is not None and (len(batches) != len(groups) or is_split or not seen.is_whole):
        batches = own
        conditions = [group[0].conditions for group in groups]
    elif len(batches) != len(groups) or is_split:
        calls = _calls_that_split(groups, rows_of(whole))
        batches = split(whole, [call.rows or 0 for call in calls]) if calls else [whole]
        conditions = [call.conditions for call in calls] or [first]
    else:
        if len(conditions) < len(batches):
            conditions = [first] * len(batches)
        others = [
            Micro(one.batch, replace(c, random=one.random))
            for one, c in zip(given, conditions, strict=True)
        ]
    pieces = [Micro(b, c) for b, c in zip(batches, conditions, strict=True)]
    ends = sum(one.epoch < given[-1].epoch for one in given)
    return StepBatches(loss, pieces, Micro(whole, first), others, ends)


def _of_rows(whole: Any, groups: Groups, seen: Seen) -> list[Any] | None:
    """The micro-batches, where it is known which rows of the batch each call saw."""
    known = [rows for rows in seen.calls if rows is not None and bool((rows >= 0).all())]
    if len(known) != len(groups) or any(len(group) != 1 for group in groups):
        return None
    total = len(seen.numbers)

    def rows_of_each(tensor: Tensor, rows: Tensor) -> Tensor:
        is_column = tensor.ndim and len(tensor) == total
        return tensor[rows.to(tensor.device)] if is_column else tensor

    return [map_tensors(lambda x, r=rows: rows_of_each(x, r), whole) for rows in known]


def consumed(given: list[Given], groups: Groups, skipped: int) -> list[Given]:
    """Those that the calls have used: loaders may be read ahead."""
    if len(given) > skipped:
        given = given[skipped:]
    seen = sum(call.rows or 0 for group in groups for call in group)
    total = 0
    for count, one in enumerate(given, 1):
        total += rows_of(one.batch) or 0
        if total == seen:
            return given[:count]
    return given


def _calls_that_split(groups: Groups, rows: int | None) -> list[Call]:
    """One call for each micro-batch, where their rows are the whole batch's; else none."""
    first = [group[0] for group in groups if group]
    if len(first) == len(groups) > 1 and sum(call.rows or 0 for call in first) == rows:
        return first
    # VirtualBatch calls the model on all slices before its one backward pass, and again to look.
    calls: list[Call] = [call for group in groups for call in group]
    for begin in range(len(calls)):
        total = 0
        for end, call in enumerate(calls[begin:], begin + 1):
            total += call.rows or 0
            if total == rows:
                return calls[begin:end]
    return []
