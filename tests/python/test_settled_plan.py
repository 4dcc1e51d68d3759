"""A plan that is settled says so in the report, whatever else the user keeps alive."""

import infinitybatch as ib
import pytest
import torch

pytestmark = [pytest.mark.alone, pytest.mark.real_times]


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


def seconds_of_candidates() -> list[tuple[int, float]]:
    model = torch.nn.Linear(8, 3)
    inputs, targets = torch.randn(64, 8), torch.randint(3, (64,))
    batch = ib.VirtualBatch(model, torch.nn.CrossEntropyLoss(), memory_budget="64MiB")
    for _ in range(4):
        batch.backward(inputs, targets)
    candidates = batch.plan(inputs, targets).candidates
    return [
        (candidate.micro_batch_size, candidate.seconds_per_sample)
        for candidate in candidates
        if candidate.seconds_per_sample is not None
    ]


def test_clocks_count_where_nothing_is_assumed():
    ib._C._assume_times((3.0, 0.5, 0.0))
    for size, seconds in seconds_of_candidates():
        assert seconds == pytest.approx(3 / size + 0.5)
    ib._C._assume_times(None)
    found = seconds_of_candidates()
    assert found and all(0 < seconds < 0.1 for _, seconds in found)
