"""Graphs that a wrapped model keeps for its backward wait away from the device."""

import copy
import gc
import resource
import signal
from ctypes import string_at

import infinitybatch as ib
import pytest
import torch
from fault_support import LONG, MyError, State, look_at_new_objects_only
from support import LOOKS, Calls, Log, until_quiet
from test_offloaded_graphs import (
    COUNT,
    HOST,
    KINDS,
    SAMPLES,
    SIZE,
    WIDTH,
    data,
    linear,
    model_of,
    spread,
    wide,
)
from torch import nn
from wrap_support import call_meanwhile, close

__all__ = ["look_at_new_objects_only"]  # a fixture

WHERE = (HOST, {"host_budget": "3KiB"}, {})


def live():
    gc.collect()
    return ib.memory.stats().live


def grads(module):
    return [parameter.grad for parameter in module.parameters()]


def step(module, x, targets, times=1, loss=spread):
    """What one forward and so many backward passes leave."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    outputs = module(x)
    value = loss(outputs, targets)
    for i in range(times):
        value.backward(retain_graph=i + 1 < times)
    left = [outputs.detach(), value.detach(), x.grad, *grads(module), *module.buffers()]
    return [tensor.clone() for tensor in left]


def steps(kind, times=(1, 2), **options):
    """What a step and one with two backward passes leave; the first one's forwards, the report."""
    inner = model_of(kind)
    calls = Log()
    inner.register_forward_pre_hook(lambda *_: calls.append(1))
    wrapped = ib.wrap(inner, micro_batch_size=SIZE, **options)
    torch.manual_seed(7)
    left = step(wrapped, *data(), times[0])
    count, report = len(calls), wrapped.last_report
    for again in times[1:]:
        left += step(wrapped, *data(), again)
    return left, count, report, inner


@pytest.mark.parametrize("kind", KINDS)
def test_offloaded_graphs_give_the_bits_of_others_and_of_second_forwards(kind):
    again = steps(kind)[0]
    kept = steps(kind, retained_micro_batches=COUNT, offload="never")[0]
    assert all(map(torch.equal, again, kept))
    for where in WHERE:
        for retained in (COUNT, 2):
            left, calls, report, inner = steps(
                kind, retained_micro_batches=retained, offload=ib.Offload("always", **where)
            )
            assert all(map(torch.equal, left, kept)), where
            looks = LOOKS + 3 * (kind == "function")  # whose gradients are looked at, too
            assert calls == COUNT + looks or (retained == 2 and report.strategy == "rerun")
            assert report.retained == retained
            assert 0 < report.offloaded_graph_bytes == report.offloaded_bytes
            # What the function keeps by itself is Python's.
            assert (report.stayed_graph_bytes > 0) == (kind == "function")
    if kind not in ("dropout", "autocast"):
        native = model_of(kind)
        wanted = step(native, *data()) + step(native, *data(), 2)
        close(left, wanted)


def test_numbers_among_outputs_are_there_when_tapes_are_compared():
    def forward(self, x):
        h = torch.tanh(self.net(x)).mean(1)
        return h, h.square().sum()

    native = Calls(forward, net=linear()).double()
    inner = copy.deepcopy(native)
    wrapped = ib.wrap(
        inner,
        micro_batch_size=SIZE,
        retained_micro_batches=COUNT,
        offload=ib.Offload("always", **HOST),
        reduce="sum",
    )
    x, y = data()
    for module in (wrapped, native):
        outputs, number = module(x)
        value = spread(outputs, y) * number
        value.backward(retain_graph=True)
        value.backward()  # by its tapes, which find the same numbers
    assert wrapped.last_report.offloaded_graph_bytes > wrapped.last_report.stayed_graph_bytes == 0
    close(grads(inner), grads(native))


def test_each_storage_moves_once_and_outputs_stay():
    def forward(self, x):
        h = torch.tanh(self.net(x))
        return h * h.view(-1).view_as(h) + h.t().sin().t() * h.detach()

    wrapped = ib.wrap(
        Calls(forward, net=linear()).double(),
        micro_batch_size=SIZE,
        retained_micro_batches=COUNT,
        offload=ib.Offload("always", **HOST),
    )
    x = torch.randn(SAMPLES, WIDTH).double()
    outputs = wrapped(x)
    # h, and what the model returned.
    assert wrapped.last_report.offloaded_graph_bytes == 2 * x.nbytes
    assert wrapped.last_report.stayed_graph_bytes == 0
    outputs.std(0).sum().backward()
    assert wrapped.last_report.offloaded_bytes == 2 * x.nbytes


