"""Histories fill themselves from a trainer's events, and hold no more than was asked for."""

import gc
import tracemalloc

import event_support
import infinitybatch as ib
import pytest
import torch
from event_support import batch, report, run
from infinitybatch import callbacks as events
from infinitybatch import histories
from infinitybatch.histories import History, every, everything, last, reservoir


def test_losses_are_values_and_sizes_by_epoch_and_batch():
    history = History()
    run(history, epochs=4, batches=3)
    assert len(history.losses) == 4 and [len(epoch) for epoch in history.losses] == [3, 3, 3, 3]
    assert history.losses[2][1] == (1 / 8, 3)
    assert history.losses[-1][-1] == (1 / 12, 3)
    assert not history.listens("on_micro_batch") and history.outputs.seen == 12


def test_metrics_of_each_evaluation():
    history = History()
    run(history, epochs=2)
    assert history.metrics.epochs == [1, 2]
    assert history.metrics[1][0] == {"loss": 0.25, "accuracy": torch.tensor(0.75)}
    history.on_evaluation_end(
        events.EvaluationEnd(
            trainer=None, epoch=2, step=6, loss=1.0, samples=1, metrics={}, seconds=0.0
        )
    )
    assert history.metrics[2][1] == {"loss": 1.0}


@pytest.mark.parametrize("where", ["device", "host", "disk"])
def test_rows_of_whole_batches(where):
    history = History(outputs=last(2), inputs=last(1), targets=everything(), where=where)
    run(history, epochs=2, batches=3)
    rows = torch.arange(3.0)[:, None].expand(3, event_support.FEATURES)
    assert history.outputs[1].batches == [1, 2] and 0 not in history.outputs.epochs
    assert torch.equal(history.outputs[1][2], rows * 2)
    assert torch.equal(history.inputs[1][2], rows)
    assert torch.equal(history.targets[0][0], torch.arange(3)) and len(history.targets) == 2
    assert history.listens("on_micro_batch")
    history.clear()
    assert len(history.outputs) == len(history.losses) == 0


def test_outputs_of_the_report_go_first():
    history = History(outputs=last(1))
    batch(history, report=report(outputs={"whole": torch.ones(3, 1)}))
    assert torch.equal(history.outputs[0][0]["whole"], torch.ones(3, 1))


def test_nested_outputs_are_joined_leaf_by_leaf():
    history = History(outputs=last(1))
    batch(history, outputs=lambda x: {"a": x, "b": (x.sum(1), "name")})
    kept = history.outputs[0][0]
    assert kept["a"].shape == (3, event_support.FEATURES) and kept["b"][1] == "name"
    assert kept["b"][0].tolist() == [0, 6, 12]


def test_nowhere_keeps_only_numbers():
    history = History(outputs=everything(), inputs=everything(), where="none")
    run(history)
    assert not history.listens("on_micro_batch")
    assert len(history.outputs) == len(history.inputs) == 0 and len(history.losses) == 2


def test_inputs_are_those_before_forward_wrote_into_them():
    history = History(inputs=last(1))
    inputs = torch.zeros(3)
    history.on_batch_begin(
        events.BatchBegin(trainer=None, epoch=0, step=0, batch=0, inputs=inputs, targets=None)
    )
    inputs += 1
    history.on_batch_end(
        events.BatchEnd(
            trainer=None, epoch=0, step=0, batch=0, loss=0.0, samples=3, report=report(),
            learning_rates=(),
        )
    )  # fmt: skip
    assert history.inputs[0][0].sum() == 0


def test_sources_are_read():
    history = History(inputs=last(1))
    source = ib.BatchSource(4, lambda begin, end: torch.arange(begin, end))
    history.on_batch_begin(
        events.BatchBegin(trainer=None, epoch=0, step=0, batch=0, inputs=source, targets=None)
    )
    assert history._waiting["inputs"].tolist() == [0, 1, 2, 3]


def micro(history, begin, end, value):
    history.on_micro_batch(
        events.MicroBatch(
            trainer=None, epoch=0, step=0, begin=begin, end=end, targets=None,
            outputs=torch.full((end - begin,), value),
        )
    )  # fmt: skip


def ends(history, samples):
    history.on_batch_end(
        events.BatchEnd(
            trainer=None, epoch=0, step=0, batch=0, loss=0.0, samples=samples, report=report(),
            learning_rates=(),
        )
    )  # fmt: skip


def test_after_a_restart_the_later_outputs_count():
    history = History(outputs=last(1))
    for begin, end, value in ((0, 4, 1.0), (4, 6, 1.0), (0, 3, 2.0), (3, 6, 3.0)):
        micro(history, begin, end, value)
    ends(history, 6)
    assert history.outputs[0][0].tolist() == [2, 2, 2, 3, 3, 3]


