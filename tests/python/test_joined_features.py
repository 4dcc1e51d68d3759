"""What forward of a wrapped model leaves in attributes, dicts, lists and hooks: that of the whole batch."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from support import Calls, classification
from torch import nn
from wrap_support import close, grads

N, SIZE = 13, 4
WAYS: dict[str, dict[str, Any]] = {
    "size": {"micro_batch_size": SIZE},
    "retained": {"micro_batch_size": SIZE, "retained_micro_batches": 2},
    "offloaded": {"micro_batch_size": SIZE, "retained_micro_batches": 9, "offload": "always"},
    "budget": {"memory_budget": "64MiB", "micro_batch_size": SIZE},
    "planned": {"memory_budget": "64MiB"},
    "static": {"micro_batch_size": SIZE, "static_graph": True},
    "native numbers": {"micro_batch_size": SIZE, "match_native_rng": True},
}
of_hooks: dict[str, torch.Tensor] = {}


def detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach()


def model_that_leaves(kept: str, norm: bool = False) -> tuple[nn.Module, Callable[[], Any]]:
    """A model, and what finds its features afterwards."""
    closure: list[torch.Tensor] = []
    held: dict[str, torch.Tensor] = {}

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.body(x)).tanh()
        if kept == "attribute":
            self.features = h.detach()
        if kept == "dict":
            self.maps = {"h": h.detach()}
        if kept == "list anew":
            self.maps = [h.detach(), h.detach().t()]
        if kept == "with a graph":
            self.features = h
        if kept == "other dimension":
            self.features = h.detach().t()
        return self.head(h)

    torch.manual_seed(0)
    model = Calls(
        forward,
        body=nn.Linear(6, 8),
        norm=nn.BatchNorm1d(8) if norm else nn.Identity(),
        head=nn.Linear(8, 5),
    ).double()

    def keep(_module: nn.Module, _given: Any, out: torch.Tensor) -> None:
        if kept == "hook, list":
            closure.append(out.detach())
        if kept == "hook, dict":
            held["norm"] = out.detach()
        if kept == "hook, global":
            of_hooks["norm"] = out.detach()

    if kept.startswith("hook"):
        model.norm.register_forward_hook(keep)
    find: dict[str, Callable[[], Any]] = {
        "attribute": lambda: model.features,
        "with a graph": lambda: model.features.detach(),
        "other dimension": lambda: model.features.t(),
        "dict": lambda: model.maps["h"],
        "list anew": lambda: model.maps[0] + model.maps[1].t(),
        "hook, list": lambda: closure.pop() if len(closure) == 1 else closure,
        "hook, dict": lambda: held["norm"],
        "hook, global": lambda: of_hooks["norm"],
    }
    return model, find[kept]


KEPT = [
    "attribute",
    "dict",
    "list anew",
    "with a graph",
    "other dimension",
    "hook, list",
    "hook, dict",
    "hook, global",
]


def reading(out: torch.Tensor, y: torch.Tensor, features: torch.Tensor) -> torch.Tensor:
    """Of every sample another weight, and all of them."""
    weights = features.square().sum(1) / features.square().sum()
    return (F.cross_entropy(out, y, reduction="none") * weights).sum() * (1 + features.mean())


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("kept", KEPT)
def test_a_loss_that_reads_them_is_exact(kept: str, norm: bool, way: str) -> None:
    theirs, of_theirs = model_that_leaves(kept, norm)
    model, of_ours = model_that_leaves(kept, norm)
    x, y = classification(N)
    wrapped = ib.wrap(model, **WAYS[way])
    if way == "static" and "list" in kept:  # forward, which would add to it, runs no more
        with pytest.warns(ib.LeftTensorNotice):
            wrapped(x)
        return
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(3):
            theirs.zero_grad()
            model.zero_grad()
            reading(theirs(x + step), y, of_theirs()).backward()
            reading(wrapped(x + step), y, of_ours()).backward()
            close(grads(model), grads(theirs), 1e-11)


@pytest.mark.parametrize("way", WAYS)
def test_without_gradients(way: str) -> None:
    theirs, of_theirs = model_that_leaves("attribute")
    model, of_ours = model_that_leaves("attribute")
    x, _ = classification(N)
    wrapped = ib.wrap(model, **WAYS[way])
    with torch.no_grad():
        for step in range(2):
            wrapped(x + step), theirs(x + step)
            close(of_ours(), of_theirs(), 1e-11)


@pytest.mark.parametrize("size", [1, 2, 4, 6])
@pytest.mark.parametrize("of", ["similarities", "mask", "attention"])
def test_shapes_that_only_look_like_samples(of: str, size: int) -> None:
    """Of 12 samples in micro-batches of one length a matrix may be anything."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        z = self.body(x)
        if of == "similarities":
            self.kept = (z @ z.t()).detach()
        if of == "mask":
            self.kept = torch.ones(size, size, dtype=torch.float64).tril()
        if of == "attention":
            self.kept = z.softmax(1)[:, :size].detach()
        return self.head(z)

    torch.manual_seed(0)
    model = Calls(forward, body=nn.Linear(6, 6), head=nn.Linear(6, 5)).double()
    theirs = copy.deepcopy(model)
    x, y = classification(12)
    wrapped = ib.wrap(model, micro_batch_size=size)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        F.cross_entropy(wrapped(x), y).backward()
    F.cross_entropy(theirs(x), y).backward()
    close(grads(model), grads(theirs), 1e-12)
    if of == "similarities":  # not those of all: somebody is told
        assert [w.category for w in told] == [ib.LeftTensorNotice]
        return
    close(model.kept, theirs.kept, 1e-12)
    assert not told


