"""Rows in files: whole lines whenever a run ends, and the next run goes on."""

import csv
import json
import math
import os
import signal
import subprocess
import sys

import numpy
import pytest
import torch
from infinitybatch._row_files import CsvRows, JsonRows


def json_rows(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def csv_rows(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_json_lines_hold_what_was_written_as_soon_as_it_is(tmp_path):
    path = tmp_path / "new folder" / "run.jsonl"
    rows = JsonRows(path, append=True)
    assert not path.exists()
    rows.write({"step": 1, "loss": torch.tensor(0.5, requires_grad=True), "note": 'a,\n"b"'})
    assert json_rows(path) == [{"step": 1, "loss": 0.5, "note": 'a,\n"b"'}]
    rows.write({"sizes": [3, torch.tensor(4)], "more": {"x": numpy.float32(1.5)}, "none": None})
    assert json_rows(path)[1] == {"sizes": [3, 4], "more": {"x": 1.5}, "none": None}


def test_numbers_that_json_lacks_are_words(tmp_path):
    path = tmp_path / "run.jsonl"
    JsonRows(path, append=True).write({"a": math.nan, "b": [math.inf, -math.inf]})
    (row,) = [json.loads(path.read_text(), parse_constant=pytest.fail)]
    assert row == {"a": "NaN", "b": ["Infinity", "-Infinity"]}
    assert math.isnan(float(row["a"])) and float(row["b"][1]) == -math.inf


@pytest.mark.parametrize("kind", [JsonRows, CsvRows])
def test_a_later_run_goes_on_or_begins_anew(tmp_path, kind):
    path = tmp_path / "run"
    for start in (0, 2):
        rows = kind(path, append=True)
        for step in (start, start + 1):
            rows.write({"step": step})
        rows.close()
    read = json_rows if kind is JsonRows else csv_rows
    assert [int(row["step"]) for row in read(path)] == [0, 1, 2, 3]
    rows = kind(path, append=False)
    rows.write({"step": 9})
    rows.close()
    rows.write({"step": 10})
    assert [int(row["step"]) for row in read(path)] == [9, 10]


@pytest.mark.parametrize("kind", [JsonRows, CsvRows])
@pytest.mark.parametrize("rest", ["", '{"step": 3, "lo', "3,0.", "x" * 10_000])
def test_what_a_killed_run_left_of_a_line_is_cut_off(tmp_path, kind, rest):
    path = tmp_path / "run"
    rows = kind(path, append=True)
    rows.write({"step": 1, "loss": 0.5})
    rows.close()
    with path.open("a") as file:
        file.write(rest)
    rows = kind(path, append=True)
    rows.write({"step": 2, "loss": 0.25})
    read = json_rows if kind is JsonRows else csv_rows
    assert [(int(row["step"]), float(row["loss"])) for row in read(path)] == [(1, 0.5), (2, 0.25)]


def test_only_a_piece_of_the_first_line(tmp_path):
    for kind, read in ((JsonRows, json_rows), (CsvRows, csv_rows)):
        path = tmp_path / kind.__name__
        path.write_text("step,lo")
        kind(path, append=True).write({"step": 1})
        assert [int(row["step"]) for row in read(path)] == [1]


def test_a_new_name_widens_the_table(tmp_path):
    path = tmp_path / "run.csv"
    rows = CsvRows(path, append=True)
    rows.write({"step": 1, "loss": 0.5})
    rows.write({"loss": 0.25, "note": 'two,\n"words"'})
    rows.write({"step": 3})
    assert csv_rows(path) == [
        {"step": "1", "loss": "0.5", "note": ""},
        {"step": "", "loss": "0.25", "note": 'two, "words"'},
        {"step": "3", "loss": "", "note": ""},
    ]
    rows.close()
    rows = CsvRows(path, append=True)
    rows.write({"accuracy": 1.0, "step": 4})
    assert csv_rows(path)[-1] == {"step": "4", "loss": "", "note": "", "accuracy": "1.0"}
    assert os.listdir(tmp_path) == ["run.csv"]


KILLED = """
import sys, pathlib
from infinitybatch import _row_files
rows = getattr(_row_files, sys.argv[1])(pathlib.Path(sys.argv[2]), append=True)
print("begins", flush=True)
step = 0
while True:
    rows.write({"step": step, "text": "x" * 500})
    step += 1
"""


@pytest.mark.parametrize("kind", ["JsonRows", "CsvRows"])
def test_a_killed_process_leaves_whole_lines_to_the_next(tmp_path, kind):
    path = tmp_path / "run"
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, kind, str(path)], stdout=subprocess.PIPE
    )
    process.stdout.readline()
    while not path.exists() or path.stat().st_size < 100_000:
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    # The system may cut a write short where a page ends; the next run takes that piece off.
    lines = path.read_bytes().count(b"\n") - (kind == "CsvRows")
    again = {"JsonRows": JsonRows, "CsvRows": CsvRows}[kind](path, append=True)
    again.write({"step": lines, "text": "x" * 500})
    again.close()
    rows = json_rows(path) if kind == "JsonRows" else csv_rows(path)
    assert len(rows) == lines + 1
    assert [int(row["step"]) for row in rows] == list(range(len(rows)))
    assert all(len(row["text"]) == 500 for row in rows)


def test_a_full_disk_raises_and_the_next_line_is_whole(tmp_path, monkeypatch):
    path = tmp_path / "run"
    rows = JsonRows(path, append=True)
    rows.write({"step": 1})
    write = os.write
    room = [4]

    def limited(file, data):
        if not room[0]:
            raise OSError(28, "No space left on device")
        part, room[0] = room[0], 0
        return write(file, bytes(data)[:part])

    monkeypatch.setattr(os, "write", limited)
    with pytest.raises(OSError):
        rows.write({"step": 2})
    monkeypatch.setattr(os, "write", write)
    rows.write({"step": 3})
    assert json_rows(path) == [{"step": 1}, {"step": 3}]
