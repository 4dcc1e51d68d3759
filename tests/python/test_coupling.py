"""Layers that mix samples are noticed and named."""

import copy
import warnings

import infinitybatch as ib
import pytest
import torch
from measure import assert_within, gradients
from support import Calls, assert_exact, classification, mlp, native, ours, worst_error
from torch import nn


def batch_norm(kind=nn.BatchNorm1d):
    return nn.Sequential(nn.Linear(6, 8), kind(8), nn.ReLU(), nn.Linear(8, 5)).double()


def functional_batch_norm():
    def forward(self, x):
        return self.net(nn.functional.batch_norm(x, None, None, training=True))

    return Calls(forward, net=mlp())


def embedding(**options):
    return Calls(
        lambda self, x: self.head(self.embedding((x.abs() * 9).long() % 20).mean(1)),
        embedding=nn.Embedding(20, 6, **options),
        head=nn.Linear(6, 5),
    ).double()


def tied():
    words = nn.Embedding(20, 5, max_norm=0.5)
    return Calls(
        lambda self, x: self.words((x.abs() * 9).long() % 20).mean(1) @ self.words.weight[:5].T,
        words=words,
    ).double()


def counting():
    """A buffer that holds the mean of what the layer saw."""

    def forward(self, x):
        self.seen.copy_(x.detach().mean(0))
        return self.net(x)

    return Calls(forward, net=mlp(), seen=torch.zeros(6, dtype=torch.float64))


# Exact in micro-batches: test_batch_norm.py, test_across_batch.py, test_max_norm.py.
NORMS = {
    "BatchNorm": batch_norm,
    "SyncBatchNorm": lambda: batch_norm(nn.SyncBatchNorm),
    "batch_norm as a function": functional_batch_norm,
    "scale_grad_by_freq": lambda: embedding(scale_grad_by_freq=True),
}
COUPLED = {
    "max_norm and another reader": (tied, "aten::embedding_renorm_"),
    "a buffer": (counting, "seen"),
}


@pytest.mark.parametrize("name", COUPLED)
def test_coupling_is_noticed(name):
    make, op = COUPLED[name]
    model = make()
    inputs, targets = classification(12)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4)
    with pytest.raises(ib.CouplingError, match="per_micro_batch") as raised:
        batch.backward(inputs, targets)
    assert raised.value.op == op and op in str(raised.value)
    assert all(p.grad is None for p in model.parameters())
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), f"{key} changed"


@pytest.mark.parametrize("name", [*COUPLED, *NORMS])
def test_one_micro_batch_couples_nothing(name):
    model = NORMS[name]() if name in NORMS else COUPLED[name][0]()
    inputs, targets = classification(12)
    wanted = native(model, nn.CrossEntropyLoss(), inputs, targets)
    for options in ({"micro_batch_size": 12}, {"memory_budget": "64MiB"}):
        found = ours(model, nn.CrossEntropyLoss(), inputs, targets, **options)
        if name in NORMS and "memory_budget" in options:
            assert worst_error(found, wanted) <= 1e-12
            continue
        assert found.report.micro_batch_sizes == [12]
        assert worst_error(found, wanted) <= 1e-15
        for key, buffer in wanted.buffers.items():
            assert torch.equal(found.buffers[key], buffer)


def test_per_micro_batch_is_what_gradient_accumulation_does():
    model = batch_norm()
    inputs, targets = classification(12)
    found = ours(
        model,
        nn.CrossEntropyLoss(),
        inputs,
        targets,
        micro_batch_size=4,
        batch_coupling="per_micro_batch",
    )
    for i in range(0, 12, 4):
        loss = nn.functional.cross_entropy(model(inputs[i : i + 4]), targets[i : i + 4]) / 3
        loss.backward()
    assert_within(found.gradients, gradients(model))
    assert_within(found.buffers, dict(model.named_buffers()))


def test_layers_that_only_look_coupled():
    inputs, targets = classification(12)
    for model in (
        batch_norm().eval(),
        nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.Linear(8, 5)).double(),
        nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5)).double(),
        embedding(),
    ):
        assert_exact(model, nn.CrossEntropyLoss(), inputs, targets, sizes=(4,))


def test_compiled_batch_norm_runs_uncompiled():
    inputs, targets = classification(12)
    whole = torch.compile(batch_norm(), backend="aot_eager")
    part = nn.Sequential(nn.Linear(6, 6).double(), batch_norm())
    part[1].compile(backend="aot_eager")
    for model in (whole, part):
        native = copy.deepcopy(getattr(model, "_orig_mod", model))
        native[-1]._compiled_call_impl = None
        nn.functional.cross_entropy(native(inputs), targets).backward()
        batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4)
        with pytest.warns(ib.UncompiledNotice, match="IB103: BatchNorm1d .*needs the whole batch"):
            batch.backward(inputs, targets)
        with warnings.catch_warnings():
            warnings.simplefilter("error", ib.UncompiledNotice)  # once
            model.zero_grad()
            batch.backward(inputs, targets)
        for found, wanted in zip(model.parameters(), native.parameters(), strict=True):
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-12, atol=1e-12)
    accepted = ib.VirtualBatch(
        whole, nn.CrossEntropyLoss(), micro_batch_size=4, batch_coupling="per_micro_batch"
    )
    accepted.backward(inputs, targets)


def test_scripted_batch_norm_is_noticed():
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = torch.jit.script(batch_norm())
    inputs, targets = classification(12)
    before = {n: b.clone() for n, b in scripted.named_buffers()}
    batch = ib.VirtualBatch(scripted, nn.CrossEntropyLoss(), micro_batch_size=4)
    for _ in range(3):  # the profiling executor changes the graph in its first runs
        with pytest.raises(ib.CouplingError, match="batch_norm"):
            batch.backward(inputs, targets)
    for name, buffer in scripted.named_buffers():
        assert torch.equal(buffer, before[name])