def test_between_the_passes_no_kept_graph_is_on_the_device():
    above = {}
    for offload in ("never", "always"):
        for count in (4, 16, 64):
            wrapped = ib.wrap(
                wide(),
                micro_batch_size=8,
                retained_micro_batches=count,
                offload=ib.Offload(offload, **HOST),
            )
            x = torch.randn(8 * count, 64).double()
            wrapped(x).square().sum().backward()
            before = live()
            outputs = wrapped(x)
            assert wrapped.last_report.retained == count
            above[offload, count] = live() - before - outputs.nbytes
            del outputs
            assert live() == before
    assert above["always", 4] == above["always", 16] == above["always", 64] < 1000, above
    assert above["never", 64] > 5 * above["never", 4] > 100_000


@until_quiet
def test_copies_run_while_other_micro_batches_compute():
    wrapped = ib.wrap(
        wide(8, 192),
        micro_batch_size=64,
        retained_micro_batches=6,
        offload=ib.Offload("always", host_bandwidth=1e9, **HOST),
    )
    outputs = wrapped(torch.randn(6 * 64, 192).double())
    forward = wrapped.last_report.offload_seconds_hidden
    assert forward > 5e-4
    outputs.std(0).sum().backward()
    report = wrapped.last_report
    assert report.offload_seconds_hidden - forward > 5e-4
    seconds = report.offload_seconds_hidden + report.offload_seconds_waited
    assert seconds >= 2 * report.offloaded_bytes / 1e9


@pytest.mark.parametrize("how", ["attribute", "hook", "numpy"])
def test_what_others_hold_stays_where_it_is(how):
    kept = []

    def forward(self, x):
        h = torch.tanh(self.net(x))
        if how == "attribute":
            self.map = h.detach()
        if how == "numpy":
            kept.append(h.detach().numpy())
        return self.head(h).mean(1)

    net, head = linear(), linear()
    inner = Calls(forward, net=net, head=head).double()
    native = copy.deepcopy(inner)
    if how == "hook":
        head.register_forward_pre_hook(lambda _, inputs: kept.append(inputs[0]))
    wrapped = ib.wrap(
        inner,
        micro_batch_size=SIZE,
        retained_micro_batches=COUNT,
        offload=ib.Offload("always", **HOST),
    )
    x, y = data()
    outputs = wrapped(x)
    for each in [*kept, *([inner.map] if how == "attribute" else [])]:
        # By no operator of torch's, either.
        held = each.tobytes() if how == "numpy" else string_at(each.data_ptr(), each.nbytes)
        assert any(held)
    # What the next forward let go of has left after it.
    stays = SAMPLES % SIZE / SAMPLES if how == "attribute" else 1
    assert wrapped.last_report.stayed_graph_bytes == stays * x.nbytes
    spread(outputs, y).backward()
    spread(native(x), y).backward()
    close(grads(inner), grads(native))


