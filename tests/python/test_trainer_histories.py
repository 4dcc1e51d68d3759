"""Histories, statistics and progress of ib.Trainer itself."""

import csv
import gc
import io
import json
import os
import signal
import subprocess
import sys
import tracemalloc

import infinitybatch as ib
import pytest
import torch
from infinitybatch.histories import History, every, everything, last, reservoir
from infinitybatch.statistics import Csv, JsonLines
from torch import nn

X, Y = torch.randn(10, 4, dtype=torch.float64), torch.randint(3, (10,))
LOADER = [(X[:6], Y[:6]), (X[6:], Y[6:])]


def trainer(callbacks, loader=None, loss=None, **options):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    options = options or {"micro_batch_size": 4}
    return ib.Trainer(
        model, loss or nn.CrossEntropyLoss(), optimizer, loader or LOADER, callbacks=callbacks, **options
    )  # fmt: skip


def coupled(outputs, targets):
    return nn.functional.cross_entropy(outputs - outputs.mean(0), targets)


@pytest.mark.parametrize("loss", [None, coupled])
@pytest.mark.parametrize("where", ["device", "host", "disk"])
@pytest.mark.parametrize("options", [{"micro_batch_size": 4}, {"keep_outputs": True}])
def test_what_is_kept_is_what_the_step_saw(loss, where, options):
    keep = {"outputs": everything(), "inputs": everything(), "targets": everything()}
    history = History(**keep, where=where)
    run = trainer(history, loss=ib.losses.coupled(coupled) if loss else None, **options)
    summaries = run(2)
    for epoch in range(2):
        for batch, (inputs, targets) in enumerate(LOADER):
            assert torch.equal(history.inputs[epoch][batch], inputs)
            assert torch.equal(history.targets[epoch][batch], targets)
            value, samples = history.losses[epoch][batch]
            outputs = history.outputs[epoch][batch]
            wanted = (loss or nn.functional.cross_entropy)(outputs, targets)
            assert abs(wanted.item() - value) <= 1e-12 and samples == len(inputs)
        mean = sum(value * samples for value, samples in history.losses[epoch]) / 10
        assert abs(mean - summaries[epoch].loss) <= 1e-12


def test_windows_are_kept_too():
    history = History(inputs=last(1), outputs=last(1))
    trainer(history, ib.windows(LOADER, batches=2))(1)
    assert torch.equal(history.inputs[0][0], X) and history.outputs[0][0].shape == (10, 3)


def test_metrics_of_evaluations():
    history = History()
    run = trainer(history)
    run(1)
    found = run.evaluate(LOADER, {"right": lambda o, t: (o.argmax(1) == t).double().mean()})
    kept = history.metrics[1][0]
    assert kept["loss"] == found.loss and float(kept["right"]) == float(found.metrics["right"])


def test_a_run_that_goes_on_from_a_checkpoint_has_the_history_of_one_that_never_stopped():
    straight, first, second = (History(losses=reservoir(5, seed=3)) for _ in range(3))
    trainer(straight)(9)
    begun = trainer(first)
    begun(4)
    file = io.BytesIO()
    torch.save(begun.state_dict(), file)
    file.seek(0)
    goes_on = trainer(second)
    goes_on.load_state_dict(torch.load(file, weights_only=True))
    goes_on(5)
    assert second.losses.epochs == straight.losses.epochs
    assert [list(epoch) for epoch in second.losses] == [list(epoch) for epoch in straight.losses]


def test_a_budget_holds_while_a_history_on_disk_keeps_all_outputs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 64))
    x, y = torch.randn(2000, 8), torch.randint(64, (2000,))
    history = History(outputs=everything(), where="disk")
    budget = ib.memory.stats().live + 700_000
    run = ib.Trainer(
        model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1), [(x, y)],
        callbacks=history, memory_budget=budget,
    )  # fmt: skip
    with ib.memory.peak() as peak:
        run(4)
    assert peak.peak <= budget
    assert history.outputs[3][0].nbytes == 512_000


