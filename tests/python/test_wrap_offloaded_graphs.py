"""Graphs that a wrapped model keeps for its backward wait away from the device."""

import copy
import gc
from ctypes import string_at

import infinitybatch as ib
import pytest
import torch
from fault_support import MyError, State, no_error_is_only_logged
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
from wrap_offload_support import grads, live, step
from wrap_support import call_meanwhile, close

WHERE = (HOST, {"host_budget": "3KiB"}, {})

__all__ = ["no_error_is_only_logged"]  # a fixture


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
    # What the next forward let go of has left after it: a list, too, is as one forward fills it.
    stays = SAMPLES % SIZE / SAMPLES if how in ("attribute", "hook") else 1
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
    # Of what the hook noted the list keeps one forward's.
    assert len(errors) == 1 and "in another thread" in errors[0]
    assert all(map(torch.equal, wanted, found))
