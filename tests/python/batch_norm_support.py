"""What tests of norms share: comparison with native gradients, a coupled loss."""

import torch
import torch.nn.functional as F
from support import native, worst_error


def noise_of(model, criterion, inputs, targets, wanted):
    """How far native itself moves when the batch is reversed."""
    return worst_error(native(model, criterion, inputs.flip(0), targets.flip(0)), wanted)


def assert_same(found, wanted, tolerance):
    assert worst_error(found, wanted) <= tolerance
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-12, atol=0)
    for name, buffer in wanted.buffers.items():
        torch.testing.assert_close(found.buffers[name], buffer, rtol=1e-12, atol=1e-14)


def contrastive(outputs, targets):
    return (outputs @ outputs.T / 3).logsumexp(1).mean() + F.cross_entropy(outputs, targets)
