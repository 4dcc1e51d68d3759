"""Forward that runs on the whole batch and fails on a part: the error says that it ran on a part."""

import infinitybatch as ib
import pytest
import torch
from torch import nn

N = 12
X, ADJACENCY = torch.randn(N, 5), torch.eye(N)
Y = torch.arange(N) % 3


class Graph(nn.Module):
    """Each node sees its neighbours."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 8), nn.Linear(8, 3)

    def forward(self, x, adjacency):
        return self.second(adjacency @ self.first(adjacency @ x).relu())


class Edges(Graph):
    def forward(self, x, edges):
        h = self.first(x)
        return self.second(torch.zeros_like(h).index_add(0, edges[1], h[edges[0]]))


OPTIONS = [dict(micro_batch_size=4), dict(micro_batch_size=1), dict(memory_budget="64MiB")]


@pytest.mark.parametrize("options", OPTIONS[:2])
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), ib.losses.coupled(nn.CrossEntropyLoss())])
def test_adjacency_matrix(loss, options):
    step = ib.VirtualBatch(Graph(), loss, **options)
    with pytest.raises(ib.BatchError, match=r"inputs\[1\] has two dimensions of 12.*ib.shared"):
        step.backward((X, ADJACENCY), Y)


@pytest.mark.parametrize("entry", ["wrap", "streaming", "coupled"])
def test_a_budget_that_holds_all_nodes_is_exact(entry):
    model, native = Graph(), Graph()
    native.load_state_dict(model.state_dict())
    loss = nn.CrossEntropyLoss()
    for _ in range(3):
        model.zero_grad()
        native.zero_grad()
        loss(native(X, ADJACENCY), Y).backward()
        if entry == "wrap":
            loss(ib.wrap(model, **OPTIONS[2])(X, ADJACENCY), Y).backward()
        else:
            whole = loss if entry == "streaming" else ib.losses.coupled(loss)
            ib.VirtualBatch(model, whole, **OPTIONS[2]).backward((X, ADJACENCY), Y)
        for found, wanted in zip(model.parameters(), native.parameters(), strict=True):
            torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("options", OPTIONS[:2])
def test_adjacency_matrix_wrapped(options):
    with pytest.raises(
        ib.BatchError, match=r"inputs\[0\]\[1\] has two dimensions of 12.*ib.shared"
    ):
        ib.wrap(Graph(), **options)(X, ADJACENCY)


@pytest.mark.parametrize("options", OPTIONS[:2])  # a budget tries the whole batch
def test_other_errors_are_forwards_own_with_a_note(options):
    edges = ib.shared(ADJACENCY.nonzero().t())
    wrapped = ib.wrap(Edges(), **options)
    with pytest.raises(IndexError, match="out of bounds") as raised:
        wrapped(X, edges)
    assert len(raised.value.__notes__) == 1
    assert "of the 12 samples" in raised.value.__notes__[0]
    # What is shared is marked already.
    assert "ib.shared" not in raised.value.__notes__[0]
    assert "compute all at once" in raised.value.__notes__[0]


def test_the_whole_batch_has_no_note():
    edges = ib.shared(ADJACENCY.nonzero().t() + N)
    with pytest.raises(IndexError) as raised:
        ib.VirtualBatch(Edges(), nn.CrossEntropyLoss(), micro_batch_size=N).backward((X, edges), Y)
    assert not hasattr(raised.value, "__notes__")


@pytest.mark.parametrize("budget", [1, "1", 64])
def test_a_budget_of_bytes_that_was_meant_as_a_share(budget):
    step = ib.VirtualBatch(nn.Linear(5, 3), nn.CrossEntropyLoss(), memory_budget=budget)
    with pytest.raises(
        ib.BudgetExceeded, match=f"; {budget}, a whole number, is bytes.*=1.0 is all"
    ):
        step.backward(X, Y)
    with pytest.raises(ib.BudgetExceeded, match="memory_budget=1.0 is all of the device"):
        ib.wrap(nn.Linear(5, 3), memory_budget=budget)(X)


def test_a_share_that_was_meant_as_bytes():
    with pytest.raises(ib.InvalidArgument, match=r"512.*at most 1; write bytes as a whole number"):
        ib.wrap(nn.Linear(5, 3), memory_budget=512.0)
