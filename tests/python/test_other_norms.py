"""Norms that couple nothing (evaluation, InstanceNorm, standardised weights), and BatchNorm on
micro-batches of one sample."""

import copy

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from batch_norm_models import images, make
from batch_norm_support import assert_same, contrastive, noise_of
from measure import excess, gradients
from support import Calls, live_bytes, native, ours, worst_error
from torch import nn


def test_eval_mode_couples_nothing():
    model = make("residual, 2 layers").eval()
    inputs, targets = images(8)
    found = ours(model, nn.CrossEntropyLoss(), inputs, targets, micro_batch_size=3)
    assert found.report.strategy == "stream"
    assert worst_error(found, native(model, nn.CrossEntropyLoss(), inputs, targets)) <= 1e-12


def test_train_and_eval_in_turn():
    model = make("residual, 2 layers")
    inputs, targets = images(8)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=3)
    assert batch.backward(inputs, targets).strategy == "cut"
    assert (model.eval(), batch.backward(inputs, targets))[1].strategy == "stream"
    assert (model.train(), batch.backward(inputs, targets))[1].strategy == "cut"


def test_instance_norm_is_not_coupled():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.Flatten(), nn.Linear(144, 5)
    ).double()
    inputs, targets = images(8)
    found = ours(model, nn.CrossEntropyLoss(), inputs, targets, micro_batch_size=3)
    assert found.report.strategy == "stream"


class Tokens(nn.Module):
    """The gradient of its BatchNorm's output is a transposed view: of a single sample its strides
    may mean one layout or the other, and torch's kernel takes the wrong one.
    """

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.norm(self.stem(x).flatten(2).transpose(1, 2)).mean(1))


@pytest.mark.parametrize("n, size", [(4, 1), (5, 2), (5, 4)])
def test_micro_batches_of_one_sample_whose_layout_is_ambiguous(n, size):
    torch.manual_seed(6)
    model = Tokens().double()
    inputs, targets = torch.randn(n, 3, 9, 9, dtype=torch.float64), torch.randint(4, (n,))
    criterion = nn.CrossEntropyLoss()
    wanted = native(model, criterion, inputs, targets)
    assert_same(ours(model, criterion, inputs, targets, micro_batch_size=size), wanted, 1e-12)


class TwiceNormalised(nn.Module):
    """What its second BatchNorm is given has a mean of zero, exactly so in some micro-batches."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.second(self.first(x) * 0.5))


def test_statistics_that_a_micro_batch_leaves_as_they_were():
    torch.manual_seed(8)
    model = TwiceNormalised().double()
    inputs, targets = torch.randn(4, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    inputs[1] = -inputs[0]
    probe = copy.deepcopy(model)
    probe(inputs[:2])
    assert not probe.second.running_mean.any()
    criterion = nn.CrossEntropyLoss()
    wanted = native(model, criterion, inputs, targets)
    tolerance = max(1e-12, 10 * noise_of(model, criterion, inputs, targets, wanted))
    assert_same(ours(model, criterion, inputs, targets, micro_batch_size=2), wanted, tolerance)


class StandardisedConv(nn.Conv2d):
    """Weight standardisation as image models write it: a BatchNorm over the weight."""

    def forward(self, x):
        weight = F.batch_norm(
            self.weight.reshape(1, self.out_channels, -1), None, None, training=True, eps=1e-6
        ).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias)


@pytest.mark.parametrize("with_batch_norm", [False, True])
def test_standardised_weights_couple_nothing(with_batch_norm):
    torch.manual_seed(7)
    model = nn.Sequential(
        StandardisedConv(3, 6, 3),
        nn.BatchNorm2d(6) if with_batch_norm else nn.GroupNorm(2, 6),
        nn.ReLU(),
        StandardisedConv(6, 4, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ).double()
    inputs, targets = torch.randn(7, 3, 8, 8, dtype=torch.float64), torch.randint(4, (7,))
    for criterion in (nn.CrossEntropyLoss(), contrastive):
        wanted = native(model, criterion, inputs, targets)
        loss = ib.losses.coupled(criterion) if criterion is contrastive else criterion
        found = ours(model, loss, inputs, targets, micro_batch_size=3)
        plain = "replay" if criterion is contrastive else "stream"
        assert found.report.strategy == ("cut" if with_batch_norm else plain)
        assert_same(found, wanted, 1e-12)


def with_instance_norm(*behind):
    layers = nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    return nn.Sequential(*layers, *behind, nn.Flatten(), nn.Linear(144, 5)).double()


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), contrastive])
@pytest.mark.parametrize("twice", [False, True])
def test_running_statistics_of_instance_norm_are_means_over_samples(criterion, twice):
    model = with_instance_norm()
    if twice:
        model.insert(2, model[1])
    inputs, targets = images(7)
    inputs += torch.arange(7.0).reshape(7, 1, 1, 1)  # each sample has another mean
    loss = ib.losses.coupled(criterion) if criterion is contrastive else criterion
    wanted = native(model, criterion, inputs, targets)
    assert not torch.equal(wanted.buffers["1.running_mean"], model[1].running_mean)
    for size in (1, 3, 4, 7):
        found = ours(model, loss, inputs, targets, micro_batch_size=size)
        assert_same(found, wanted, 1e-12)
    budget = live_bytes() + 2**23
    assert_same(ours(model, loss, inputs, targets, memory_budget=budget), wanted, 1e-12)
    wrapped = copy.deepcopy(model)
    same = ib.wrap(wrapped, micro_batch_size=3)
    criterion(same(inputs), targets).backward()
    assert excess(dict(wrapped.named_buffers()), wanted.buffers, least=1e-12) == {}
    assert excess(gradients(wrapped), wanted.gradients, least=1e-12) == {}


def test_running_statistics_that_are_read_are_refused():
    """What follows would depend on the other samples."""
    reading = Calls(
        lambda self, x: self.net(x) + self.net[1].running_mean.mean(), net=with_instance_norm()
    )
    model = with_instance_norm(nn.BatchNorm2d(4))  # cut: its statistics are provisional
    inputs, targets = images(7)
    for each in (reading, model):
        with pytest.raises(ib.CouplingError):
            ours(each, nn.CrossEntropyLoss(), inputs, targets, micro_batch_size=3)
    model.eval()
    wanted = native(model, nn.CrossEntropyLoss(), inputs, targets)
    found = ours(model, nn.CrossEntropyLoss(), inputs, targets, micro_batch_size=3)
    assert_same(found, wanted, 1e-12)
