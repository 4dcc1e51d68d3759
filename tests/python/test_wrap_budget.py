"""Wrapped modules inside a memory budget: peaks, gradients, graphs that are kept, what cannot fit."""

import copy

import infinitybatch as ib
import pytest
import torch
from fault_support import LONG, State
from support import Calls, mlp
from torch import nn
from wrap_budget_support import conv, live, needs, peak_of, wide
from wrap_support import X, close, contrastive, grads, opaque


def encoder():
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    net = Calls(
        lambda self, x: self.head(self.layers(x).mean(1)),
        layers=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        head=nn.Linear(32, 16),
    )
    return net.double(), torch.randn(128, 16, 32).double()


MODELS = {"mlp": wide, "conv": conv, "encoder": encoder}


@pytest.mark.parametrize("name", MODELS if LONG else ("mlp", "conv"))
def test_the_whole_step_stays_inside_and_is_exact(name):
    torch.manual_seed(0)
    make = MODELS[name]
    need = needs(make, 8)
    model, x = make()
    native = copy.deepcopy(model)
    contrastive(native(x)).backward()
    kept = []
    for factor in (1.25, 2.0, 6.0) if LONG else (1.25, 6.0):
        model.zero_grad(set_to_none=True)
        budget = live() + int(factor * need)
        wrapped = ib.wrap(model, memory_budget=budget)
        for step in range(7):
            model.zero_grad(set_to_none=True)
            peak = peak_of(lambda w=wrapped: contrastive(w(x)).backward())
            report = wrapped.last_report
            assert peak <= budget, (factor, step, report)
            assert report.restarts == 0
            assert report.peak_bytes <= budget and report.memory_budget == budget
            assert sum(report.micro_batch_sizes) == 128
            close(grads(model), grads(native))
            if step > 4:
                assert report.predicted_peak_bytes is not None
        assert abs(report.predicted_peak_bytes / report.peak_bytes - 1) <= 1e-3
        kept.append(sum(report.micro_batch_sizes[-report.retained :]) if report.retained else 0)
    assert kept[-1] >= 32  # rows whose forward runs once


def test_what_forward_begins_backward_can_end():
    """Tapes stay until the graph of a call is gone, here each with a copy of a buffer."""

    def forward(self, x):
        self.steps += 1
        return self.net(x)

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 4))
    model = Calls(forward, net=net, steps=torch.zeros(2048)).double()
    x = torch.randn(64, 64).double()
    begun = 0
    for room in range(600, 840, 20 if LONG else 40):
        model.zero_grad(set_to_none=True)
        budget = live() + (room << 10)
        wrapped = ib.wrap(model, memory_budget=budget)
        try:
            outputs = wrapped(x)
        except ib.BudgetExceeded:
            assert begun == 0  # more room is never too little
            continue
        contrastive(outputs).backward()
        del outputs
        assert wrapped.last_report.peak_bytes <= budget
        begun += 1
    assert 0 < begun < 12


def test_a_whole_batch_that_fits_runs_each_forward_once_and_draws_as_natively():
    net = nn.Sequential(nn.Linear(6, 32), nn.Dropout(0.4), nn.Tanh(), nn.Linear(32, 5)).double()
    native = copy.deepcopy(net)
    counted = Calls(lambda self, x: self.net(x), net=net)
    calls = []
    counted.register_forward_hook(lambda *_: calls.append(1))
    wrapped = ib.wrap(counted, memory_budget="1GiB")
    for _ in range(40):  # sizes are timed until they are known well enough
        contrastive(wrapped(X)).backward()
    net.zero_grad()
    calls.clear()
    torch.manual_seed(3)
    loss = contrastive(wrapped(X))
    assert wrapped.last_report.retained == len(wrapped.last_report.micro_batch_sizes)
    state = torch.get_rng_state()
    loss.backward()
    assert torch.equal(state, torch.get_rng_state())
    assert len(calls) == len(wrapped.last_report.micro_batch_sizes)
    if len(calls) == 1:
        torch.manual_seed(3)
        contrastive(native(X)).backward()
        close(grads(net), grads(native))


@pytest.mark.parametrize("model", [mlp, opaque])
def test_graphs_that_are_kept_replayed_and_run_again_give_the_same(model):
    """Kept graphs are dropped where something else takes their memory after forward."""
    inner = model()
    native = copy.deepcopy(inner)
    contrastive(native(X)).backward()
    budget = live() + (8 << 20)
    wrapped = ib.wrap(inner, memory_budget=budget)
    for _ in range(3):
        inner.zero_grad(set_to_none=True)
        loss = contrastive(wrapped(X))
        assert wrapped.last_report.restarts == 0
        loss.backward()
        close(grads(inner), grads(native))
    assert wrapped.last_report.retained == len(wrapped.last_report.micro_batch_sizes)


def taken_meanwhile(wrapped, model, x, native, leave):
    """A step in which all but `leave` bytes of the budget is taken between forward and backward;
    its report, and None for the report where backward could not go on."""
    model.zero_grad(set_to_none=True)
    loss = contrastive(wrapped(x))
    report = wrapped.last_report
    taken = torch.zeros(report.memory_budget - live() - leave, dtype=torch.uint8)
    try:
        loss.backward()
    except ib.BudgetExceeded:
        return None
    finally:
        del taken
    close(grads(model), grads(native))
    return wrapped.last_report


