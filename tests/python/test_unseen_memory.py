"""Memory that no operator made: compiled code and extensions allocate it past the dispatcher and
give it to operators as `out=`."""

import copy

import infinitybatch as ib
import pytest
import torch
from torch import nn
from wrap_support import close, contrastive, grads


class Fused(torch.autograd.Function):
    """What Inductor makes of a linear layer."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        z = torch._C._dynamo.guards._empty_strided_cpu((len(x), len(bias)), (len(bias), 1), x.dtype)
        torch.addmm(bias, x, weight.t(), out=z)
        ctx.save_for_backward(x, weight)
        return z

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x, gradient.sum(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        for layer in (self.first, self.second):
            x = Fused.apply(x.tanh(), layer.weight, layer.bias)
        return x


SCRATCH = torch.zeros(4, 8).double()


class Remembering(Net):
    """Writes into memory that was there before, of which the next micro-batch reads."""

    def forward(self, x):
        x = Fused.apply(x, self.first.weight, self.first.bias)
        scratch = SCRATCH[: len(x)]
        torch.add(scratch, x.detach(), out=scratch)
        return Fused.apply(x + scratch, self.second.weight, self.second.bias)


def pair(kind, n=10):
    torch.manual_seed(0)
    model = kind().double()
    native = copy.deepcopy(model)
    x = torch.randn(n, 6).double()
    contrastive(native(x)).backward()
    return model, native, x


OPTIONS = [
    dict(micro_batch_size=4),
    dict(micro_batch_size=4, retained_micro_batches=1),
    dict(memory_budget="64MiB"),
]


@pytest.mark.parametrize("options", OPTIONS)
def test_wrap(options):
    model, native, x = pair(Net)
    contrastive(ib.wrap(model, **options)(x)).backward()
    close(grads(model), grads(native))


@pytest.mark.parametrize("options", OPTIONS)
def test_coupled_loss(options):
    model, native, x = pair(Net)
    ib.VirtualBatch(model, ib.losses.coupled(contrastive), **options).backward(x)
    close(grads(model), grads(native))


def test_memory_that_was_there_before_is_refused():
    model, _, x = pair(Remembering, 4)
    with pytest.raises(ib.Unsupported, match="not a buffer of the model"):
        ib.wrap(model, micro_batch_size=2)(x)
