"""verify: says that an exact step is exact, that another is not, and leaves no trace."""

import copy
import random
import re

import infinitybatch as ib
import numpy as np
import pytest
import torch
from support import Calls
from torch import nn
from torch.nn import functional as F

X = torch.randn(37, 20, generator=torch.Generator().manual_seed(1))
Y = torch.randint(5, (37,), generator=torch.Generator().manual_seed(2))


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.ReLU(), nn.Linear(64, 5))


class Centred(nn.Module):
    """Couples the samples by hand."""

    def __init__(self):
        super().__init__()
        self.net = make_net()

    def forward(self, x):
        return {"plain": self.net(x), "centred": self.net(x - x.mean(0))}


def contrast(outputs):
    z = F.normalize(outputs, dim=-1)
    return F.cross_entropy(z @ z.T, torch.arange(len(z)))


@pytest.mark.parametrize(
    ("loss", "strategy"),
    [
        (nn.CrossEntropyLoss(), "stream"),
        (nn.CrossEntropyLoss(label_smoothing=0.1, reduction="sum"), "stream"),
        (F.cross_entropy, "stream"),
        (
            ib.losses.separable(
                lambda o, t: F.cross_entropy(o, t, reduction="sum"), lambda t, n: n
            ),
            "stream",
        ),
        (ib.losses.coupled(contrast), "replay"),
    ],
)
@pytest.mark.parametrize("options", [{"micro_batch_size": 8}, {"memory_budget": "64MiB"}])
def test_an_exact_step_is_found_exact(loss, strategy, options):
    labels = Y.clone()
    labels[3] = 4
    report = ib.verify(make_net(), loss, X, labels, **options)
    assert report.exact, report.explain()
    assert report.in_fp64.exact and report.in_fp64.worst.error <= 1e-12
    assert len(report.own.parameters) == 4
    assert report.own.type == "Float"
    assert report.rows == report.batch_size == 37
    assert report.strategy == strategy
    assert report.coupled_output is None
    assert "exact in 4 parameters" in report.explain()


def test_a_wrong_denominator_is_found():
    loss = ib.losses.separable(
        lambda o, t: F.cross_entropy(o, t, reduction="sum"), lambda t, n: n + 1
    )
    # The native loss is the user's own; here it is given by hand, as a criterion would be.
    batch = ib.VirtualBatch(make_net(), loss, micro_batch_size=8)
    native = ib.losses.coupled(F.cross_entropy)
    report = batch._verify(X, Y, native)
    assert not report.exact
    assert "NOT EXACT" in report.explain()
    assert report.in_fp64.worst.error > 0.01


def test_coupling_that_nobody_declared_is_named():
    loss = ib.losses.separable(
        lambda o, t: F.cross_entropy(o["plain"] + o["centred"], t, reduction="sum"),
        lambda t, n: n,
    )
    with pytest.raises(ib.CouplingError, match="aten::mean"):  # a step sees it by itself
        ib.verify(Centred(), loss, X, Y, micro_batch_size=8)
    report = ib.verify(Centred(), loss, X, Y, micro_batch_size=8, batch_coupling="per_micro_batch")
    assert not report.exact
    assert report.coupled_output == "outputs['centred']"
    assert "couples samples" in report.explain()
    whole = ib.verify(Centred(), loss, X, Y, micro_batch_size=37)
    assert whole.exact
    assert whole.coupled_output == "outputs['centred']"


def test_everything_is_as_it_was():
    net = make_net()
    net.register_buffer("seen", torch.zeros(3))
    net[0].weight.grad = torch.full_like(net[0].weight, 2)
    grad = net[0].weight.grad
    state = {name: value.clone() for name, value in net.state_dict().items()}
    addresses = [p.data_ptr() for p in net.parameters()]
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    expected = (torch.rand(1), random.random(), np.random.rand())
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    ib.verify(net, nn.CrossEntropyLoss(), X, Y, micro_batch_size=8)
    assert (torch.rand(1), random.random(), np.random.rand()) == expected
    assert net[0].weight.grad is grad
    assert (grad == 2).all()
    assert net[2].weight.grad is None
    for name, value in net.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, state[name])
    assert [p.data_ptr() for p in net.parameters()] == addresses


