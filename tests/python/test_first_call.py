"""What a module makes at its first call and keeps (a table, a mask) in front of recordings that are
checked by another one."""

import copy
from typing import Any

import infinitybatch as ib
import pytest
import torch
from support import Calls, Tally
from torch import nn
from wrap_support import close, contrastive, grads

X = torch.randn(11, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def table(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.calls()
    if self.table is None:
        self.table = torch.arange(8.0, dtype=torch.float64).sin() + 0.1
    return self.drop(self.norm(self.layer(x) * self.table))


def from_samples(self: Any, x: torch.Tensor) -> torch.Tensor:
    """The first call decides by its samples: no micro-batch can."""
    self.calls()
    if self.table is None:
        self.table = 1 / self.layer(x).detach().std(0)
    return self.drop(self.norm(self.layer(x) * self.table))


def from_statistics(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.calls()
    normed = self.norm(self.layer(x))
    if self.table is None:
        self.table = 1 / normed.detach().abs().amax(0)
    return self.drop(normed * self.table)


def from_numbers(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.calls()
    if self.table is None:
        self.table = torch.full((8,), 1 + x.mean().item(), dtype=torch.float64)
    return self.drop(self.norm(self.layer(x) * self.table))


def model(forward: Any, norm: bool = False, drop: float = 0.0) -> nn.Module:
    made = Calls(
        forward,
        layer=nn.Linear(6, 8),
        norm=nn.BatchNorm1d(8) if norm else nn.Identity(),
        drop=nn.Dropout(drop),
    ).double()
    made.table, made.calls = None, Tally()
    return made


WAYS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "norm": ({"norm": True}, {}),
    "norm, budget": ({"norm": True}, {"memory_budget": "64MiB", "micro_batch_size": None}),
    "norm, segments": ({"norm": True}, {"checkpoint_segments": 2}),
    "static": ({}, {"static_graph": True}),
    "norm, static": ({"norm": True}, {"static_graph": True}),
    "drawn": ({"drop": 0.5}, {"match_native_rng": True}),
    "norm, drawn": ({"norm": True, "drop": 0.5}, {"match_native_rng": True}),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_table_is_made_once(way: str) -> None:
    kind, options = WAYS[way]
    native = model(table, **kind)
    ours = copy.deepcopy(native)
    batch = ib.VirtualBatch(
        ours, ib.losses.coupled(contrastive), **{"micro_batch_size": 4, **options}
    )
    for step in range(3):
        torch.manual_seed(step)
        native.zero_grad()
        contrastive(native(X + step)).backward()
        torch.manual_seed(step)
        ours.zero_grad()
        batch.backward(X + step)
        close(grads(ours), grads(native))
        close(list(ours.buffers()), list(native.buffers()))


def test_it_costs_two_calls_once() -> None:
    ours = model(table, norm=True)
    batch = ib.VirtualBatch(ours, ib.losses.coupled(contrastive), micro_batch_size=4)
    counts = []
    for _ in range(3):
        ours.calls.count = 0
        batch.backward(X)
        counts.append(ours.calls.count)
    warm = model(table, norm=True)
    warm(X)
    batch = ib.VirtualBatch(warm, ib.losses.coupled(contrastive), micro_batch_size=4)
    warm.calls.count = 0
    batch.backward(X)
    # Whether it makes the same of other samples, and whether it reads what it has made.
    assert counts[0] == warm.calls.count + 2
    assert counts[2] == 3


@pytest.mark.parametrize("forward", [from_samples, from_statistics, from_numbers])
def test_what_samples_decide_is_refused(forward: Any) -> None:
    batch = ib.VirtualBatch(
        model(forward, norm=True), ib.losses.coupled(contrastive), micro_batch_size=4
    )
    for _ in range(2):
        with pytest.raises(
            ib.CouplingError, match="took another way|reads values|depends on 'table'"
        ):
            batch.backward(X)


def test_wrapped() -> None:
    native = model(table, norm=True)
    ours = copy.deepcopy(native)
    contrastive(native(X)).backward()
    contrastive(ib.wrap(ours, micro_batch_size=4)(X)).backward()
    close(grads(ours), grads(native))
