"""`scale_grad_by_freq` of bags: gradients that counts divide."""

import copy

import infinitybatch as ib
import pytest
import torch
from max_norm_models import (
    CRITERION,
    LENGTH,
    SAMPLES,
    SIZES,
    TOLERANCE,
    WORDS,
    assert_as_native,
    bag_of,
    coupling,
    labels,
    tokens,
    weighted,
    with_offsets,
)
from support import Calls, native, result_of, worst_error
from torch import nn

#: Backward divides by counts; `max_norm` is not the point.
SCALED = {
    "sum": lambda: bag_of(mode="sum", scale_grad_by_freq=True),
    "mean": lambda: bag_of(mode="mean", scale_grad_by_freq=True),
    "padding": lambda: bag_of(mode="sum", padding_idx=2, scale_grad_by_freq=True),
    "mean, padding": lambda: bag_of(mode="mean", padding_idx=2, scale_grad_by_freq=True),
    "offsets": lambda: with_offsets(mode="sum", scale_grad_by_freq=True),
    "mean, offsets": lambda: with_offsets(mode="mean", scale_grad_by_freq=True),
    "last offset": lambda: with_offsets(
        mode="mean", include_last_offset=True, scale_grad_by_freq=True
    ),
    "weighted": lambda: weighted(scale_grad_by_freq=True),
    "weighted, padding": lambda: weighted(scale_grad_by_freq=True, padding_idx=2),
}


@pytest.mark.parametrize("name", SCALED)
def test_bags_scaled_by_frequency(name):
    model = SCALED[name]()
    for found in assert_as_native(model, tokens(), labels(), CRITERION, SIZES):
        sizes = found.report.micro_batch_sizes
        assert found.report.strategy == "cut" or sizes == [SAMPLES]
    ways = [
        {"micro_batch_size": 5, "retained_micro_batches": 1},
        {"micro_batch_size": 5, "static_graph": True},
    ]
    assert_as_native(model, tokens(), None, ib.losses.coupled(coupling), ways)


@pytest.mark.parametrize("options", [{"micro_batch_size": 5}, {"memory_budget": "64MiB"}])
@pytest.mark.parametrize("name", SCALED)
def test_wrapped_bags_scaled_by_frequency(name, options):
    model, x, y = SCALED[name](), tokens(), labels()
    wanted = native(model, CRITERION, x, y)
    own = copy.deepcopy(model)
    loss = CRITERION(ib.wrap(own, **options)(x), y)
    loss.backward(retain_graph=True)
    assert worst_error(result_of(own, loss), wanted) <= TOLERANCE
    own.zero_grad()
    loss.backward()
    assert worst_error(result_of(own, loss), wanted) <= TOLERANCE


def test_a_bag_whose_other_results_are_used():
    def forward(self, x):
        offsets = torch.arange(0, x.numel(), LENGTH)
        sums, _, sizes, _ = torch.embedding_bag(
            self.words, x.reshape(-1), offsets, True, 0, False, None, False, None
        )
        return self.head(sums + sizes[:, None])

    model = Calls(forward, words=nn.Parameter(torch.randn(WORDS, 6)), head=nn.Linear(6, 4)).double()
    with pytest.raises(ib.CouplingError, match="more of its results"):
        ib.VirtualBatch(model, CRITERION, micro_batch_size=4).backward(tokens(), labels())
