"""Mappings of classes that torch's pytrees do not know keep their class, in forward and out of it."""

import collections.abc
import copy
import types
import weakref

import infinitybatch as ib
import pytest
import torch
from support import Calls, mlp
from torch import nn
from wrap_support import X, Y, close, contrastive, grads


class ByAttribute(dict):
    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class IsItsAttributes(dict):
    def __init__(self, **items):
        super().__init__(**items)
        self.__dict__ = self


class CopiesToAttributes(dict):
    def __init__(self, **items):
        super().__init__(**items)
        vars(self).update(items)


class OfUser(collections.UserDict):
    """As the `BatchEncoding` of transformers is."""

    def __init__(self, **items):
        super().__init__(items)
        self.note = "kept"

    def __getattr__(self, name):
        if name == "data" or name not in self.data:
            raise AttributeError(name)
        return self.data[name]


class Noted(ByAttribute):
    def __init__(self, **items):
        super().__init__(**items)
        vars(self)["note"] = "kept"


class SetsItems(dict):
    __getattr__ = dict.get
    __setattr__ = dict.__setitem__


KINDS = [SetsItems, ByAttribute, IsItsAttributes, CopiesToAttributes, OfUser, Noted]


def run(kind):
    """Reads what it is given by attributes, and gives back an object of the same class."""

    def forward(self, batch):
        assert type(batch) is kind and list(batch) == ["x", "scale"]
        assert batch.x is batch["x"] and getattr(batch, "note", None) in (None, "kept")
        return [kind(logits=self.net(batch.x) * batch.scale, kind=3)]

    return Calls(forward, net=mlp())


@pytest.mark.parametrize("size", [4, 13])
@pytest.mark.parametrize("kind", KINDS)
def test_their_class_is_kept(kind, size):
    inner = run(kind)
    native = copy.deepcopy(inner)
    given = kind(x=X, scale=2.0)
    (wanted,), (found,) = native(given), ib.wrap(inner, micro_batch_size=size)(given)
    assert type(found) is kind and list(found) == ["logits", "kind"]
    assert found.logits is found["logits"] and found.kind == 3
    assert vars(found).keys() == vars(wanted).keys()
    assert given["x"] is X and given.x is X
    contrastive(wanted.logits).backward()
    contrastive(found.logits).backward()
    close(grads(inner), grads(native))


def test_nested_and_marked():
    def forward(self, batch):
        inside = batch.inside
        assert type(inside) is IsItsAttributes and inside.whole.shape == (3,)
        return ByAttribute(out=IsItsAttributes(z=self.net(inside.x) * inside.whole.sum()))

    inner = Calls(forward, net=mlp())
    whole = torch.ones(3).double()
    given = ByAttribute(inside=IsItsAttributes(x=X, whole=ib.shared(whole)))
    found = ib.wrap(inner, micro_batch_size=4)(given)
    assert type(found) is ByAttribute and type(found.out) is IsItsAttributes
    close(found.out.z, inner.net(X) * 3)


class Sealed(dict):
    def __setitem__(self, key, value):
        raise TypeError("sealed")


class HidesRows(dict):
    """Holds a tensor that is none of its items."""

    def __init__(self, **items):
        super().__init__(**items)
        self.rows = items["x"] * 2


class HidesNames(ByAttribute):
    def __init__(self, **items):
        super().__init__(**items)
        self.names = [f"sample {i}" for i in range(len(items["x"]))]


class SharesItems(collections.abc.MutableMapping):
    """A copy of it would share its items."""

    def __init__(self, **items):
        self.items_ = items

    def __getitem__(self, key):
        return self.items_[key]

    def __setitem__(self, key, value):
        self.items_[key] = value

    def __delitem__(self, key):
        del self.items_[key]

    def __iter__(self):
        return iter(self.items_)

    def __len__(self):
        return len(self.items_)


@pytest.mark.parametrize(
    "make",
    [Sealed, HidesRows, HidesNames, SharesItems, lambda x: types.MappingProxyType({"x": x})],
)
def test_what_cannot_be_made_again_is_a_dict(make):
    inner = Calls(lambda self, batch: self.net(batch["x"]) * (type(batch) is dict), net=mlp())
    close(ib.wrap(inner, micro_batch_size=4)(make(x=X)), inner.net(X))


@pytest.mark.parametrize("kind", [dict, OfUser, Noted])
def test_inputs_of_a_step_are_keywords(kind):
    inner = Calls(lambda self, x, scale: self.net(x) * scale, net=mlp())
    native = copy.deepcopy(inner)
    given = kind(x=X, scale=2.0)
    ib.VirtualBatch(inner, nn.CrossEntropyLoss(), micro_batch_size=4).backward(given, Y)
    nn.CrossEntropyLoss()(native(**given), Y).backward()
    close(grads(inner), grads(native))


def test_a_coupled_loss_is_given_the_class():
    def loss(outputs, targets):
        assert type(outputs) is Noted and outputs.note == "kept"
        assert type(targets) is IsItsAttributes and targets.y is targets["y"]
        return contrastive(outputs.logits) + nn.functional.cross_entropy(outputs.logits, targets.y)

    inner = Calls(lambda self, x: Noted(logits=self.net(x)), net=mlp())
    native = copy.deepcopy(inner)
    step = ib.VirtualBatch(inner, ib.losses.coupled(loss), micro_batch_size=4)
    step.backward(X, IsItsAttributes(y=Y))
    loss(native(X), IsItsAttributes(y=Y)).backward()
    close(grads(inner), grads(native))


def test_attributes_are_outputs_too():
    def forward(self, x):
        out = ByAttribute(logits=self.net(x))
        out.rows = len(x)
        return out

    inner = Calls(forward, net=mlp())
    with pytest.raises(ib.BatchError, match=r"outputs\.rows"):
        ib.wrap(inner, micro_batch_size=4)(X)
    assert ib.wrap(inner, micro_batch_size=13)(X).rows == 13


def test_nothing_of_the_whole_batch_is_kept():
    inner = Calls(lambda self, batch: Noted(logits=self.net(batch["x"])), net=mlp())
    x = X.clone()
    gone = weakref.ref(x)
    with torch.no_grad():
        found = ib.wrap(inner, micro_batch_size=4)(Noted(x=x))
    del x
    assert gone() is None and found.note == "kept"
