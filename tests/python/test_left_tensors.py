"""Tensors that forward leaves on the module, or with a hook, and that the loss reads past the outputs."""

import copy
import warnings

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from support import Calls, classification, mlp
from torch import nn

N = 12
SIZE = 5
WAYS = {
    "replay": {},
    "rerun": {"use_tapes": False},
    "all retained": {"retained_micro_batches": 9},
    "per micro-batch": {"batch_coupling": "per_micro_batch"},
}


def mixture(keep):
    """A mixture of experts, as far as its auxiliary loss goes."""

    def forward(self, x):
        self.aux = keep(self.gate(x).square())
        return self.head(x)

    return Calls(forward, gate=nn.Linear(6, 4), head=nn.Linear(6, 5)).double()


def losses_of(model):
    return ib.losses.coupled(lambda o, t: F.cross_entropy(o, t) + model.aux.sum())


@pytest.mark.parametrize("way", WAYS)
def test_an_auxiliary_loss_on_the_module_is_refused_by_name(way):
    model = nn.Sequential(nn.Identity(), mixture(torch.mean))
    inputs, targets = classification(N)
    batch = ib.VirtualBatch(model, losses_of(model[1]), micro_batch_size=SIZE, **WAYS[way])
    name = "hook or a closure" if way == "per micro-batch" else r"'1\.aux'"
    for _ in range(2):
        with pytest.raises(ib.Unsupported, match=rf"{name}.*across_batch"):
            batch.backward(inputs, targets)
        assert all(p.grad is None for p in model.parameters())


def test_values_without_a_graph_are_refused_too():
    model = mixture(lambda gates: gates.detach().mean())
    inputs, targets = classification(N)
    with pytest.raises(ib.Unsupported, match="'aux'"):
        ib.VirtualBatch(model, losses_of(model), micro_batch_size=SIZE).backward(inputs, targets)


def test_the_loss_may_be_the_tensor_itself():
    model = mixture(torch.mean)
    inputs, targets = classification(N)
    loss = ib.losses.coupled(lambda o, t: model.aux)
    with pytest.raises(ib.Unsupported, match="'aux'"):
        ib.VirtualBatch(model, loss, micro_batch_size=SIZE).backward(inputs, targets)


@pytest.mark.parametrize("way", WAYS)
def test_features_of_a_hook_are_refused(way):
    model = mlp()
    features = []
    model[0].register_forward_hook(lambda module, given, output: features.append(output))
    inputs, targets = classification(N)

    def loss(outputs, labels):
        return F.cross_entropy(outputs, labels) + features[-1].square().mean()

    batch = ib.VirtualBatch(model, ib.losses.coupled(loss), micro_batch_size=SIZE, **WAYS[way])
    with pytest.raises(ib.Unsupported, match="hook or a closure"):
        batch.backward(inputs, targets)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("size", [N, N + 1])
def test_one_micro_batch_sees_what_the_whole_batch_sees(size):
    model = mixture(torch.mean)
    inputs, targets = classification(N)
    reference = copy.deepcopy(model)
    value = F.cross_entropy(reference(inputs), targets) + reference.aux
    value.backward()
    ib.VirtualBatch(model, losses_of(model), micro_batch_size=size).backward(inputs, targets)
    for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-12, atol=1e-14)


def table(self, x):
    if not hasattr(self, "table"):
        self.table = torch.linspace(0.5, 1.5, 5, dtype=x.dtype)
    return self.head(x) * self.table


def constant(self, x):
    self.table = torch.full((5,), 0.5, dtype=x.dtype)
    return self.head(x) * self.table


def weight(self, x):
    """As torch.nn.utils.weight_norm leaves it."""
    self.table = self.head.weight.norm(dim=1)
    return self.head(x) / self.table


