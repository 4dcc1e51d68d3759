"""The original's devices: forward on one, backward from another, a model that moves."""

import warnings

import pytest
import simulated_device as sim
import torch
from infinitybatch import InfinityBatch, InfinityBatchWarning, MovedModelNotice, tools
from torch import nn

pytestmark = sim.two_devices
HERE, THERE = (torch.device(torch.get_default_device().type, index) for index in (0, 1))


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double().to(HERE)


def batches(count=2):
    generator = torch.Generator("cpu").manual_seed(5)
    return [
        (
            torch.randn(12, 6, dtype=torch.float64, generator=generator, device="cpu"),
            torch.randint(3, (12,), generator=generator, device="cpu"),
        )
        for _ in range(count)
    ]


def native(epochs):
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(epochs):
        for inputs, targets in batches():
            optimizer.zero_grad()
            outputs = model(inputs.to(HERE))
            nn.functional.cross_entropy(outputs, targets.to(HERE)).backward()
            optimizer.step()
    return model


def manager(**options):
    model = network()
    optimizer = torch.optim.Adam(model.parameters())
    return InfinityBatch(
        model, optimizer, nn.CrossEntropyLoss(), batches(), verbose=False, micro_batch_size=5,
        **options,
    )  # fmt: skip


@pytest.mark.parametrize("backward", ["cpu", THERE, None])
def test_outputs_are_where_backward_begins(backward):
    ib = manager(backward_device=backward)
    assert ib.forward_device == HERE and ib.backward_device == torch.device(backward or HERE)
    for inputs, targets in ib.dataloader:
        outputs = ib.batch_(inputs.to(HERE))
        assert outputs.device == ib.backward_device
        ib.loss(targets)
        ib.backward()
        ib.step()
        ib.zero_grad()
    assert tools.compare_networks(ib.model, native(1), tolerance=1e-12)


def test_changemodeldevice_takes_the_optimizer_with_it():
    ib = manager()
    ib.epoch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ib.changemodeldevice(THERE)
        ib.epoch()
    assert ib.forward_device == THERE
    state = next(iter(ib.optimizer.state.values()))
    assert state["exp_avg"].device == THERE
    assert tools.compare_networks(ib.model, native(2), tolerance=1e-12)


def test_a_model_that_was_moved_behind_its_back_is_noticed():
    ib = manager()
    ib.epoch()
    ib.model.to(THERE)
    with pytest.warns(InfinityBatchWarning, match=f"from {HERE} to {THERE}"):
        with pytest.warns(MovedModelNotice):
            ib.epoch()
    assert ib.forward_device == THERE
    assert tools.compare_networks(ib.model, native(2), tolerance=1e-12)
