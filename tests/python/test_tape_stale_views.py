"""Views whose memory is written meanwhile: torch makes their graph nodes anew when it needs them,
and nobody else may ask for it.

In front of that a lock is held under which ops run (asking there never returned), and of a view
whose base was written without a graph the question itself is an error, which natively nobody meets.
"""

import copy

import infinitybatch as ib
import pytest
import torch
from support import Calls
from tape_support import replays
from torch import nn
from wrap_support import close, contrastive, grads

X = torch.randn(11, 6, generator=torch.Generator().manual_seed(1)).double()


def both_parts(h):
    r = torch.view_as_real(torch.complex(h, h))
    r[..., 1].add_(h)
    return torch.cat([r[..., 0], r[..., 1]], 1)


def base_written(h):
    f = torch.complex(h, h)
    r = torch.view_as_real(f)
    f.mul_(2)
    return r.flatten(1)


def real_part_of_written(h):
    f = torch.complex(h, h)
    r = f.real
    f.mul_(2)
    return r * 1


def sibling_written(h):
    r = torch.view_as_real(torch.complex(h, h))
    r[..., 1].add_(h)
    return r.flatten(1)


def without_a_graph(write):
    def forward(h):
        with torch.no_grad():
            write(h)
        return h * 3

    return forward


def looked_at(h):
    view = h[:, :2]
    h.mul_(2)
    assert view.grad_fn is not None  # made anew here
    return h * view.sum(1, keepdim=True)


FORWARDS = {
    "both parts": both_parts,
    "base": base_written,
    "real part": real_part_of_written,
    "sibling": sibling_written,
    "looked at": looked_at,
    "no_grad item": without_a_graph(lambda h: h.__setitem__((slice(None), 0), 2.0)),
    "no_grad view": without_a_graph(lambda h: h.view(-1).mul_(2.0)),
    "no_grad slice": without_a_graph(lambda h: torch.relu_(h[:, 2:])),
    "no_grad transposed": without_a_graph(lambda h: h.t().copy_(h.t() * 2)),
    "no_grad, read by a view": without_a_graph(lambda h: h[:, 4:].sub_(h[:, :4])),
}
WAYS = {
    "replay": dict(micro_batch_size=4),
    "retained": dict(micro_batch_size=4, retained_micro_batches=2),
    "checkpoints": dict(micro_batch_size=4, checkpoint_segments=3),
    "static": dict(micro_batch_size=4, static_graph=True),
    "budget": dict(memory_budget="64MiB"),
}


def model_of(name):
    torch.manual_seed(0)
    forward = FORWARDS[name]
    net = Calls(lambda self, x: forward(self.first(x) + 0), first=nn.Linear(6, 8))
    return net.double()


@pytest.mark.parametrize("name", FORWARDS)
def test_recorded(name):
    weight = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    replays(lambda x: FORWARDS[name](x @ weight), X)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", FORWARDS)
def test_coupled_losses(name, way):
    model = model_of(name)
    native = copy.deepcopy(model)
    contrastive(native(X)).backward()
    step = ib.VirtualBatch(model, ib.losses.coupled(contrastive), **WAYS[way])
    for _ in range(2):
        model.zero_grad(set_to_none=True)
        step.backward(X)
        close(grads(model), grads(native))


@pytest.mark.parametrize("name", FORWARDS)
def test_separable_losses(name):
    model = model_of(name)
    native = copy.deepcopy(model)
    wanted = native(X)
    targets = torch.zeros_like(wanted)
    nn.functional.mse_loss(wanted, targets).backward()
    ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=4).backward(X, targets)
    close(grads(model), grads(native))


@pytest.mark.parametrize("options", [dict(micro_batch_size=4), dict(memory_budget="64MiB")])
@pytest.mark.parametrize("name", FORWARDS)
def test_wrapped(name, options):
    model = model_of(name)
    native = copy.deepcopy(model)
    contrastive(native(X)).backward()
    contrastive(ib.wrap(model, **options)(X)).backward()
    close(grads(model), grads(native))
