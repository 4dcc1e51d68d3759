"""Methods of a wrapped module beside forward: computed in micro-batches where they are named, told of
where they pass them by."""

import contextlib
import copy
import inspect
import pickle
import warnings

import infinitybatch as ib
import pytest
import torch
from support import mlp
from torch import nn
from wrap_support import X, close, contrastive


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = mlp(), mlp()
        self.calls = 0

    def forward(self, x, y):
        return self.encode(x) * self.get_right(y)

    def encode(self, x, scale: float = 1.0):
        """Of the left tower."""
        self.calls += 1
        return self.left(x) * scale

    def get_right(self, y):
        return self.right(y)

    def training_step(self, batch, number):
        return contrastive(self(batch, batch))

    def get_towers(self):
        return [self.left, self.right]

    def penalty(self, weight):
        return weight * sum(p.pow(2).sum() for p in self.parameters())

    def distance(self, outputs, targets):
        return (outputs - targets).pow(2).mean()

    @torch.no_grad()
    def predict(self, x):
        return self.left(x)

    def fit(self, x):
        self.left(x).sum().backward()

    def _inside(self, x):
        return self.left(x)


@contextlib.contextmanager
def quiet():
    with warnings.catch_warnings():
        warnings.simplefilter("error", ib.UnwrappedMethodNotice)
        yield


def sizes(module):
    report = module.last_report
    return None if report is None else report.micro_batch_sizes


def test_named_methods_are_computed_in_micro_batches():
    inner = TwoTowers()
    wrapped = ib.wrap(inner, micro_batch_size=4, methods=("encode", "_inside"))
    assert inspect.signature(wrapped.encode) == inspect.signature(inner.encode)
    assert wrapped.encode.__doc__ == inner.encode.__doc__
    parameters = list(inner.left.parameters())
    with quiet():
        for name in ("encode", "_inside"):
            found, wanted = (contrastive(getattr(m, name)(X)) for m in (wrapped, inner))
            assert sizes(wrapped) == [4, 4, 4, 1]
            close(torch.autograd.grad(found, parameters), torch.autograd.grad(wanted, parameters))
        # Two of them in one loss, and beside forward.
        found, wanted = (
            contrastive(m.encode(X, scale=2.0)) * m(X, X).pow(2).sum() for m in (wrapped, inner)
        )
        parameters = list(inner.parameters())
        close(torch.autograd.grad(found, parameters), torch.autograd.grad(wanted, parameters))


def test_what_is_set_on_the_inner_module_runs_in_micro_batches():
    inner = TwoTowers()
    inner.encode = lambda x, power=2: inner.left(x) ** power
    wrapped = ib.wrap(inner, micro_batch_size=4, methods=("encode", "get_right"))
    assert list(inspect.signature(wrapped.encode).parameters) == ["x", "power"]
    inner.get_right = lambda y: inner.right(y) * 3
    for name in ("encode", "get_right"):
        close(getattr(wrapped, name)(X), getattr(inner, name)(X))
        assert sizes(wrapped) == [4, 4, 4, 1]
    wrapped.encode = lambda x: x
    assert wrapped.encode(X) is X
    del wrapped.encode
    close(wrapped.encode(X), inner.encode(X))


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]
)
def test_copies_and_further_wrappers_keep_them(copied):
    wrapped = ib.wrap(TwoTowers(), micro_batch_size=4, methods=("encode",))
    for module, size in ((copied(wrapped), 4), (ib.wrap(wrapped, micro_batch_size=6), 6)):
        close(module.encode(X), wrapped.encode(X))
        assert sizes(module)[0] == size


def test_a_method_under_a_budget_and_with_layers_that_see_the_batch():
    inner = TwoTowers()
    inner.left.append(nn.BatchNorm1d(5).double())
    native = copy.deepcopy(inner)
    wrapped = ib.wrap(inner, memory_budget="64MiB", micro_batch_size=4, methods=("encode",))
    for module in (native, wrapped):
        contrastive(module.encode(X)).backward()
    assert len(sizes(wrapped)) == 4
    close([p.grad for p in inner.left.parameters()], [p.grad for p in native.left.parameters()])
    close(dict(inner.named_buffers()), dict(native.named_buffers()))


@pytest.mark.parametrize("name", ["encode", "get_right", "fit"])
def test_a_method_that_passes_micro_batches_by_tells_once(name):
    wrapped = ib.wrap(TwoTowers(), micro_batch_size=4)
    with pytest.warns(ib.UnwrappedMethodNotice, match=f'IB105.*methods=\\("{name}",\\)') as told:
        found = getattr(wrapped, name)(X)
    assert len(told) == 1 and told[0].filename == __file__
    with quiet():
        getattr(wrapped, name)(X)
    if found is not None:
        close(found, getattr(ib.unwrap(wrapped), name)(X))


def test_harmless_methods_are_silent():
    wrapped = ib.wrap(TwoTowers(), micro_batch_size=4)
    with quiet():
        for _ in range(2):
            wrapped.training_step(X, 0).backward()
            assert sizes(wrapped) == [4, 4, 4, 1]
            assert len(wrapped.get_towers()) == 2
            wrapped.penalty(X[0, 0]).backward()
            wrapped.distance(wrapped(X, X), X[:, :5]).backward()
            wrapped.predict(X)
            with torch.no_grad():
                wrapped.encode(X)
    assert not torch.nn.modules.module._has_any_global_hook()


def test_the_innermost_method_is_named():
    class Outer(TwoTowers):
        def optimizer_step(self, x):
            return self.encode(x), self(x, x), self.get_right(x)

    wrapped = ib.wrap(Outer(), micro_batch_size=4)
    with pytest.warns(ib.UnwrappedMethodNotice) as told:
        wrapped.optimizer_step(X)
    assert [str(w.message).split()[1] for w in told] == ["Outer.encode", "Outer.get_right"]


def test_after_an_exception_nothing_is_watched():
    wrapped = ib.wrap(TwoTowers(), micro_batch_size=4)
    with pytest.raises(RuntimeError):
        wrapped.get_right(X[:, :2])
    assert not torch.nn.modules.module._has_any_global_hook()
    wrapped(X, X)


@pytest.mark.parametrize(
    ("methods", "error", "match"),
    [
        ("encode", ib.InvalidType, "tuple of names"),
        ((3,), ib.InvalidType, "tuple of names"),
        (("encoed",), ib.InvalidArgument, "encoed"),
        (("forward",), ib.InvalidArgument, "beside forward"),
        (("train",), ib.InvalidArgument, "nn.Module"),
        (("left",), ib.InvalidArgument, "left"),
    ],
)
def test_names_that_cannot_be(methods, error, match):
    with pytest.raises(error, match=match):
        ib.wrap(TwoTowers(), micro_batch_size=4, methods=methods)
