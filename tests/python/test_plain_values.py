"""Values that are no tensors: outputs that follow the micro-batch, inputs with one entry a sample."""

import dataclasses
import math

import infinitybatch as ib
import numpy as np
import pytest
import torch
from support import Calls, classification, gradient_error, mlp, native_gradients
from torch import nn
from torch.nn import functional as F

X, Y = classification(12)


def model_giving(value):
    return Calls(lambda self, x: (self.net(x), value(x)), net=mlp())


def loss(outputs, targets):
    return F.cross_entropy(outputs[0], targets)


def coupled(model, n, **options):
    return ib.VirtualBatch(model, ib.losses.coupled(loss), **options).backward(X[:n], Y[:n])


def wrapped(model, n, **options):
    ib.wrap(model, **options)(X[:n])


def kept(model, n, **options):
    sums = ib.losses.separable(
        lambda o, t: F.cross_entropy(o[0], t, reduction="sum"), lambda t: len(t)
    )
    ib.VirtualBatch(model, sums, keep_outputs=True, **options).backward(X[:n], Y[:n])


WAYS = {"coupled": coupled, "wrap": wrapped, "keep_outputs": kept}
FOLLOWING = {
    "len": len,
    "item": lambda x: x.sum().item(),
    "mixed": lambda x: len(x) if len(x) > 3 else None,
    "nested": lambda x: {"count": [len(x)]},
}


@pytest.mark.parametrize("n", [12, 10])
@pytest.mark.parametrize("value", FOLLOWING)
@pytest.mark.parametrize("way", WAYS)
def test_outputs_that_follow_the_micro_batch(way, value, n):
    if (way, value, n) == ("keep_outputs", "mixed", 12):
        n = 10
    model = model_giving(FOLLOWING[value])
    size = 4 if value == "mixed" else 3
    with pytest.raises(ib.BatchError, match=r"outputs\[1\].*return a tensor.*loss") as raised:
        WAYS[way](model, n, micro_batch_size=size)
    assert len(str(raised.value)) < 600
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("value", [lambda x: 2 * len(x), lambda x: 1 / len(x)])
@pytest.mark.parametrize("way", ["coupled", "wrap"])
def test_what_is_made_of_the_number_of_samples(way, value):
    """All micro-batches have one size: another one tells."""
    with pytest.raises(ib.BatchError, match=r"outputs\[1\] is .* for another of"):
        WAYS[way](model_giving(value), 12, micro_batch_size=3)


def test_arrays_among_outputs():
    with pytest.raises(ib.BatchError, match=r"outputs\[1\] is array"):
        coupled(model_giving(lambda x: x[:, 0].numpy()), 12, micro_batch_size=3)


@pytest.mark.parametrize("n", [12, 10])
@pytest.mark.parametrize("value", [None, "text", True, 7, 3, 0.5, math.nan], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_constants_stand_once(way, value, n):
    if (way, value, n) == ("keep_outputs", 3, 12):
        with pytest.raises(ib.BatchError, match="Where it is a constant, give another micro_batch"):
            WAYS[way](model_giving(lambda x: value), n, micro_batch_size=3)
        return
    for _ in range(2):  # a later step relies on what the first one learned
        WAYS[way](model_giving(lambda x: value), n, micro_batch_size=3)


def test_a_later_step_trusts_what_was_learned():
    step = ib.VirtualBatch(
        model_giving(lambda x: 3), ib.losses.coupled(loss), micro_batch_size=3, use_tapes=False
    )
    for _ in range(2):
        assert step.backward(X, Y).loss.isfinite()


@dataclasses.dataclass
class Extra:
    weight: torch.Tensor
    name: str = "extra"


@dataclasses.dataclass
class Settings:
    scale: float = 2.0


ROWS = {
    "numbers": list(range(1, 13)),
    "texts": ["a"] * 12,
    "a long tuple": tuple(range(12)),
    "lists of numbers": [[1] * i for i in range(1, 13)],
    "an array of texts": np.array(["a"] * 12),
    "a dataclass": Extra(torch.rand(12, 5, dtype=torch.float64)),
}


def first(x, extra=None, **options):
    return x


@pytest.mark.parametrize("kind", ROWS)
def test_hidden_rows(kind):
    rows = ROWS[kind]
    model = Calls(lambda self, x, extra: self.net(first(x, extra)), net=mlp())
    step = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4)
    way_out = "register_dataclass" if kind == "a dataclass" else "shared"
    for inputs, name in (
        ((X, rows), r"inputs\[1\]"),
        ({"x": X, "extra": rows}, r"inputs\['extra'\]"),
        ({"x": X, "extra": {"more": rows}}, r"inputs\['extra'\]\['more'\]"),
    ):
        with pytest.raises(ib.BatchError, match=f"{name} is an? .*{way_out}"):
            step.backward(inputs, Y)
    module = ib.wrap(model, micro_batch_size=4)
    for call in (lambda: module(X, rows), lambda: module(X, extra=rows)):
        with pytest.raises(ib.BatchError, match=f"inputs.* is an? .*{way_out}"):
            call()
    step.backward((X, ib.shared(rows)), Y)
    module(X, ib.shared(rows))


def test_targets_that_are_a_list():
    step = ib.VirtualBatch(
        mlp(),
        ib.losses.coupled(lambda o, t: F.cross_entropy(o, torch.tensor(t))),
        micro_batch_size=4,
    )
    step.backward(X, Y.tolist())  # a loss of all outputs is given all of it
    found = [p.grad for p in step._model.parameters()]
    step._model.zero_grad()
    step.backward(X, ib.shared(Y.tolist()))
    assert all(map(torch.equal, found, [p.grad for p in step._model.parameters()]))
    sums = ib.losses.separable(lambda o, t: F.cross_entropy(o, torch.tensor(t)), len)
    with pytest.raises(ib.BatchError, match="targets is a list with one entry for each of 12"):
        ib.VirtualBatch(mlp(), sums, micro_batch_size=4).backward(X, Y.tolist())


def test_a_dataclass_alone():
    with pytest.raises(ib.BatchError, match="inputs is a Extra.*register_dataclass"):
        ib.VirtualBatch(mlp(), nn.CrossEntropyLoss()).backward(Extra(X), Y)


@pytest.mark.parametrize(
    "option",
    [(12, 12), (3, 2, 2), [1, 2, 3], {"size": [1, 2, 3]}, Settings(), "twelve texts", [None] * 12],
    ids=str,
)
def test_options_are_no_rows(option):
    model = Calls(lambda self, x, extra: self.net(first(x, extra)), net=mlp())
    expected = native_gradients(model.net, F.cross_entropy, X, Y)
    ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4).backward((X, option), Y)
    assert gradient_error(model.net, expected) < 1e-12
    ib.wrap(model, micro_batch_size=4)(X[:2], option)
    ib.wrap(model, micro_batch_size=4)(X, extra=option)


@dataclasses.dataclass
class Scores:
    logits: torch.Tensor


def test_an_object_that_holds_all_outputs():
    model = Calls(lambda self, x: Scores(self.net(x)), net=mlp())
    value = ib.losses.coupled(lambda o, t: F.cross_entropy(o.logits, t[: len(o.logits)]))
    with pytest.raises(ib.InvalidType, match="outputs is a Scores.*torch.utils._pytree"):
        ib.VirtualBatch(model, value, micro_batch_size=4).backward(X, Y)
    expected = native_gradients(model.net, F.cross_entropy, X, Y)
    ib.VirtualBatch(model, value, micro_batch_size=12).backward(X, Y)
    assert gradient_error(model.net, expected) < 1e-12