def test_a_model_that_cannot_be_run_in_fp64_is_compared_in_its_own_precision():
    report = ib.verify(
        make_net(), nn.CrossEntropyLoss(weight=torch.ones(5)), X, Y, micro_batch_size=8
    )
    assert report.in_fp64 is None
    assert "Double" in report.why_no_fp64
    assert "\n" not in report.why_no_fp64
    assert report.exact


def test_random_layers_are_refused():
    net = nn.Sequential(make_net(), nn.Dropout())
    with pytest.raises(ib.Unsupported, match="draws random numbers"):
        ib.verify(net, nn.CrossEntropyLoss(), X, Y, micro_batch_size=8)
    assert ib.verify(net.eval(), nn.CrossEntropyLoss(), X, Y, micro_batch_size=8).exact


def test_where_native_has_no_memory_fewer_rows_are_compared():
    net = make_net()
    with ib.memory.limit(ib.memory.stats("cpu").live + 300 * 2**10):
        big = torch.randn(1)  # the limit is at work
        report = ib.verify(
            net,
            nn.CrossEntropyLoss(),
            ib.BatchSource(4096, lambda begin, end: X[:1].expand(end - begin, 20)),
            ib.BatchSource(4096, lambda begin, end: Y[:1].expand(end - begin)),
            micro_batch_size=4,
        )
    assert big.numel() == 1
    assert report.rows < report.batch_size == 4096
    assert "native has no memory for more" in report.explain()


def test_errors_of_the_model_come_back():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def forward(self, x):
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        ib.verify(Broken(), nn.CrossEntropyLoss(), X, Y, micro_batch_size=8)


def test_reports_are_short_when_shown():
    torch.manual_seed(0)
    x, y = torch.randn(8, 6), torch.randint(4, (8,))
    report = ib.verify(nn.Linear(6, 4), nn.CrossEntropyLoss(), x, y, micro_batch_size=3)
    assert re.fullmatch(
        r"<VerifyReport: exact, 8 of 8 samples, stream, Float: worst error \S+ of \S+ in \w+>",
        repr(report),
    )
    assert re.fullmatch(r"<Comparison: exact, Double: worst error .*>", repr(report.in_fp64))


