"""A wrapped module is an instance of a subclass of the inner class, with the name, signature and state
of the inner one."""

import abc
import copy
import gc
import inspect
import pickle
import weakref

import infinitybatch as ib
import pytest
import torch
from support import Calls, mlp
from torch import nn
from wrap_support import X, close, contrastive, grads


class Encoder(nn.Module):
    """Has methods beside forward, a class attribute that objects override, and a property."""

    scale = 1.0
    built: list[str] = []

    def __init_subclass__(cls, **_):
        raise TypeError("no subclass of mine")

    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.scale = 2.0
        self._inner = "my own"
        self.seen = 0

    def forward(self, x, mask=None, *, gain: float = 1.0):
        """Says what it does."""
        return self.net(x) * self.scale * gain

    def encode(self, x):
        self.seen += 1
        return self(x).relu()

    @property
    def half(self):
        return self.scale / 2

    @half.setter
    def half(self, value):
        self.scale = 2 * value


def test_it_is_an_instance_of_the_inner_class():
    for inner in (Encoder(), mlp(), nn.Linear(6, 4), ib.wrap(Encoder(), micro_batch_size=3)):
        wrapped = ib.wrap(inner, micro_batch_size=4)
        kind = Encoder if isinstance(inner, Encoder) else type(inner)
        assert isinstance(wrapped, kind) and isinstance(wrapped, ib.Wrapped)
        assert not isinstance(mlp(), ib.Wrapped)
        for name in ("__name__", "__qualname__", "__module__", "__doc__"):
            assert getattr(type(wrapped), name) == getattr(kind, name)
        assert wrapped._get_name() == kind.__name__
        assert ib.unwrap(wrapped) is ib.unwrap(inner) and type(ib.wrap(inner)) is type(wrapped)
    model = mlp()
    assert ib.unwrap(model) is model


def test_signatures_are_the_inner_ones():
    wrapped = ib.wrap(Encoder(), micro_batch_size=4)
    assert inspect.signature(wrapped.forward) == inspect.signature(Encoder().forward)
    assert inspect.signature(type(wrapped).forward) == inspect.signature(Encoder.forward)
    assert inspect.getfullargspec(wrapped.forward) == inspect.getfullargspec(Encoder().forward)
    assert wrapped.forward.__doc__ == Encoder.forward.__doc__
    own = Encoder()
    own.forward = lambda y, z=3: own.net(y)
    assert list(inspect.signature(ib.wrap(own).forward).parameters) == ["y", "z"]
    # Who unwraps functions must not come upon the inner forward, which knows no micro-batches.
    assert not hasattr(wrapped.forward, "__wrapped__")
    wrapped.forward = type(wrapped).forward.__get__(wrapped)
    wrapped(X)
    assert len(wrapped.last_report.micro_batch_sizes) == 4
    del wrapped.forward
    wrapped(X)


def test_methods_run_on_the_wrapped_module():
    inner = Encoder()
    wrapped = ib.wrap(inner, micro_batch_size=4)
    assert wrapped.scale == inner.scale == 2.0 and wrapped.half == 1.0
    wrapped.half = 3.0
    assert inner.scale == wrapped.scale == 6.0 and wrapped._inner == inner._inner == "my own"
    close(wrapped.encode(X), inner.encode(X))
    assert len(wrapped.last_report.micro_batch_sizes) == 4
    assert wrapped.seen == inner.seen == 2
    inner.late = 5
    assert wrapped.late == 5 and "late" in dir(wrapped)
    assert wrapped.__dict__ is inner.__dict__


def test_a_call_of_the_inner_class_runs_once():
    class Doubling(nn.Linear):
        def __call__(self, *args):
            return super().__call__(*args) * 2

    inner = Doubling(6, 4).double()
    close(ib.wrap(inner, micro_batch_size=4)(X), inner(X))


def test_what_is_made_of_its_class_is_a_plain_module():
    wrapped = ib.wrap(mlp(), micro_batch_size=4)
    assert type(wrapped[:2]) is nn.Sequential and len(wrapped[:2]) == 2
    assert type(type(wrapped)(nn.Tanh())) is nn.Sequential


