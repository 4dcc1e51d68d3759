"""A step that an exception ends leaves everything as it was, and the next step is right."""

import copy
import gc
import random

import infinitybatch as ib
import pytest
import torch
from fault_support import LONG, FailingBackward, FailingOps, MyError, State, after
from support import Calls
from torch import nn
from transaction_support import OPTIONS, past_the_first_steps, set_up, step_bits


def check_failure(model, batch, inputs, targets, break_it, mend_it, expect):
    """Fails one step with `break_it`; checks that nothing is left of it."""
    loss = nn.CrossEntropyLoss()
    wanted = step_bits(model, loss, inputs, targets)
    gc.collect()
    state = State(model)
    live = ib.memory.stats().live
    break_it()
    with pytest.raises(type(expect)) as raised:
        batch.backward(inputs, targets)
    assert raised.value is expect
    mend_it()
    state.check()
    # A traceback holds the frames of the model, and these hold activations.
    raised.value.__traceback__ = None
    del raised
    assert ib.memory.stats().live == live, "bytes were left behind"
    found = step_bits(model, loss, inputs, targets)
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
    batch.backward(inputs, targets)  # and this very object works, too


@pytest.mark.parametrize("with_grads", [False, True])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("call", [1, 2, 4])
def test_an_exception_in_forward(options, call, with_grads):
    model, inputs, targets = set_up(with_grads)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), **options)
    error = MyError("in forward")
    check_failure(
        model,
        batch,
        inputs,
        targets,
        lambda: setattr(model, "before_forward", after(call, error)),
        lambda: setattr(model, "before_forward", lambda: None),
        error,
    )


@pytest.mark.parametrize(
    "kind", [MyError, KeyboardInterrupt, StopIteration, ValueError, SystemExit]
)
def test_the_same_exception_object_comes_back(kind):
    model, inputs, targets = set_up(True)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=3)
    error = kind("mine")
    check_failure(
        model,
        batch,
        inputs,
        targets,
        lambda: setattr(model, "before_forward", after(2, error)),
        lambda: setattr(model, "before_forward", lambda: None),
        error,
    )


@pytest.mark.parametrize("options", OPTIONS)
def test_an_exception_in_the_loss(options):
    model, inputs, targets = set_up(True)
    error = MyError("in the loss")
    fail = []

    def total(outputs, labels):
        for f in fail:
            f()
        return nn.functional.cross_entropy(outputs, labels, reduction="sum")

    batch = ib.VirtualBatch(
        model, ib.losses.separable(total, lambda labels, samples: samples), **options
    )
    check_failure(
        model, batch, inputs, targets, lambda: fail.append(after(2, error)), fail.clear, error
    )


@pytest.mark.parametrize("part", ["denominator", "penalty", "callback"])
def test_an_exception_in_other_code_of_the_users(part):
    model, inputs, targets = set_up(True)
    error = MyError(part)
    fail = {}
    loss = ib.losses.separable(
        lambda o, t: nn.functional.cross_entropy(o, t, reduction="sum"),
        lambda t, samples: fail.get("denominator", lambda: None)() or samples,
        penalty=lambda: fail.get("penalty", lambda: None)() or 0 * model.net[0].weight.sum(),
    )
    batch = ib.VirtualBatch(
        model,
        loss,
        micro_batch_size=3,
        on_micro_batch=lambda _: fail.get("callback", lambda: None)(),
    )
    check_failure(
        model,
        batch,
        inputs,
        targets,
        lambda: fail.update({part: after(1, error)}),
        fail.clear,
        error,
    )


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("kind", [MyError, KeyboardInterrupt])
def test_an_exception_in_backward(options, kind):
    model, inputs, targets = set_up(True)
    model.net.insert(2, Calls(lambda self, x: FailingBackward.apply(x)))
    error = kind("in backward")
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), **options)
    try:
        check_failure(
            model,
            batch,
            inputs,
            targets,
            lambda: setattr(FailingBackward, "error", error),
            lambda: setattr(FailingBackward, "error", None),
            error,
        )
    finally:
        FailingBackward.error = None


