"""Coupled losses give the gradient of the whole batch: losses x models x sizes x graphs kept."""

import copy

import infinitybatch as ib
import pytest
import torch
from coupled_support import (
    BODIES,
    LOSSES,
    assert_same_step,
    make_case,
    native_coupled,
    ours_coupled,
    same_bits,
)
from support import Calls, excess_in_single, mlp
from torch import nn
from torch.nn import functional as F

# Samples and micro-batch size: one by one, even, uneven, larger than N, one sample.
SIZES = [(6, 1), (12, 4), (7, 3), (5, 9)]


def retained_counts(n: int, size: int) -> list[int]:
    count = -(-n // size)
    return sorted({0, 1, count - 1, count, 99})


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("body", BODIES)
def test_gradients_are_those_of_the_whole_batch(body, loss):
    for n, size in SIZES:
        model, value, inputs, targets = make_case(body, loss, n)
        wanted = native_coupled(model, value, inputs, targets)
        first = None
        for retained in retained_counts(n, size):
            where = f"{n} samples, micro-batches of {size}, {retained} retained"
            options = {"micro_batch_size": size, "retained_micro_batches": retained}
            found = ours_coupled(model, value, inputs, targets, **options)
            assert_same_step(found, wanted, where)
            assert found.report.micro_batch_sizes == [
                min(size, n - begin) for begin in range(0, n, size)
            ]
            # Keeping a graph changes no bit.
            first = first or found
            assert same_bits(found, first), where
            assert found.report.restarts == 0
            all_kept = retained >= -(-n // size) and not found.buffers
            assert found.report.strategy == ("replay" if all_kept else BODIES[body][2]), where
            reason = found.report.strategy_reason
            assert bool(reason) == (found.report.strategy == "rerun")


@pytest.mark.parametrize("body", BODIES)
def test_the_planner_is_as_exact(body):
    model, value, inputs, targets = make_case(body, "info_nce", 23)
    wanted = native_coupled(model, value, inputs, targets)
    found = ours_coupled(model, value, inputs, targets, memory_budget="64MiB")
    assert_same_step(found, wanted, "planned")


def test_why_user_code_ran_twice_is_said():
    for body, reason in {"opaque": "Cube", "checkpoint": "torch.utils.checkpoint"}.items():
        model, value, inputs, targets = make_case(body, "info_nce", 6)
        found = ours_coupled(model, value, inputs, targets, micro_batch_size=2)
        assert found.report.strategy == "rerun"
        assert reason in found.report.strategy_reason


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("body", ["mlp", "conv", "encoder", "lstm", "opaque"])
def test_single_precision_is_as_good_as_natively(body, loss):
    model, value, inputs, targets = make_case(body, loss, 24)
    truth = native_coupled(model, value, inputs, targets)
    model, inputs = model.float(), inputs.float()
    if isinstance(value, nn.Module):
        value = copy.deepcopy(value).float()
    if targets is not None and targets.is_floating_point():
        targets = targets.float()
    whole = [
        native_coupled(
            model, value, *(x if x is None else x.roll(by, 0) for x in (inputs, targets))
        )
        for by in range(0, 24, 3)
    ]
    for retained in (0, 2, 99):
        found = ours_coupled(
            model, value, inputs, targets, micro_batch_size=5, retained_micro_batches=retained
        )
        assert excess_in_single(found, truth, whole) == {}


def test_several_steps_of_an_optimizer():
    """Plans, tapes and sinks are made anew for parameters that have changed."""
    model, value, inputs, targets = make_case("encoder", "info_nce", 17)
    step = ib.VirtualBatch(model, ib.losses.coupled(value), memory_budget="64MiB")
    optimizer = torch.optim.AdamW([*model.parameters(), *value.parameters()], lr=0.01)
    for _ in range(4):
        wanted = native_coupled(model, value, inputs, targets)
        optimizer.zero_grad()
        report = step.backward(inputs)
        torch.testing.assert_close(report.loss, wanted.loss, rtol=1e-12, atol=0)
        for name, gradient in wanted.gradients.items():
            part, _, key = name.partition(".")
            owner = model if part == "model" else value
            torch.testing.assert_close(
                owner.get_parameter(key).grad, gradient, rtol=1e-10, atol=1e-15
            )
        optimizer.step()


def test_a_loss_that_uses_the_models_parameters_too():
    """Weight decay written into the loss, and a prototype matrix that the loss shares."""
    model = mlp()
    inputs, targets = torch.randn(11, 6, dtype=torch.float64), torch.arange(11) % 5
    wanted = copy.deepcopy(model)

    def value(net):
        def of(outputs, targets):
            return F.cross_entropy(outputs / outputs.std(), targets) + 0.1 * sum(
                p.square().sum() for p in net.parameters()
            )

        return of

    value(wanted)(wanted(inputs), targets).backward()
    for retained in (0, 2, 99):
        model.zero_grad()
        ib.VirtualBatch(
            model,
            ib.losses.coupled(value(model)),
            micro_batch_size=4,
            retained_micro_batches=retained,
        ).backward(inputs, targets)
        for a, b in zip(model.parameters(), wanted.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-15)


def test_a_frozen_parameter_and_one_that_is_never_used():
    model, value, inputs, targets = make_case("mlp", "info_nce", 9)
    model.unused = nn.Linear(2, 2).double()
    model.body[0].weight.requires_grad_(False)
    wanted = native_coupled(model, value, inputs, targets)
    for retained in (0, 1, 99):
        found = ours_coupled(
            model, value, inputs, targets, micro_batch_size=2, retained_micro_batches=retained
        )
        assert found.gradients["model.unused.weight"] is None
        assert found.gradients["model.body.0.weight"] is None
        assert_same_step(found, wanted, retained)


def test_inputs_that_require_grad():
    model, value, inputs, _ = make_case("mlp", "info_nce", 9)
    inputs.requires_grad_()
    value(model(inputs), None).backward()
    wanted, inputs.grad = inputs.grad, None
    for retained in (0, 1, 99):
        inputs.grad = None
        ib.VirtualBatch(
            model,
            ib.losses.coupled(value),
            micro_batch_size=2,
            retained_micro_batches=retained,
        ).backward(inputs)
        torch.testing.assert_close(inputs.grad, wanted, rtol=1e-12, atol=1e-16)


def test_an_output_that_carries_gradient_for_some_samples_only():
    """Expert routing: a micro-batch may have nobody for the expert."""

    def forward(self, x):
        y = torch.zeros(len(x), 4, dtype=x.dtype)
        rows = (x[:, 0] > 0.8).nonzero().flatten()
        if len(rows):
            y = y.index_add(0, rows, self.expert(x[rows]))
        return y, self.other(x)

    model = Calls(forward, expert=nn.Linear(5, 4), other=nn.Linear(5, 4)).double()
    inputs = torch.rand(12, 5, dtype=torch.float64) * 0.7
    inputs[[2, 9], 0] = 0.9
    _, value, _, _ = make_case("mlp", "info_nce", 2)
    loss = lambda outputs, _: value((outputs[0] + 0.1, outputs[1]), None)  # noqa: E731
    wanted = native_coupled(model, loss, inputs, None)
    assert float(wanted.gradients["model.expert.weight"].norm()) > 0
    for retained in (0, 2, 99):
        found = ours_coupled(
            model, loss, inputs, None, micro_batch_size=2, retained_micro_batches=retained
        )
        assert_same_step(found, wanted, retained)


def test_outputs_are_seen_in_the_order_of_the_batch():
    """The loss weighs each row by its place, in every output."""
    model, _, inputs, _ = make_case("mlp", "info_nce", 11)

    def value(outputs, places):
        assert torch.equal(places, torch.arange(11))
        weight = torch.arange(1, 12, dtype=torch.float64)[:, None]
        return (outputs[0] * weight).sum().tanh() + (outputs[1] / weight).square().sum()

    wanted = native_coupled(model, value, inputs, torch.arange(11))
    for retained in (0, 1, 99):
        found = ours_coupled(
            model,
            value,
            inputs,
            torch.arange(11),
            micro_batch_size=3,
            retained_micro_batches=retained,
        )
        assert_same_step(found, wanted, retained)


def test_inputs_from_a_source_and_shared_inputs():
    model = Calls(lambda self, x, bias: self.net(x) + bias, net=mlp())
    inputs = torch.randn(10, 6, dtype=torch.float64)
    bias = torch.randn(5, dtype=torch.float64)
    labels = torch.arange(10) % 3
    loss = make_case("mlp", "batch_hard", 2)[1]
    wanted = native_coupled(model, loss, (inputs, bias), labels)
    found = ours_coupled(model, loss, (inputs, ib.shared(bias)), labels, micro_batch_size=4)
    assert_same_step(found, wanted, "shared")
    source = ib.BatchSource(10, lambda begin, end: (inputs[begin:end], ib.shared(bias)))
    found = ours_coupled(model, loss, source, labels, micro_batch_size=4)
    assert_same_step(found, wanted, "source")
