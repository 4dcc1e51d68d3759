"""Losses and outputs that are none: each mistake with its error and what the message says. Those that
are refused when they are made stand in test_own_losses.py."""

import functools

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from misuse_support import X, check, step
from support import Calls, mlp
from torch import nn


def returns(value):
    return Calls(lambda self, x: value(self.net(x)), net=mlp())


class Wrapped:
    """A class that no pytree knows, holding a tensor."""

    def __init__(self, tensor):
        self.tensor = tensor


class DynamicCache:
    """Named as transformers' is, which no pytree of torch knows."""


def own_loss(value):
    return ib.losses.separable(lambda o, t: value(o), lambda t, samples: samples)


def elementwise(outputs, targets):
    return F.cross_entropy(outputs, targets, reduction="none")


def own_denominator(value):
    return ib.losses.separable(lambda o, t: o.sum(), lambda t, samples: value)


MISUSES = {
    "a loss that is text": (
        lambda: step(loss="cross_entropy"),
        ib.InvalidType,
        "loss must be a callable, a criterion.*not str",
    ),
    "a loss that is a tensor": (lambda: step(loss=X.sum()), ib.InvalidType, "not Tensor"),
    "a loss that returns nothing": (
        lambda: step(loss=lambda o, t: None),
        ib.InvalidType,
        "must return a scalar tensor, not NoneType$",
    ),
    "a loss that returns a number": (
        lambda: step(loss=lambda o, t: 1.0),
        ib.InvalidType,
        r"must return a scalar tensor, not float; remove \.item\(\)",
    ),
    "a loss for each element": (
        lambda: step(loss=lambda o, t: F.cross_entropy(o, t, reduction="none")),
        ib.InvalidArgument,
        r"the loss '<lambda>' returned .* \[12\]; .* \.mean\(\).*leave out reduction=\"none\"",
    ),
    "a loss for each element, by name": (
        lambda: step(loss=ib.losses.coupled(elementwise)),
        ib.InvalidArgument,
        "the loss 'elementwise' returned",
    ),
    "a loss for each element, with options": (
        lambda: step(loss=ib.losses.coupled(functools.partial(F.cross_entropy, reduction="none"))),
        ib.InvalidArgument,
        "the loss 'cross_entropy' returned",
    ),
    "a complex loss": (
        lambda: step(loss=lambda o, t: o.sum() * 1j),
        ib.InvalidArgument,
        r"complex.*\.abs\(\)",
    ),
    "a loss_device that is none": (
        lambda: ib.losses.coupled(lambda o: o.sum(), loss_device="foo"),
        ib.InvalidArgument,
        "loss_device is 'foo', which is not a device",
    ),
    "a criterion's class": (
        lambda: step(loss=nn.CrossEntropyLoss),
        ib.InvalidType,
        r"loss is the class CrossEntropyLoss itself.*CrossEntropyLoss\(\)",
    ),
    "a loss of the model's own in a function": (
        lambda: step(model=returns(lambda y: y.sum()), loss=ib.losses.coupled(lambda o: o)),
        ib.BatchError,
        "losses.from_model",
    ),
    "a model that returns no tensor": (
        lambda: step(model=returns(lambda y: None)),
        ib.InvalidArgument,
        "0 tensor",
    ),
    "a model that returns too much": (
        lambda: step(model=returns(lambda y: (y, y))),
        ib.InvalidArgument,
        "2 tensor",
    ),
    "targets that are missing": (
        lambda: step(targets=None),
        ib.InvalidArgument,
        "targets",
    ),
    "a sum that is no tensor": (
        lambda: step(loss=own_loss(lambda o: 3.0)),
        ib.InvalidType,
        "sum must return a scalar tensor, not float",
    ),
    "a sum of many numbers": (
        lambda: step(loss=own_loss(lambda o: o)),
        ib.InvalidArgument,
        "scalar tensor",
    ),
    "a denominator that is no number": (
        lambda: step(loss=own_denominator("all")),
        ib.InvalidType,
        "denominator must return a number",
    ),
    "a denominator of three arguments": (
        lambda: ib.losses.separable(lambda o, t: o, lambda a, b, c: 1),
        ib.InvalidArgument,
        "takes 3 arguments",
    ),
    "a denominator that is a number": (
        lambda: ib.losses.separable(lambda o, t: o, 3),
        ib.InvalidType,
        "denominator must be callable",
    ),
    "a sum that is a number": (
        lambda: ib.losses.separable(3, None),
        ib.InvalidType,
        "sum must be callable",
    ),
    "a penalty that is a number": (
        lambda: ib.losses.with_penalty(nn.MSELoss(), 3),
        ib.InvalidType,
        "penalty must be callable",
    ),
    "from_model without a denominator": (
        lambda: ib.losses.from_model(3),
        ib.InvalidType,
        "denominator must be callable",
    ),
    "from_model with a model that returns no loss": (
        lambda: step(
            model=returns(lambda y: {"logits": y}), loss=ib.losses.from_model(lambda t: len(t))
        ),
        ib.InvalidType,
        "returns its loss",
    ),
    "weights of the wrong type": (
        lambda: ib.losses.cross_entropy(weight=[1, 2]),
        TypeError,
        "cross_entropy",
    ),
    "outputs that nobody knows how to join": (
        lambda: step(
            model=returns(lambda y: (y, Wrapped(y))),
            loss=own_loss(lambda o: o[0].sum()),
            keep_outputs=True,
            micro_batch_size=4,
        ),
        ib.InvalidType,
        r"outputs\[1\] is a Wrapped",
    ),
    "a language model's cache among the outputs": (
        lambda: ib.wrap(returns(lambda y: (y, [DynamicCache()])), micro_batch_size=4)(X),
        ib.InvalidType,
        r"outputs\[1\]\[0\] is a DynamicCache.*use_cache=False",
    ),
    "outputs that cannot be joined": (
        lambda: step(
            model=returns(lambda y: y.sum(0)),
            loss=own_loss(lambda o: o.sum()),
            keep_outputs=True,
            micro_batch_size=4,
        ),
        ib.BatchError,
        "keep_outputs",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(name):
    check(*MISUSES[name])


SQUEEZED = r"has one row, and squeeze\(\) drops its dimension too.*squeeze\(-1\)"


@pytest.mark.parametrize("size", [4, 1])
@pytest.mark.parametrize("way", ["streamed", "coupled", "wrap"])
def test_a_part_of_one_row_that_is_squeezed(way, size):
    model = returns(lambda y: y[:, :1].squeeze())
    x, targets = torch.cat([X, X[:1]]), torch.zeros(13, dtype=X.dtype)
    losses = {"streamed": nn.MSELoss(), "coupled": ib.losses.coupled(F.mse_loss)}

    def run():
        if way == "wrap":
            return ib.wrap(model, micro_batch_size=size)(x)
        return step(model, x, targets, losses[way], micro_batch_size=size)

    check(run, ib.InvalidArgument, SQUEEZED)


def test_outputs_of_other_ranks_are_not_called_squeezed():
    model = returns(lambda y: y if len(y) == 4 else y[None])
    loss = ib.losses.coupled(lambda o, t: o.sum())
    with pytest.raises(ib.BatchError) as raised:
        step(model, X[:11], X[:11], loss, micro_batch_size=4)
    assert "squeeze" not in str(raised.value)


def test_a_forward_that_fails_on_a_squeezed_row_has_a_note():
    model = returns(lambda y: torch.stack([y[:, 0].sum() * y[:, :1].squeeze(), y[:, 1]], 1))
    with pytest.raises(IndexError) as raised:
        step(model, torch.cat([X, X[:1]]), torch.zeros(13).long(), micro_batch_size=4)
    assert not isinstance(raised.value, ib.Error)
    assert "a micro-batch of 1 of the 13 samples" in raised.value.__notes__[0]
    assert raised.value.__notes__[0].endswith("as in squeeze(-1)")
