"""`max_norm` in wrapped models."""

import copy

import infinitybatch as ib
import pytest
import torch
from coupled_support import Cube
from max_norm_models import (
    CRITERION,
    MODELS,
    TOLERANCE,
    assert_same_weights,
    labels,
    reader,
    table,
    tokens,
)
from support import Calls, native, result_of, worst_error
from torch.nn import functional as F


@pytest.mark.parametrize("options", [{"micro_batch_size": 5}, {"memory_budget": "64MiB"}])
@pytest.mark.parametrize("name", MODELS)
def test_wrapped(name, options):
    model, x, y = MODELS[name](), tokens(), labels()
    wanted = native(model, CRITERION, x, y)
    own = copy.deepcopy(model)
    wrapped = ib.wrap(own, **options)
    for _ in range(2):  # a row that is short enough stays as it is
        own.zero_grad()
        loss = CRITERION(wrapped(x), y)
        loss.backward()
        assert worst_error(result_of(own, loss), wanted) <= TOLERANCE
        assert_same_weights(own, wanted.model)


def test_wrapped_where_backward_runs_forward_again():
    """Behind an autograd function."""
    model = reader(table(), Calls(lambda self, x: Cube.apply(x))).float()
    x, y = tokens(48), labels(48)
    wanted = native(model, CRITERION, x, y)
    own = copy.deepcopy(model)
    loss = CRITERION(ib.wrap(own, micro_batch_size=4)(x), y)
    assert_same_weights(own, wanted.model)
    loss.backward()
    assert worst_error(result_of(own, loss), wanted) <= 1e-5
    assert_same_weights(own, wanted.model)


def test_wrapped_without_gradients():
    model, x = reader(table()), tokens(48)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin(x)
        ib.wrap(model, micro_batch_size=4)(x)
    assert_same_weights(model, twin)


def test_two_wrapped_calls_before_one_backward():
    model, x, other = reader(table()), tokens(48), tokens(48)
    twin = copy.deepcopy(model)
    wrapped = ib.wrap(model, micro_batch_size=5)
    for module in (wrapped, twin):
        F.mse_loss(module(x), module(other)).backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=TOLERANCE, atol=1e-15)
    assert_same_weights(model, twin)
