"""Numbers that a model keeps in Python and that change what forward does: each micro-batch sees what
the whole batch's forward would have seen, and a counter moves once for each logical batch."""

import copy
from types import SimpleNamespace
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from support import LOOKS, Calls, Double, classification, looks
from torch import nn
from wrap_support import close, grads

N, SIZE = 13, 4


class Counting(nn.Module):
    """`kind` says where the counter lies and what it does."""

    def __init__(self, kind: str, norm: bool, opaque: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.head = nn.Linear(8, 5)
        self.kind, self.opaque = kind, opaque
        self.calls = 0
        self.scale = 0.25
        self.flag = True
        self.counts = [0, {"calls": 0}]
        self.config = SimpleNamespace(inner=SimpleNamespace(calls=0))
        self.double()

    def factor(self, rows: int) -> float:
        if self.kind == "scale":
            self.calls += 1
            return min(1.0, self.calls / 10)
        if self.kind == "branch":
            self.calls += 1
            return 3.0 if self.calls > 2 else 0.5
        if self.kind == "float":
            self.scale *= 1.5
            return self.scale
        if self.kind == "toggle":
            self.flag = not self.flag
            return 2.0 if self.flag else 0.5
        if self.kind == "list":
            self.counts[0] += 1
            self.counts[1]["calls"] += 2
            return (self.counts[0] + self.counts[1]["calls"]) / 10
        if self.kind == "object":
            self.config.inner.calls += 1
            return self.config.inner.calls / 10
        if self.kind == "first call":
            factor, self.flag = (4.0 if self.flag else 1.0), False
            return factor
        if self.kind == "samples":
            self.calls += rows
            return 2.0 if self.calls > 20 else 1.0
        return 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.first(x)) * self.factor(len(x))
        return self.head((Double.apply(y) if self.opaque else y).tanh())

    def numbers(self) -> Any:
        return (self.calls, self.scale, self.flag, self.counts, self.config)


KINDS = ["scale", "branch", "float", "toggle", "list", "object", "first call"]
WAYS: dict[str, tuple[bool, dict[str, Any]]] = {
    "streamed": (False, {"micro_batch_size": SIZE}),
    "coupled": (False, {"micro_batch_size": SIZE}),
    "coupled, opaque": (False, {"micro_batch_size": SIZE}),
    "coupled, budget": (False, {"memory_budget": "64MiB"}),
    "norm": (True, {"micro_batch_size": SIZE}),
    "norm, budget": (True, {"memory_budget": "64MiB"}),
    "wrap": (False, {"micro_batch_size": SIZE}),
    "wrap, opaque": (False, {"micro_batch_size": SIZE}),
    "wrap, budget": (False, {"memory_budget": "64MiB"}),
    "wrap, norm": (True, {"micro_batch_size": SIZE}),
    "static": (False, {"micro_batch_size": SIZE, "static_graph": True}),
    "wrap, static": (False, {"micro_batch_size": SIZE, "static_graph": True}),
    "segments": (False, {"micro_batch_size": SIZE, "checkpoint_segments": 2}),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_counter_moves_once_for_each_batch(kind: str, way: str) -> None:
    norm, options = WAYS[way]
    theirs = Counting(kind, norm, opaque="opaque" in way)
    model = copy.deepcopy(theirs)
    loss = ib.losses.coupled(F.cross_entropy) if "coupled" in way else nn.CrossEntropyLoss()
    if way.startswith("wrap"):
        wrapped = ib.wrap(model, **options)
    else:
        batch = ib.VirtualBatch(model, loss, **options)
    x, y = classification(N)
    for _ in range(4):
        theirs.zero_grad()
        model.zero_grad()
        F.cross_entropy(theirs(x), y).backward()
        if way.startswith("wrap"):
            F.cross_entropy(wrapped(x), y).backward()
        else:
            batch.backward(x, y)
        close(grads(model), grads(theirs), 1e-11)
        assert model.numbers() == theirs.numbers()


@pytest.mark.parametrize("by", ["streamed", "coupled", "wrap"])
def test_a_number_of_samples_that_decides_is_refused(by: str) -> None:
    """Natively forward sees all of the batch counted."""
    model = Counting("samples", norm=False)
    x, y = classification(N)
    loss = ib.losses.coupled(F.cross_entropy) if by == "coupled" else nn.CrossEntropyLoss()
    with pytest.raises(ib.CouplingError, match="'calls'"):
        if by == "wrap":
            ib.wrap(model, micro_batch_size=SIZE)(x)
        else:
            ib.VirtualBatch(model, loss, micro_batch_size=SIZE).backward(x, y)
    assert model.calls == 0


@pytest.mark.parametrize("by", ["streamed", "wrap"])
def test_a_number_that_depends_on_samples_is_refused(by: str) -> None:
    """A moving maximum: no micro-batch knows that of all."""

    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 5).double()
            self.most = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.most = 0.9 * self.most + 0.1 * float(x.detach().abs().max())
            return self.head(x) / self.most

    model = Normalised()
    x, y = classification(N)
    with pytest.raises(ib.CouplingError, match="'most'"):
        if by == "wrap":
            ib.wrap(model, micro_batch_size=SIZE)(x)
        else:
            ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=SIZE).backward(x, y)
    assert model.most == 1.0


