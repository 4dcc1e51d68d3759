"""What tests of `match_native_rng=True` share: seeds, random states, comparison with native."""

import random

import infinitybatch as ib
import numpy as np
import torch
import torch.nn.functional as F
from random_models import GENERATOR
from support import native, ours, worst_error
from torch import nn


def coupled_loss(outputs, targets):
    """Draws itself, on all outputs at once."""
    outputs = F.dropout(outputs, 0.1)
    return (outputs @ outputs.T / 9).logsumexp(1).mean() + F.cross_entropy(outputs, targets)


LOSSES = {
    "separable": (nn.CrossEntropyLoss(), nn.CrossEntropyLoss()),
    "coupled": (coupled_loss, ib.losses.coupled(coupled_loss)),
}


def seed(number=3):
    torch.manual_seed(number)
    GENERATOR.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def random_state():
    return (
        torch.get_rng_state(),
        GENERATOR.get_state(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        np.random.get_state()[2:],
    )


def same_state(a, b):
    return all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(a, b, strict=True)
    )


def assert_native(model, inputs, targets, which="separable", tolerance=1e-12, **options):
    theirs, loss = LOSSES[which]
    seed()
    wanted = native(model, theirs, inputs, targets)
    after = random_state()
    seed()
    found = ours(model, loss, inputs, targets, match_native_rng=True, **options)
    assert worst_error(found, wanted) <= tolerance
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-12, atol=0)
    for name, buffer in wanted.buffers.items():
        torch.testing.assert_close(found.buffers[name], buffer, rtol=1e-12, atol=1e-14)
    assert same_state(random_state(), after), "generators stand elsewhere"
    return found.report
