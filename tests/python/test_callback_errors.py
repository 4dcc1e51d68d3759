"""Memory that runs out while torch calls back: torch only logs it, and the step must not go on as
if the op had not been there. Failures of single allocations are tested from C++."""

import infinitybatch as ib
import pytest
import torch
from torch import nn
from torch.nn import functional as F


class TwoDropouts(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x):
        hidden = F.dropout(self.first(x), 0.3, self.training)
        return self.last(F.dropout(torch.tanh(hidden), 0.3, self.training))


class Clamped(nn.Module):
    """A parameter that forward writes, in a way that does not depend on the samples."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 2)

    def forward(self, x):
        with torch.no_grad():
            self.first.bias.clamp_(-0.2, 0.2)
        return self.last(torch.tanh(self.first(x)))


def task(kind):
    torch.manual_seed(1)
    model = kind().double()
    x, target = torch.randn(7, 4, dtype=torch.double), torch.randn(7, 2, dtype=torch.double)
    torch.manual_seed(3)
    return model, x, target


def state(model):
    grads = [p.grad if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [torch.get_rng_state(), *(p.detach().clone() for p in model.parameters()), *grads]


def assert_equal(found, wanted, **tolerance):
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, **tolerance)


EXACT = dict(rtol=0, atol=0)


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("size", [3, None])
def test_generator_states_need_no_room_in_the_budget(size, wrap):
    """A copy of a generator's state is 5 kB, far more than anything else here."""
    model, x, target = task(TwoDropouts)
    F.mse_loss(model(x), target).backward()
    wanted = state(model)
    outcomes = set()
    for room in range(512, 16384, 512):
        model, x, target = task(TwoDropouts)
        before = state(model)
        budget = ib.memory.stats("cpu").live + room
        options = dict(match_native_rng=True, memory_budget=budget, micro_batch_size=size)
        try:
            if wrap:
                F.mse_loss(ib.wrap(model, **options)(x), target).backward()
            else:
                ib.VirtualBatch(model, nn.MSELoss(), **options).backward(x, target)
        except (ib.Error, torch.OutOfMemoryError):
            outcomes.add("refused")
            if not wrap:  # natively a forward that worked has drawn
                assert_equal(state(model), before, **EXACT)
        else:
            outcomes.add("exact")
            assert_equal(state(model), wanted, rtol=1e-12, atol=1e-14)
    assert outcomes == {"exact", "refused"}


def test_a_parameter_is_put_back_where_there_was_no_room_to_copy_it():
    for place in range(1, 400):
        model, x, target = task(Clamped)
        before = state(model)
        batch = ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=3)
        with ib.memory.fail_allocation(place) as failure:
            try:
                batch.backward(x, target)
            except torch.OutOfMemoryError:
                assert_equal(state(model), before, **EXACT)
        if not failure.failed:
            return
    raise AssertionError("more allocations than thought")


def test_a_generator_of_the_users_is_put_back():
    own = torch.Generator().manual_seed(4)

    class Draws(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 2)

        def forward(self, x):
            x = self.first(x) * torch.rand(1, generator=own, dtype=x.dtype)
            if len(x) < 3:
                raise ValueError("the last micro-batch")
            return x

    model, x, target = task(Draws)
    before = own.get_state()
    with pytest.raises(ValueError, match="the last micro-batch"):
        ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=3).backward(x, target)
    assert torch.equal(own.get_state(), before)
