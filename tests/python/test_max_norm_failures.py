"""`max_norm` where something else reads the weight, where a step fails or memory runs out."""

import copy

import infinitybatch as ib
import pytest
import torch
from fault_support import MyError, State
from max_norm_models import (
    CRITERION,
    LENGTH,
    TOLERANCE,
    WORDS,
    assert_as_native,
    coupling,
    labels,
    reader,
    table,
    tokens,
)
from support import Calls, Log, native, result_of, worst_error
from torch import nn
from torch.nn import functional as F


def tied() -> nn.Module:
    return Calls(
        lambda self, x: F.linear(self.words(x).tanh().mean(1), self.words.weight[:4]), words=table()
    ).double()


def read_before() -> nn.Module:
    return Calls(
        lambda self, x: self.words.weight.sum() * self.words(x).mean(1)[:, :4], words=table()
    ).double()


def read_plainly() -> nn.Module:
    return Calls(
        lambda self, x: (
            self.words(x[:, 1:]).mean(1)[:, :4] + F.embedding(x[:, 0], self.words.weight)[:, :4]
        ),
        words=table(),
    ).double()


def two_norms() -> nn.Module:
    return Calls(
        lambda self, x: (
            self.words(x).mean(1)[:, :4]
            + F.embedding(x, self.words.weight, max_norm=0.5).mean(1)[:, :4]
        ),
        words=table(),
    ).double()


def of_a_buffer() -> nn.Module:
    return Calls(
        lambda self, x: self.head(F.embedding(x, self.words, max_norm=1.0).mean(1)),
        words=torch.randn(WORDS, 6).double(),
        head=nn.Linear(6, 4),
    ).double()


COUPLED = {
    "tied": (tied, "aten::linear reads too"),
    "read before": (read_before, "aten::sum"),
    "read plainly": (read_plainly, "aten::embedding reads too"),
    "two norms": (two_norms, "different norms"),
    "a buffer": (of_a_buffer, "no parameter"),
}


@pytest.mark.parametrize("name", COUPLED)
def test_what_else_reads_the_weight_is_named(name):
    make, match = COUPLED[name]
    model, x, y = make(), tokens(), labels()
    before = State(model)
    versions = [p._version for p in model.parameters()]
    for loss, targets in ((CRITERION, (y,)), (ib.losses.coupled(coupling), ())):
        batch = ib.VirtualBatch(model, loss, micro_batch_size=4)
        with pytest.raises(ib.CouplingError, match=match) as raised:
            batch.backward(x, *targets)
        assert raised.value.op == "aten::embedding_renorm_"
        before.check()
    with pytest.raises(ib.CouplingError, match=match):
        ib.wrap(model, micro_batch_size=4)(x)
    before.check()
    assert versions == [p._version for p in model.parameters()]
    ways = [{"micro_batch_size": 12}, {"memory_budget": "64MiB"}]
    for found in assert_as_native(model, x, y, CRITERION, ways):
        assert found.report.micro_batch_sizes == [12]


@pytest.mark.parametrize("kind", ["stream", "coupled", "cut"])
def test_a_step_that_fails_leaves_the_weight_alone(kind):
    norm = [nn.BatchNorm1d(6)] if kind == "cut" else []
    model = reader(table(), *norm)
    calls = Log()

    def fail(module, inputs):
        calls.append(0)
        if len(calls) == 3:
            raise MyError

    hook = model.head.register_forward_pre_hook(fail)
    x, y = tokens(), labels()
    before = State(model)
    version = model.embedding.weight._version
    loss, targets = (ib.losses.coupled(coupling), ()) if kind == "coupled" else (CRITERION, (y,))
    batch = ib.VirtualBatch(model, loss, micro_batch_size=3)
    with pytest.raises(MyError):
        batch.backward(x, *targets)
    before.check()
    assert model.embedding.weight._version == version
    hook.remove()
    calls.clear()
    wanted = native(model, (lambda o, _: coupling(o)) if kind == "coupled" else CRITERION, x, y)
    report = batch.backward(x, *targets)
    assert worst_error(result_of(model, report.loss), wanted) <= TOLERANCE
    assert torch.equal(model.embedding.weight, wanted.model.embedding.weight)


