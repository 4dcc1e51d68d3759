"""Statistics of hand-made events, in files."""

import csv
import importlib.util
import json
import sys
import types

import infinitybatch as ib
import pytest
import torch
from event_support import run
from infinitybatch import callbacks as events
from infinitybatch._row_files import CsvRows
from infinitybatch.statistics import Csv, JsonLines, TensorBoard


def json_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def csv_rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_json_lines_tell_everything_that_happens(tmp_path):
    path = tmp_path / "runs" / "run.jsonl"
    log = JsonLines(path)
    run(log, epochs=2, batches=2)
    log.on_checkpoint_saved(
        events.CheckpointSaved(trainer=None, epoch=2, step=4, path=tmp_path / "a.safetensors")
    )
    log.on_failure(
        events.Failure(trainer=None, epoch=2, step=4, exception=ValueError("bad\nthing"))
    )
    rows = json_rows(path)
    one_epoch = ["batch", "batch", "epoch", "evaluation"]
    kinds = ["run", *one_epoch, *one_epoch, "end", "checkpoint", "failure"]
    assert [row["event"] for row in rows] == kinds
    assert {name: rows[6][name] for name in ("epoch", "step", "batch", "loss", "samples")} == {
        "epoch": 1, "step": 3, "batch": 1, "loss": 0.25, "samples": 3,
    }  # fmt: skip
    assert rows[1]["learning_rate"] == 0.1 and rows[1]["micro_batch_size"] == 2
    assert rows[1]["peak_bytes"] == 2**20 and 0 <= rows[1]["seconds"] < 1 < rows[1]["time"]
    assert rows[4]["accuracy"] == 0.75 and rows[4]["loss"] == 0.25
    assert rows[-2]["path"] == str(tmp_path / "a.safetensors")
    assert rows[-1]["exception"] == "ValueError: bad\nthing"


def test_a_later_run_appends_unless_told_otherwise(tmp_path):
    path = tmp_path / "run.jsonl"
    run(JsonLines(path, batches=False), epochs=1)
    run(JsonLines(path, batches=False), epochs=1, first=1)
    assert [row["epoch"] for row in json_rows(path) if row["event"] == "epoch"] == [0, 1]
    assert not [row for row in json_rows(path) if row["event"] == "batch"]
    run(JsonLines(path, append=False), epochs=1, first=5)
    assert [row["epoch"] for row in json_rows(path) if row["event"] == "epoch"] == [5]


@pytest.mark.parametrize(
    ("rows", "count", "names"),
    [
        (
            "batch",
            6,
            "epoch step batch loss samples seconds learning_rate peak_bytes micro_batch_size restarts",
        ),
        ("epoch", 2, "epoch step loss samples batches seconds learning_rate"),
        ("evaluation", 2, "epoch step loss samples seconds accuracy"),
    ],
)
def test_csv_has_a_row_of_the_kind_that_was_asked_for(tmp_path, rows, count, names):
    path = tmp_path / "run.csv"
    run(Csv(path, rows), epochs=1)
    run(Csv(path, rows), epochs=1, first=1)
    read = csv_rows(path)
    assert len(read) == count and list(read[0]) == names.split()
    assert [row["epoch"] for row in read] == sorted(row["epoch"] for row in read)


def test_a_metric_with_the_name_of_a_column(tmp_path):
    log = Csv(tmp_path / "run.csv", "evaluation")
    log.on_evaluation_end(
        events.EvaluationEnd(
            trainer=None, epoch=1, step=2, loss=0.5, samples=3, seconds=0.1,
            metrics={"loss": 0.75, "matrix": torch.eye(2)},
        )
    )  # fmt: skip
    (row,) = csv_rows(tmp_path / "run.csv")
    assert (row["loss"], row["metric_loss"]) == ("0.5", "0.75")
    assert row["matrix"] == "[[1.0, 0.0], [0.0, 1.0]]"


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: JsonLines(3), ib.InvalidType, "path must be a path"),
        (lambda: Csv("x.csv", "epochs"), ib.InvalidArgument, "rows is 'epochs'"),
        (lambda: JsonLines("x", append="no"), ib.InvalidType, "append is 'no'"),
    ],
)
def test_wrong_arguments_make_no_file(tmp_path, monkeypatch, make, error, text):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=text):
        make()
    assert not list(tmp_path.iterdir())


def test_without_tensorboard_the_command_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ib.Unsupported, match="pip install tensorboard"):
        TensorBoard(tmp_path)


class Writer:
    made = []

    def __init__(self, folder, purge_step=None):
        self.folder, self.purge_step, self.scalars, self.flushed = folder, purge_step, [], 0
        Writer.made.append(self)

    def add_scalar(self, name, value, step):
        self.scalars.append((name, value, step))

    def flush(self):
        self.flushed = len(self.scalars)


def test_tensorboard_gets_scalars_under_their_steps(monkeypatch, tmp_path):
    Writer.made = []
    module = types.SimpleNamespace(SummaryWriter=Writer)
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    board = TensorBoard(tmp_path, batches=False)
    run(board, epochs=1)
    run(board, epochs=1, first=1)
    run(TensorBoard(tmp_path), epochs=1, first=2)
    first, second = Writer.made
    assert (first.purge_step, second.purge_step) == (None, 6)  # of the steps that are done again
    assert ("evaluation/accuracy", 0.75, 2) in first.scalars
    assert ("epoch/loss", 0.5, 5) in first.scalars
    assert not [name for name, *_ in first.scalars if name.startswith("batch/")]
    assert ("batch/loss", 1 / 7, 6) in second.scalars
    assert first.flushed == len(first.scalars) > 0
    names = {name.split("/")[1] for name, *_ in second.scalars}
    assert not names & {"epoch", "step", "batch"}


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is missing"
)
def test_tensorboard_reads_what_was_written(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(TensorBoard(tmp_path), epochs=2)
    run(TensorBoard(tmp_path), epochs=1, first=1)  # goes on from a checkpoint after epoch 0
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert [one.step for one in read.Scalars("batch/loss")] == list(range(6))
    assert [(one.step, one.value) for one in read.Scalars("evaluation/accuracy")] == [
        (2, 0.75),
        (5, 0.75),
    ]


def test_half_a_line_of_a_killed_run_goes_before_the_table_widens(tmp_path):
    path = tmp_path / "table.csv"
    path.write_bytes(b"epoch,loss\n0,1.0\n1,0.")
    rows = CsvRows(path, append=True)
    rows.write({"epoch": 1, "loss": 0.5, "right": 0.25})
    rows.close()
    assert path.read_text() == "epoch,loss,right\n0,1.0,\n1,0.5,0.25\n"
