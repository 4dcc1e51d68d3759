"""`python -m infinitybatch train --model package.module:factory`."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from command_line_tools import ROOT, binary, epochs
from command_line_tools import run as program
from infinitybatch._command import run
from torch.nn.functional import cross_entropy

MODULE = """
import time

import torch
from torch import nn

X = torch.randn(120, 6, generator=torch.Generator().manual_seed(1))
Y = X[:, :4].argmax(1)


class Net(nn.Module):
    def __init__(self, features=6, classes=4):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(features, 32), nn.Linear(32, 32)])
        self.layers.append(nn.Linear(32, classes))

    def forward(self, x):
        x = x.flatten(1)
        for layer in self.layers[:-1]:
            x = layer(x).relu()
        return self.layers[-1](x)


def sized(samples):
    assert samples.kind in ("vectors", "images")
    features = 1
    for size in samples.shape:
        features *= size
    return Net(features, samples.classes)


class Slow(Net):
    def forward(self, x):
        time.sleep(0.01)
        return super().forward(x)


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x):
        return self.layer(x)


def data():
    whole = torch.utils.data.TensorDataset(X, Y)
    parts = torch.utils.data.Subset(whole, range(90)), torch.utils.data.Subset(whole, range(90, 120))
    return parts[0], torch.utils.data.DataLoader(parts[1], batch_size=20)


def numbers():
    return [(X[:50], X[:50, :4]), (X[50:], X[50:, :4])]


def halves(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)


def largest():
    return {"largest": lambda outputs, targets: outputs.max()}


def no_model():
    return 3


