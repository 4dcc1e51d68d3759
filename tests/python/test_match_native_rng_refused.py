"""`match_native_rng=True` where the whole batch's numbers cannot be drawn: typed errors, failures."""

import random

import infinitybatch as ib
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from native_rng_support import LOSSES, assert_native, random_state, same_state, seed
from random_models import GENERATOR, three_dropouts
from support import Calls, Tally, call, classification, native, ours
from torch import nn
from torch.utils.checkpoint import checkpoint


def refused(forward, match, op=None, loss=None, n=12, error=ib.CouplingError, **parts):
    model = Calls(forward, first=nn.Linear(6, 6), last=nn.Linear(6, 5), **parts).double()
    inputs, targets = classification(n)
    seed()
    before = random_state()
    batch = ib.VirtualBatch(
        model, loss or nn.CrossEntropyLoss(), micro_batch_size=4, match_native_rng=True
    )
    with pytest.raises(error, match=match) as caught:
        batch.backward(inputs, targets)
    if op:
        assert caught.value.op == op
    assert same_state(random_state(), before)
    assert all(p.grad is None for p in model.parameters())


def test_dropout_inside_of_a_recurrent_layer():
    refused(
        lambda self, x: self.last(self.lstm(self.first(x).unsqueeze(1))[0][:, -1]),
        "aten::lstm .*inside of a larger op",
        "aten::lstm",
        lstm=nn.LSTM(6, 6, num_layers=2, dropout=0.3, batch_first=True),
    )
    # Without dropout it draws nothing.
    model = Calls(
        lambda self, x: self.last(F.dropout(self.lstm(x.unsqueeze(1))[0][:, -1], 0.2)),
        last=nn.Linear(6, 5),
        lstm=nn.LSTM(6, 6, batch_first=True),
    ).double()
    assert_native(model, *classification(11), micro_batch_size=4)


def test_permutations_of_the_batch():
    def mixup(self, x):
        x = self.first(x)
        return self.last(0.7 * x + 0.3 * x[torch.randperm(len(x))])

    refused(mixup, "aten::randperm .*permutes", "aten::randperm")
    # Of a single sample nothing is drawn.
    model = Calls(mixup, first=nn.Linear(6, 6), last=nn.Linear(6, 5)).double()
    inputs, targets = classification(7)
    with pytest.raises(ib.CouplingError, match="aten::randperm .*permutes"):
        ours(
            model, nn.CrossEntropyLoss(), inputs, targets, micro_batch_size=1, match_native_rng=True
        )
    wrapped = ib.wrap(model, micro_batch_size=1, match_native_rng=True)
    with pytest.raises(ib.CouplingError, match="aten::randperm .*permutes"):
        wrapped(inputs)
    refused(
        lambda self, x: self.last(self.first(x)[torch.randint(len(x), (len(x),))]),
        "aten::randint .*depends on how many samples",
        "aten::randint",
    )
    refused(
        lambda self, x: self.last(self.first(x)[torch.multinomial(x.abs().sum(1), len(x))]),
        "aten::multinomial",
    )


def test_values_on_the_host():
    def on_the_host(self, x):
        x = F.dropout(self.first(x), 0.5)
        return self.last(x * 2 if float(x.sum()) > 0 else x)

    refused(on_the_host, "aten::(item|_local_scalar_dense) reads values")

    def select(self, x):
        x = self.first(x)
        return self.last(x) + self.last(x[torch.rand(len(x)) < 0.5]).sum()

    refused(select, "aten::index reads values")

    def skips(self, x):
        x = self.first(x)
        return self.last(x.tanh() if torch.rand(()) < 0.5 else x)

    refused(skips, "reads values")


def test_shapes_that_hide_the_samples():
    def in_rows(self, x):
        x = self.first(x)
        return self.last(x * torch.rand(x.numel(), dtype=x.dtype).view_as(x))

    refused(in_rows, "aten::rand .*cannot be seen", "aten::rand")
    refused(
        lambda self, x: self.last(self.first(x)) + torch.rand(len(x), len(x)).mean(),
        "aten::rand .*no single dimension",
    )
    refused(
        lambda self, x: self.last(self.first(x)) + torch.rand(len(x) + 1).mean(),
        "aten::rand .*no single dimension",
    )


def test_numbers_that_are_written_elsewhere():
    def into(self, x):
        noise = torch.empty(len(x), 6, dtype=x.dtype)
        torch.rand(len(x), 6, out=noise, dtype=x.dtype)
        return self.last(self.first(x) * noise)

    refused(into, "aten::rand .*out=")


