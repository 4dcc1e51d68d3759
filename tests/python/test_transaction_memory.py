"""A step that runs out of memory is answered or leaves everything as it was."""

import copy
import random
import time

import infinitybatch as ib
import pytest
import torch
from fault_support import LONG, FailingBackward, MyError, State, after
from support import Calls, Tally, classification, mlp
from torch import nn
from transaction_support import OPTIONS, past_the_first_steps, set_up, step_bits


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


def test_a_limit_that_a_python_forward_runs_into():
    """What one sample needs is found out under the limit; the settled plan stays inside."""

    def forward(self, x):
        big = torch.zeros(len(x), 100_000)  # 400 kB a sample, at once
        return self.net(x) + big[:, :1].double()

    model = Calls(forward, net=mlp())
    inputs, targets = classification(64)
    native = copy.deepcopy(model.net)
    nn.functional.cross_entropy(native(inputs), targets).backward()
    # A test that failed before keeps its tensors alive, in its traceback.
    budget = ib.memory.stats("cpu").live + 2**20
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), memory_budget=budget)
    for _ in range(3):
        model.zero_grad()
        report = batch.backward(inputs, targets)
        assert max(report.micro_batch_sizes) <= 2
        assert report.peak_bytes <= budget
        for a, b in zip(model.net.parameters(), native.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-16)
    assert report.restarts == 0
