"""Functions that take other arguments than they are given, and arguments that nothing has: each
mistake with its error and what the message says."""

import infinitybatch as ib
import pytest
import torch
from misuse_support import CRITERION, X, Y, check, step
from support import mlp
from torch import nn

MISUSES = {
    "a misspelt option": (
        lambda: step(microbatch_size=4),
        ib.InvalidType,
        r"VirtualBatch has no argument 'microbatch_size'; did you mean micro_batch_size=\?",
    ),
    "half an option": (
        lambda: ib.wrap(mlp(), micro_batch=4),
        ib.InvalidType,
        r"wrap has no argument 'micro_batch'; did you mean micro_batch_size=\?",
    ),
    "a misspelt option of verify": (
        lambda: ib.verify(mlp(), CRITERION, X, Y, budget="1GiB"),
        ib.InvalidType,
        r"no argument 'budget'; did you mean memory_budget=\?",
    ),
    "an option of nothing": (
        lambda: ib.wrap(mlp(), verbosity=3),
        ib.InvalidType,
        "wrap has no argument 'verbosity'$",
    ),
    "an option by position": (
        lambda: ib.wrap(mlp(), "32MiB"),
        ib.InvalidType,
        r"wrap takes options by name: wrap\(model, memory_budget='32MiB'\)",
    ),
    "a size by position": (
        lambda: ib.VirtualBatch(mlp(), CRITERION, 4),
        ib.InvalidType,
        r"VirtualBatch takes options by name: VirtualBatch\(model, loss, micro_batch_size=4\)",
    ),
    "a device": (
        lambda: step(device="cuda"),
        ib.InvalidType,
        r"no argument 'device'; it runs where the model is, model\.to\(device\)",
    ),
    "a VirtualBatch called": (
        lambda: ib.VirtualBatch(mlp(), CRITERION, micro_batch_size=4)(X, Y),
        ib.InvalidType,
        r"write batch\.backward\(inputs, targets\)",
    ),
    "verify without targets": (
        lambda: ib.verify(mlp(), CRITERION, X, micro_batch_size=4),
        ib.InvalidArgument,
        "CrossEntropyLoss needs targets, but was given none",
    ),
    "a scaler's class": (
        lambda: step(micro_batch_size=4, grad_scaler=torch.amp.GradScaler),
        ib.InvalidType,
        r"grad_scaler is the class GradScaler itself; give an instance: GradScaler\(...\)",
    ),
    "a callback without an argument": (
        lambda: step(micro_batch_size=4, on_micro_batch=lambda: None),
        ib.InvalidArgument,
        r"on_micro_batch takes \(\), but is called with \(micro_batch\): lambda micro_batch: \.\.\.",
    ),
    "a source's function of one argument": (
        lambda: ib.BatchSource(12, lambda begin: X),
        ib.InvalidArgument,
        r"rows takes \(begin\), but is called with \(begin, end\): lambda begin, end: \.\.\.",
    ),
    "sum and denominator swapped": (
        lambda: ib.losses.separable(lambda labels: len(labels), lambda outputs, labels: outputs),
        ib.InvalidArgument,
        r"sum takes \(labels\), but is called with \(outputs, targets\)",
    ),
    "a coupled loss's class": (
        lambda: ib.losses.coupled(nn.CrossEntropyLoss),
        ib.InvalidType,
        r"the loss is the class CrossEntropyLoss itself; give an instance: CrossEntropyLoss\(...\)",
    ),
    "a loss of three arguments": (
        lambda: step(loss=lambda outputs, targets, weights: outputs.sum()),
        ib.InvalidArgument,
        r"the loss takes \(outputs, targets, weights\), but is called with \(outputs, targets\)",
    ),
    "a penalty of the model": (
        lambda: ib.losses.with_penalty(nn.MSELoss(), lambda model: model.weight.square().sum()),
        ib.InvalidArgument,
        r"penalty takes \(model\), but is called with \(\): lambda: \.\.\.",
    ),
    "a tape of no function": (
        lambda: ib.tape.record(3, (X,)),
        ib.InvalidType,
        "function must be callable, not int",
    ),
    "a tape of a tensor": (
        lambda: ib.tape.record(torch.sin, X),
        ib.InvalidType,
        r"inputs must be the tuple of arguments, not Tensor: record\(function, \(x,\)\)",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(name):
    check(*MISUSES[name])


def test_what_tells_nothing_of_its_arguments_is_believed():
    assert ib.BatchSource(12, X.narrow) is not None
    assert ib.losses.with_penalty(nn.MSELoss(), torch.nn.Bilinear(1, 1, 1).bias.sum) is not None


@pytest.mark.parametrize(
    ("name", "way_out"),
    [
        ("step", "call batch.backward(inputs, targets), then optimizer.step()"),
        ("zero_grad", "call optimizer.zero_grad()"),
        ("forward", "batch.backward(inputs, targets) runs it"),
        ("parameters", "it is the model's, model.parameters"),
    ],
)
def test_methods_of_other_steps_say_what_to_call(name, way_out):
    batch = ib.VirtualBatch(mlp(), CRITERION, micro_batch_size=4)
    with pytest.raises(AttributeError) as raised:
        getattr(batch, name)
    assert f"VirtualBatch has no attribute '{name}': {way_out}" in str(raised.value)
    assert not hasattr(batch, name) and not hasattr(batch, "_nothing")