def test_numbers_that_cannot_be_joined_are_told_of() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        z = self.body(x)
        self.last_norm = z.detach().norm()
        return z

    model = Calls(forward, body=nn.Linear(6, 5)).double()
    x, _ = classification(N)
    with pytest.warns(ib.LeftTensorNotice, match="IB102.*'last_norm'"):
        ib.wrap(model, micro_batch_size=SIZE)(x).sum().backward()


def test_a_budget_that_has_no_room_for_them_is_kept() -> None:
    """Maps for a plot, beside which nothing else counts."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        z = self.body(x)
        self.maps = [(z[:, :, None] * z[:, None]).detach() for _ in range(4)]
        return self.head(z)

    torch.manual_seed(0)
    model = Calls(forward, body=nn.Linear(6, 16), head=nn.Linear(16, 5)).double()
    theirs = copy.deepcopy(model)
    x, y = classification(64)
    whole = 64 * 4 * 16 * 16 * 8
    F.cross_entropy(theirs(x), y).backward()
    maps = [each.numpy().copy() for each in theirs.maps]  # no tensors of the budget's
    theirs.maps = []
    joined = set()
    for room in (whole // 4, whole // 2, whole * 2, whole * 4, whole * 8, whole * 20):
        model.zero_grad(set_to_none=True)
        model.maps = []
        budget = ib.memory.stats().live + room
        wrapped = ib.wrap(model, memory_budget=budget)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for _ in range(2):
                    model.zero_grad(set_to_none=True)
                    F.cross_entropy(wrapped(x), y).backward()
        except ib.BudgetExceeded:
            assert room < whole * 4
            continue
        close(grads(model), grads(theirs), 1e-11)
        assert wrapped.last_report.peak_bytes <= budget
        here = all(len(m) == 64 for m in model.maps)
        assert here or wrapped.last_report.left_on_module == ["maps"]
        if here:
            close(model.maps, [torch.from_numpy(each) for each in maps], 1e-12)
        joined.add(here)
    assert True in joined


@pytest.mark.parametrize("options", [{"micro_batch_size": SIZE}])
def test_what_had_no_room_for_a_while_is_joined_again(options: dict[str, Any]) -> None:
    """Somebody else holds the memory in one call."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        z = self.body(x)
        self.map = (z[:, :, None] * z[:, None]).detach()
        return self.head(z)

    torch.manual_seed(0)
    model = Calls(forward, body=nn.Linear(6, 16), head=nn.Linear(16, 5)).double()
    x, y = classification(64)
    whole = 64 * 16 * 16 * 8
    live = ib.memory.stats().live
    budget = live + 20 * whole
    held = torch.zeros(budget - live - int(1.3 * whole), dtype=torch.uint8)
    wrapped = ib.wrap(model, memory_budget=budget, **options)

    def joined() -> bool:
        model.zero_grad(set_to_none=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ib.LeftTensorNotice)
            F.cross_entropy(wrapped(x), y).backward()
        assert wrapped.last_report.peak_bytes <= budget
        here = len(model.map) == 64
        assert here or wrapped.last_report.left_on_module == ["map"]
        return here

    assert not joined()
    del held
    found = [joined() for _ in range(24)]
    assert not any(found[:8])  # time is not spent on it in each call
    first = found.index(True)
    assert all(found[first:])


def test_an_output_that_lies_there_too_is_that_output() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.body(x)
        return self.kept

    model = Calls(forward, body=nn.Linear(6, 5)).double()
    theirs = copy.deepcopy(model)
    x, _ = classification(N)
    out = ib.wrap(model, micro_batch_size=SIZE)(x)
    (out.sum() + model.kept.square().sum()).backward()
    (theirs(x).sum() + theirs.kept.square().sum()).backward()
    close(grads(model), grads(theirs), 1e-12)
