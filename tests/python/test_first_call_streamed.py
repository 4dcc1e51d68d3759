"""State that forward's first call makes and that is no number (a table, a module, an entry of a
list), in steps whose forward is not cut: each micro-batch is the first call, as natively the whole
batch is, or the step is refused."""

import copy
from types import SimpleNamespace
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from support import classification
from torch import nn
from wrap_support import close, grads

N, SIZE = 13, 4


class First(nn.Module):
    """`kind` says what the first call makes, and what differs because of it."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        self.kind = kind
        self.made: Any = None
        self.log: list[Any] = []
        self.names: set[int] = set()
        self.pair = (1, 2)
        self.double()

    def factor(self, y: torch.Tensor) -> Any:
        kind = self.kind
        if kind == "tensor":  # which only the later calls read
            if self.made is None:
                self.made = torch.arange(8.0, dtype=y.dtype).cos()
                return 4.0
            return self.made
        if kind == "seen by is None alone":
            was, self.made = self.made, torch.ones(1)
            return 4.0 if was is None else 1.0
        if kind == "object":
            if self.made is None:
                self.made = SimpleNamespace(scale=0.5)
                return 4.0
            return self.made.scale
        if kind == "another object":
            self.made = SimpleNamespace(n=1 + (self.made.n if self.made else 0))
            return self.made.n / 4
        if kind == "pair":
            self.pair = (self.pair[0] + 1, self.pair[1])
            return self.pair[0] / 4
        if kind == "log":
            self.log.append("x")
            return len(self.log) / 4
        if kind == "set":
            self.names.add(len(self.names))
            return len(self.names) / 4
        if kind == "module":
            if self.made is None:
                torch.manual_seed(5)
                self.made = nn.Linear(8, 8).double()
                return 4.0
            return self.made(y)
        if kind == "table of constants":
            if self.made is None:
                self.made = torch.arange(8.0, dtype=y.dtype).cos()
            return self.made
        if kind == "features":
            self.made = y
            self.log = [y.detach()]
            return 1.0
        raise ValueError(kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).tanh()
        return self.head(y * self.factor(y))

    def left(self) -> Any:
        made = vars(self.made) if isinstance(self.made, SimpleNamespace) else None
        return (made, self.log if self.kind == "log" else None, self.names, self.pair)


KINDS = [
    "tensor", "seen by is None alone", "object", "another object", "pair", "log", "set",
    "table of constants", "features",
]  # fmt: skip
WAYS: dict[str, dict[str, Any]] = {
    "streamed": {"micro_batch_size": SIZE},
    "coupled": {"micro_batch_size": SIZE},
    "budget": {"memory_budget": "64MiB"},
    "segments": {"micro_batch_size": SIZE, "checkpoint_segments": 2},
    "static": {"micro_batch_size": SIZE, "static_graph": True},
    "wrap": {"micro_batch_size": SIZE},
    "wrap, budget": {"memory_budget": "64MiB"},
    "wrap, static": {"micro_batch_size": SIZE, "static_graph": True},
}


def step_of(model: nn.Module, way: str) -> Any:
    if way.startswith("wrap"):
        wrapped = ib.wrap(model, **WAYS[way])
        return lambda x, y: F.cross_entropy(wrapped(x), y).backward()
    loss = ib.losses.coupled(F.cross_entropy) if way == "coupled" else nn.CrossEntropyLoss()
    return ib.VirtualBatch(model, loss, **WAYS[way]).backward


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_each_micro_batch_is_the_first_call(kind: str, way: str) -> None:
    theirs = First(kind)
    model = copy.deepcopy(theirs)
    step = step_of(model, way)
    x, y = classification(N)
    for _ in range(3):
        theirs.zero_grad()
        model.zero_grad()
        F.cross_entropy(theirs(x), y).backward()
        step(x, y)
        close(grads(model), grads(theirs), 1e-11)
        assert model.left() == theirs.left()


@pytest.mark.parametrize("way", WAYS)
def test_a_module_of_the_first_call_is_found_or_refused(way: str) -> None:
    theirs = First("module")
    model = copy.deepcopy(theirs)
    step = step_of(model, way)
    x, y = classification(N)
    for _ in range(3):
        theirs.zero_grad()
        model.zero_grad()
        F.cross_entropy(theirs(x), y).backward()
        try:
            step(x, y)
        except ib.Error as error:
            print(way, error)
            assert model.made is None
            return
        close(grads(model), grads(theirs), 1e-11)


def of_samples(self: Any, y: torch.Tensor) -> Any:
    if self.made is None:
        self.made = 1 / y.detach().std(0)
    return self.made


def number_of_samples(self: Any, y: torch.Tensor) -> Any:
    if self.made is None:
        self.made = y.detach().std().item()
    return self.made


def object_of_samples(self: Any, y: torch.Tensor) -> Any:
    if self.made is None:
        self.made = SimpleNamespace(scale=1 / y.detach().std(0))
    return self.made.scale


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("factor", [of_samples, number_of_samples, object_of_samples])
def test_what_samples_decide_is_exact_or_refused(factor: Any, way: str) -> None:
    """Where the budget has room for the whole batch at once it is exact."""
    model = First("")
    model.factor = factor.__get__(model)
    theirs = First("")
    theirs.factor = factor.__get__(theirs)
    x, y = classification(N)
    F.cross_entropy(theirs(x), y).backward()
    step = step_of(model, way)
    if "budget" not in way:
        with pytest.raises(ib.CouplingError):
            step(x, y)
        assert model.made is None
        return
    step(x, y)
    close(grads(model), grads(theirs), 1e-11)
