"""Forwards that write into a dict that they are given and return it: the caller's dict is the one that
a wrapped model returns, with what the whole batch gives in it."""

import copy
from collections import OrderedDict, UserDict
from typing import Any

import infinitybatch as ib
import pytest
import torch
from support import Calls
from torch import nn

SAMPLES = 7
WAYS: dict[str, dict[str, Any]] = {
    "ragged": {"micro_batch_size": 3},
    "singles": {"micro_batch_size": 1},
    "all": {"micro_batch_size": SAMPLES},
    "budget": {"memory_budget": "64MiB"},
    "static graph": {"micro_batch_size": 3, "static_graph": True},
}


def layered(self: Any, features: Any) -> Any:
    """Goes on from the layer of an earlier call, where there is one."""
    before = features["layer"] if "layer" in features else features["x"]
    features["layer"] = torch.tanh(self.net(before))
    features.pop("labels", None)
    return features


def model() -> nn.Module:
    torch.manual_seed(0)
    return Calls(layered, net=nn.Linear(4, 4)).double()


def two_calls(module: Any, given: Any, **more: Any) -> list[torch.Tensor]:
    """What two calls with one dict leave; `more` are keywords of the calls."""
    inner = ib.unwrap(module)
    inner.zero_grad()
    returned = [module(given, **more) for _ in range(2)]
    assert returned[0] is given and returned[1] is given
    assert list(given) == ["x", "text", "layer"] and given["text"] == "as it was"
    given["layer"].square().sum().backward()
    return [given["x"], given["layer"].detach(), *(p.grad for p in inner.parameters())]


@pytest.mark.parametrize("kind", [dict, OrderedDict, UserDict])
@pytest.mark.parametrize("way", WAYS)
def test_the_callers_dict_comes_back_changed(way: str, kind: Any) -> None:
    x = torch.randn(SAMPLES, 4).double()

    def given() -> Any:
        return kind(x=x, text="as it was", labels=torch.arange(SAMPLES))

    inner = model()
    wanted = two_calls(copy.deepcopy(inner), given())
    wrapped = ib.wrap(inner, **WAYS[way])
    for _ in range(3):
        found = two_calls(wrapped, given())
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_by_keyword_and_without_gradients() -> None:
    inner = Calls(lambda self, *, features: layered(self, features), net=nn.Linear(4, 4))
    given = {"x": torch.randn(SAMPLES, 4)}
    with torch.no_grad():
        assert ib.wrap(inner, micro_batch_size=2)(features=given) is given
        wanted = inner.net(given["x"]).tanh()
    torch.testing.assert_close(given["layer"], wanted, rtol=1e-6, atol=1e-7)


def test_another_dict_leaves_the_callers_alone() -> None:
    inner = Calls(lambda self, f: {**f, "y": self.net(f["x"])}, net=nn.Linear(4, 4))
    given = {"x": torch.randn(SAMPLES, 4)}
    outputs = ib.wrap(inner, micro_batch_size=2)(given)
    assert outputs is not given and list(given) == ["x"] and list(outputs) == ["x", "y"]


def test_a_call_that_fails_leaves_it_alone() -> None:
    def fails(self: Any, features: Any) -> Any:
        features["y"] = self.net(features["x"])
        if len(features["x"]) == 1:
            raise ArithmeticError("one row")
        return features

    given = {"x": torch.randn(SAMPLES, 4)}
    with pytest.raises(ArithmeticError, match="one row"):
        ib.wrap(Calls(fails, net=nn.Linear(4, 4)), micro_batch_size=3)(given)
    assert list(given) == ["x"]
