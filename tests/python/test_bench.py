"""bench: times every strategy that applies, and leaves no trace."""

import gc
import json
import random
import re

import infinitybatch as ib
import numpy as np
import pytest
import torch
from support import LOOKS
from torch import nn
from torch.nn import functional as F

pytestmark = pytest.mark.alone

X = torch.randn(37, 20, generator=torch.Generator().manual_seed(1))
Y = torch.randint(5, (37,), generator=torch.Generator().manual_seed(2))


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))


def contrast(outputs):
    z = F.normalize(outputs, dim=-1)
    return F.cross_entropy(z @ z.T, torch.arange(len(z)))


TWO_PASSES = {"retain-none", "rerun", "retain-half", "retain-all"}


@pytest.mark.parametrize(
    ("loss", "options", "first"),
    [
        (nn.CrossEntropyLoss(weight=torch.arange(1.0, 6)), {"micro_batch_size": 8}, {"stream"}),
        (nn.CrossEntropyLoss(), {"memory_budget": "64MiB"}, {"stream"}),
        (ib.losses.coupled(contrast), {"micro_batch_size": 8}, set()),
        (ib.losses.coupled(contrast), {"memory_budget": "64MiB"}, {"planned"}),
    ],
)
def test_every_strategy_that_applies_is_timed(loss, options, first):
    targets = Y if isinstance(loss, nn.Module) else None
    report = ib.bench(make_net(), loss, X, targets, rounds=3, **options)
    names = [times.name for times in report.strategies]
    expected = {"native"} | first | TWO_PASSES
    size = max(report.strategies[1].micro_batch_sizes)
    if size == 37:  # one micro-batch: half of it is none
        expected -= {"retain-half"}
    assert set(names) == expected and len(names) == len(expected)
    assert report.reference == "native" and report.rounds == 3 and report.batch_size == 37
    for times in report.strategies:
        assert times.timed and times.why_not == ""
        assert len(times.cpu_seconds) == len(times.wall_seconds) == 3
        assert times.peak_bytes > report.live_bytes > 0
        assert 0 < times.cpu.lower <= times.cpu.median <= times.cpu.upper
        assert times.name in str(report)
    assert report.strategies[0].wall.median == 1


def test_an_opaque_model_says_that_it_runs_twice():
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * 2

    net = make_net()
    model = ib.make_model(lambda x: Double.apply(net(x)), net.parameters())
    report = ib.bench(model, ib.losses.coupled(contrast), X, rounds=1, micro_batch_size=8)
    names = {times.name: times for times in report.strategies}
    assert names["retain-none"].strategy == "rerun"
    assert "rerun" not in names  # it is the same
    assert "retain-none ran the model twice" in report.explain()


