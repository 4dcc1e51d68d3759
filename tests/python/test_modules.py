"""What a step finds in modules of every sort: C++ walks over the ordinary ones, Python over the rest."""

import collections
import copy

import infinitybatch as ib
import pytest
import torch
from measure import assert_within, numbered
from torch import nn
from torch.nn import functional


class Hides(nn.Module):
    """Its traversal leaves one submodule out; the sinks find the parameters in the graph."""

    def __init__(self):
        super().__init__()
        self.shown, self.hidden = nn.Linear(4, 6), nn.Linear(6, 3)

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        yield prefix, self
        yield prefix + "shown", self.shown

    def forward(self, x):
        return self.hidden(torch.tanh(self.shown(x)))


class Twice(nn.Module):
    """One layer in two places, one parameter under two names, one that is not there."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = nn.ModuleDict({"same": self.first, "last": nn.Linear(4, 3)})
        self.again = self.inner["last"].weight
        self.nothing = None
        self.register_parameter("absent", None)
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("empty", None)

    def forward(self, x):
        return self.inner["last"](self.inner["same"](torch.tanh(self.first(x)))) * self.scale


class Special(nn.Parameter):
    pass


def special():
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    model[0].weight = Special(model[0].weight.detach())
    return model


def ordered():
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    model._modules = collections.OrderedDict(model._modules)
    return model


def of_instance():
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    model.named_modules = lambda *args, **kwargs: nn.Module.named_modules(model, *args, **kwargs)
    return model


MAKERS = {
    "hides": Hides,
    "twice": Twice,
    "special": special,
    "ordered": ordered,
    "scripted": lambda: torch.jit.script(
        nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    ),
}


SINGLE = 2e-6  # float32, few samples


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("name", MAKERS)
def test_gradients_of_every_sort(name):
    torch.manual_seed(0)
    model, native = MAKERS[name](), MAKERS[name]()
    native.load_state_dict(model.state_dict())
    inputs = torch.randn(7, 4)
    targets = torch.randint(3, (7,))
    ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=3).backward(inputs, targets)
    functional.cross_entropy(native(inputs), targets).backward()
    gradients = [numbered(p.grad for p in nn.Module.parameters(m)) for m in (model, native)]
    assert_within(*gradients, least=SINGLE)


def test_what_changes_between_steps_is_found():
    model = nn.Sequential(nn.Linear(4, 3))
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=3)
    inputs, targets = torch.randn(7, 4), torch.randint(3, (7,))
    for change in (
        lambda: None,
        lambda: setattr(model[0], "weight", nn.Parameter(torch.randn(3, 4))),
        lambda: model.append(nn.Linear(3, 3)),
        lambda: setattr(model[1], "weight", Special(torch.randn(3, 3))),
    ):
        change()
        model.zero_grad()
        batch.backward(inputs, targets)
        native = copy.deepcopy(model)
        native.zero_grad()
        functional.cross_entropy(native(inputs), targets).backward()
        gradients = [numbered(p.grad for p in m.parameters()) for m in (model, native)]
        assert_within(*gradients, least=SINGLE)


def test_what_an_instance_overrides_is_heard():
    model = of_instance()
    calls = []
    inner = model.named_modules
    model.named_modules = lambda *args, **kwargs: calls.append(1) or inner(*args, **kwargs)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=3)
    batch.backward(torch.randn(7, 4), torch.randint(3, (7,)))
    assert calls


@pytest.mark.parametrize("existing", [False, True])
@pytest.mark.parametrize("hooked", [False, True])
def test_grad_after_the_hand_out_with_and_without_hooks(existing, hooked):
    """Without hooks no engine runs; `.grad` is the same object where there was one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    inputs, targets = torch.randn(7, 4).double(), torch.randint(3, (7,))
    native = copy.deepcopy(model)
    grads, calls = [], []
    for parameter, twin in zip(model.parameters(), native.parameters(), strict=True):
        if existing:
            parameter.grad, twin.grad = torch.ones_like(parameter), torch.ones_like(parameter)
        if hooked:
            parameter.register_post_accumulate_grad_hook(calls.append)
        grads.append(parameter.grad)
    ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=3).backward(inputs, targets)
    functional.cross_entropy(native(inputs), targets).backward()
    for parameter, twin, before in zip(model.parameters(), native.parameters(), grads, strict=True):
        torch.testing.assert_close(parameter.grad, twin.grad, rtol=1e-12, atol=1e-14)
        assert parameter.grad.stride() == twin.grad.stride()
        assert not parameter.grad.requires_grad
        assert parameter.grad is before or not existing
    assert len(calls) == (4 if hooked else 0)
