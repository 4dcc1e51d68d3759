"""Bounded containers: which entries they keep, and where."""

import gc
import random
import tracemalloc

import infinitybatch as ib
import numpy
import pytest
import torch
from infinitybatch import _selection as selection
from infinitybatch import _stores
from infinitybatch._containers import Container


def container(keep, where="host", folder=None):
    return Container("outputs", keep, _stores.make("outputs", where, folder))


def filled(keep, epochs=5, batches=4, **options):
    made = container(keep, **options)
    for epoch in range(epochs):
        for batch in range(batches):
            made.add(epoch, batch, lambda e=epoch, b=batch: torch.tensor([e, b]))
    return made


def places(container):
    return [tuple(entry.tolist()) for epoch in container for entry in epoch]


EVERY_PLACE = [(epoch, batch) for epoch in range(5) for batch in range(4)]


@pytest.mark.parametrize("where", ["device", "host", "disk"])
@pytest.mark.parametrize(
    ("keep", "kept"),
    [
        (selection.everything(), EVERY_PLACE),
        (selection.last(6), EVERY_PLACE[-6:]),
        (selection.every(3), EVERY_PLACE[::3]),
        (selection.every(3, at_most=2), EVERY_PLACE[::3][-2:]),
    ],
)
def test_what_is_kept(keep, kept, where):
    made = filled(keep, where=where)
    assert places(made) == kept and made.seen == 20
    assert made.epochs == sorted({epoch for epoch, _ in kept})
    epoch, batch = kept[0]
    assert made[epoch][batch].tolist() == [epoch, batch]
    assert made[epoch].batches[0] == batch
    assert made[-1][-1].tolist() == list(kept[-1])


def test_what_is_not_kept_says_what_is():
    made = filled(selection.last(6))
    with pytest.raises(IndexError, match=r"outputs\[2\] is not kept; there are epochs 3 to 4"):
        made[2]
    with pytest.raises(IndexError, match=r"outputs\[3\]\[1\] .* epoch 3 has batches 2 to 3"):
        made[3][1]
    with pytest.raises(IndexError):
        made[-3]
    with pytest.raises(IndexError):
        made[3][-3]
    assert repr(made) == "outputs: 6 of 20 entries kept, of 2 epochs"


def test_nothing_is_kept_nor_made():
    made = container(selection.everything(), "none")
    made.add(0, 0, lambda: pytest.fail("made for nothing"))
    assert made.seen == 1 and len(made) == 0 and list(made) == []


def test_a_reservoir_is_fair_and_leaves_all_other_random_numbers_alone():
    states = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    counts = numpy.zeros(20)
    for seed in range(400):
        made = filled(selection.reservoir(5, seed))
        kept = places(made)
        assert len(kept) == 5
        for epoch, batch in kept:
            counts[4 * epoch + batch] += 1
    assert counts.sum() == 2000
    assert counts.min() > 60 and counts.max() < 140  # 100 on average, 9 each way
    assert places(filled(selection.reservoir(5, 3))) == places(filled(selection.reservoir(5, 3)))
    after = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert after == states


def test_entries_are_copies_without_a_graph_and_hold_no_more_than_themselves():
    large = torch.zeros(1000, 1000, requires_grad=True)
    for where in ("device", "host"):
        made = container(selection.last(1), where)
        view = (large * 2)[:2]
        made.add(0, 0, lambda view=view: {"scores": view, "names": ["a", 3], "n": numpy.ones(2)})
        kept = made[0][0]
        assert not kept["scores"].requires_grad
        assert kept["scores"].untyped_storage().nbytes() == 2 * 1000 * 4
        assert kept["names"] == ["a", 3]


def test_an_entry_does_not_follow_what_was_stored():
    for where in ("device", "host", "disk"):
        made = container(selection.last(1), where)
        tensor, array = torch.zeros(3), numpy.zeros(3)
        made.add(0, 0, lambda t=tensor, a=array: (t, a))
        tensor += 1
        array += 1
        assert made[0][0][0].sum() == 0 and made[0][0][1].sum() == 0