class OverTheBatch(nn.Module):
    """An LSTM that takes the batch for time."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(64, 64)

    def forward(self, h):
        return self.lstm(h[:, None])[0][:, 0]


MIXERS = {
    "cumsum": lambda: lambda h: h.cumsum(0),
    "less the first": lambda: lambda h: h - h[:1],
    "LSTM over the batch": OverTheBatch,
    "the next one's": lambda: lambda h: h.roll(1, 0),
    "less the last": lambda: lambda h: h - h[-1:],
}


class Mixed(nn.Module):
    def __init__(self, mix):
        super().__init__()
        self.net = make_net()
        self.mix = mix

    def forward(self, x):
        return self.net[2](self.mix(self.net[1](self.net[0](x))))


@pytest.mark.parametrize("name", MIXERS)
def test_samples_that_depend_on_earlier_ones_are_named(name):
    torch.manual_seed(3)
    net = Mixed(MIXERS[name]())
    criterion = nn.CrossEntropyLoss()
    with pytest.raises(ib.CouplingError):
        ib.verify(net, criterion, X, Y, micro_batch_size=8)
    report = ib.verify(net, criterion, X, Y, micro_batch_size=8, batch_coupling="per_micro_batch")
    assert report.coupled_output == "outputs" and not report.exact


@pytest.mark.parametrize(
    ("dtype", "share"), [(torch.bfloat16, 5e-4), (torch.float16, 1e-4), (torch.float64, 1e-6)]
)
def test_an_order_that_matters_is_no_rounding(dtype, share):
    """A little of all samples before it: less than anybody looks for in outputs."""
    net = Mixed(lambda h: h + share * h.cumsum(0)).to(dtype)
    x, y = torch.cat([X, X.flip(1)]).to(dtype), torch.cat([Y, Y])
    report = ib.verify(
        net,
        nn.CrossEntropyLoss(),
        x,
        y,
        micro_batch_size=8,
        batch_coupling="per_micro_batch",
    )
    assert not report.exact and not report.in_fp64.exact
    assert report.in_fp64.worst.error > 1e-6 and report.in_fp64.worst.allowed == 1e-12


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("source", ["torch.Generator", "NumPy generator"])
def test_a_native_batch_that_does_not_repeat_is_refused(source, dtype):
    own = torch.Generator().manual_seed(1)
    numbers = np.random.default_rng(1)
    draw = {
        "torch.Generator": lambda h: torch.randn(h.shape, generator=own),
        "NumPy generator": lambda h: torch.from_numpy(numbers.normal(size=tuple(h.shape))),
    }[source]
    net = Mixed(lambda h: h * draw(h).to(h.dtype)).to(dtype)
    with pytest.raises(ib.Unsupported, match=r"not repeatable.*net.*moved by"):
        ib.verify(net, nn.CrossEntropyLoss(), X.to(dtype), Y, micro_batch_size=8)


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_random_numbers_of_others_are_refused(draw):
    net = Mixed(lambda h: h * draw())
    with pytest.raises(ib.Unsupported, match="draws random numbers"):
        ib.verify(net, nn.CrossEntropyLoss(), X, Y, micro_batch_size=8)


def test_a_model_of_fp64_is_compared_once():
    report = ib.verify(
        make_net().double(), nn.CrossEntropyLoss(), X.double(), Y, micro_batch_size=8
    )
    assert report.exact and report.explain().count("fp64: exact") == 1
    assert report.own.type == report.in_fp64.type == "Double"
    assert report.own.worst.error == report.in_fp64.worst.error


def test_the_numbers_of_the_whole_batch_can_be_compared():
    net = nn.Sequential(make_net(), nn.Dropout(0.4), nn.Linear(5, 5))
    report = ib.verify(net, nn.CrossEntropyLoss(), X, Y, micro_batch_size=8, match_native_rng=True)
    assert report.exact, report.explain()
    assert report.in_fp64.worst.error <= 1e-12


def test_what_is_left_in_buffers_is_compared():
    def forward(self, x):
        self.seen.copy_(torch.tensor(float(len(x))))
        self.steps += 1
        return self.net(x)

    net = Calls(forward, net=make_net(), seen=torch.zeros(()), steps=torch.tensor(3))
    options = {"micro_batch_size": 8, "batch_coupling": "per_micro_batch"}
    for model in (net, copy.deepcopy(net).double()):
        report = ib.verify(model, nn.CrossEntropyLoss(), X.to(model.seen.dtype), Y, **options)
        assert not report.exact and report.in_fp64.worst.error <= 1e-12
        errors = {each.name: each.error for each in report.in_fp64.buffers}
        assert errors["seen"] == pytest.approx(32 / 37)  # the last micro-batch has 5 of 37
        assert errors["steps"] == pytest.approx(4 / 4)  # 5 micro-batches
        assert "NOT EXACT in 2 buffers; the worst is steps" in report.explain()
        assert net.steps == 3


def test_buffers_of_an_exact_step_are_exact():
    def forward(self, x):
        self.last = x.new_ones(2)  # another tensor in its place
        return self.net(x)

    net = nn.Sequential(make_net(), nn.BatchNorm1d(5), nn.Linear(5, 5))
    own = Calls(forward, net=net, last=torch.zeros(2), nothing=torch.tensor([1.0, float("nan")]))
    last = own.last
    report = ib.verify(own, nn.CrossEntropyLoss(), X, Y, micro_batch_size=8)
    assert report.exact, report.explain()
    assert len(report.in_fp64.buffers) == 5 and not report.own.buffers
    assert "\n  exact in 5 buffers; the worst" in report.explain()
    assert own.last is last and torch.equal(last, torch.zeros(2))
