"""The loss of a batch, so that it can be computed again: given by the user, or taken from the loop."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from .. import _tree
from ..errors import BatchError, InvalidArgument, InvalidType, StateError
from .batches import Join
from .calls import CRITERIA, Call, Criterion, own_loss

Loss = Callable[[nn.Module, Any], Tensor]

WAY_OUT = "give loss=lambda model, batch: criterion(model(batch[0]), batch[1])"


def checked(loss: Any) -> Loss | None:
    """`loss` as a function of model and batch; None where it has to be taken from the loop."""
    if loss is None:
        return None
    if isinstance(loss, type):
        raise InvalidType(
            f"loss is the class {loss.__name__} itself; give an instance: {loss.__name__}()"
        )
    if isinstance(loss, nn.Module) or (callable(loss) and loss in CRITERIA):
        return _of_pairs(loss)
    if not callable(loss):
        raise InvalidType(
            f"loss must be a criterion of torch.nn or a function of model and batch, not "
            f"{type(loss).__name__}; {WAY_OUT}"
        )
    return loss


def call(model: nn.Module, inputs: Any) -> Any:
    """As VirtualBatch calls a model."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if type(inputs) in (tuple, list):
        return model(*inputs)
    return model(inputs)


def _of_pairs(criterion: Any) -> Loss:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            raise BatchError(
                f"with a criterion as loss= each batch is a pair (inputs, targets), not "
                f"{type(batch).__name__}; {WAY_OUT}"
            )
        return criterion(call(model, batch[0]), batch[1])

    return loss


def scalar(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise InvalidType(
            f"loss must return a scalar tensor, not {type(value).__name__}: remove .item()"
        )
    if value.numel() != 1:
        raise InvalidArgument(
            f"loss must return a scalar, not a tensor of shape {tuple(value.shape)}: reduce it with "
            f".mean() or .sum()"
        )
    if not value.requires_grad:
        raise InvalidArgument(
            "loss returned a tensor without a gradient: it has to be computed by the model that it "
            "is given"
        )
    return value.reshape(())


def as_batch(calls: list[Call]) -> Any:
    """The batch of one micro-batch's calls: what `recorded` computes the loss of."""
    (only,) = calls
    kwargs = {n: v for n, v in only.kwargs.items() if n != "num_items_in_batch"}
    return {"args": only.args, "kwargs": kwargs, "targets": [c.target for c in only.criteria]}


def join_recorded(batches: list[Any], join: Join) -> Any:
    # Targets may have several rows for each sample: tokens.
    targets = [torch.cat(column) for column in zip(*(b["targets"] for b in batches), strict=True)]
    inputs = [{n: b[n] for n in ("args", "kwargs")} for b in batches]
    return {**join(inputs), "targets": targets}


def inputs_of(calls: list[Call]) -> Any:
    """The batch for a loss of the user's own where no loader was watched: what the model was called
    with; of several calls (two towers) a tuple."""
    each = tuple(_inputs(one) for one in calls)
    return each[0] if len(each) == 1 else each


def _inputs(only: Call) -> Any:
    if only.args and only.kwargs:
        return {"args": only.args, "kwargs": only.kwargs}
    if only.args:
        return only.args[0] if len(only.args) == 1 else only.args
    return {n: v for n, v in only.kwargs.items() if n != "num_items_in_batch"}


def recorded(calls: list[list[Call]], model: nn.Module) -> Loss:
    """The loss that the loop was seen to compute, one list of calls for each micro-batch.

    Raises StateError where that does not tell what the loss is.
    """
    for group in calls:
        _refuse(group)
    first = calls[0][0]
    for (only,) in calls[1:]:
        if not _alike(first.criteria, only.criteria):
            raise _not_told("micro-batches have other criteria, or other arguments of them")
    if not first.criteria:
        return lambda model, batch: _own(_run(first, model, batch))
    (criterion,) = first.criteria

    def loss(given: nn.Module, batch: Any) -> Any:
        outputs = _run(first, given if first.module is model else first.module, batch)
        value = _tree.flatten(outputs)[0][criterion.leaf]
        for function, args, kwargs in criterion.chain:
            value = function(value, *args, **kwargs)
        return criterion.function(value, batch["targets"][0], *criterion.rest, **criterion.keywords)

    return loss


def _run(first: Call, module: nn.Module, batch: Any) -> Any:
    return module(*batch["args"], **batch["kwargs"])


def _own(outputs: Any) -> Tensor:
    value = own_loss(outputs)
    if value is None:
        raise StateError(f"the model gave no loss on the whole batch; {WAY_OUT}")
    return value


def _not_told(why: str) -> StateError:
    return StateError(f"cannot tell what the loss of your loop is: {why}; {WAY_OUT}")


def _alike(one: list[Criterion], other: list[Criterion]) -> bool:
    """Whether the same is computed of outputs and targets."""

    def parts(criteria: list[Criterion]) -> Any:
        leaves = [(c.rest, c.keywords, [args for _, *args in c.chain]) for c in criteria]
        return [(c.function, c.leaf, [f for f, *_ in c.chain]) for c in criteria], _tree.flatten(
            leaves
        )[0]

    (functions, leaves), (others, other_leaves) = parts(one), parts(other)
    if functions != others or len(leaves) != len(other_leaves):
        return False
    for a, b in zip(leaves, other_leaves, strict=True):
        if isinstance(a, Tensor) or isinstance(b, Tensor):
            both = isinstance(a, Tensor) and isinstance(b, Tensor)
            if not both or a.shape != b.shape or not bool(torch.equal(a, b)):
                return False
    return True


def refuse_other(groups: list[list[Call]]) -> None:
    """Raises StateError where backward() was called on more than the criterion's own value."""
    for group in groups:
        for one in group:
            if one.other:
                raise _not_told(f"beside the criterion's value, {one.other}")


def _refuse(group: list[Call]) -> None:
    refuse = _not_told
    if len(group) != 1:
        raise refuse(f"the model is called {len(group)} times for one backward()")
    (only,) = group
    if only.is_inner:
        raise refuse(f"{type(only.module).__name__} is called on what other parameters computed")
    if only.has_loss and not only.criteria:
        return
    if only.lost:
        raise refuse(f"{only.lost} is called on something else than the model's outputs")
    if len(only.criteria) != 1:
        raise refuse(
            f"{len(only.criteria) or 'no'} criteria of torch.nn.functional are called on the "
            f"model's outputs"
        )
    reduction = _reduction(only.criteria[0])
    if reduction != "mean":
        raise refuse(
            f"{CRITERIA[only.criteria[0].function]} has reduction={reduction!r}, and what it is "
            f"divided by is not seen"
        )


def _reduction(criterion: Any) -> str:
    import inspect

    bound = inspect.signature(criterion.function).bind(
        None, None, *criterion.rest, **criterion.keywords
    )
    bound.apply_defaults()
    return str(bound.arguments["reduction"])
