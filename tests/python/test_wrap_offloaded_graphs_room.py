"""Offloaded graphs behind `wrap`: whether they pay, too little room, refused memory, misuse."""

import copy
import resource
import signal

import infinitybatch as ib
import pytest
import torch
from fault_support import LONG, State, no_error_is_only_logged
from support import Calls, until_quiet
from test_offloaded_graphs import (
    COUNT,
    HOST,
    SAMPLES,
    SIZE,
    data,
    linear,
    model_of,
    spread,
    wide,
)
from wrap_offload_support import grads, live, step
from wrap_support import close

__all__ = ["no_error_is_only_logged"]  # a fixture


@pytest.mark.parametrize("disk", [True, False], ids=["disk", "host"])
def test_no_room_is_a_typed_error_and_leaves_everything_as_it_was(disk):
    inner = model_of("dropout")
    options = {"micro_batch_size": SIZE, "retained_micro_batches": COUNT}
    where = {} if disk else {"host_budget": "20KiB", "disk": False}
    wrapped = ib.wrap(inner, offload=ib.Offload("always", **where), **options)
    x, y = data()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    state, before = State(inner), live()
    try:
        for room in (2**12, 10 * 2**12):
            if disk:
                resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
            with pytest.raises(ib.OffloadError):
                wrapped(x)
            state.check()
            assert live() == before
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    few = SAMPLES if disk else 2 * SIZE  # what was taken is free again
    found = []
    for module in (wrapped, ib.wrap(inner, **options)):
        torch.manual_seed(5)
        found.append(step(module, x[:few], y[:few]))
    assert all(map(torch.equal, *found))


def test_a_refused_allocation_anywhere():
    """Backward that fails loses its graphs, and runs the tapes the next time."""
    inner = model_of("plain")
    wrapped = ib.wrap(
        inner,
        micro_batch_size=SIZE,
        retained_micro_batches=COUNT,
        offload=ib.Offload("always", **HOST),
    )
    x, y = data()
    for _ in range(4):  # the first two and the fourth look at rows
        inner.zero_grad()
        wanted = step(wrapped, x, y)
    inner.zero_grad()
    with ib.memory.fail_allocation() as none:
        wrapped(x)
    forward = none.seen
    assert forward > 40
    places = range(1, forward + 1, 1 if LONG else 5)
    for place in places:
        state = State(inner)
        before = live()
        with ib.memory.fail_allocation(place) as failure, pytest.raises(torch.OutOfMemoryError):
            wrapped(x)
        assert failure.failed
        state.check()
        assert live() == before, place
    place = 1
    while True:
        value = spread(wrapped(x), y)
        state = State(inner)
        with ib.memory.fail_allocation(place) as failure:
            try:
                value.backward(retain_graph=True)
            except (torch.OutOfMemoryError, RuntimeError):
                assert failure.failed
        if not failure.failed:
            break
        state.check()
        value.backward()
        assert all(map(torch.equal, wanted[3:], grads(inner))), place
        inner.zero_grad()
        place += 1 if LONG else 4
    assert place > 40


@pytest.mark.parametrize("offload", ["auto", "never"])
def test_graphs_that_do_not_fit_are_offloaded_where_they_were_asked_for(offload):
    inner, x = wide(), torch.randn(128, 64).double()
    native = copy.deepcopy(inner)
    native(x).std(0).sum().backward()
    gradients = sum(parameter.nbytes for parameter in inner.parameters())
    wrapped = ib.wrap(
        inner,
        micro_batch_size=8,
        retained_micro_batches=16,
        memory_budget=live() + gradients + 150 * 2**10,
        offload=ib.Offload(offload, **HOST),
    )
    if offload == "never":
        with pytest.raises(ib.BudgetExceeded):
            wrapped(x)
        return
    restarts = []
    for _ in range(2):
        inner.zero_grad(set_to_none=True)
        outputs = wrapped(x)
        outputs.std(0).sum().backward()
        del outputs
        report = wrapped.last_report
        restarts.append(report.restarts)
        assert report.peak_bytes <= report.memory_budget
        assert report.retained == 16 and report.offloaded_graph_bytes > 2**17
        close(grads(inner), grads(native))
    assert restarts[0] > 0 and restarts[1] == 0


def planned(bandwidth, room=2.0, width=64, count=64, calls=8, **where):
    """A budget of so many MiB more than there is, and the last of a few calls."""
    inner = Calls(lambda self, x: self.net(x).mean(1), net=wide(8, width))
    native = copy.deepcopy(inner)
    x = torch.randn(count, 16, width).double()
    native(x.flip(0)).std(0).sum().backward()  # the last bias's gradient is rounding alone
    moved = grads(native)
    native.zero_grad(set_to_none=True)
    native(x).std(0).sum().backward()
    gradients = sum(parameter.nbytes for parameter in inner.parameters())
    ran = []
    inner.register_forward_pre_hook(lambda _, inputs: ran.append(len(inputs[0])))
    wrapped = ib.wrap(
        inner,
        memory_budget=live() + gradients + int(room * 2**20),
        offload=ib.Offload("always", host_bandwidth=bandwidth, **{**HOST, **where}),
    )
    for _ in range(calls):
        ran.clear()
        inner.zero_grad(set_to_none=True)
        outputs = wrapped(x)
        outputs.std(0).sum().backward()
        del outputs
        close(grads(inner), grads(native), moved=moved)
        report = wrapped.last_report
        assert report.peak_bytes <= report.memory_budget
    return report, sum(ran)


@pytest.mark.parametrize("room", [0.7, 2.0])
@until_quiet
def test_a_fast_link_beats_second_forwards_and_the_peak_is_predicted(room):
    report, rows = planned(0.0, room)
    assert report.predicted_peak_bytes == pytest.approx(report.peak_bytes, rel=0.01)
    assert report.retained == len(report.micro_batch_sizes) > 1
    assert report.offloaded_bytes == report.offloaded_graph_bytes > 2**20
    assert rows == 64
    assert report.strategy == "replay" and report.restarts == 0
    assert "graphs are offloaded: of their copies" in report.strategy_reason


@until_quiet
def test_a_slow_link_does_not():
    report, _ = planned(2e8, 0.7, count=32, calls=4)
    assert report.offloaded_bytes == report.offloaded_graph_bytes == 0
    assert "graphs are not offloaded: of their copies" in report.strategy_reason


def test_a_host_that_is_too_small_for_graphs_is_no_error():
    report, _ = planned(0.0, host_budget="100KiB", calls=4)
    assert report.offloaded_bytes == 0
    assert "graphs are not offloaded: " in report.strategy_reason


def test_misuse():
    with pytest.raises(ib.InvalidArgument, match="without micro_batch_size"):
        ib.wrap(linear(), retained_micro_batches=2)
    with pytest.raises(ib.InvalidArgument, match="retained_micro_batches is -1"):
        ib.wrap(linear(), micro_batch_size=2, retained_micro_batches=-1)
