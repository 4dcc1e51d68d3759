"""A single sample whose graph does not fit: its tape is cut for memory and played segment by segment."""

from __future__ import annotations

import copy
from collections.abc import Callable

import infinitybatch as ib
import pytest
import torch
from checkpoint_models import (
    MODELS,
    TOLERANCE,
    Chain,
    CountedChain,
    make,
)
from measure import gradients
from support import Calls, Log, gradient_error, looks, native_gradients
from torch import nn


class Shared(nn.Module):
    """One weight on both sides of every cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            x = x + torch.tanh(self.layer(x))
        return self.head(x)


@pytest.mark.parametrize("segments", [2, 3, 7, 50])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_whole_batch(name: str, size: int, segments: int) -> None:
    model, inputs, targets = make(name)
    wanted = native_gradients(model, nn.MSELoss(), inputs, targets)
    batch = ib.VirtualBatch(
        model, nn.MSELoss(), micro_batch_size=size, checkpoint_segments=segments
    )
    for step in range(3):  # replayed, then kept while user code runs
        model.zero_grad()
        report = batch.backward(inputs, targets)
        assert report.strategy == "checkpoint"
        assert gradient_error(model, wanted) <= TOLERANCE, step


@pytest.mark.parametrize("name", MODELS)
def test_user_code_runs_once_for_each_micro_batch(name: str) -> None:
    model, inputs, targets = make(name)
    calls = Log()
    model.register_forward_hook(lambda *_: calls.append(1))
    batch = ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=2, checkpoint_segments=4)
    for step in range(2):
        calls.clear()
        batch.backward(inputs, targets)
        counts = name == "counting" and step == 0  # buffers that may count samples are asked about
        assert len(calls) == 3 + looks(step) + counts


MAKERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "arange": lambda h: torch.arange(h.shape[1]),
    "zeros": lambda h: torch.zeros(h.shape[1]),
    "full": lambda h: torch.full((h.shape[1],), 0.5),
    "eye": lambda h: torch.eye(h.shape[1])[0],
    "linspace": lambda h: torch.linspace(0, 1, h.shape[1]),
    "tensor": lambda h: torch.tensor([0.5] * h.shape[1]),
    "new": lambda h: h.new_ones(h.shape[1]),
}


@pytest.mark.parametrize("segments", [2, 3, 7])
@pytest.mark.parametrize("maker", MAKERS)
def test_a_cut_in_front_of_an_op_that_makes_a_tensor(maker: str, segments: int) -> None:
    """It runs below autograd, and the graph of the last segment begins in front of it."""

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            x = x + MAKERS[maker](x)
        return x

    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))
    model = Calls(forward, layers=layers).double()
    inputs, targets = torch.randn(2, 6, 6, dtype=torch.float64)
    wanted = native_gradients(model, nn.MSELoss(), inputs, targets)
    batch = ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=2, checkpoint_segments=segments)
    for step in range(2):
        model.zero_grad()
        assert batch.backward(inputs, targets).strategy == "checkpoint"
        assert gradient_error(model, wanted) <= TOLERANCE, step


@pytest.mark.parametrize("autocast", [False, True], ids=["as it is", "autocast"])
@pytest.mark.parametrize("name", [*MODELS, "shared"])
def test_a_graph_that_is_kept_gives_the_bits_of_one_that_is_played(
    name: str, autocast: bool
) -> None:
    if name == "shared":
        torch.manual_seed(0)
        model, inputs, targets = Shared(), torch.randn(6, 8), torch.randn(6, 1)
    else:
        model, inputs, targets = make(name)
    model, inputs, targets = model.float(), inputs.float(), targets.float()
    batch = ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=6, checkpoint_segments=3)
    steps = []
    for _ in range(3):  # the first step plays the last segment, the others have kept its graph
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            report = batch.backward(inputs, targets)
        steps.append([report.loss, *(parameter.grad for parameter in model.parameters())])
    for step in steps[1:]:
        assert all(map(torch.equal, steps[0], step))


def test_the_last_segment_is_computed_once() -> None:
    model = CountedChain(9)
    inputs, targets = torch.randn(4, 8, 8), torch.randn(4, 8)
    batch = ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=4, checkpoint_segments=3)
    batch.backward(inputs, targets)
    model.take_counts()
    batch.backward(inputs, targets)
    counts = model.take_counts()
    assert counts == sorted(counts, reverse=True)
    assert set(counts) == {1, 2}
    assert counts.count(1) >= 3


@pytest.mark.parametrize("when", ["at once", "behind"])
@pytest.mark.parametrize("how", ["register_hook", "retain_grad"])
def test_a_hook_on_any_value_is_noticed_in_later_steps(when: str, how: str) -> None:
    """Also on what waits at the last cut, set in front of it or behind."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(6)])
            self.place = -1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            between = []
            for layer in self.layers:
                for step in (layer, torch.tanh):
                    x = step(x)
                    between.append(x)
                    if when == "at once" and len(between) == self.place + 1:
                        self.hook(x)
            if when == "behind" and self.place >= 0:
                self.hook(between[self.place])
            return x

        def hook(self, x: torch.Tensor) -> None:
            if how == "register_hook":
                x.register_hook(lambda gradient: 2 * gradient)
            else:
                x.retain_grad()

    model = Model()
    inputs, targets = torch.randn(4, 8), torch.randn(4, 8)
    for place in range(12):
        batch = ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=4, checkpoint_segments=3)
        model.place = -1
        for _ in range(2):
            batch.backward(inputs, targets)
        model.zero_grad()
        model.place = place
        with pytest.raises(ib.Unsupported, match=r"hook was set|retain_grad|graph node was set"):
            batch.backward(inputs, targets)
        assert all(parameter.grad is None for parameter in model.parameters())


def test_masks_of_replayed_segments_are_those_of_the_recording() -> None:
    torch.manual_seed(0)
    model = Chain(12, 8, dropout=0.4).double()
    inputs = torch.randn(4, 10, 8, dtype=torch.float64)
    targets = torch.randn(4, 1, dtype=torch.float64)
    whole = copy.deepcopy(model)
    batch = ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=4, checkpoint_segments=5)
    for step in range(3):
        torch.manual_seed(step)
        whole.zero_grad()
        loss = nn.MSELoss()(whole(inputs), targets)
        loss.backward()
        after = torch.get_rng_state()
        torch.manual_seed(step)
        model.zero_grad()
        report = batch.backward(inputs, targets)
        assert torch.equal(report.loss, loss.detach())
        assert torch.equal(torch.get_rng_state(), after)
        assert gradient_error(model, gradients(whole)) <= TOLERANCE