def test_memory_that_is_taken_after_forward_costs_graphs_not_the_step():
    torch.manual_seed(0)
    need = needs(conv, 8)
    model, x = conv()
    native = copy.deepcopy(model)
    contrastive(native(x)).backward()
    wrapped = ib.wrap(
        model,
        memory_budget=live() + 4 * need,
        micro_batch_size=8,
        retained_micro_batches=4,
        offload="never",
    )
    contrastive(wrapped(x)).backward()
    # The graphs are a bit more than `need`, which is what a step without them takes: gradients, the
    # loss, and one micro-batch's graph, which goes with its backward.
    plenty = taken_meanwhile(wrapped, model, x, native, leave=need)
    assert (plenty.retained, plenty.restarts) == (4, 0)
    for leave in (need // 2, need // 3, need // 4):
        report = taken_meanwhile(wrapped, model, x, native, leave)
        assert (report.retained, report.restarts) == (4, 1), leave
        assert report.peak_bytes <= report.memory_budget
    again = taken_meanwhile(wrapped, model, x, native, leave=need)
    assert (again.retained, again.restarts) == (4, 0)


def test_memory_that_is_taken_from_a_plan_is_exact_or_refused():
    """Which sizes are fastest, and so how many graphs are kept and what backward needs beside
    them, depends on the machine."""
    torch.manual_seed(0)
    need = needs(conv, 8)
    model, x = conv()
    native = copy.deepcopy(model)
    contrastive(native(x)).backward()
    for factor in (1.5, 2.5, 4.0) if LONG else (2.5,):
        model.zero_grad(set_to_none=True)
        wrapped = ib.wrap(model, memory_budget=live() + int(factor * need))
        for _ in range(6):
            model.zero_grad(set_to_none=True)
            contrastive(wrapped(x)).backward()
        for part in range(1, 8, 1 if LONG else 3):
            report = taken_meanwhile(wrapped, model, x, native, part * need // 8)
            if report is not None and report.restarts > 0:
                assert report.retained > 0  # what there was to drop
        model.zero_grad(set_to_none=True)
        contrastive(wrapped(x)).backward()
        close(grads(model), grads(native))
        assert wrapped.last_report.peak_bytes <= wrapped.last_report.memory_budget


def test_what_cannot_fit_says_so_and_changes_nothing():
    net = nn.Sequential(nn.Linear(64, 512), nn.Dropout(), nn.Linear(512, 512))
    net.register_buffer("steps", torch.zeros(()))

    def forward(self, x):
        self.net.steps += 1
        return self.net(x)

    model = Calls(forward, net=net)
    x = torch.randn(64, 64)
    net(x).sum().backward()
    budget = live() + 4096
    wrapped = ib.wrap(model, memory_budget=budget)
    before = State(model)
    with pytest.raises(ib.BudgetExceeded, match="KiB|MiB") as caught:
        wrapped(x)
    assert caught.value.limit == budget and caught.value.needed > budget
    before.check()
    del caught
    with pytest.raises(ib.BudgetExceeded, match="before forward"):
        ib.wrap(model, memory_budget=1)(x)


def test_a_loss_that_passes_the_budget_is_an_error_of_backward():
    model, x = wide()
    native = copy.deepcopy(model)
    native(x).square().mean().backward()
    budget = live() + (8 << 20)
    wrapped = ib.wrap(model, memory_budget=budget)

    def hungry(z):
        return (z.square().mean() * torch.ones(4 << 20).double()).mean()  # 32 MiB

    with pytest.raises(ib.BudgetExceeded, match="between forward and backward") as caught:
        hungry(wrapped(x)).backward()
    assert caught.value.needed > 32 << 20
    assert all(p.grad is None for p in model.parameters())
    del caught
    # Known from now on: forward does not begin what cannot end.
    with pytest.raises(ib.BudgetExceeded):
        wrapped(x)


@pytest.mark.parametrize("form", ["bytes", "512MiB", 0.5, "auto", None])
def test_every_form_of_a_budget(form):
    inner = mlp()
    native = copy.deepcopy(inner)
    contrastive(native(X)).backward()
    budget = live() + (64 << 20) if form == "bytes" else form
    wrapped = ib.wrap(inner, memory_budget=budget)
    for _ in range(2):
        inner.zero_grad(set_to_none=True)
        contrastive(wrapped(X)).backward()
        close(grads(inner), grads(native))
    assert wrapped.last_report.memory_budget > 0


def test_a_size_beside_a_budget_is_kept_to():
    torch.manual_seed(0)
    need = needs(conv, 8)
    model, x = conv()
    native = copy.deepcopy(model)
    contrastive(native(x)).backward()
    budget = live() + need
    wrapped = ib.wrap(model, micro_batch_size=8, memory_budget=budget)
    assert peak_of(lambda: contrastive(wrapped(x)).backward()) <= budget
    assert wrapped.last_report.micro_batch_sizes == [8] * 16
    close(grads(model), grads(native))
    model.zero_grad(set_to_none=True)
    with pytest.raises(ib.BudgetExceeded, match="micro_batch_size=128"):
        ib.wrap(model, micro_batch_size=128, memory_budget=live() + need)(x)


def test_a_call_without_gradients_that_does_not_fit_says_so():
    """Graphs that such a call does not keep were to be offloaded, again and again without an end."""
    model = mlp(width=64)
    x = torch.randn(8, 6, dtype=torch.float64)
    wrapped = ib.wrap(
        model,
        micro_batch_size=8,
        retained_micro_batches=2,
        memory_budget=ib.memory.stats().live + 6000,
    )
    with torch.no_grad(), pytest.raises(ib.BudgetExceeded):
        wrapped(x)
