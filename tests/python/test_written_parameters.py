"""Parameters that forward writes: as one native forward leaves them, or refused and put back."""

import copy
from typing import Any

import infinitybatch as ib
import pytest
import torch
from module_state_support import CRITERION, from_first_batch, layers
from support import assert_exact, classification, native, ours, worst_error


def norm_constraint(self: Any, x: torch.Tensor) -> torch.Tensor:
    """As EEGNet's layers do: each row of the weight is brought back to a largest norm."""
    self.layer.weight.data = torch.renorm(self.layer.weight.data, p=2, dim=0, maxnorm=0.3)
    return self.head(self.layer(x).tanh())


def clamped(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.layer.weight.clamp_(-0.05, 0.1)
    return self.head(self.layer(x).tanh())


def momentum_encoder(self: Any, x: torch.Tensor) -> torch.Tensor:
    """The slow copy moves once per forward, whatever the samples are."""
    for slow, fast in zip(self.slow.parameters(), self.layer.parameters(), strict=True):
        slow.data = 0.9 * slow.data + 0.1 * fast.data
    return self.head(self.layer(x).tanh() - self.slow(x).tanh().detach())


def momentum_in_place(self: Any, x: torch.Tensor) -> torch.Tensor:
    for slow, fast in zip(self.slow.parameters(), self.layer.parameters(), strict=True):
        slow.data.mul_(0.9).add_(fast.data, alpha=0.1)
    return self.head(self.layer(x).tanh() - self.slow(x).tanh().detach())


def momentum_by_max(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Written by an overload whose name does not tell: `max.dim_max`."""
    with torch.no_grad():
        choices = torch.stack([self.slow.weight * 0.5, self.slow.weight - 0.1])
        torch.max(choices, 0, out=(self.slow.weight.data, torch.empty(8, 6, dtype=torch.long)))
    return self.head(self.layer(x).tanh() - self.slow(x).tanh())


def padding_row(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.layer.weight[0].fill_(0.0)
    return self.head(self.layer(x).tanh())


def first_batch_by_data(self: Any, x: torch.Tensor) -> torch.Tensor:
    """ActNorm: scale and shift of the first batch that comes by."""
    if not self.ready:
        self.shift.data = -x.detach().mean(0)
        self.scale.data = 1 / x.detach().std(0)
        self.ready.fill_(True)
    return self.head((x + self.shift) * self.scale)


def first_batch_in_place(self: Any, x: torch.Tensor) -> torch.Tensor:
    if not self.ready:
        self.shift.data.copy_(-x.detach().mean(0))
        self.ready.fill_(True)
    return self.head((x + self.shift) * self.scale)


SAMPLES_DO_NOT_MATTER = {
    f.__name__: f
    for f in (
        norm_constraint,
        clamped,
        momentum_encoder,
        momentum_in_place,
        momentum_by_max,
        padding_row,
    )
}


SAMPLES_MATTER = {f.__name__: f for f in (first_batch_by_data, first_batch_in_place)}


@pytest.mark.parametrize("name", SAMPLES_DO_NOT_MATTER)
def test_parameters_are_written_as_by_one_forward(name):
    model = layers(SAMPLES_DO_NOT_MATTER[name])
    inputs, targets = classification()
    assert_exact(model, CRITERION, inputs, targets, sizes=(1, 2, 5, 64))
    whole = copy.deepcopy(model)
    CRITERION(whole(inputs), targets).backward()
    found = ours(model, CRITERION, inputs, targets, micro_batch_size=2)
    for (key, wanted), value in zip(
        whole.named_parameters(), found.model.parameters(), strict=True
    ):
        torch.testing.assert_close(value, wanted, rtol=1e-13, atol=0, msg=key)


@pytest.mark.parametrize("name", SAMPLES_DO_NOT_MATTER)
def test_a_later_micro_batch_that_writes_is_put_back_too(name):
    model = layers(lambda self, x: SAMPLES_DO_NOT_MATTER[name](self, x) * 1.0)
    inputs, targets = classification(5)
    batch = ib.VirtualBatch(model, CRITERION, micro_batch_size=2)
    whole = copy.deepcopy(model)
    for _ in range(3):
        model.zero_grad()
        whole.zero_grad()
        batch.backward(inputs, targets)
        CRITERION(whole(inputs), targets).backward()
    for (key, wanted), value in zip(whole.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-13, atol=0, msg=key)
        if wanted.grad is not None:
            torch.testing.assert_close(value.grad, wanted.grad, rtol=1e-11, atol=1e-15, msg=key)


def test_operators_that_were_defined_anew_are_others():
    """One that writes may lie where one lay that does not, and have its name."""
    inputs, targets = classification(12)
    for turn in range(6):
        library = torch.library.Library("infinitybatch_tests", "FRAGMENT")

        def scale(w):
            w.mul_(0.9)

        def look(w):
            pass

        kinds = [scale if (turn + i) % 2 else look for i in range(40)]
        for i, kind in enumerate(kinds):
            library.define(f"op_{i}(Tensor{'(a!)' if kind is scale else ''} w) -> ()")
            library.impl(f"op_{i}", kind, "CompositeExplicitAutograd")
        ops = [getattr(torch.ops.infinitybatch_tests, f"op_{i}").default for i in range(40)]

        def forward(self, x, ops=ops):
            with torch.no_grad():
                for op in ops:
                    op(self.slow.weight.data)
            return self.head(self.layer(x).tanh() - self.slow(x).tanh())

        model = layers(forward)
        wanted = native(model, CRITERION, inputs, targets)
        found = ours(model, CRITERION, inputs, targets, micro_batch_size=4)
        assert worst_error(found, wanted) <= 1e-12
        assert torch.equal(found.model.slow.weight, wanted.model.slow.weight)
        library._destroy()


@pytest.mark.parametrize("name", SAMPLES_MATTER)
@pytest.mark.parametrize("wrapped", [False, True])
def test_parameters_written_from_samples_are_refused_and_put_back(name, wrapped):
    model = from_first_batch(SAMPLES_MATTER[name])
    inputs, targets = classification(12)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    memory = [parameter.data_ptr() for parameter in model.parameters()]
    with pytest.raises((ib.CouplingError, ib.Unsupported), match="parameter|exchanged"):
        if wrapped:
            with torch.no_grad():
                ib.wrap(model, micro_batch_size=4)(inputs)
        else:
            ib.VirtualBatch(model, CRITERION, micro_batch_size=4).backward(inputs, targets)
    assert [parameter.data_ptr() for parameter in model.parameters()] == memory
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("name", SAMPLES_MATTER)
def test_the_first_batch_is_whole_where_it_fits(name):
    model = from_first_batch(SAMPLES_MATTER[name])
    inputs, targets = classification(12)
    wanted = native(model, CRITERION, inputs, targets)
    found = ours(model, CRITERION, inputs, targets, memory_budget="256MiB")
    assert worst_error(found, wanted) <= 1e-12
    # The call alone that initialises: afterwards micro-batches are exact.
    assert_exact(found.model, CRITERION, inputs, targets)
