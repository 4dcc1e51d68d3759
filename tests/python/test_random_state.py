"""NumPy's and Python's random state: a step that fails puts back every bit, one that succeeds adds
nothing to what the model drew."""

import random

import infinitybatch as ib
import numpy as np
import pytest
import torch
from support import Tally
from torch import nn


class Drawing(nn.Module):
    """Calls `draw` in every forward."""

    def __init__(self, draw):
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.draw = draw

    def forward(self, x):
        self.draw()
        return self.linear(x)


def everything():
    state = np.random.get_state(legacy=False)
    inner = {k: np.asarray(v).tolist() for k, v in state["state"].items()}
    gauss = state.get("has_gauss"), state.get("gauss")
    return state["bit_generator"], inner, gauss, random.getstate()


def step(draw):
    batch = ib.VirtualBatch(Drawing(draw), nn.CrossEntropyLoss(), micro_batch_size=2)
    return batch.backward(torch.randn(6, 3), torch.tensor([0, 1, 0, 1, 0, 1]))


def prepare(kind):
    random.seed(7)
    if kind in ("cached", "wraps"):
        random.gauss()  # the second of two numbers waits
    if kind == "pcg64":
        np.random.set_bit_generator(np.random.PCG64(3))
        return
    np.random.seed(7)
    # The key is made anew every 624 words, and normal numbers come in pairs.
    for _ in range({"fresh": 0, "cached": 1, "pair": 2, "wraps": 311, "later": 1001}[kind]):
        np.random.standard_normal()


@pytest.fixture(params=["fresh", "cached", "pair", "wraps", "later", "pcg64"])
def prepared(request):
    generator = np.random.get_bit_generator()
    prepare(request.param)
    yield request.param
    np.random.set_bit_generator(generator)


DRAWS = {
    "nothing": lambda: None,
    "one normal": lambda: np.random.standard_normal(),
    "two normals": lambda: np.random.standard_normal(2),
    "many": lambda: (np.random.standard_normal(1001), np.random.rand(700), random.random()),
    "one number": random.random,
    "gauss": lambda: random.gauss(),
}


@pytest.mark.parametrize("draw", DRAWS)
def test_a_failing_step_puts_everything_back(prepared, draw):
    before = everything()

    def draw_and_fail():
        DRAWS[draw]()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        step(draw_and_fail)
    assert everything() == before


@pytest.mark.parametrize("draw", ["nothing", "one normal", "many", "gauss"])
def test_a_step_draws_only_what_the_model_draws(prepared, draw):
    step(DRAWS[draw])
    after = everything()
    prepare(prepared)
    for _ in range(3):
        DRAWS[draw]()
    assert after == everything()


def test_native_numbers_leave_them_alone(prepared):
    model = nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5))
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=2, match_native_rng=True)
    before = everything()
    batch.backward(torch.ones(6, 3), torch.tensor([0, 1, 0, 1, 0, 1]))
    assert everything() == before


@pytest.mark.parametrize("kind", [random.Random, type("Mine", (random.Random,), {})])
def test_another_generator_in_the_place_of_pythons_own(monkeypatch, kind):
    mine = kind(3)
    for name in ("getstate", "setstate"):
        monkeypatch.setattr(random, name, getattr(mine, name))
    mine.gauss(0, 1)
    before = mine.getstate()

    def draw_and_fail():
        mine.gauss(0, 1)
        mine.random()
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        step(draw_and_fail)
    assert mine.getstate() == before


def test_torchs_own_state_comes_back_with_a_normal_number_that_waits():
    made = Tally()

    def draw():
        made()
        torch.randn(3)
        if made.count == 3:
            raise RuntimeError("late")

    batch = ib.VirtualBatch(Drawing(draw), nn.CrossEntropyLoss(), micro_batch_size=2)
    torch.manual_seed(3)
    torch.randn(1)  # made two, the second waits to be drawn
    before = torch.get_rng_state()
    expected = torch.randn(3)
    torch.set_rng_state(before)
    with pytest.raises(RuntimeError, match="late"):
        batch.backward(torch.ones(6, 3), torch.tensor([0, 1, 0, 1, 0, 1]))
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(torch.randn(3), expected)