def test_micro_batches_in_any_order():
    history = History(outputs=last(1))
    for begin in (4, 0, 2):
        micro(history, begin, begin + 2, float(begin))
    ends(history, 6)
    assert history.outputs[0][0].tolist() == [0, 0, 2, 2, 4, 4]


def test_a_batch_that_failed_leaves_nothing_behind():
    history = History(outputs=last(2), inputs=last(2))
    history.on_batch_begin(
        events.BatchBegin(
            trainer=None, epoch=0, step=0, batch=0, inputs=torch.zeros(9), targets=None
        )
    )
    micro(history, 0, 2, 7.0)
    history.on_failure(events.Failure(trainer=None, epoch=0, step=0, exception=KeyError()))
    assert not history._waiting and not history._pieces
    batch(history)
    assert history.outputs[0][0].shape == (3, event_support.FEATURES)
    assert history.losses.seen == 1 and history.inputs[0].batches == [0]


def test_rows_that_never_came_are_no_silent_gap():
    history = History(outputs=last(1))
    micro(history, 0, 2, 1.0)
    with pytest.raises(ib.StateError, match="outputs of 2 of 6 samples.*keep_outputs=True"):
        ends(history, 6)


def test_on_disk_no_more_than_a_micro_batch_is_in_memory(tmp_path):
    history = History(outputs=last(2), where="disk", folder=tmp_path)
    for attempt in ("fails", "ends"):
        for begin in range(0, 8, 2):
            live = ib.memory.stats().live
            micro(history, begin, begin + 2, float(begin))
            assert ib.memory.stats().live == live
        if attempt == "fails":
            history.on_failure(events.Failure(trainer=None, epoch=0, step=0, exception=KeyError()))
            assert not list(tmp_path.iterdir())
    ends(history, 8)
    assert history.outputs[0][0].tolist() == [0, 0, 2, 2, 4, 4, 6, 6]
    assert len(list(tmp_path.iterdir())) == 4
    micro(history, 0, 4, 1.0)
    micro(history, 0, 2, 1.0)  # begins again
    assert len(list(tmp_path.iterdir())) == 5
    history.clear()
    assert not list(tmp_path.iterdir())


def test_outputs_that_have_no_rows_are_refused():
    for outputs in (lambda x: x.t(), lambda x: x.sum()):
        history = History(outputs=last(1))
        with pytest.raises(ib.Unsupported, match="keep_outputs=True"):
            batch(history, outputs=outputs)


@pytest.mark.parametrize("keep", [last(4), every(2, at_most=3), reservoir(3, seed=1), everything()])
def test_a_checkpoint_carries_numbers_and_the_choice(keep):
    one, other = History(losses=keep, metrics=keep), History(losses=keep, metrics=keep)
    straight = History(losses=keep, metrics=keep)
    run(straight, epochs=8)
    run(one, epochs=4)
    state = torch.load(saved(one.state_dict()), weights_only=True)
    run(other, epochs=1)  # forgotten
    other.load_state_dict(state)
    run(other, epochs=4, first=4)
    for name in ("losses", "metrics"):
        left, right = getattr(other, name), getattr(straight, name)
        assert left.epochs == right.epochs and left.seen == right.seen
        assert [list(epoch) for epoch in left] == [list(epoch) for epoch in right]


def saved(state):
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("where", ["device", "host"])
def test_a_thousand_epochs_add_nothing_but_what_was_asked_for(where):
    history = History(
        losses=last(50), metrics=last(5), outputs=every(7, at_most=3), inputs=reservoir(4),
        targets=last(2), where=where,
    )  # fmt: skip
    run(history, epochs=100)
    gc.collect()
    live = ib.memory.stats().live
    tracemalloc.start()
    run(history, epochs=20, first=100)
    before = tracemalloc.get_traced_memory()[0]
    run(history, epochs=880, first=120)
    gc.collect()
    assert abs(ib.memory.stats().live - live) <= 64
    assert tracemalloc.get_traced_memory()[0] - before < 20_000
    tracemalloc.stop()
    assert history.losses.seen == 3000 and history.losses[999][2] == (1 / 3000, 3)
    kept = {name: sum(map(len, getattr(history, name))) for name in ("losses", "inputs", "outputs")}
    assert kept == {"losses": 50, "inputs": 4, "outputs": 3}


def test_what_is_no_selection_or_place():
    with pytest.raises(ib.InvalidType, match=r"outputs is 10, .*outputs=ib.histories.last\(100\)"):
        History(outputs=10)
    with pytest.raises(ib.InvalidArgument, match="where is 'gpu'"):
        History(outputs=last(1), where="gpu")
    assert "losses: 0 of 0" in repr(History()) and "outputs" not in repr(History())
    assert set(histories.__all__) <= set(dir(histories))