@pytest.mark.parametrize("forward", [table, constant, weight])
@pytest.mark.parametrize("way", WAYS)
def test_what_is_the_same_for_all_samples_may_be_read(forward, way):
    model = Calls(forward, head=nn.Linear(6, 5)).double()
    inputs, targets = classification(N)

    def loss(outputs, labels, model=model):
        return F.cross_entropy(outputs, labels) * model.table.square().sum()

    reference = copy.deepcopy(model)
    loss(reference(inputs), targets, reference).backward()
    batch = ib.VirtualBatch(model, ib.losses.coupled(loss), micro_batch_size=SIZE, **WAYS[way])
    if forward is weight and way == "per micro-batch":
        pytest.raises(ib.Unsupported, batch.backward, inputs, targets)  # nobody knows attributes
        return
    batch.backward(inputs, targets)
    for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-12, atol=1e-14)


def test_the_ways_out_are_exact():
    inputs, targets = classification(N)
    model = mixture(torch.mean)
    reference = copy.deepcopy(model)
    value = F.cross_entropy(reference(inputs), targets) + reference.gate(inputs).square().mean()
    value.backward()
    as_output = Calls(
        lambda self, x: (self.inner(x), self.inner.gate(x).square()), inner=copy.deepcopy(model)
    )
    loss = ib.losses.coupled(lambda o, t: F.cross_entropy(o[0], t) + o[1].mean())
    ib.VirtualBatch(as_output, loss, micro_batch_size=SIZE).backward(inputs, targets)
    # Each micro-batch's share of the loss reads its own, which is right for sums over samples.
    sums = mixture(torch.sum)
    sums.load_state_dict(model.state_dict())
    share = ib.losses.separable(
        lambda o, t: F.cross_entropy(o, t, reduction="sum") + sums.aux / 4, lambda t, n: n
    )
    ib.VirtualBatch(sums, share, micro_batch_size=SIZE).backward(inputs, targets)
    for inner in (as_output.inner, sums):
        for found, wanted in zip(inner.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-12, atol=1e-14)


def notices(model, **options):
    inputs, targets = classification(N)
    wrapped = ib.wrap(model, **options)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            F.cross_entropy(wrapped(inputs), targets).backward()
    return wrapped, [w for w in told if w.category is ib.LeftTensorNotice]


@pytest.mark.parametrize("norm", [False, True])
def test_wrap_tells_once_of_a_tensor_that_a_loss_could_read(norm):
    beside = nn.BatchNorm1d(6).double() if norm else nn.Identity()
    model = nn.Sequential(beside, mixture(torch.mean))
    wrapped, told = notices(model, micro_batch_size=SIZE)
    assert [str(w.message)[:5] for w in told] == ["IB102"]
    assert "'1.aux'" in str(told[0].message) and told[0].filename == __file__
    assert wrapped.last_report.left_on_module == ["1.aux"]
    assert wrapped.last_report.strategy == ("cut" if norm else "replay")


def test_wrap_tells_of_a_list_that_grows():
    """Natively there is one auxiliary loss for each forward."""

    def forward(self, x):
        hidden = self.body(x)
        self.losses.append(hidden.square().mean())
        return self.head(hidden)

    model = Calls(forward, body=nn.Linear(6, 6), head=nn.Linear(6, 5), losses=[]).double()
    wrapped, told = notices(model, micro_batch_size=SIZE)
    assert told and all(str(w.message).startswith("IB102") for w in told)
    assert wrapped.last_report.left_on_module == ["losses"]


def kept_output(self, x):
    self.out = self.head(x)
    return self.out


def for_a_plot(self, x):
    y = self.head(x)
    self.attention = y.softmax(1).detach()
    return y


@pytest.mark.parametrize("forward", [table, constant, weight, kept_output, for_a_plot])
def test_wrap_is_silent_about_what_no_loss_is_wronged_by(forward):
    wrapped, told = notices(Calls(forward, head=nn.Linear(6, 5)).double(), micro_batch_size=SIZE)
    assert not told and wrapped.last_report.left_on_module == []


def test_wrap_is_silent_about_the_whole_batch_as_one():
    for options in ({}, {"memory_budget": "64MiB"}):
        options["micro_batch_size"] = N
        assert not notices(mixture(torch.mean), **options)[1], options