@pytest.mark.parametrize("which", ["tensor", "post_accumulate", "output"])
@pytest.mark.parametrize("with_grads", [False, True])
def test_an_exception_in_a_hook(which, with_grads):
    model, inputs, targets = set_up(with_grads)
    error = MyError("in a hook")
    handles = []

    def break_it():
        weight = model.net[0].weight
        if which == "tensor":
            handles.append(weight.register_hook(after(1, error)))
        elif which == "post_accumulate":
            handles.append(weight.register_post_accumulate_grad_hook(after(1, error)))
        else:
            hook = after(2, error)
            handles.append(
                model.net.register_forward_hook(lambda m, i, o: o.register_hook(hook) and None)
            )

    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=3)
    check_failure(
        model,
        batch,
        inputs,
        targets,
        break_it,
        lambda: [handle.remove() for handle in handles],
        error,
    )


def writes_outputs(outputs, targets):
    """Who watches the loss copies them first, in front of an op that is yet to run."""
    return nn.functional.cross_entropy(outputs.mul_(2), targets)


@pytest.mark.parametrize("stays", [False, True])
@pytest.mark.parametrize("with_grads", [False, True])
@pytest.mark.parametrize("coupled", [False, True])
def test_an_exception_at_any_op(coupled, with_grads, stays):
    model, inputs, targets = set_up(with_grads)
    loss = ib.losses.coupled(writes_outputs) if coupled else nn.CrossEntropyLoss()
    batch = past_the_first_steps(model, loss, inputs, targets)
    twin = copy.deepcopy(model)  # without .grad
    for parameter, original in zip(twin.parameters(), model.parameters(), strict=True):
        parameter.grad = None if original.grad is None else original.grad.clone()
    twin_batch = past_the_first_steps(twin, loss, inputs, targets)
    with FailingOps() as counter:
        twin_batch.backward(inputs, targets)
    names = counter.names
    assert len(names) > 150 and "aten.addmm.default" in names
    # Existing gradients are added to in place, which fails nowhere but in a test: left out.
    parameters = len(list(model.parameters()))
    last = len(names) - parameters if with_grads else len(names)
    assert names[-parameters:] == ["aten.add_.Tensor" if with_grads else "aten.detach.default"] * 4
    places = range(1, last + 1)
    if not LONG:
        places = sorted(random.Random(1).sample(places, 10 if stays or coupled else 40)) + [last]
    wanted = step_bits(model, loss, inputs, targets)
    for place in places:
        state = State(model)
        live = ib.memory.stats().live
        error = MyError(place)
        with pytest.raises(MyError) as raised, FailingOps(place, error, stays):
            batch.backward(inputs, targets)
        assert raised.value is error
        where = f"op {place} of {len(names)}: {names[place - 1]}"
        error.__traceback__ = None
        del raised
        try:
            state.check()
            assert ib.memory.stats().live == live, "bytes were left behind"
        except AssertionError as failure:
            raise AssertionError(f"{where}: {failure}") from None
        found = step_bits(model, loss, inputs, targets)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True)), where
        del state, found


def test_what_was_being_handled_is_no_cause():
    """A step may be somebody's answer to running out of memory."""
    model, inputs, targets = set_up(False)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), memory_budget="64MiB")
    error = MyError("mine")
    model.before_forward = after(2, error)
    try:
        raise torch.OutOfMemoryError("native")
    except torch.OutOfMemoryError:
        with pytest.raises(MyError) as raised:
            batch.backward(inputs, targets)
    assert raised.value is error


def test_a_rehearsal_changes_nothing():
    model, inputs, targets = set_up(True)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), memory_budget="64MiB")
    state = State(model)
    plan = batch.plan(inputs, targets)
    state.check()
    assert plan.batch_size == 12 and sum(plan.micro_batch_sizes) == 12
