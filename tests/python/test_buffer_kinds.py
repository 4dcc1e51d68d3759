"""Buffers and plain attributes of any kind of tensor, read and written by forward, in every way to
run: native's result and native's buffer, or a typed error that leaves all as it was."""

import itertools
import os
import warnings
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
from buffer_kinds_support import (
    KINDS,
    WAYS,
    Net,
    data,
    gradients_of,
    mean_square,
    native,
    net_for,
    run_step,
    run_wrapped,
)
from support import Log
from torch import nn

PLACES = ["buffer", "attribute"]
Run = Callable[[Net, str], None]

#: Writes into these are on no tape, so that none can be cut.
NO_TAPE = ["COO", "COO, other places", "CSR", "nested", "MKL-DNN"]
CUT = ["BatchNorm", "segments", "native numbers", "static", "static and coupled", "budget"]


@pytest.fixture(autouse=True)
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch: prototypes, and what is deprecated
        yield


def outcome(run: Run, way: str, kind: str, place: str, writes: bool) -> str:
    """ "exact", or the name of the typed error."""
    wanted, net = (net_for(way, kind, place, writes) for _ in range(2))
    before = net.numbers()
    native(wanted, WAYS[way][1])
    try:
        run(net, way)
    except ib.errors.Error as error:
        assert torch.equal(net.numbers(), before), f"{error} left it changed"
        assert all(p.grad is None for p in net.parameters())
        return type(error).__name__
    mine, right = gradients_of(net), gradients_of(wanted)
    assert (mine - right).norm() <= 1e-12 * right.norm()
    assert torch.equal(net.numbers(), wanted.numbers())
    if place == "buffer":
        kept = net.state_dict()["kept"]
        assert kept.layout == wanted.kept.layout and kept.dtype == wanted.kept.dtype
        assert torch.equal(KINDS[kind].read(kept), wanted.numbers())
    return "exact"


Row = tuple[str, bool, str, Run]


def rows_of(kind: str) -> list[Row]:
    """A share of all rows, which all kinds take together; all of them where tests may take long."""
    rows = list(itertools.product(PLACES, (False, True), WAYS, (run_step, run_wrapped)))
    share = 1 if os.environ.get("INFINITYBATCH_LONG_TESTS") == "1" else 9
    mine = rows[list(KINDS).index(kind) % share :: share]
    return [row for row in mine if KINDS[kind].write is not None or not row[1]]


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_beside_native(kind: str) -> None:
    for place, writes, way, run in rows_of(kind):
        found = outcome(run, way, kind, place, writes)
        if writes and place == "attribute":  # nobody restores it between micro-batches
            assert found in ("exact", "CouplingError", "Unsupported"), (way, run)
            continue
        refused = writes and kind in NO_TAPE and way in CUT
        assert found == "exact" or (refused and found in ("CouplingError", "Unsupported")), (
            place,
            writes,
            way,
            run,
            found,
        )


@pytest.mark.parametrize("kind", KINDS)
def test_verify_and_trainer(kind: str) -> None:
    writes = KINDS[kind].write is not None
    net = net_for("separable", kind, "buffer", writes)
    before = net.numbers()
    report = ib.verify(net, nn.MSELoss(), *data(), micro_batch_size=4)
    assert report.exact, report.explain()
    assert torch.equal(net.numbers(), before)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    ib.Trainer(net, nn.MSELoss(), optimizer, [data()], micro_batch_size=4)(1)
    other = net_for("separable", kind, "buffer", writes)
    mean_square(other(data()[0]), data()[1]).backward()
    torch.optim.SGD(other.parameters(), lr=0.1).step()
    for mine, right in zip(net.parameters(), other.parameters(), strict=True):
        assert (mine - right).norm() <= 1e-12 * right.norm()
    assert torch.equal(net.numbers(), other.numbers())


class Graphs(nn.Module):
    """A network of features that are neighbours, as an adjacency in a sparse tensor says."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(6, 96), nn.Linear(96, 96), nn.Linear(96, 4)
        dense = (torch.rand(96, 96) < 0.1) * torch.rand(96, 96) + torch.eye(96)
        self.double().register_buffer("adjacency", dense.double().to_sparse(layout=layout))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = (self.adjacency @ self.first(x).tanh().T).T
        return self.last((self.adjacency @ self.middle(hidden).tanh().T).T)


@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("wrapped", [False, True])
def test_adjacencies_under_budgets(layout: torch.layout, wrapped: bool) -> None:
    """The default offload takes nothing that forward did not make."""
    x = torch.randn(
        256,
        6,
        dtype=torch.float64,
        generator=torch.Generator(torch.get_default_device()).manual_seed(0),
    )

    def spread(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        return outputs.logsumexp(0).square().sum()

    right = Graphs(layout)
    with ib.memory.peak() as peak:
        spread(right(x), x).backward()
    exact = 0
    for share in (0.5, 0.6, 0.7, 0.8, 0.9):
        net = Graphs(layout)
        before = net.adjacency.to_dense()
        try:
            budget = int(share * peak.peak)
            if wrapped:
                spread(ib.wrap(net, memory_budget=budget)(x), x).backward()
            else:
                batch = ib.VirtualBatch(net, ib.losses.coupled(spread), memory_budget=budget)
                batch.backward(x, x)
            exact += 1
            mine, wanted = gradients_of(net), gradients_of(right)
            assert (mine - wanted).norm() <= 1e-12 * wanted.norm()
        except ib.BudgetExceeded:
            pass
        assert torch.equal(net.state_dict()["adjacency"].to_dense(), before)
    assert exact > 0


def test_what_others_hold_comes_back_after_a_failed_step() -> None:
    """A tensor that user code took past every operator, from a graph that was offloaded."""
    kept: list[torch.Tensor] = Log()

    class Keeps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 800).double(), nn.Linear(800, 5).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.first(x).tanh()
            kept.append(hidden.data)
            return self.last(hidden)

    def failing(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("the user's own")

    net = Keeps()
    x = torch.randn(12, 6, dtype=torch.float64)
    batch = ib.VirtualBatch(
        net,
        ib.losses.coupled(failing),
        micro_batch_size=3,
        retained_micro_batches=99,
        offload="always",
    )
    with pytest.raises(RuntimeError, match="the user's own"):
        batch.backward(x, x)
    with torch.no_grad():
        assert torch.equal(kept[0], net.first(x[:3]).tanh())
