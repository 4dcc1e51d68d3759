"""A step that begins again has changed something each time: none goes on for ever."""

import copy
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from support import Calls, native, ours, result_of, worst_error
from torch import nn

MiB = 1 << 20
MOST = 1000  #: forwards of a step that ends


def test_a_loss_that_does_not_fit_beside_a_forward_that_keeps_nothing() -> None:
    """Segments of forward, which was a view, were made smaller for it, and took no less."""
    calls = [0]

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        assert calls[0] < MOST
        return x.view(len(x), -1)

    def total(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        scores = F.cross_entropy(model.head(outputs), targets, reduction="sum")
        return scores + 0 * torch.zeros(64 * MiB // 4).sum()

    model = Calls(forward, head=nn.Linear(64, 10))
    loss = ib.losses.separable(total, lambda targets, count: count)
    batch = ib.VirtualBatch(model, loss, memory_budget=ib.memory.stats().live + 32 * MiB)
    with pytest.raises(ib.BudgetExceeded, match=r"needs at least 64\.\d MiB"):
        batch.backward(torch.randn(8, 64), torch.randint(10, (8,)))
    assert calls[0] < 20


def test_a_wrapped_model_within_one_that_finds_no_room() -> None:
    """What the outer one's attempt had made itself, the graphs of calls of the inner one, was let go
    of and made again by each attempt."""
    calls = [0]

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        calls[0] += 1
        assert calls[0] < MOST
        h = self.inner(x)
        return h + h.new_zeros(len(x), 4_000_000)[:, :64]  # 16 MB a sample

    torch.manual_seed(0)
    linear = nn.Linear(64, 64)
    inner = ib.wrap(linear, memory_budget="1GiB", micro_batch_size=1, retained_micro_batches=1)
    x = torch.randn(16, 64)
    linear(x).square().sum().backward()
    wanted = [p.grad.clone() for p in linear.parameters()]
    linear.zero_grad()
    budget = ib.memory.stats().live + 48 * MiB
    wrapped = ib.wrap(Calls(forward, inner=inner), memory_budget=budget)
    wrapped(x).square().sum().backward()
    torch.testing.assert_close([p.grad for p in linear.parameters()], wanted, rtol=1e-4, atol=3e-5)
    assert wrapped.last_report.peak_bytes <= budget


def test_seeds_of_an_own_generator_beside_a_layer_of_the_whole_batch() -> None:
    """The same numbers in each micro-batch, as natively: ops hold the states that they began with."""
    generator = torch.Generator()

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        generator.manual_seed(7)
        h = self.norm(self.first(x) * torch.rand(6, generator=generator, dtype=x.dtype))
        generator.manual_seed(9)
        h = self.last(h * torch.rand(6, generator=generator, dtype=x.dtype))
        generator.manual_seed(11)
        return h

    torch.manual_seed(0)
    model = Calls(forward, first=nn.Linear(6, 6), norm=nn.BatchNorm1d(6), last=nn.Linear(6, 5))
    model.double()
    x, y = torch.randn(16, 6).double(), torch.randint(5, (16,))
    wanted = native(model, nn.CrossEntropyLoss(), x, y)
    for budget in ({"micro_batch_size": 4}, {"memory_budget": ib.memory.stats().live + 64 * MiB}):
        assert worst_error(ours(model, nn.CrossEntropyLoss(), x, y, **budget), wanted) < 1e-12
        found = copy.deepcopy(model)
        loss = F.cross_entropy(ib.wrap(found, **budget)(x), y)
        loss.backward()
        assert worst_error(result_of(found, loss), wanted) < 1e-12