@pytest.mark.parametrize("kind", ["stream", "coupled"])
def test_memory_that_runs_out_anywhere_leaves_the_weight_alone(kind):
    """Even where there is no room for the copy that undoes it."""
    model, x, y = reader(table()), tokens(6), labels(6)
    loss, targets = (ib.losses.coupled(coupling), ()) if kind == "coupled" else (CRITERION, (y,))
    before = State(model)
    batch = ib.VirtualBatch(model, loss, micro_batch_size=3)
    with ib.memory.fail_allocation() as counter:
        batch.backward(x, *targets)
    model.load_state_dict(before.values)
    model.zero_grad()
    step = max(1, counter.seen // 60)
    for place in range(1, counter.seen, step):
        with ib.memory.fail_allocation(place) as failure:
            try:
                batch.backward(x, *targets)
            except Exception:
                assert failure.failed
                before.check()
                continue
        model.load_state_dict(before.values)
        model.zero_grad()


def test_budget_holds_the_copy():
    model = reader(nn.Embedding(20000, 6, max_norm=1.5))
    x, y = torch.randint(20000, (64, LENGTH)), labels(64)
    size = model.embedding.weight.nbytes
    wanted = native(model, CRITERION, x, y)
    live = ib.memory.stats().live
    budget = live + int(3.3 * size)  # the copy, the gradient and a micro-batch's
    batch = ib.VirtualBatch(model, CRITERION, memory_budget=budget)
    report = batch.backward(x, y)
    assert live + 2 * size < report.peak_bytes <= budget
    assert worst_error(result_of(model, report.loss), wanted) <= TOLERANCE
    model.zero_grad()
    with torch.no_grad():
        model.embedding.weight.mul_(2)
    weight = model.embedding.weight.detach().clone()
    live = ib.memory.stats().live
    with pytest.raises(ib.BudgetExceeded):
        ib.VirtualBatch(model, CRITERION, memory_budget=live + size // 2).backward(x, y)
    assert torch.equal(model.embedding.weight, weight)


def test_verify_and_bench_leave_the_weight_alone():
    model, x, y = reader(table()), tokens(), labels()
    before = State(model)
    report = ib.verify(model, CRITERION, x, y, micro_batch_size=4)
    assert report.exact
    before.check()
    ib.bench(model, CRITERION, x, y, micro_batch_size=4, rounds=3)
    before.check()
    model = reader(table()).float()
    before = State(model)
    assert ib.verify(model, CRITERION, x, y, micro_batch_size=4).exact
    before.check()


@pytest.mark.parametrize("way", ["streamed", "coupled", "wrapped"])
def test_where_the_same_rows_split_otherwise_find_no_room(way):
    """What a callback was refused there belongs to that forward, and not to the one that follows."""
    model = Calls(
        lambda self, x: self.head(self.embedding(x).mean(1)),
        embedding=nn.Embedding(WORDS, 64, max_norm=1.0),
        head=nn.Linear(64, 4),
    ).double()
    x, y = torch.randint(WORDS, (512, 16)), labels(512)
    wanted = native(model, CRITERION, x, y)
    own = copy.deepcopy(model)
    if way == "wrapped":
        loss = CRITERION(ib.wrap(own, micro_batch_size=3)(x), y)
        loss.backward()
    else:
        kind = CRITERION if way == "streamed" else ib.losses.coupled(CRITERION)
        loss = ib.VirtualBatch(own, kind, micro_batch_size=3).backward(x, y).loss
    assert worst_error(result_of(own, loss), wanted) <= TOLERANCE