def rescaled(fail):
    """Looks up rows of a weight that it scales, and has a constant on its tape."""

    def forward(self, x):
        scale = torch.tensor([0.5, 2.0], dtype=x.dtype)
        h = self.table(x.abs().argmax(1) % 3).tanh() * scale.repeat(WIDTH // 2)
        if fail and len(x) < SIZE:
            raise MyError
        return self.head(h + x).tanh()

    torch.manual_seed(3)
    table = nn.Embedding(3, WIDTH, max_norm=0.7)
    inner = Calls(forward, table=table, head=linear()).double()
    return inner, torch.randn(SAMPLES, WIDTH).double(), torch.randn(SAMPLES, 1).double()


def test_what_the_library_itself_keeps_of_a_forward_stays():
    inner, x, y = rescaled([])
    native = copy.deepcopy(inner)
    wrapped = ib.wrap(
        inner,
        micro_batch_size=SIZE,
        retained_micro_batches=COUNT,
        offload=ib.Offload("always", **HOST),
    )
    for _ in range(2):
        close(step(wrapped, x, y, 2), step(native, x, y, 2))
        close(list(inner.parameters()), list(native.parameters()))
    assert wrapped.last_report.offloaded_graph_bytes > 0


def test_a_forward_that_fails_puts_back_what_it_wrote():
    fail = [1]
    inner, x, y = rescaled(fail)
    native = copy.deepcopy(inner)
    wrapped = ib.wrap(
        inner,
        micro_batch_size=SIZE,
        retained_micro_batches=COUNT,
        offload=ib.Offload("always", **HOST),
    )
    state, before = State(inner), live()
    for _ in range(2):
        with pytest.raises(MyError):
            wrapped(x)
        state.check()
        assert live() == before
    fail.clear()
    close(step(wrapped, x, y), step(native, x, y))


def test_several_calls_before_backward_share_the_arena():
    """And give their places back, in whatever order they end, or without a backward."""
    inner = model_of("plain")
    native = copy.deepcopy(inner)
    x, y = data()
    tries = ib.wrap(
        inner, micro_batch_size=SIZE, retained_micro_batches=9, offload=ib.Offload("always", **HOST)
    )
    tries(x)
    one = tries.last_report.offloaded_graph_bytes
    wrapped = ib.wrap(
        inner,
        micro_batch_size=SIZE,
        retained_micro_batches=9,
        offload=ib.Offload("always", host_budget=int(3.5 * one), disk=False),
    )
    for _ in range(4):
        for module in (wrapped, native):
            module.zero_grad()
            a, b, c = module(x), module(x[:9]), module(x[3:])
            spread(torch.cat([a, b]), torch.cat([y, y[:9]])).backward()
            spread(c, y[3:]).backward()
            module(x)  # without a backward
        close(grads(inner), grads(native))
        a = b = c = None
        gc.collect()
    held = []
    with pytest.raises(ib.OffloadError, match="host_budget"):
        for _ in range(4):
            held.append(wrapped(x))
    assert len(held) == 3
    held.clear()
    close(step(wrapped, x, y), step(native, x, y))


def test_buffers_that_forward_writes_leave_no_graph_to_keep():
    def forward(self, x):
        self.steps += 1
        return self.net(x).mean(1)

    torch.manual_seed(0)
    inner = Calls(forward, net=linear(), steps=torch.zeros(2)).double()
    native = copy.deepcopy(inner)
    wrapped = ib.wrap(
        inner,
        micro_batch_size=SIZE,
        retained_micro_batches=COUNT,
        offload=ib.Offload("always", **HOST),
    )
    close(step(wrapped, *data()), step(native, *data()))
    assert wrapped.last_report.retained == wrapped.last_report.offloaded_bytes == 0


def test_layers_that_see_the_whole_batch_keep_none():
    inner = nn.Sequential(linear(), nn.BatchNorm1d(WIDTH), nn.Tanh(), linear()).double()
    native = copy.deepcopy(inner)
    wrapped = ib.wrap(
        inner,
        micro_batch_size=SIZE,
        retained_micro_batches=COUNT,
        offload=ib.Offload("always", **HOST),
    )
    x, y = torch.randn(SAMPLES, WIDTH).double(), data()[1]
    for _ in range(2):
        close(step(wrapped, x, y), step(native, x, y))
    assert wrapped.last_report.strategy == "cut" and wrapped.last_report.retained == 0
    mixing = ib.wrap(
        Calls(lambda self, x: self.net(x - x.mean(0)), net=linear()).double(),
        micro_batch_size=SIZE,
        retained_micro_batches=COUNT,
        offload=ib.Offload("always", **HOST),
    )
    with pytest.raises(ib.CouplingError, match="mean"):
        mixing(x)


def test_copies_and_one_thread_at_a_time():
    inner = model_of("plain")
    wrapped = ib.wrap(
        inner,
        micro_batch_size=SIZE,
        retained_micro_batches=COUNT,
        offload=ib.Offload("always", **HOST),
    )
    x, y = data()
    wanted = step(wrapped, x, y)
    value = spread(wrapped(x), y)
    twin = copy.deepcopy(wrapped)  # while graphs are away
    assert all(map(torch.equal, wanted, step(twin, x, y)))
    assert twin.last_report.offloaded_graph_bytes > 0
    wrapped.zero_grad()
    value.backward()
    assert all(map(torch.equal, wanted[3:], grads(inner)))
    with call_meanwhile(inner.net[1], lambda: wrapped(x)) as errors:
        found = step(wrapped, x, y)
    # What the hook noted where rows were looked at is undone.
    assert len(errors) == COUNT and "in another thread" in errors[0]
    assert all(map(torch.equal, wanted, found))


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