def test_seeds_inside_of_forward():
    def seeds(self, x):
        torch.manual_seed(7)
        return self.last(F.dropout(self.first(x), 0.3))

    refused(seeds, "seeds a random generator")

    def seeds_its_own(self, x):
        noise = torch.rand(6, generator=GENERATOR, dtype=x.dtype)
        GENERATOR.manual_seed(7)
        return self.last(self.first(x) * noise + torch.rand(6, generator=GENERATOR))

    refused(seeds_its_own, "seeds a random generator")

    def with_a_draw_between(self, x):
        noise = torch.rand(6, generator=GENERATOR, dtype=x.dtype)
        GENERATOR.manual_seed(7)
        h = F.dropout(self.first(x) * noise, 0.3)
        return self.last(h + torch.rand(6, generator=GENERATOR))

    refused(with_a_draw_between, "seeds a random generator")

    def behind_its_last_draw(self, x):
        noise = torch.rand(6, generator=GENERATOR, dtype=x.dtype)
        GENERATOR.manual_seed(7)
        return self.last(F.dropout(self.first(x) * noise, 0.3))

    refused(behind_its_last_draw, "seeds a random generator")


def test_numbers_of_python_and_numpy_for_each_sample():
    def by_sample(self, x):
        scale = torch.tensor([[random.random()] for _ in range(len(x))], dtype=x.dtype)
        return self.last(self.first(F.dropout(x, 0.1)) * scale)

    refused(by_sample, "draws from the module random, and not equally often", "random")

    def by_numpy(self, x):
        return self.last(self.first(x) + torch.from_numpy(np.random.rand(len(x), 6)))

    refused(by_numpy, "draws from the module numpy.random", "numpy.random")


def test_opaque_code_beside_draws():
    def recomputed(self, x):
        return self.last(
            checkpoint(lambda x: F.dropout(self.first(x), 0.3), x, use_reentrant=False)
        )

    refused(recomputed, "cannot be cut")
    # As one micro-batch it needs not be cut.
    model = Calls(recomputed, first=nn.Linear(6, 6), last=nn.Linear(6, 5)).double()
    inputs, targets = classification(11)
    for which in LOSSES:
        report = assert_native(model, inputs, targets, which, memory_budget="32MiB")
        assert report.micro_batch_sizes == [11]


def test_a_separable_loss_that_draws():
    loss = ib.losses.separable(
        lambda outputs, targets: F.cross_entropy(F.dropout(outputs, 0.2), targets, reduction="sum"),
        lambda targets, samples: samples,
    )
    refused(
        lambda self, x: self.last(self.first(x)), "the loss draws random numbers", "loss", loss=loss
    )
    refused(
        lambda self, x: self.last(F.dropout(self.first(x), 0.2)),
        "the loss draws random numbers",
        "loss",
        loss=loss,
    )


def test_failures_leave_generators_alone():
    calls = Tally()

    def forward(self, x):
        calls()
        noise = torch.rand(len(x), 7, generator=GENERATOR, dtype=x.dtype)
        x = F.dropout(self.first(x) * noise, 0.3)
        if calls.count == self.fails_at:
            raise KeyError("here")
        return self.last(x)

    model = Calls(forward, first=nn.Linear(6, 7), last=nn.Linear(7, 5)).double()
    inputs, targets = classification(12)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4, match_native_rng=True)
    seed()
    before = random_state()
    for place in range(1, 7):
        calls.count = 0
        model.fails_at = place
        with pytest.raises(KeyError, match="here"):
            batch.backward(inputs, targets)
        assert same_state(random_state(), before), place
        assert all(p.grad is None for p in model.parameters())
        batch = ib.VirtualBatch(
            model, nn.CrossEntropyLoss(), micro_batch_size=4, match_native_rng=True
        )
    model.fails_at = 0
    batch.plan(inputs, targets)
    assert same_state(random_state(), before)
    wanted = native(model, nn.CrossEntropyLoss(), inputs, targets)
    after = random_state()
    seed()
    batch.backward(inputs, targets)
    assert same_state(random_state(), after)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted.gradients[name], rtol=1e-11, atol=1e-14)


def test_misuse():
    model, loss = three_dropouts(), nn.CrossEntropyLoss()
    with pytest.raises(ib.InvalidArgument, match="per_micro_batch"):
        ib.VirtualBatch(model, loss, match_native_rng=True, batch_coupling="per_micro_batch")
    with pytest.raises(ib.InvalidArgument, match="use_tapes"):
        ib.VirtualBatch(model, loss, match_native_rng=True, use_tapes=False)
    assert call(model.float(), torch.randn(2, 6)).shape == (2, 5)
