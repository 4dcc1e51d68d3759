"""What a progress callback shows: in a terminal, in a notebook, in a log."""

import io
import re
import sys
import time
import types

import event_support
import infinitybatch as ib
import pytest
import torch
from event_support import run
from infinitybatch import Progress, _progress_text
from infinitybatch import callbacks as events


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Each look at the clock is a second later."""
    now = iter(range(10**6))
    monkeypatch.setattr(time, "monotonic", lambda: float(next(now)))


class Terminal(io.StringIO):
    def isatty(self):
        return True


def shown(file=None, trainer=None, epochs=2, batches=3, **options):
    file = file or io.StringIO()
    run(Progress(file=file, **options), epochs=epochs, batches=batches, trainer=trainer)
    return file.getvalue()


def test_lines_of_a_log():
    lines = shown(interval=0, fields=("epoch", "batch", "loss")).splitlines()
    assert lines == [
        "epoch 1/2 · batch 1 · loss 1",
        "epoch 1/2 · batch 2 · loss 0.5",
        "epoch 1/2 · batch 3 · loss 0.3333",
        "epoch 1/2 · batch 3/3 · loss 0.5",
        "evaluation: epoch 1/2 · loss 0.25 · accuracy 0.75",
        "epoch 2/2 · batch 1/3 · loss 0.25",
        "epoch 2/2 · batch 2/3 · loss 0.2",
        "epoch 2/2 · batch 3/3 · loss 0.1667",
        "epoch 2/2 · batch 3/3 · loss 0.5",
        "evaluation: epoch 2/2 · loss 0.25 · accuracy 0.75",
    ]


class Loader:
    def __len__(self):
        return 3


class Endless:
    def __len__(self):
        raise TypeError("nobody knows")


def test_no_time_left_is_shown_before_it_is_known():
    options = {"interval": 0, "fields": ("epoch", "eta")}
    lines = shown(**options).splitlines()
    assert all("left" not in line for line in lines[:5])  # until the first epoch tells its length
    assert all("left" in line for line in lines if line.startswith("epoch 2"))
    lines = shown(trainer=types.SimpleNamespace(loader=Loader()), **options).splitlines()
    assert "left" not in lines[0] and "left" in lines[1]
    assert "left" not in shown(**options, epochs=1, batches=5)
    assert "left" not in shown(trainer=types.SimpleNamespace(loader=Endless()), epochs=1, **options)


def test_the_time_left_is_that_of_batches_after_the_first(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    times = _progress_text.Times()
    for seconds in (100.0, 2.0, 4.0):
        times.batch_begins()
        now[0] += seconds
        assert times.batch_ends() == seconds
    assert times.left(10) == 30 and times.left(None) is None and times.elapsed() == 106


def test_the_time_left_is_that_of_the_whole_run(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    class Clock(ib.Callback):
        def on_batch_end(self, event):
            now[0] += 10

    file = io.StringIO()
    run(
        Clock() + Progress(file=file, interval=0, format="{eta}", batches=3),
        epochs=2,
        first=4,
        batches=3,
    )
    lines = file.getvalue().splitlines()
    assert lines[:3] == ["?", "0:40", "0:30"] and lines[5:8] == ["0:20", "0:10", "0:00"]


def test_interval_and_none():
    every = shown(interval=0, epochs=1, batches=50).splitlines()
    some = shown(interval=20, epochs=1, batches=50).splitlines()
    assert len(every) == 52 and 5 < len(some) < 45
    assert len(shown(interval=None, epochs=3).splitlines()) == 6
    assert len(shown(epochs=1, batches=50).splitlines()) < 52  # ten seconds in a log


def test_a_format_of_ones_own():
    lines = shown(interval=0, format="{epoch}/{epochs} {loss:.2f} {eta:>5} {accuracy}").splitlines()
    assert lines[0] == "1/2 1.00 ? ?" and lines[1] == "1/2 0.50 ? ?"


def test_every_field_reads_well():
    fields = (
        "epoch", "batch", "step", "loss", "samples", "seconds", "rate", "micro_batch_size", "peak",
        "learning_rate", "elapsed", "eta", "nothing",
    )  # fmt: skip
    lines = shown(interval=0, fields=fields, batches=3).splitlines()
    assert lines[6].split(" · ")[:4] == ["epoch 2/2", "batch 2/3", "step 5", "loss 0.2"]
    rest = lines[6].split(" · ")[4:]
    assert rest[:4] == ["3 samples", "1 s/batch", "3 samples/s", "micro-batch 2"]
    assert rest[4:6] == ["peak 1 MiB", "learning_rate 0.1"]
    assert rest[6].endswith(" elapsed") and rest[7].endswith(" left") and len(rest) == 8


def test_a_terminal_has_one_line_that_changes():
    pytest.importorskip("tqdm")
    text = shown(Terminal(), interval=0, fields=("epoch", "loss"))
    assert (
        "|" not in text.split("evaluation")[0]
    )  # no bar before anybody knows how long an epoch is
    assert "\r 33%|" in text.split("evaluation")[1]
    lines = text.split("\n")
    assert len([line for line in lines if "evaluation:" in line]) == 2
    assert len(lines) <= 6  # two epochs, two evaluations
    assert "100%|" in lines[2] and "?" not in text and "it/s" not in text


def test_a_terminal_without_tqdm_has_plain_lines(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm", None)
    text = shown(Terminal(), interval=0, fields=("epoch",))
    assert "\r" not in text and text.splitlines()[0] == "epoch 1/2"


class ZMQInteractiveShell:
    """Named as the shell of notebooks."""


def test_a_notebook_has_the_bar_of_notebooks(monkeypatch):
    tqdm = pytest.importorskip("tqdm").tqdm
    used = []

    class Widget(tqdm):
        def __init__(self, *args, **kwargs):
            used.append(self)
            super().__init__(*args, **kwargs)

    notebook = types.SimpleNamespace(get_ipython=lambda: ZMQInteractiveShell())
    monkeypatch.setitem(sys.modules, "IPython", notebook)
    monkeypatch.setitem(sys.modules, "tqdm.auto", types.SimpleNamespace(tqdm=Widget))
    shown(interval=0)
    assert len(used) == 2
    monkeypatch.setitem(sys.modules, "tqdm", None)
    assert "\r" not in shown(interval=0)  # without tqdm


def test_a_failure_ends_the_line():
    pytest.importorskip("tqdm")
    file = Terminal()
    progress = Progress(interval=0, file=file, fields=("epoch",))
    progress.on_run_begin(events.RunBegin(trainer=None, epoch=0, step=0, epochs=1))
    progress.on_epoch_begin(events.EpochBegin(trainer=None, epoch=0, step=0))
    event_support.batch(progress)
    progress.on_failure(events.Failure(trainer=None, epoch=0, step=0, exception=KeyError()))
    assert file.getvalue().endswith("\n")
    event_support.batch(progress)  # goes on in the middle of an epoch
    assert file.getvalue().count("epoch 1/1") >= 2


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: Progress("loss"), ib.InvalidType, r'Progress\(\["epoch", "loss"\]\)'),
        (lambda: Progress([1]), ib.InvalidType, "fields must be names"),
        (lambda: Progress(interval=-1), ib.InvalidArgument, "interval is -1"),
        (lambda: Progress(interval=float("nan")), ib.InvalidArgument, "interval is nan"),
        (lambda: Progress(interval="often"), ib.InvalidType, "interval must be seconds"),
        (lambda: Progress(format="{loss"), ib.InvalidArgument, "format="),
        (lambda: Progress(format="{}"), ib.InvalidArgument, "format="),
        (lambda: Progress(format="{loss:d}"), ib.InvalidArgument, "cannot show a step"),
        (lambda: Progress(format=3), ib.InvalidType, "format must be a string"),
    ],
)
def test_wrong_arguments(make, error, text):
    with pytest.raises(error, match=text):
        make()


def test_the_plan_is_told_once_with_what_was_tried():
    """With a budget: the size that it led to, and the others."""
    model = torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 4))
    batches = [(torch.randn(400, 64), torch.randint(4, (400,)))] * 2
    budget = ib.memory.stats().live + 2**20
    for options, count in (
        ({"memory_budget": budget}, 1),
        ({"micro_batch_size": 32}, 0),
        ({"memory_budget": budget, "micro_batch_size": 32}, 0),
    ):
        file = io.StringIO()
        trainer = ib.Trainer(
            model, torch.nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), 0.1), batches,
            callbacks=Progress(file=file), **options,
        )  # fmt: skip
        trainer(2)
        told = [line for line in file.getvalue().splitlines() if line.startswith("plan: ")]
        assert len(told) == count
        if told:
            assert re.match(
                r"plan: micro-batches of \d+ for 400 samples within \S+ MiB · tried \d+ \(\S+ [KM]iB",
                told[0],
            ), told
            assert "too much" in told[0]
