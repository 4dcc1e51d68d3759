"""`max_norm`: weights that forward rewrites."""

import copy

import infinitybatch as ib
import pytest
import torch
from coupled_support import Cube
from fault_support import State
from max_norm_models import (
    CRITERION,
    LENGTH,
    MODELS,
    SIZES,
    TOLERANCE,
    assert_as_native,
    assert_same_weights,
    coupling,
    labels,
    reader,
    table,
    tokens,
)
from support import Calls, native, result_of, worst_error
from torch import nn


def rewrites(model: nn.Module, x: torch.Tensor) -> bool:
    other = copy.deepcopy(model)
    other(x)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return not all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", MODELS)
def test_streamed(name):
    model, x = MODELS[name](), tokens()
    assert rewrites(model, x)
    for found in assert_as_native(model, x, labels(), CRITERION, SIZES):
        assert found.report.restarts == 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("retained", [0, 2, 4])
def test_coupled_loss(name, retained):
    ways = [{"micro_batch_size": 3, "retained_micro_batches": retained}]
    (found,) = assert_as_native(MODELS[name](), tokens(), None, ib.losses.coupled(coupling), ways)
    assert found.report.strategy != "rerun"


@pytest.mark.parametrize("name", ["Embedding", "twice", "bag, weighted"])
def test_forward_runs_twice(name):
    """Behind an autograd function no tape can be believed."""
    model = MODELS[name]()
    head = model.head
    model.head = nn.Sequential(Calls(lambda self, x: Cube.apply(x)), head)
    ways = [{"micro_batch_size": 3}, {"memory_budget": "64MiB"}]
    loss = ib.losses.coupled(coupling)
    found = assert_as_native(model, tokens(), None, loss, ways)
    assert found[0].report.strategy == "rerun"
    (found,) = assert_as_native(MODELS[name](), tokens(), None, loss, ways[:1], use_tapes=False)
    assert found.report.strategy == "rerun"


@pytest.mark.parametrize("name", ["Embedding", "twice", "sparse"])
def test_scaled_rows_are_not_scaled_again(name):
    """In fp32 a row's norm may pass max_norm by a rounding after it was scaled."""
    model, x = MODELS[name]().float(), tokens(64)
    again = copy.deepcopy(model)
    again(x)
    assert rewrites(again, x)
    wanted = native(model, lambda o, _: coupling(o), x, None)
    for retained in (0, 8, 16):
        own = copy.deepcopy(model)
        loss = ib.losses.coupled(coupling)
        batch = ib.VirtualBatch(own, loss, micro_batch_size=4, retained_micro_batches=retained)
        report = batch.backward(x)
        assert report.strategy != "rerun"
        assert worst_error(result_of(own, report.loss), wanted) <= 1e-5
        if name == "twice":
            continue  # natively a row that two lookups read is scaled twice
        assert_same_weights(own, wanted.model)


@pytest.mark.parametrize("kind", ["stream", "coupled"])
def test_beside_batch_norm(kind):
    model = reader(table(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())
    y = labels() if kind == "stream" else None
    loss = CRITERION if kind == "stream" else ib.losses.coupled(coupling)
    ways = [{"micro_batch_size": 1}, {"micro_batch_size": 5}, {"memory_budget": "64MiB"}]
    for found in assert_as_native(model, tokens(), y, loss, ways):
        assert found.report.strategy == "cut"


def test_beside_a_batch_norm_that_chooses_the_words():
    """Which rows are looked up is not known before the whole batch was there."""

    def forward(self, x):
        chosen = self.norm(x.double()).argmax(1)
        return self.head(self.embedding(chosen))

    model = Calls(
        forward, norm=nn.BatchNorm1d(LENGTH), embedding=table(), head=nn.Linear(6, 4)
    ).double()
    x, y = tokens(), labels()
    before = State(model)
    with pytest.raises(ib.CouplingError, match="embedding_renorm_"):
        ib.VirtualBatch(model, CRITERION, micro_batch_size=4).backward(x, y)
    before.check()
    assert_as_native(model, x, y, CRITERION, [{"memory_budget": "64MiB"}])


def test_static_graph():
    """User code stays in the loop: a recording would not scale the rows of other samples."""
    model = reader(table())
    batch = ib.VirtualBatch(model, CRITERION, micro_batch_size=4, static_graph=True)
    for _ in range(3):
        x, y = tokens(), labels()
        wanted = native(model, CRITERION, x, y)
        model.zero_grad()
        report = batch.backward(x, y)
        assert worst_error(result_of(model, report.loss), wanted) <= TOLERANCE
        assert torch.equal(model.embedding.weight, wanted.model.embedding.weight)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.3)


def test_numbers_of_the_whole_batch():
    model, x, y = reader(table(), nn.Dropout(0.3)), tokens(), labels()
    torch.manual_seed(3)
    wanted = native(model, CRITERION, x, y)
    for size in (1, 5):
        own = copy.deepcopy(model)
        torch.manual_seed(3)
        batch = ib.VirtualBatch(own, CRITERION, micro_batch_size=size, match_native_rng=True)
        report = batch.backward(x, y)
        assert worst_error(result_of(own, report.loss), wanted) <= TOLERANCE
        assert torch.equal(own.embedding.weight, wanted.model.embedding.weight)


@pytest.mark.parametrize("segments", [2, 4])
@pytest.mark.parametrize("kind", ["stream", "coupled"])
def test_one_sample_in_segments(kind, segments):
    layers = [layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh())]
    model = reader(table(), *layers)
    y = labels() if kind == "stream" else None
    loss = CRITERION if kind == "stream" else ib.losses.coupled(coupling)
    ways = [
        {"micro_batch_size": size, "checkpoint_segments": segments, "offload": offload}
        for size in (1, 5)
        for offload in ("auto", "always")
    ]
    assert_as_native(model, tokens(), y, loss, ways)
