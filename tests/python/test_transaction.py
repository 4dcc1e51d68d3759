"""A step that fails leaves everything as it was, and the next step is right."""

import copy
import functools
import gc
import random
import signal
import threading
import time
import types

import infinitybatch as ib
import numpy as np
import pytest
import torch
from fault_support import LONG, FailingBackward, FailingOps, MyError, State, after
from support import Calls, Tally, classification, mlp
from torch import nn


class Fussy(nn.Module):
    """Draws random numbers of three kinds, writes a buffer, and fails when told to."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 5))
        self.register_buffer("steps", torch.zeros(3))
        self.double()
        self.before_forward = lambda: None

    def forward(self, x):
        self.before_forward()
        self.steps += 1
        noise = random.random() + np.random.rand()
        return self.net(x) + 0.1 * noise


OPTIONS = [{"micro_batch_size": 3}, {"memory_budget": "64MiB"}]


def set_up(with_grads):
    np.random.seed(0)
    model = Fussy()
    inputs, targets = classification(12)
    if with_grads:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
    return model, inputs, targets


def step_bits(model, loss, inputs, targets):
    """The bits that a step gives from a fixed random state."""
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    model = copy.deepcopy(model)
    report = ib.VirtualBatch(model, loss, micro_batch_size=3).backward(inputs, targets)
    return [report.loss, *(p.grad for p in model.parameters()), *model.buffers()]


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


@pytest.mark.parametrize("options", OPTIONS)
def test_ctrl_c_between_micro_batches(options):
    """The model's Python code is over so quickly that the signal is seen by the step's own check."""
    model, inputs, targets = set_up(True)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), **options)
    state = State(model)
    # Raised by the handler: an exception of ours shows that Python's handlers ran.
    error = MyError("signal")

    def handler(*_):
        raise error

    previous = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(MyError) as raised:
            source = ib.BatchSource(
                12, lambda b, e: signal.raise_signal(signal.SIGUSR1) or inputs[b:e]
            )
            batch.backward(source, targets)
        assert raised.value is error
    finally:
        signal.signal(signal.SIGUSR1, previous)
    state.check()


def test_ctrl_c_reaches_a_step_that_runs_no_python_at_all():
    """No bytecode runs between micro-batches, so that only the step's own check can see it."""
    weight = torch.randn(5, 6, requires_grad=True)
    forward = functools.partial(nn.functional.linear, weight=weight)  # all of it is C
    view = types.SimpleNamespace(
        forward=forward,
        one_of_many=lambda function: function,
        parameters=lambda: [("weight", weight)],
        buffers=lambda: [],
        is_training=lambda: True,
        is_uncompiled=False,
    )
    batch = ib._C.VirtualBatch(view, ib.losses.cross_entropy(), micro_batch_size=1)
    main = threading.main_thread().ident
    timer = threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGINT))
    inputs = torch.randn(100_000, 6)  # seconds of work
    # A job in the background of a shell is started with the signal ignored.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer.start()
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            batch.backward(inputs, torch.zeros(len(inputs), dtype=torch.int64))
    finally:
        signal.signal(signal.SIGINT, previous)
    assert time.monotonic() - start < 2
    timer.join()
    assert weight.grad is None


def past_the_first_steps(model, loss, inputs, targets):
    """Steps 1, 2 and 4 look for mixed samples; what fails there ends that alone."""
    batch = ib.VirtualBatch(model, loss, micro_batch_size=3)
    grads = [p.grad for p in model.parameters()]
    buffers = [b.clone() for b in model.buffers()]
    model.zero_grad()
    for _ in range(2):
        batch.backward(inputs, targets)
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        parameter.grad = grad
    for buffer, value in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(value)
    return batch


def count_allocations(model, inputs, targets):
    twin = copy.deepcopy(model)
    twin_batch = past_the_first_steps(twin, nn.CrossEntropyLoss(), inputs, targets)
    with ib.memory.fail_allocation() as counter:
        twin_batch.backward(inputs, targets)
    return counter.seen


@pytest.mark.parametrize("with_grads", [False, True])
def test_a_failed_allocation_anywhere(with_grads):
    model, inputs, targets = set_up(with_grads)
    loss = nn.CrossEntropyLoss()
    batch = past_the_first_steps(model, loss, inputs, targets)
    count = count_allocations(model, inputs, targets)
    assert count > 100
    places = range(1, count + 1)
    if not LONG:
        places = sorted(random.Random(1).sample(places, 40))
    wanted = step_bits(model, loss, inputs, targets)
    failures = 0
    for place in places:
        state = State(model)
        live = ib.memory.stats().live
        with ib.memory.fail_allocation(place) as failure:
            try:
                batch.backward(inputs, targets)
            except torch.OutOfMemoryError as error:
                failures += 1
                error.__traceback__ = None
        assert failure.failed, f"there was no allocation {place}"
        state.check()
        assert ib.memory.stats().live == live, f"allocation {place} left bytes behind"
        found = step_bits(model, loss, inputs, targets)
        assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
        del state, found
    assert failures == len(places)


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


