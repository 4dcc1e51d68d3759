"""What BatchNorm in training cannot make exact is refused and leaves everything as it was."""

import copy

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from batch_norm_models import images, make
from batch_norm_support import assert_same
from support import Calls, Tally, native, ours, worst_error
from torch import nn


def test_a_single_sample_without_any_statistics_is_refused():
    inputs, targets = images(4)
    with pytest.raises(ib.CouplingError, match="micro-batches of two samples or more"):
        ours(make("neither"), nn.CrossEntropyLoss(), inputs, targets, micro_batch_size=1)


def test_one_sample_raises_what_native_raises():
    model = make("1d")
    inputs, targets = images(1)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(inputs)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        ours(model, nn.CrossEntropyLoss(), inputs, targets, micro_batch_size=1)


REFUSED = {
    "a value on the host": (
        lambda self, x: (
            self.head(self.norm(self.first(x)).mean((2, 3)))
            * (2.0 if float(self.norm(self.first(x)).abs().max()) > 1e9 else 1.0)
        ),
        "reads values",
    ),
    "a list": (
        lambda self, x: (
            self.head(self.norm(self.first(x)).mean((2, 3)))
            * self.norm(self.first(x)).mean((0, 2, 3)).tolist()[0]
        ),
        "took another way|reads values|changed",
    ),
    "a shape": (
        lambda self, x: self.head(
            (lambda y: y.mean((2, 3)) + y[y > 0].sum() / y[y > 0].numel())(self.norm(self.first(x)))
        ),
        "reads values",
    ),
    "statistics that forward writes": (
        lambda self, x: (
            (self.norm.reset_running_stats(), self.norm(self.first(x)))[1].mean((2, 3))
            @ self.head.weight.T
        ),
        "running statistics",
    ),
    "a parameter": (
        lambda self, x: self.head(
            (self.first(x) + self.norm(self.first.weight.repeat(1, 2, 1, 1)).sum()).mean((2, 3))
        ),
        "does not come from the samples",
    ),
    "other layers": (
        lambda self, x: self.head(
            (self.norm if int(x[0, 0, 0, 0] * 1e6) % 2 else self.twin)(self.first(x)).mean((2, 3))
        ),
        "do not run the same layers",
    ),
    "running statistics": (
        lambda self, x: (
            self.head(self.norm(self.first(x)).mean((2, 3))) + self.norm.running_mean.sum()
        ),
        "running statistics",
    ),
    "samples in the channels": (
        lambda self, x: self.head(
            F.batch_norm(self.first(x).flatten(0, 1)[None], None, None, training=True)
            .unflatten(1, (-1, 6))[0]
            .mean((2, 3))
        ),
        "first dimension does not hold the samples",
    ),
    "rows that forward selects": (
        lambda self, x: self.head(
            F.batch_norm(
                (y := self.first(x).mean((2, 3)))[y[:, 0] > y[:, 0].median()],
                None,
                None,
                training=True,
            ).sum(0)
            + y
        ),
        "too few rows.*select afterwards",
    ),
    "no row is selected": (
        lambda self, x: self.head(
            self.first(x).mean((2, 3))
            + F.batch_norm(self.first(x)[x[:, 0, 0, 0] > 1e-6], None, None, training=True).sum()
        ),
        "first dimension does not hold the samples",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused(name):
    forward, message = REFUSED[name]
    model = Calls(
        forward,
        first=nn.Conv2d(3, 6, 3),
        norm=nn.BatchNorm2d(6),
        twin=nn.BatchNorm2d(6),
        head=nn.Linear(6, 5),
    ).double()
    inputs, targets = images(8)
    inputs[:, 0, 0, 0] = torch.arange(8) // 3 % 2 * 1e-6 + 1e-7  # micro-batches of 3 differ in it
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    with pytest.raises(ib.CouplingError, match=message):
        ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=3).backward(inputs, targets)
    assert torch.equal(torch.get_rng_state(), state)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert all(p.grad is None for p in model.parameters())


def test_a_number_of_layers_that_changes_ends_in_an_error():
    """It once began again for ever."""

    def forward(self, x):
        times = 1 + int(x.abs().sum() * 1e6) % 3
        x = self.first(x)
        for _ in range(times):
            x = self.norm(x)
        return self.head(x.mean((2, 3)))

    model = Calls(
        forward, first=nn.Conv2d(3, 6, 3), norm=nn.BatchNorm2d(6), head=nn.Linear(6, 5)
    ).double()
    inputs, targets = images(12)
    try:
        ours(model, nn.CrossEntropyLoss(), inputs, targets, memory_budget="64MiB")
    except ib.CouplingError as error:
        assert "equally often" in str(error) or "do not run the same layers" in str(error)


def test_inputs_that_forward_changes_are_refused():
    model = Calls(
        lambda self, x: self.head(self.norm(self.first(x.mul_(2))).mean((2, 3))),
        first=nn.Conv2d(3, 6, 3),
        norm=nn.BatchNorm2d(6),
        head=nn.Linear(6, 5),
    ).double()
    for options in ({"micro_batch_size": 3}, {"memory_budget": "64MiB"}):
        inputs, targets = images(8)
        with pytest.raises(ib.Unsupported, match="changes its inputs in place"):
            ib.VirtualBatch(model, nn.CrossEntropyLoss(), **options).backward(inputs, targets)
    plain = Calls(lambda self, x: self.head(x.mul_(2).mean((2, 3))), head=nn.Linear(3, 5)).double()
    inputs, targets = images(40)
    batch = ib.VirtualBatch(plain, ib.losses.coupled(F.cross_entropy), memory_budget="64MiB")
    with pytest.raises(ib.Unsupported, match="changes its inputs in place"):
        batch.backward(inputs, targets)


def test_whole_numbers_may_choose_what_a_layer_gave():
    """Masks decide about a shape, indices do not."""
    model = Calls(
        lambda self, x: self.head(
            self.norm(self.first(x))[:, torch.arange(5, -1, -1)].mean((2, 3))
        ),
        first=nn.Conv2d(3, 6, 3),
        norm=nn.BatchNorm2d(6),
        head=nn.Linear(6, 5),
    ).double()
    inputs, targets = images(8)
    found = ours(model, nn.CrossEntropyLoss(), inputs, targets, micro_batch_size=3)
    assert_same(found, native(model, nn.CrossEntropyLoss(), inputs, targets), 1e-12)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 2

    @staticmethod
    def backward(context, gradient):
        return gradient * 2


def test_opaque_code_and_batch_norm():
    model = Calls(
        lambda self, x: self.head(Doubled.apply(self.norm(self.first(x))).mean((2, 3))),
        first=nn.Conv2d(3, 6, 3),
        norm=nn.BatchNorm2d(6),
        head=nn.Linear(6, 5),
    ).double()
    inputs, targets = images(8)
    with pytest.raises(ib.CouplingError, match="cannot be cut: .*autograd function"):
        ours(model, nn.CrossEntropyLoss(), inputs, targets, micro_batch_size=3)
    # As one micro-batch it couples nothing.
    found = ours(model, nn.CrossEntropyLoss(), inputs, targets, memory_budget="64MiB")
    assert worst_error(found, native(model, nn.CrossEntropyLoss(), inputs, targets)) <= 1e-12


def test_failures_leave_everything_as_it_was():
    model = make("residual, 6 layers")
    inputs, targets = images(11)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4)
    batch.backward(inputs, targets)
    wanted = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    before = copy.deepcopy(model.state_dict())
    # At every place where a hook of the user's runs, and in the loss.
    for failing in range(1, 4):
        tally = Tally()  # a number in the closure would be put back

        def fail(*_, failing=failing, tally=tally):
            tally()
            if tally.count == failing:
                raise KeyboardInterrupt

        handle = model.norms[2].register_forward_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            batch.backward(inputs, targets)
        handle.remove()
        for key, value in model.state_dict().items():
            assert torch.equal(value, before[key]), key
        assert all(p.grad is None for p in model.parameters())
    for name, buffer in model.named_buffers():  # statistics as in the first step
        buffer.copy_(before[name])
    batch.backward(inputs, targets)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, wanted[name])