def test_an_apply_of_the_inner_class_s_own():
    class Functional(nn.Module):
        def apply(self, left, right=2):
            return left * right

    assert ib.wrap(Functional()).apply(3, right=5) == 15


class Meta(abc.ABCMeta):
    def __init__(cls, name, bases, namespace):
        super().__init__(name, bases, namespace)
        known.append(name)


known: list[str] = []


class Registered(nn.Module, metaclass=Meta):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        return self.net(x)


class Slotted(nn.Module):
    __slots__ = ("factor",)

    def __init__(self):
        super().__init__()
        self.net = mlp()
        object.__setattr__(self, "factor", 2.0)

    def forward(self, x):
        return self.net(x) * self.factor


class Table(nn.Module, dict):  # Python makes no object of such a class beside another's state
    def __init__(self):
        super().__init__()
        self.net = mlp()
        self["a"] = 1

    __eq__, __hash__ = object.__eq__, object.__hash__

    def forward(self, x):
        return self.net(x) * self["a"]

    def entries(self):
        return len(self)


class Proxy(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("net"), name)

    def forward(self, x):
        return self.net(x)


@pytest.mark.parametrize("make", [Registered, Slotted, Table, Proxy])
def test_classes_of_every_kind(make):
    inner = make()
    names = list(known)
    wrapped = ib.wrap(inner, micro_batch_size=4)
    assert known == names  # no class of its own is registered
    parameters = list(inner.parameters())
    close(
        torch.autograd.grad(contrastive(wrapped(X)), parameters),
        torch.autograd.grad(contrastive(inner(X)), parameters),
    )
    assert len(wrapped.last_report.micro_batch_sizes) == 4
    assert isinstance(wrapped, make) == (make is not Table)
    if make is Table:
        assert wrapped.entries() == 1
    if make is Proxy:
        assert wrapped.append(nn.Tanh()) is inner.net
    if make is Slotted:
        wrapped.factor = 3.0
        assert inner.factor == 3.0
        return  # torch copies no module that has slots
    other = copy.deepcopy(wrapped)
    close(other(X), wrapped(X))
    assert ib.unwrap(other) is not inner and type(ib.unwrap(other)) is make


def test_a_graph_module():
    inner = torch.fx.symbolic_trace(Encoder())
    wrapped = ib.wrap(inner, micro_batch_size=4)
    close(wrapped(X), inner(X))
    wrapped.recompile()
    wrapped.graph = inner.graph
    wrapped(X)
    assert len(wrapped.last_report.micro_batch_sizes) == 4
    close(copy.deepcopy(wrapped)(X), inner(X))
    assert wrapped.code == inner.code


def test_a_scripted_module():
    inner = torch.jit.script(mlp())
    wrapped = ib.wrap(inner, micro_batch_size=4)
    for module in (wrapped, copy.deepcopy(wrapped)):
        with torch.no_grad():
            close(module(X), inner(X))
        assert len(module.last_report.micro_batch_sizes) == 4
    assert not wrapped.eval().training and not inner.training


def test_a_class_that_changes_later():
    """As `parametrize` and lazy modules do it."""
    inner = nn.Linear(6, 5).double()
    wrapped = ib.wrap(inner, micro_batch_size=4)
    torch.nn.utils.parametrizations.weight_norm(inner)
    close(wrapped(X), inner(X))
    close(wrapped.weight, inner.weight)
    lazy = nn.LazyLinear(5, dtype=torch.float64)
    wrapped = ib.wrap(lazy, micro_batch_size=4)
    with torch.no_grad():
        lazy(X)
    close(wrapped(X), lazy(X))