value = 3
"""
COMMON = ("--data", "own_nets:data", "--batch-size", "40", "--micro-batch-size", "16", "--json")
EVERYTHING = (
    *COMMON,
    *("--amp", "--schedule", "cosine", "--clip", "1", "--ema", "0.9"),
    *("--metrics", "top5,balanced-accuracy,macro-f1,perplexity"),
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own_nets.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_nets", raising=False)
    return tmp_path


def lines(capsys: pytest.CaptureFixture[str], event: str = "epoch") -> list[dict[str, Any]]:
    told = map(json.loads, capsys.readouterr().out.splitlines())
    return [line for line in told if line["event"] == event]


def without_times(told: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{k: v for k, v in t.items() if "second" not in k and "peak" not in k} for t in told]


@pytest.mark.skipif(not (ROOT / "data/digits").exists(), reason="make setup fetches the digits")
def test_the_bits_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--data", str(ROOT / "data/digits"), "--seed", "3", "--epochs", "2", "--json"]
    flags += ["--batch-size", "300", "--micro-batch-size", "64", "--optimizer", "sgd"]
    flags += ["--schedule", "cosine", "--clip", "0.5", "--metrics", "top5,macro-f1", "--ema", "0.9"]
    theirs = epochs(program("train", "--model", "mlp", "--width", "32", "--depth", "2", *flags))
    assert run(["--model", "own_nets:sized", *flags]) == 0
    ours = lines(capsys)
    for name in ("loss", "held_out_loss"):
        assert [e[name] for e in ours] == [e[name] for e in theirs]
    for mine, its in zip(ours, theirs, strict=True):
        for name, value in its["held_out_metrics"].items():
            assert mine["held_out_metrics"][name] == pytest.approx(value, 1e-12)


def test_goes_on_with_the_same_bits(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    begin = ["--model", "own_nets:Net", *EVERYTHING]
    assert run([*begin, "--epochs", "4", "--save", "whole.pt"]) == 0
    whole = lines(capsys)
    assert run([*begin, "--epochs", "4", "--save", "half.pt", "--checkpoint-every", "2"]) == 0
    capsys.readouterr()
    # As two epochs left it: the checkpoint after the fourth is written anew.
    with pytest.raises(SystemExit):
        stop_after(2, [*begin, "--epochs", "4", "--save", "half.pt"])
    capsys.readouterr()
    assert run(["--resume", "half.checkpoint.pt", "--json"]) == 0
    assert without_times(lines(capsys)) == without_times(whole[2:])
    one, other = (torch.load(f"{name}.pt", weights_only=True) for name in ("whole", "half"))
    assert all(torch.equal(one[key], other[key]) for key in one)
    assert json.loads((folder / "half.json").read_text())["ema"] == 0.9


def stop_after(epochs: int, arguments: list[str]) -> None:
    """Ctrl-C at the beginning of the epoch after so many."""
    from infinitybatch import _command

    class Stops(_command._Report):
        def on_epoch_begin(self, event: Any) -> None:
            if event.epoch == epochs:
                raise KeyboardInterrupt

    report, _command._Report = _command._Report, Stops
    try:
        assert run(arguments) == 130
    finally:
        _command._Report = report
    raise SystemExit


def test_averages_are_measured_and_saved(capsys: pytest.CaptureFixture[str]) -> None:
    import own_nets  # type: ignore[import-not-found]

    assert run(["--model", "own_nets:Net", *EVERYTHING[:7], "--epochs", "2", "--ema", "0.9",
                "--save", "m.pt"]) == 0  # fmt: skip
    (*_, told) = lines(capsys)
    model = own_nets.Net()
    model.load_state_dict(torch.load("m.pt", weights_only=True))
    outputs = model(own_nets.X[90:])
    loss = cross_entropy(outputs, own_nets.Y[90:]).item()
    assert told["held_out_loss"] == pytest.approx(loss, rel=1e-6)
    right = (outputs.argmax(1) == own_nets.Y[90:]).float().mean().item()
    assert told["held_out_accuracy"] == pytest.approx(right)


def test_metrics_beside_their_definitions(capsys: pytest.CaptureFixture[str]) -> None:
    import own_nets

    assert run(["--model", "own_nets:Net", *COMMON, "--epochs", "3", "--save", "m.pt",
                "--metrics", "top5,balanced-accuracy,macro-f1,perplexity"]) == 0  # fmt: skip
    (*_, told) = lines(capsys)
    model = own_nets.Net()
    model.load_state_dict(torch.load("m.pt", weights_only=True))
    outputs, targets = model(own_nets.X[90:]), own_nets.Y[90:]
    best = outputs.argmax(1)
    recall, f1 = [], []
    for c in range(4):
        right = ((best == c) & (targets == c)).sum().item()
        of, taken = (targets == c).sum().item(), (best == c).sum().item()
        recall += [right / of] if of else []
        f1 += [2 * right / (of + taken)] if of + taken else []
    wanted = {
        "accuracy": (best == targets).double().mean().item(),
        "top5": 1.0,
        "balanced-accuracy": sum(recall) / len(recall),
        "macro-f1": sum(f1) / len(f1),
        "perplexity": cross_entropy(outputs, targets).exp().item(),
    }
    assert told["held_out_metrics"] == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize(
    "flags",
    [
        ("--model", "own_nets:Regression", "--data", "own_nets:numbers", "--loss", "MSELoss"),
        ("--model", "own_nets:Net", "--data", "own_nets:data", "--schedule", "own_nets:halves"),
        ("--model", "own_nets:Net", "--data", "own_nets:data", "--metrics", "own_nets:largest"),
        ("--model", "own_nets:Net", "--data", "own_nets:data", "--optimizer", "Adadelta"),
        ("--model", "own_nets:Net", "--data", "own_nets:data", "--batch-size", "all"),
        ("--model", "own_nets:Net", "--data", "own_nets:data", "--memory-budget", "4MiB"),
    ],
)
def test_parts_of_all_kinds(flags: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*flags, "--epochs", "3", "--json"]) == 0
    told = lines(capsys)
    assert told[-1]["loss"] < told[0]["loss"]
    if "own_nets:largest" in flags:
        assert "largest" in told[0]["held_out_metrics"]


def test_float16_has_a_grad_scaler(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--model", "own_nets:Net", *COMMON, "--epochs", "3", "--amp", "float16"]) == 0
    told = lines(capsys)
    assert told[-1]["loss"] < told[0]["loss"]


def test_arrays_in_files(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    generator = numpy.random.default_rng(1)
    x = generator.normal(size=(60, 6))
    numpy.save("x.npy", numpy.asfortranarray(x.astype(">f8")))
    numpy.save("y.npy", x[:, :4].argmax(1).astype(">u2"))
    numpy.savez("both.npz", samples=x.astype("f4"), classes=x[:, :4].argmax(1))
    told = []
    for flags in (
        ["--data", "x.npy", "--labels", "y.npy"],
        ["--data", "both.npz", "--inputs", "samples", "--labels", "classes"],
    ):
        assert run(["--model", "own_nets:sized", *flags, "--epochs", "1", "--json"]) == 0
        told.append(lines(capsys)[0]["loss"])
    assert told[0] == pytest.approx(told[1], rel=1e-5)


def test_sigterm_saves_and_says_how_to_go_on(folder: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    command = [sys.executable, "-m", "infinitybatch", "train", "--model", "own_nets:Slow", *COMMON]
    process = subprocess.Popen(
        [*command, "--epochs", "10000", "--save", "m.safetensors"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    while '"epoch"' not in process.stdout.readline():
        pass
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate()
    assert process.returncode == 143
    assert "the interrupted step was discarded; go on with: python -m infinitybatch" in errors
    assert "--resume m.checkpoint.pt" in errors and "Traceback" not in errors
    state = torch.load("m.checkpoint.pt", weights_only=True)
    assert state["loop"]["step"] >= 3 and not Path("m.safetensors").exists()


def test_everything_else_is_the_programs() -> None:
    asked = [sys.executable, "-m", "infinitybatch", "--version"]
    ours, theirs = (
        subprocess.run(command, capture_output=True, text=True, check=True).stdout
        for command in (asked, [binary(), "--version"])
    )
    assert ours == theirs


OWN = ["--model", "own_nets:Net", "--data", "own_nets:data"]
MISUSE: dict[str, tuple[list[str], int, str]] = {
    "no factory": (["--model", "mlp"], 2, "--model mlp is no package.module:factory"),
    "no module": (["--model", "nets:Net"], 2, "there is no module nets"),
    "no such name": (["--model", "own_nets:Ned"], 2, "own_nets has no Ned; did you mean Net?"),
    "no callable": (["--model", "own_nets:value"], 2, "is a int; name what can be called"),
    "no model": (["--model", "own_nets:no_model", *OWN[2:]], 2, "gave a int; it must give a torch"),
    "no data": ([*OWN[:2], "--data", "nowhere"], 1, "no data at nowhere"),
    "labels": ([*OWN, "--labels", "y.npy"], 2, "--labels is of files"),
    "a flag": ([*OWN, "--epoch", "3"], 2, "--epoch is not a flag; did you mean --epochs?"),
    "epochs": ([*OWN, "--epochs", "0"], 2, "--epochs must be a whole number, at least 1, not 0"),
    "batch size": ([*OWN, "--batch-size", "0"], 2, '--batch-size must be a number of 1 or more, or "all"'),
    "micro batch": ([*OWN, "--micro-batch-size", "x"], 2, "--micro-batch-size must be a whole"),
    "budget": ([*OWN, "--memory-budget", "much"], 2, "--memory-budget"),
    "small budget": ([*OWN, "--memory-budget", "1KiB"], 3, "--memory-budget is 1 KiB"),
    "loss": ([*OWN, "--loss", "CrosEntropyLoss"], 2, "did you mean CrossEntropyLoss?"),
    "optimizer": ([*OWN, "--optimizer", "adm"], 2, "did you mean adam?"),
    "schedule": ([*OWN, "--schedule", "steps"], 2, "--schedule steps is not known; use constant"),
    "metrics": ([*OWN, "--metrics", "f1"], 2, "--metrics f1 is not known; use top5"),
    "metrics of numbers": (
        ["--model", "own_nets:Regression", "--data", "own_nets:numbers", "--loss", "MSELoss",
         "--metrics", "top5"], 2, "needs class scores"),
    "clip": ([*OWN, "--clip", "0"], 2, "--clip must be a number above 0, not 0"),
    "ema": ([*OWN, "--ema", "1"], 2, "--ema must be a number below 1, as 0.999, not 1"),
    "amp": ([*OWN, "--amp", "fp8"], 2, "--amp"),
    "device": ([*OWN, "--device", "gpu"], 2, "--device gpu is not there; this machine"),
    "held out": ([*OWN, "--held-out", "2"], 2, "--held-out must be a number from 0 to 0.9"),
    "seed": ([*OWN, "--seed", "-1"], 2, "--seed"),
    "save": ([*OWN, "--save", "m.bin"], 2, "--save m.bin must end in .pt, .pth or .safetensors"),
    "save nowhere": ([*OWN, "--save", "a/m.pt"], 2, "there is no folder a: mkdir -p a"),
    "checkpoint": ([*OWN, "--checkpoint-every", "2"], 2, "--checkpoint-every needs a place"),
    "resume": (["--resume", "no.checkpoint.pt"], 2, "there is no such file"),
    "diverges": ([*OWN, "--lr", "1e12", "--optimizer", "sgd"], 1, "training diverged: the loss is"),
}  # fmt: skip


@pytest.mark.parametrize("name", MISUSE)
def test_misuse(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, code, message = MISUSE[name]
    assert run(arguments) == code
    (*_, line) = capsys.readouterr().err.splitlines()
    assert line.startswith("infinitybatch: ") and message in line, line


def test_a_checkpoint_of_another_training(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--model", "own_nets:Net", *COMMON, "--epochs", "1", "--save", "m.pt",
                "--checkpoint-every", "1"]) == 0  # fmt: skip
    for flags, message in (
        (["--seed", "1", "--epochs", "2"], "--seed is 1, and m.checkpoint.pt was trained with 0"),
        ([], "all 1 epochs are done; train on with more, as in: --epochs 2"),
    ):
        assert run(["--resume", "m.checkpoint.pt", *flags]) == 2
        assert message in capsys.readouterr().err
    Path("m.checkpoint.pt").write_bytes(b"nothing")
    assert run(["--resume", "m.checkpoint.pt"]) == 2
    assert "or is damaged" in capsys.readouterr().err


def test_several_processes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each would train a model of its own and write the same file."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run([*OWN, "--epochs", "1", "--save", "m.pt"]) == 2
    assert "there are 2 (WORLD_SIZE)" in capsys.readouterr().err
    assert not Path("m.pt").exists()


def test_what_was_learned_of_files_is_resumed(capsys: pytest.CaptureFixture[str]) -> None:
    """Numbers of classes, columns and scaling are the first run's, whatever the file holds now."""
    random = numpy.random.default_rng(0)
    labels = numpy.arange(120) % 3
    rows = random.normal(0, 0.3, (120, 2)) + numpy.array([[3, 0], [0, 3], [-3, -3]])[labels]

    def write(which: numpy.ndarray, columns: str) -> None:
        lines = [f"{columns[0]},{columns[1]},label"]
        for row, label in zip(rows[which], labels[which], strict=True):
            values = dict(zip("ab", map(float, row), strict=True))
            lines.append(f"{values[columns[0]]},{values[columns[1]]},{'cde'[label]}")
        Path("t.csv").write_text("\n".join(lines) + "\n")

    write(labels >= 0, "ab")
    flags = ["--model", "own_nets:sized", "--data", "t.csv", "--batch-size", "32", "--json"]
    flags += ["--micro-batch-size", "16", "--checkpoint-every", "20", "--save", "m.pt"]
    assert run([*flags, "--epochs", "20"]) == 0
    assert lines(capsys)[-1]["held_out_accuracy"] > 0.95
    write(labels > 0, "ba")
    assert run(["--resume", "m.checkpoint.pt", "--epochs", "21", "--lr", "1e-9", "--json"]) == 0
    assert lines(capsys)[-1]["held_out_accuracy"] > 0.95
    Path("t.csv").write_text(Path("t.csv").read_text().replace(",e\n", ",f\n"))
    assert run(["--resume", "m.checkpoint.pt", "--epochs", "22", "--json"]) == 1
    assert "class 'f' is none that the model was trained on (c, d, e)" in capsys.readouterr().err
