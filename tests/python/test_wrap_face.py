"""A wrapped module is the face of the inner one: what that one has of its own is what runs."""

import copy
import pickle

import infinitybatch as ib
import pytest
import torch
from support import mlp
from torch import nn
from wrap_support import X, Y, close


class Own(nn.Module):
    """Overrides what a module may: each call is noted."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head = nn.Linear(6, 8).double(), nn.Linear(8, 4).double()
        self.calls = []
        self.type = "own"

    def forward(self, x):
        return self.head(self.backbone(x).relu())

    def parameters(self, recurse=True):
        return self.head.parameters(recurse)

    def requires_grad_(self, requires_grad=True):
        self.head.requires_grad_(requires_grad)
        return self

    def zero_grad(self, set_to_none=True):
        self.calls.append("zero_grad")
        super().zero_grad(set_to_none)

    def eval(self):
        self.calls.append("eval")
        return super().eval()

    def to(self, *args, **kwargs):
        self.calls.append("to")
        return super().to(*args, **kwargs)

    def named_modules(self, memo=None, prefix="", remove_duplicate=True):
        self.calls.append("named_modules")
        return super().named_modules(memo, prefix, remove_duplicate)

    def frozen(self):
        return self

    def sizes(self):
        return [p.numel() for p in self.backbone.parameters()]


@pytest.mark.parametrize("layers", [1, 2])
def test_what_the_inner_class_overrides_runs(layers):
    inner = Own()
    wrapped = inner
    for _ in range(layers):
        wrapped = ib.wrap(wrapped, micro_batch_size=4)
    assert len(list(wrapped.parameters())) == 2
    assert wrapped.requires_grad_(False) is wrapped
    assert inner.backbone.weight.requires_grad and not inner.head.weight.requires_grad
    wrapped.zero_grad()
    assert wrapped.eval() is wrapped and not inner.training
    assert wrapped.to(torch.float32) is wrapped and inner.head.weight.dtype == torch.float32
    assert inner.calls == ["zero_grad", "eval", "to"]
    assert wrapped.float() is wrapped and wrapped.train() is wrapped and inner.training
    assert wrapped.type == "own"
    wrapped.type = "other"
    assert inner.type == wrapped.type == "other"


def test_among_modules_stands_the_wrapped_one():
    wrapped = ib.wrap(Own(), micro_batch_size=4)
    for module in (wrapped, ib.wrap(mlp(), micro_batch_size=4)):
        assert next(module.modules()) is module and dict(module.named_modules())[""] is module
        around = nn.Sequential(module)
        assert list(around.modules())[1] is module
    assert wrapped.calls
    named = [name for name, _ in nn.Sequential(wrapped).named_modules()]
    assert named == ["", "0", "0.backbone", "0.head"]


def test_methods_that_return_the_module_return_the_wrapped_one():
    wrapped = ib.wrap(Own(), micro_batch_size=4)
    assert wrapped.frozen() is wrapped and wrapped.sizes() == [48, 8]
    assert pickle.loads(pickle.dumps(wrapped.sizes))() == [48, 8]
    outer = ib.wrap(wrapped, micro_batch_size=4)
    assert outer.frozen() is outer


def test_apply_sees_the_inner_module():
    seen = []
    inner = nn.Linear(6, 4)
    wrapped = ib.wrap(inner, micro_batch_size=4)
    assert wrapped.apply(seen.append) is wrapped
    nn.Sequential(wrapped).apply(seen.append)
    assert seen[:2] == [inner, inner]


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_keep_what_is_overridden(copied):
    wrapped = ib.wrap(Own(), micro_batch_size=4)
    other = copied(wrapped)
    other.zero_grad()
    assert other.calls == ["zero_grad"] and wrapped.calls == []
    assert other.frozen() is other and len(list(other.parameters())) == 2
    close(other(X), wrapped(X))


def test_what_is_set_on_the_inner_object_runs():
    """As accelerate does with `to`."""
    inner = mlp()
    wrapped = ib.wrap(inner, micro_batch_size=4)
    inner.to = lambda *_: "moved"
    assert wrapped.to("cpu") == "moved"


def hooked(module, log):
    module.register_state_dict_pre_hook(lambda *_: log.append("save"))
    module.register_state_dict_post_hook(lambda *_: log.append("saved"))
    module.register_load_state_dict_pre_hook(lambda *_: log.append("load"))
    module.register_load_state_dict_post_hook(lambda *_: log.append("loaded"))
    module._register_state_dict_hook(lambda *_: log.append("saved, private"))
    module._register_load_state_dict_pre_hook(lambda *_: log.append("load, private"))
    return module


@pytest.mark.parametrize("child", [False, True])
@pytest.mark.parametrize("copied", [lambda m: m, copy.deepcopy, copy.copy])
def test_hooks_on_the_state_fire_once(child, copied):
    def calls(make, on_inner):
        log = []
        inner = nn.Linear(6, 4)
        if on_inner:
            module = make(hooked(inner, log))
        else:
            module = hooked(make(inner), log)
        for around in (module, make(module)):
            around = nn.Sequential(copied(around)) if child else copied(around)
            around.load_state_dict(around.state_dict())
        return log

    for on_inner in (False, True):
        wanted = calls(lambda m: m, on_inner)
        assert len(wanted) == 12
        assert calls(lambda m: ib.wrap(m, micro_batch_size=4), on_inner) == wanted


def test_copies_of_the_inner_module_know_hooks_set_on_the_wrapped_one():
    log = []
    inner = nn.Linear(6, 4)
    hooked(ib.wrap(inner, micro_batch_size=4), log)
    other = copy.deepcopy(inner)
    other.load_state_dict(other.state_dict())
    assert len(log) == 6


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_an_empty_batch_is_run_natively(mode):
    inner = mlp()
    wrapped = ib.wrap(inner, micro_batch_size=4)
    with mode():
        assert wrapped(X[:0]).shape == (0, 5)
        assert wrapped(input=ib.batch_dim(X[:0], 0)).shape == (0, 5)
        with pytest.raises(ib.BatchError, match="nothing to split"):
            wrapped(3)
        with pytest.raises(ib.BatchError):
            wrapped({"a": X[:0], "b": X})
    for loss in (torch.Tensor.sum, torch.Tensor.mean):  # gradients of zero, and of no number
        found, wanted = (
            torch.autograd.grad(loss(m(X[:0])), list(inner.parameters())) for m in (wrapped, inner)
        )
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    with pytest.raises(ib.BatchError, match="inputs is empty: it has 0 samples"):
        ib.VirtualBatch(inner, nn.CrossEntropyLoss()).backward(X[:0], Y[:0])