@pytest.mark.parametrize("by", ["streamed", "wrap"])
def test_numbers_that_are_only_written_are_nobodys_concern(by: str) -> None:
    class Logs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop = nn.Dropout(0.5)
            self.head = nn.Linear(6, 5).double()
            self.seen = 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.rows, self.name = len(x), f"of {len(x)}"
            z = self.head(self.drop(x))
            self.entropy = z.detach().logsumexp(1).mean().item()
            self.seen += int((z.detach() > 0).sum())
            return z

    model = Logs().eval()
    theirs = copy.deepcopy(model)
    wrapped = ib.wrap(model, micro_batch_size=SIZE)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=SIZE)
    x, y = classification(N)
    for _ in range(3):
        theirs.zero_grad()
        model.zero_grad()
        F.cross_entropy(theirs(x), y).backward()
        if by == "wrap":
            F.cross_entropy(wrapped(x), y).backward()
        else:
            batch.backward(x, y)
        close(grads(model), grads(theirs), 1e-12)
        assert model.seen == theirs.seen


@pytest.mark.parametrize("by", ["streamed", "coupled", "wrap"])
def test_a_switch_that_flips_beside_inputs_that_forward_writes(by: str) -> None:
    def forward(self: Any, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        self.flip = not self.flip
        h = self.net(x)
        z.mul_(1.01)  # natively, too: the caller's tensor changes once
        return (torch.tanh(h) if self.flip else torch.sin(h)) + z.sum(1, keepdim=True)

    theirs = Calls(forward, net=nn.Linear(6, 5), flip=False).double()
    model = copy.deepcopy(theirs)
    wrapped = ib.wrap(model, micro_batch_size=SIZE)
    loss = ib.losses.coupled(F.cross_entropy) if by == "coupled" else nn.CrossEntropyLoss()
    batch = ib.VirtualBatch(model, loss, micro_batch_size=SIZE)
    x, y = classification(N)
    for _ in range(2):
        theirs.zero_grad()
        model.zero_grad()
        z = [torch.ones(N, 3, dtype=torch.float64) for _ in range(2)]
        F.cross_entropy(theirs(x, z[0]), y).backward()
        if by == "wrap":
            F.cross_entropy(wrapped(x, z[1]), y).backward()
        else:
            batch.backward((x, z[1]), y)
        close(grads(model), grads(theirs), 1e-12)
        assert model.flip == theirs.flip and torch.equal(*z)


@pytest.mark.parametrize("by", ["streamed", "coupled", "wrap"])
def test_settled_steps_run_forward_no_more_than_before(by: str) -> None:
    class Tally:
        __slots__ = ("count",)  # nobody looks there

    model = Counting("scale", norm=False)
    tally = Tally()
    tally.count = 0

    def note(*_: Any) -> None:
        tally.count += 1

    model.first.register_forward_pre_hook(note)
    loss = ib.losses.coupled(F.cross_entropy) if by == "coupled" else nn.CrossEntropyLoss()
    wrapped = ib.wrap(model, micro_batch_size=SIZE)
    batch = ib.VirtualBatch(model, loss, micro_batch_size=SIZE)
    x, y = classification(N)
    for step in range(3):
        tally.count = 0
        if by == "wrap":
            F.cross_entropy(wrapped(x), y).backward()
        else:
            batch.backward(x, y)
        assert tally.count == 4 + looks(step) if step else 4 < tally.count <= 9 + LOOKS
