"""Static graphs under a budget, where a rehearsal has confirmed recordings before the step itself:
what no recording tells must still be learned, or done by forward."""

import infinitybatch as ib
import pytest
import torch
from measure import assert_within, gradients
from support import Calls
from torch import nn
from torch.nn import functional as F


def steps(model, loss, batches, room=1 << 24, **options):
    """Compares gradients and buffers of a few steps with native's."""
    found = []
    for ours in (True, False):
        torch.manual_seed(0)
        net = model().double()
        if ours:
            budget = ib.memory.stats("cpu").live + room
            step = ib.VirtualBatch(
                net,
                ib.losses.coupled(loss),
                static_graph=True,
                memory_budget=budget,
                **options,
            ).backward
        else:

            def step(x, target, net=net):
                loss(net(x), target).backward()

        seen = []
        for x, target in batches:
            net.zero_grad()
            step(x, target)
            seen.append([p.grad for p in net.parameters()] + [b.clone() for b in net.buffers()])
        found.append(seen)
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


def batches(*sizes):
    g = torch.Generator().manual_seed(1)
    real = dict(generator=g, dtype=torch.double)
    return [(torch.randn(n, 5, **real), torch.randn(n, 4, **real)) for n in sizes]


class Prototypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.prototypes = nn.Parameter(torch.randn(4, 6))

    def forward(self, x):
        return self.first(x), torch.tanh(self.prototypes)


@pytest.mark.parametrize("sizes", [(8, 8, 8), (9, 9, 4), (4, 5), (7,)])
def test_prototypes_stand_once(sizes):
    """As many as micro-batches have rows where the budget asks for two of them."""

    def loss(outputs, target):
        scores = outputs[0] @ outputs[1].t()
        return F.mse_loss(scores, target) + scores.logsumexp(0).sum()

    exact = 0
    for room in range(3000, 24000, 1500):
        try:
            steps(Prototypes, loss, batches(*sizes), room)
        except ib.BudgetExceeded:
            continue
        exact += 1
    assert exact > 3


class Renewed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 4)
        self.register_buffer("average", torch.zeros(6))

    def forward(self, x):
        self.average = self.average * 0.5 + 0.5
        return self.last(self.first(x) + self.average)


@pytest.mark.parametrize("sizes", [(4, 4, 4), (8, 8, 8)])
def test_a_buffer_that_forward_replaces_is_replaced_in_every_step(sizes):
    steps(Renewed, F.mse_loss, batches(*sizes))


def test_shapes_that_depend_on_values_are_a_typed_error():
    def forward(self, x):
        chosen = (x[:, 0] > 0).nonzero()[:, 0]
        return self.last(self.first(x).index_add(0, chosen, self.first(x[chosen])))

    torch.manual_seed(0)
    model = Calls(forward, first=nn.Linear(5, 6), last=nn.Linear(6, 4)).double()
    batch = ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=4, static_graph=True)
    for x, target in batches(8, 8, 8, 8):
        model.zero_grad()
        try:
            batch.backward(x, target)
        except (ib.Unsupported, ib.CouplingError):
            return
        found = gradients(model)
        model.zero_grad()
        F.mse_loss(model(x), target).backward()
        assert_within(found, gradients(model))


def test_kernels_that_could_draw_and_do_not_leave_the_generator_alone():
    def forward(self, x):
        tokens = self.first(x).unflatten(1, (3, 2))
        return self.last(F.scaled_dot_product_attention(tokens, tokens, tokens).flatten(1))

    torch.manual_seed(0)
    model = Calls(forward, first=nn.Linear(5, 6), last=nn.Linear(6, 4)).double()
    batch = ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=4, static_graph=True)
    before = torch.get_rng_state()
    for x, target in batches(8, 8, 8):
        batch.backward(x, target)
        assert torch.equal(torch.get_rng_state(), before)
