"""A wrapped container (Sequential, ModuleList, ModuleDict) is a container."""

import infinitybatch as ib
import pytest
from support import mlp
from torch import nn


def wrapped(model):
    return ib.wrap(model, micro_batch_size=3)


def test_containers_are_containers():
    model = mlp()
    outer = wrapped(model)
    assert len(outer) == len(model) and outer[0] is model[0] and outer[-1] is model[-1]
    assert list(outer) == list(model) and model[0] in outer and bool(outer)
    assert list(reversed(outer)) == list(model)[::-1]


def test_they_are_changed_as_the_inner_one_is():
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh())
    outer = wrapped(model)
    first, last = nn.Linear(6, 4), nn.ReLU()
    outer[0] = first
    del outer[1]
    assert outer.append(last) is outer and outer.insert(1, nn.Tanh()) is outer
    assert outer.extend([nn.Tanh()]) is outer
    assert [type(layer) for layer in model] == [nn.Linear, nn.Tanh, nn.ReLU, nn.Tanh]
    assert model[0] is first and model[2] is last
    assert list(outer.state_dict()) == ["0.weight", "0.bias"]
    del model[0]
    assert list(outer.children()) == list(model) == list(outer) and not outer.state_dict()
    entries = wrapped(nn.ModuleDict())
    entries["a"] = first
    assert entries["a"] is first and list(entries.keys()) == list(entries) == ["a"]
    del entries["a"]
    assert not len(entries) and not entries


def test_they_are_joined_as_the_inner_one_is():
    model, other = nn.Sequential(nn.Linear(6, 4)), nn.Sequential(nn.Tanh())
    outer = wrapped(model)
    for right in (other, wrapped(other)):
        joined = outer + right
        assert type(joined) is nn.Sequential and list(joined) == [model[0], other[0]]
    assert list(outer * 2) == list(2 * outer) == [model[0], model[0]]
    same = outer
    same += wrapped(other)
    assert same is outer and list(model) == [model[0], other[0]]
    same *= 2
    assert same is outer and len(model) == 4


def test_what_is_no_container_raises_its_own_error():
    def replace(module):
        module[0] = nn.Tanh()

    def remove(module):
        del module[0]

    alone = wrapped(nn.Linear(3, 3))
    assert bool(alone)
    asked = [
        len,
        iter,
        reversed,
        replace,
        remove,
        lambda module: module[0],
        lambda module: module + module,
        lambda module: module * 2,
    ]
    for ask in asked:
        with pytest.raises(TypeError, match="Linear"):
            ask(alone)
