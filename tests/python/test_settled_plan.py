"""A plan that is settled says so in the report, whatever else the user keeps alive."""

import infinitybatch as ib
import pytest
import torch

pytestmark = pytest.mark.alone


def steps_until_settled(keep: list) -> int:
    """Steps of a small job; each step's loss is kept, so that every step finds more alive."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
    inputs, targets = torch.randn(64, 8), torch.randint(3, (64,))
    batch = ib.VirtualBatch(model, torch.nn.CrossEntropyLoss(), memory_budget="64MiB")
    for step in range(1, 100):
        model.zero_grad(set_to_none=True)
        report = batch.backward(inputs, targets)
        keep.append(report.loss)
        if report.predicted_peak_bytes is not None:
            assert report.predicted_peak_bytes == report.peak_bytes
            return step
    raise AssertionError("100 steps without a prediction")


def test_keeping_every_loss_does_not_hide_the_prediction():
    losses: list[torch.Tensor] = []
    assert steps_until_settled(losses) < 50
