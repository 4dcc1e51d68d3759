"""What `static_graph` has recorded is recorded anew where the modules are set otherwise."""

import copy
from collections.abc import Callable

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from batch_norm_models import images
from support import Tally
from torch import nn
from wrap_support import close, grads


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        nn.BatchNorm2d(4),
        nn.Tanh(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        Head(),
    ).double()


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 10)
        self.activation = F.relu
        self.calls = Tally()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls()
        return self.linear(self.activation(x))


def exchange(model: nn.Sequential) -> None:
    model[2] = nn.GELU()


CHANGES: dict[str, Callable[[nn.Sequential], object]] = {
    "one layer into eval mode": lambda m: m[1].eval(),
    "momentum": lambda m: setattr(m[1], "momentum", 0.5),
    "eps": lambda m: setattr(m[1], "eps", 0.5),
    "a module without parameters": exchange,
    "a function": lambda m: setattr(m[5], "activation", F.silu),
    "a stride": lambda m: setattr(m[0], "stride", (2, 2)),
    "a hook": lambda m: m[2].register_forward_hook(lambda module, given, found: found * 2),
    "a hook before": lambda m: m[2].register_forward_pre_hook(lambda module, given: given[0] * 2),
}


def stepper(model: nn.Sequential, way: str) -> Callable[..., None]:
    if way == "wrap":
        wrapped = ib.wrap(model, micro_batch_size=4, static_graph=True)
        return lambda x, y: F.cross_entropy(wrapped(x), y).backward()
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4, static_graph=True)
    return lambda x, y: batch.backward(x, y)


@pytest.mark.parametrize("way", ["VirtualBatch", "wrap"])
@pytest.mark.parametrize("change", CHANGES)
def test_another_setting_is_another_recording(change: str, way: str) -> None:
    model = network()
    twin = copy.deepcopy(model)
    step = stepper(model, way)
    for i in range(5):
        if i == 3:
            CHANGES[change](model)
            CHANGES[change](twin)
        inputs, targets = images(8)
        model.zero_grad()
        twin.zero_grad()
        step(inputs, targets)
        F.cross_entropy(twin(inputs), targets).backward()
        close(grads(model), grads(twin), 1e-12)
        statistics = {name: buffer.double() for name, buffer in model.named_buffers()}
        close(statistics, {name: buffer.double() for name, buffer in twin.named_buffers()}, 1e-12)


@pytest.mark.parametrize("way", ["VirtualBatch", "wrap"])
def test_a_counter_that_forward_raises_is_no_other_setting(way: str) -> None:
    model = network()
    step = stepper(model, way)
    inputs, targets = images(8)
    for _ in range(4):  # the fourth looks at rows
        step(inputs, targets)
    calls = model[5].calls.count
    for _ in range(3):
        step(inputs, targets)
    assert 0 < calls == model[5].calls.count