def test_a_failed_allocation_in_a_planned_step_is_answered():
    """The planner begins again with less; the result is as good."""
    inputs, targets = classification(64)
    model = mlp()
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), memory_budget="64MiB")
    native = copy.deepcopy(model)
    nn.functional.cross_entropy(native(inputs), targets).backward()
    for place in (1, 60, 150):
        model.zero_grad()
        with ib.memory.fail_allocation(place) as failure:
            try:
                report = batch.backward(inputs, targets)
            except torch.OutOfMemoryError:
                assert all(p.grad is None for p in model.parameters())
                continue
        assert failure.failed and report.restarts == 1
        for a, b in zip(model.parameters(), native.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-16)


def run_out_of_memory():
    torch.empty(2**30)  # more than the budget


def run_out_of_memory_as_a_cause():
    try:
        run_out_of_memory()
    except torch.OutOfMemoryError as error:
        raise MyError("mine") from error


@pytest.mark.parametrize("place", ["forward", "backward"])
@pytest.mark.parametrize("fail", [run_out_of_memory, run_out_of_memory_as_a_cause])
def test_running_out_of_memory_in_the_users_python_is_answered_by_a_smaller_plan(place, fail):
    model = mlp()
    model.insert(1, Calls(lambda self, x: FailingBackward.apply(x)))
    inputs, targets = classification(64)
    native = copy.deepcopy(model)
    nn.functional.cross_entropy(native(inputs), targets).backward()
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), memory_budget="64MiB")
    calls = Tally()

    def at_the_third(*_):
        calls()
        if calls.count == 3:
            fail()

    if place == "forward":
        model.register_forward_pre_hook(at_the_third)
    else:
        model[0].register_full_backward_hook(at_the_third)
    report = batch.backward(inputs, targets)
    assert report.restarts == 1 and calls.count > 3
    for a, b in zip(model.parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-16)


def out_of_memory():
    return torch.OutOfMemoryError("mine")


def out_of_memory_as_a_cause():
    error = MyError("mine")
    error.__cause__ = torch.OutOfMemoryError("the cause")
    return error


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("make", [out_of_memory, out_of_memory_as_a_cause])
def test_an_out_of_memory_error_of_the_users_own_comes_back_as_it_is(make, options):
    """Nothing that the limit watches failed, so no smaller plan is an answer."""
    model, inputs, targets = set_up(False)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), **{"memory_budget": "64MiB", **options})
    state = State(model)
    mine = make()
    model.before_forward = after(1, mine)
    with pytest.raises(type(mine)) as raised:
        batch.backward(inputs, targets)
    assert raised.value is mine
    state.check()


def test_the_users_own_out_of_memory_error_leaves_the_plan_as_large_as_before():
    def forward(self, x):
        self.before_forward()
        time.sleep(0.01)  # whatever the size: the largest is the fastest beyond doubt
        return self.net(x)

    model = Calls(forward, net=mlp())
    model.before_forward = lambda: None
    inputs, targets = classification(64)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), memory_budget="64MiB")
    for _ in range(10):
        model.zero_grad()
        if batch.backward(inputs, targets).micro_batch_sizes == [64]:
            break
    mine = out_of_memory()
    model.before_forward = after(1, mine)
    model.zero_grad()
    with pytest.raises(torch.OutOfMemoryError) as raised:
        batch.backward(inputs, targets)
    assert raised.value is mine
    now = batch.backward(inputs, targets)
    assert now.micro_batch_sizes == [64] and now.restarts == 0


def test_the_users_own_out_of_memory_error_after_a_restart_comes_back_as_it_is():
    """What the attempt before ran out of is no excuse."""
    model, inputs, targets = set_up(False)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), memory_budget="64MiB")
    mine = out_of_memory()
    calls = Tally()

    def first_ours_then_theirs():
        calls()
        if calls.count == 3:
            run_out_of_memory()
        if calls.count == 5:
            raise mine

    model.before_forward = first_ours_then_theirs
    state = State(model)
    with pytest.raises(torch.OutOfMemoryError) as raised:
        batch.backward(inputs, targets)
    assert raised.value is mine and calls.count == 5
    state.check()


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


def test_a_limit_that_a_python_forward_runs_into():
    """What one sample needs is found out under the limit; the settled plan stays inside."""

    def forward(self, x):
        big = torch.zeros(len(x), 100_000)  # 400 kB a sample, at once
        return self.net(x) + big[:, :1].double()

    model = Calls(forward, net=mlp())
    inputs, targets = classification(64)
    native = copy.deepcopy(model.net)
    nn.functional.cross_entropy(native(inputs), targets).backward()
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), memory_budget="1MiB")
    for _ in range(3):
        model.zero_grad()
        report = batch.backward(inputs, targets)
        assert max(report.micro_batch_sizes) <= 2
        assert report.peak_bytes <= 2**20
        for a, b in zip(model.net.parameters(), native.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-16)
    assert report.restarts == 0


def test_a_rehearsal_changes_nothing():
    model, inputs, targets = set_up(True)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), memory_budget="64MiB")
    state = State(model)
    plan = batch.plan(inputs, targets)
    state.check()
    assert plan.batch_size == 12 and sum(plan.micro_batch_sizes) == 12