def test_without_tapes_the_model_runs_again():
    found = []
    for use_tapes in (True, False):
        net, calls = make_net(), []
        net.register_forward_hook(lambda *_, calls=calls: calls.append(1))
        loss = ib.losses.coupled(contrast)
        batch = ib.VirtualBatch(net, loss, micro_batch_size=10, use_tapes=use_tapes)
        report = batch.backward(X)
        assert len(calls) == (4 if use_tapes else 8) + LOOKS
        assert report.strategy == ("replay" if use_tapes else "rerun")
        assert report.strategy_reason == ("" if use_tapes else "use_tapes=false was given")
        found.append([parameter.grad for parameter in net.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_report_is_short_when_shown():
    report = ib.bench(
        make_net(), nn.CrossEntropyLoss(), X, Y, micro_batch_size=8, rounds=1, seconds=5
    )
    assert re.fullmatch(
        r"<BenchReport: 37 samples, \d strategies over 1 rounds, against \w+>", repr(report)
    )


def test_the_report_is_json():
    report = ib.bench(make_net(), nn.CrossEntropyLoss(), X, Y, rounds=2, micro_batch_size=8)
    again = json.loads(json.dumps(report.as_dict()))
    assert again["reference"] == "native" and again["memory_budget"] is None
    stream = again["strategies"][1]
    assert stream["name"] == "stream" and stream["micro_batch_sizes"] == [8, 8, 8, 8, 5]
    assert stream["cpu"]["median"] == pytest.approx(np.median(ratios(again, 1)))


def ratios(report, index):
    ours, native = report["strategies"][index], report["strategies"][0]
    return np.array(ours["cpu_seconds"]) / np.array(native["cpu_seconds"])


def test_where_native_does_not_fit_the_cheapest_is_the_reference():
    wide = nn.Sequential(nn.Linear(20, 512), nn.ReLU(), nn.Linear(512, 5))
    inputs = ib.BatchSource(4096, lambda begin, end: X[:1].expand(end - begin, 20))
    targets = ib.BatchSource(4096, lambda begin, end: Y[:1].expand(end - begin))
    with ib.memory.limit(ib.memory.stats("cpu").live + 4 * 2**20):
        report = ib.bench(
            wide, nn.CrossEntropyLoss(), inputs, targets, rounds=3, micro_batch_size=256
        )
    native = report.strategies[0]
    assert not native.timed and native.cpu_seconds == []
    assert report.reference != "native"
    timed = {times.name: times for times in report.strategies if times.timed}
    assert timed[report.reference].cpu.median == 1
    cheapest = min(np.median(times.cpu_seconds) for times in timed.values())
    assert np.median(timed[report.reference].cpu_seconds) == cheapest
    assert "native was not timed: " in report.explain()
    assert report.as_dict()["strategies"][0]["cpu"] is None


def test_no_further_round_begins_when_time_is_up():
    report = ib.bench(
        make_net(), nn.CrossEntropyLoss(), X, Y, rounds=10**6, seconds=0.2, micro_batch_size=8
    )
    assert 3 <= report.rounds < 10**6


def test_everything_is_as_it_was():
    net = nn.Sequential(make_net(), nn.Dropout())
    net.register_buffer("seen", torch.zeros(3))
    weight = net[0][0].weight
    weight.grad = torch.full_like(weight, 2)
    grad = weight.grad
    state = {name: value.clone() for name, value in net.state_dict().items()}

    def draw():
        return torch.rand(1), random.random(), np.random.rand()

    def seed():
        torch.manual_seed(5), random.seed(5), np.random.seed(5)

    seed()
    expected = draw()
    seed()
    assert gc.isenabled()
    ib.bench(net, nn.CrossEntropyLoss(), X, Y, rounds=2, micro_batch_size=8)
    assert gc.isenabled()
    assert draw() == expected
    assert weight.grad is grad and (grad == 2).all()
    assert net[0][2].weight.grad is None
    assert all(torch.equal(value, state[name]) for name, value in net.state_dict().items())


def test_the_models_error_comes_back_and_garbage_is_collected_again():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def forward(self, x):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        ib.bench(Broken(), nn.CrossEntropyLoss(), X, Y, micro_batch_size=8)
    assert gc.isenabled()


MISUSES = {
    "no rounds": ({"rounds": 0}, ib.InvalidArgument, "rounds is 0; it is 1 or more"),
    "half a round": ({"rounds": 2.5}, ib.InvalidType, "whole number of rounds, not float"),
    "rounds None": ({"rounds": None}, ib.InvalidType, "rounds, not NoneType"),
    "rounds true": ({"rounds": True}, ib.InvalidType, "rounds, not bool"),
    "no time": ({"seconds": 0}, ib.InvalidArgument, "time above 0"),
    "time is a text": ({"seconds": "1 min"}, ib.InvalidType, "number of seconds, not str"),
    "retained": ({"retained_micro_batches": 2}, ib.InvalidArgument, "none, half and all"),
    "tapes": ({"use_tapes": False}, ib.InvalidArgument, "with tapes and without"),
    "size 0": ({"micro_batch_size": 0}, ib.InvalidArgument, "micro_batch_size is 0"),
    "budget": ({"memory_budget": "lots"}, ib.InvalidArgument, "lots"),
    "no such option": ({"micro_batch": 8}, TypeError, "micro_batch"),
}


@pytest.mark.parametrize("case", MISUSES)
def test_misuse(case):
    options, error, message = MISUSES[case]
    options = {"micro_batch_size": 8} | options
    with pytest.raises(error, match=message):
        ib.bench(make_net(), nn.CrossEntropyLoss(), X, Y, **options)


def test_misuse_of_the_batch_and_the_moment():
    with pytest.raises(ib.BatchError, match="37 samples, targets 36"):
        ib.bench(make_net(), nn.CrossEntropyLoss(), X, Y[:36], micro_batch_size=8)
    with torch.no_grad(), pytest.raises(ib.StateError, match="no_grad"):
        ib.bench(make_net(), nn.CrossEntropyLoss(), X, Y, micro_batch_size=8)
    with pytest.raises(ib.BudgetExceeded):
        ib.bench(make_net(), nn.CrossEntropyLoss(), X, Y, memory_budget=100)
