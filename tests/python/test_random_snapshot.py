"""The random state in front of each batch: kept as it lies in memory, told as values if asked for."""

import random
import sys

import numpy
import pytest
import torch
from infinitybatch import _random_state


def drawn():
    return (
        torch.rand(3).tolist(),
        torch.randn(1).item(),
        random.random(),
        random.gauss(0, 1),
        numpy.random.rand(2).tolist(),
        numpy.random.standard_normal(),
    )


def seeded(odd: bool) -> None:
    torch.manual_seed(5)
    random.seed(6)
    numpy.random.seed(7)
    if odd:  # the second of two normal numbers waits to be drawn
        torch.randn(1), random.gauss(0, 1), numpy.random.standard_normal()


def equal(a, b) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[name], b[name]) for name in a)
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def test_a_snapshot_puts_back_what_was_there():
    for odd in (False, True):
        seeded(odd)
        snapshot = _random_state.Snapshot()
        wanted = drawn()
        drawn()
        for restored in (snapshot, snapshot.values()):
            _random_state.restore(restored)
            assert drawn() == wanted


def test_its_values_are_those_of_the_moment_and_asking_draws_nothing():
    for odd in (False, True):
        seeded(odd)
        wanted = _random_state.capture()
        snapshot = _random_state.Snapshot()
        drawn()
        here = _random_state.capture()
        assert equal(snapshot.values(), wanted)
        assert equal(_random_state.capture(), here)
        assert equal(_random_state.values(wanted), wanted)
        assert _random_state.values(None) is None
        assert not equal(here, wanted)


def test_numpy_that_would_come_later_is_in_it(monkeypatch):
    seeded(odd=False)
    with monkeypatch.context() as before:
        before.delitem(sys.modules, "numpy.random")  # nobody has drawn from it
        snapshot = _random_state.Snapshot()
    wanted = numpy.random.get_state()[1].tolist()
    assert {"numpy", "python"} <= snapshot.values().keys()
    assert numpy.random.get_state()[1].tolist() == wanted


@pytest.mark.parametrize("odd", [False, True])
def test_numpy_is_not_asked_for_its_624_numbers(monkeypatch, odd):
    _random_state.Snapshot()  # looks once where they lie
    seeded(odd)
    get_state, asked = numpy.random.get_state, []
    with monkeypatch.context() as watched:
        watched.setattr(
            numpy.random, "get_state", lambda *a, **b: asked.append(1) or get_state(*a, **b)
        )
        snapshot = _random_state.Snapshot()
    assert not asked
    wanted = drawn()
    snapshot.restore()
    assert drawn() == wanted


def test_another_generator_of_numpy_is_asked_and_put_back():
    before = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(numpy.random.PCG64(3))
    try:
        numpy.random.standard_normal()
        snapshot = _random_state.Snapshot()
        wanted = numpy.random.standard_normal(3).tolist()
        snapshot.restore()
        assert numpy.random.standard_normal(3).tolist() == wanted
    finally:
        numpy.random.set_bit_generator(before)