def test_hooks_are_its_own():
    inner = nn.Linear(6, 5).double()
    fired = []
    inner.register_forward_hook(lambda m, args, out: fired.append((m, len(out))))
    wrapped = ib.wrap(inner, micro_batch_size=7)
    wrapped.register_forward_hook(lambda m, args, out: fired.append((m, len(out))))
    wrapped.register_forward_pre_hook(lambda m, args, kw: fired.append((m, 0)), with_kwargs=True)
    wrapped(X)
    # Looks are undone, and of two micro-batches the list keeps one call, as of one forward.
    assert fired == [(wrapped, 0), (inner, 6), (wrapped, 13)]
    other = pickle.loads(pickle.dumps(ib.wrap(nn.Linear(6, 5))))
    assert not other._forward_hooks


def test_classes_go_with_the_last_module():
    inner = torch.fx.symbolic_trace(mlp())
    wrapped = ib.wrap(inner, micro_batch_size=4)
    gone = weakref.ref(type(wrapped)), weakref.ref(type(inner))
    del inner, wrapped
    gc.collect()
    assert [kind() for kind in gone] == [None, None]


def test_data_parallel_is_refused():
    wrapped = ib.wrap(mlp(), micro_batch_size=4)
    with pytest.raises(ib.Unsupported, match="DistributedDataParallel"):
        wrapped._replicate_for_data_parallel()


# ---- Programs of a wrapped module: exact or refused, never that of one micro-batch --------------


def test_torch_jit_refuses():
    wrapped = ib.wrap(mlp(), micro_batch_size=4)
    for module in (wrapped, nn.Sequential(wrapped)):
        with pytest.raises(ib.Unsupported, match="ib.unwrap"):
            torch.jit.trace(module, X)
        with pytest.raises(ib.Unsupported, match="ib.unwrap"):
            torch.jit.script(module)
    traced = torch.jit.trace(ib.unwrap(wrapped), X)
    assert len(traced(X.repeat(2, 1))) == 26


def test_symbolic_trace_refuses_or_calls():
    wrapped = ib.wrap(Encoder(), micro_batch_size=4)
    with pytest.raises(ib.Unsupported, match="ib.unwrap"):
        torch.fx.symbolic_trace(wrapped)
    around = nn.Sequential(ib.wrap(nn.Linear(6, 5).double(), micro_batch_size=4), nn.Tanh())
    traced = torch.fx.symbolic_trace(around)  # a layer of torch's is one call of it
    close(traced(X), around(X))


@pytest.mark.parametrize("strict", [False, True])
def test_torch_export_refuses(strict):
    wrapped = ib.wrap(mlp(), micro_batch_size=4)
    with pytest.raises(Exception, match="ib.unwrap"):
        torch.export.export(wrapped, (X,), strict=strict)
    exported = torch.export.export(ib.unwrap(wrapped), (X,), strict=strict)
    close(exported.module()(X), wrapped(X))


@pytest.mark.parametrize("method", [False, True])
def test_torch_compile_calls(method):
    inner = mlp()
    wrapped = ib.wrap(inner, micro_batch_size=4)
    if method:
        wrapped.compile(backend="eager")
        compiled = wrapped
    else:
        compiled = torch.compile(wrapped, backend="eager")
    for rows in (13, 10):
        inner.zero_grad()
        contrastive(inner(X[:rows])).backward()
        wanted = {n: g.clone() for n, g in grads(inner).items()}
        inner.zero_grad()
        contrastive(compiled(X[:rows])).backward()
        close(grads(inner), wanted)
        assert sum(wrapped.last_report.micro_batch_sizes) == rows


def test_a_list_with_one_tensor_for_each_sample_is_explained():
    def forward(self, images):
        return torch.stack([self.net(image).mean((1, 2)) for image in images])

    images = [torch.randn(3, 8 + i, 8) for i in range(5)]
    wrapped = ib.wrap(Calls(forward, net=nn.Conv2d(3, 4, 3)), micro_batch_size=2)
    with pytest.raises(
        ib.BatchError, match="inputs.* is a list of 5 tensors.*torch.stack"
    ) as caught:
        wrapped(images)
    assert type(caught.value.__cause__) is RuntimeError  # the model's own