class Stops(ib.Callback):
    def __init__(self, at):
        self.at = at

    def on_micro_batch(self, event):
        if event.step == self.at and event.begin:
            self.at = None
            raise KeyError("in the middle of a step")


def test_a_step_that_fails_and_comes_again_is_kept_once(tmp_path):
    history, straight = History(outputs=everything()), History(outputs=everything())
    run = trainer([history, JsonLines(tmp_path / "run.jsonl"), Stops(2)])
    with pytest.raises(KeyError):
        run(3)
    run(2)
    trainer(straight)(3)
    assert history.losses.seen == straight.losses.seen == 6
    for one, another in zip(history.outputs, straight.outputs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, another, strict=True))
    rows = [json.loads(line) for line in (tmp_path / "run.jsonl").read_text().splitlines()]
    kinds = [row["event"] for row in rows]
    assert kinds.count("batch") == 6 and kinds.count("epoch") == 3 and kinds.count("failure") == 1
    assert [row["step"] for row in rows if row["event"] == "batch"] == list(range(6))


def test_csv_and_progress(tmp_path):
    shown = io.StringIO()
    run = trainer(Csv(tmp_path / "run.csv", "batch") + ib.Progress(file=shown, interval=0))
    run(2)
    with (tmp_path / "run.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [int(row["samples"]) for row in rows] == [6, 4, 6, 4]
    assert all(int(row["peak_bytes"]) > 0 and row["micro_batch_size"] == "4" for row in rows)
    lines = shown.getvalue().splitlines()
    assert lines[0].startswith("epoch 1/2 · batch 1/2 · loss") and " left" not in lines[0]
    assert " left" in lines[1] and lines[-1].startswith("epoch 2/2 · batch 2/2 · loss")


def test_a_thousand_epochs_add_nothing(tmp_path):
    """Of allocator and host, with every kind of callback at work."""
    history = History(
        losses=last(20), outputs=every(7, at_most=2), inputs=reservoir(2), targets=last(1)
    )
    log = JsonLines(tmp_path / "run.jsonl", batches=False)
    with open(os.devnull, "w") as nowhere:
        run = trainer([history, log, ib.Progress(interval=None, file=nowhere)], [(X, Y)])
        run(10)
        tracemalloc.start()
        run(100)
        gc.collect()
        live = ib.memory.stats().live
        run(900)  # the trainer's own summaries, of 1,000 epochs, are full now
        gc.collect()
        before = tracemalloc.get_traced_memory()[0]
        run(300)
        gc.collect()
        grown = tracemalloc.get_traced_memory()[0] - before
        tracemalloc.stop()
    assert abs(ib.memory.stats().live - live) <= 256
    assert grown < 20_000
    assert history.losses.seen == 1310 and sum(map(len, history.losses)) == 20


KILLED = """
import sys, torch, infinitybatch as ib
from infinitybatch.statistics import Csv, JsonLines
model = torch.nn.Linear(4, 3)
batches = [(torch.randn(6, 4), torch.randint(3, (6,)))]
callbacks = JsonLines(sys.argv[1]) + Csv(sys.argv[2], "batch")
optimizer = torch.optim.SGD(model.parameters(), 0.1)
loss = torch.nn.CrossEntropyLoss()
run = ib.Trainer(model, loss, optimizer, batches, callbacks=callbacks, micro_batch_size=4)
print("begins", flush=True)
run(10**9)
"""


def test_a_killed_run_leaves_whole_lines(tmp_path):
    lines, table = tmp_path / "run.jsonl", tmp_path / "run.csv"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(lines), str(table)], stdout=subprocess.PIPE
    )
    assert process.stdout.readline() == b"begins\n"
    while not table.exists() or table.stat().st_size < 5000:
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    steps = [row["step"] for row in rows if row["event"] == "batch"]
    with table.open(newline="") as file:
        cells = list(csv.DictReader(file))
    assert steps == list(range(len(steps))) and len(steps) - len(cells) in (0, 1)
    assert all(None not in row.values() for row in cells)