def test_disk_keeps_as_many_files_as_entries(tmp_path):
    made = filled(selection.last(3), where="disk", folder=tmp_path)
    assert len(list(tmp_path.iterdir())) == 3
    other = filled(selection.last(2), where="disk", folder=tmp_path)  # a second run, there too
    assert len(list(tmp_path.iterdir())) == 5
    assert places(made) == EVERY_PLACE[-3:] and places(other) == EVERY_PLACE[-2:]
    made.clear()
    assert len(list(tmp_path.iterdir())) == 2 and made.seen == 0


def test_a_temporary_folder_goes_with_its_container():
    made = filled(selection.last(3), where="disk")
    folder = made._store._folder
    assert len(list(folder.iterdir())) == 3
    del made
    gc.collect()
    assert not folder.exists()


def test_a_disk_that_fails_is_a_typed_error(tmp_path):
    made = container(selection.last(2), "disk", tmp_path)
    made.add(0, 0, lambda: torch.ones(4))
    tmp_path.joinpath("outputs-00000000.pt").unlink()
    tmp_path.rmdir()
    with pytest.raises(ib.OffloadError, match='outputs of a history.*where="host"') as caught:
        made.add(0, 1, lambda: torch.ones(4))
    assert caught.value.needed == 16
    tmp_path.mkdir()
    for batch in range(2, 6):
        made.add(0, batch, lambda: torch.ones(4))
    assert made[0].batches == [4, 5]


def test_a_batch_that_is_computed_a_second_time_replaces_itself(tmp_path):
    made = filled(selection.last(6), epochs=2, where="disk", folder=tmp_path)
    for batch in range(4):
        made.add(1, batch, lambda b=batch: torch.tensor([7, b]))
    assert places(made) == [(7, 0), (7, 1), (7, 2), (7, 3)]
    assert len(list(tmp_path.iterdir())) == 4
    for epoch in range(2, 50):
        made.add(epoch, 0, lambda: torch.ones(1))
    assert sum(map(len, made)) == 6 == len(list(tmp_path.iterdir()))
    assert len(made._places) == len(made._numbers) == 6


@pytest.mark.parametrize(
    "keep", [selection.last(10), selection.every(7, 10), selection.reservoir(10)]
)
@pytest.mark.parametrize("where", ["device", "host", "disk"])
def test_a_thousand_epochs_add_nothing(keep, where):
    made = container(keep, where)

    def run(epochs):
        for epoch in epochs:
            for batch in range(3):
                made.add(epoch, batch, lambda: torch.zeros(100))

    gc.collect()
    others = ib.memory.stats().live
    run(range(100))
    gc.collect()
    live = ib.memory.stats().live
    tracemalloc.start()
    run(range(100, 120))
    before = tracemalloc.get_traced_memory()[0]
    run(range(120, 1000 if where != "disk" else 300))
    gc.collect()
    assert ib.memory.stats().live == live <= others + 10 * 400 + 1000
    assert tracemalloc.get_traced_memory()[0] - before < 20_000
    tracemalloc.stop()
    assert sum(map(len, made)) == 10


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: selection.last(0), ib.InvalidArgument, "n is 0; it is 1 or more"),
        (lambda: selection.last(1.5), ib.InvalidType, "n must be a whole number"),
        (lambda: selection.every(2, at_most=0), ib.InvalidArgument, "at_most is 0"),
        (lambda: selection.reservoir(1, "x"), ib.InvalidType, "seed must be a whole number"),
        (lambda: container(selection.last(1), "gpu"), ib.InvalidArgument, "where is 'gpu'"),
    ],
)
def test_wrong_arguments(make, error, text):
    with pytest.raises(error, match=text):
        make()
