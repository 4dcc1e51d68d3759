"""Messages that readers stumbled over: each says what is wrong in the user's words, and the way out."""

import re
from collections.abc import Callable
from pathlib import Path

import infinitybatch as ib
import numpy
import pytest
import torch
from command_line_tools import ERROR, OK, OUT_OF_MEMORY, USAGE, idx, run

SMALL = ("--model", "mlp", "--width", "8", "--depth", "1", "--epochs", "1")

# Arguments, exit code, what stderr begins with after the program's name.
REFUSED = {
    "a flag before the command": (
        ("--json", "train"),
        USAGE,
        "--json goes after the command: infinitybatch train --json;",
    ),
    "a flag with its value before the command": (
        ("--epochs", "3", "train"),
        USAGE,
        "--epochs goes after the command: infinitybatch train --epochs;",
    ),
    "a flag without a command": (
        ("--rounds=3",),
        USAGE,
        "--rounds=3 goes after the command: infinitybatch bench --rounds=3;",
    ),
    "a separator": (
        ("train", "--", "--epochs", "1"),
        USAGE,
        "unexpected argument after --: --epochs;",
    ),
    "a fraction of an epoch": (
        ("train", "--epochs", "1.5"),
        USAGE,
        "--epochs must be a whole number, at least 1, not 1.5;",
    ),
    "an exponent": (
        ("train", "--epochs", "1e3"),
        USAGE,
        "--epochs must be a whole number, at least 1, not 1e3;",
    ),
    "a huge number": (
        ("train", "--epochs", "9" * 30),
        USAGE,
        "--epochs must be a whole number, at most 1099511627776, not 9",
    ),
    "a word as learning rate": (
        ("train", "--lr", "fast"),
        USAGE,
        "--lr must be a number, not fast;",
    ),
    "a flag twice": (
        ("train", "--epochs", "1", "--epochs", "2"),
        USAGE,
        "--epochs was given twice; give it once;",
    ),
    "a flag three times": (
        ("train", "--lr", "1", "--lr", "2", "--lr", "3"),
        USAGE,
        "--lr was given 3 times; give it once;",
    ),
    "labels in a folder": (
        ("train", "--data", "{folder}/x.npy", "--labels", "{folder}"),
        USAGE,
        "--labels {folder} is a folder; give",
    ),
    "too small a budget": (
        ("plan", "--data", "{folder}/pair", "--memory-budget", "4KiB"),
        OUT_OF_MEMORY,
        ".*needs at least [0-9.]+ KiB; --memory-budget is 4 KiB. Raise it, for "
        'example to --memory-budget="[0-9.]+[KM]iB", or',
    ),
}

CONFIGS = {
    "two signs": (b"epochs = = 1\n", ", line 1: expected a value after 'epochs =', as in:"),
    "only a comment": (b"seed = 1\nepochs = # 3\n", ", line 2: expected a value after 'epochs ='"),
    "a binary file": (b"\x7fELF\x02\x01\x01\0\0\n=\0\xff", " is not a TOML file; it has lines of"),
    "a key twice": (b"epochs = 1\nepochs = 2\n", ": --epochs was given twice; give it once;"),
}

# What is read in more than one spelling.
ACCEPTED = {
    "optimizer": ("--optimizer", "Adam"),
    "device": ("--device", "CPU"),
    "model": ("--model", "MLP"),
    "strategy": ("--strategy", "Native"),
    "bytes by a letter": ("--memory-budget", "24M"),
    "a percentage": ("--memory-budget", "80%"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_arguments(case: str, folder: Path) -> None:
    arguments, code, message = REFUSED[case]
    result = run(*[text.format(folder=folder) for text in arguments])
    assert result.returncode == code, result.stderr
    said = result.stderr.splitlines()[-1]
    assert re.match("infinitybatch: " + message.format(folder=folder), said), said


@pytest.mark.parametrize("case", CONFIGS)
def test_configuration_files(case: str, pair: tuple[str, Path], tmp_path: Path) -> None:
    content, message = CONFIGS[case]
    (tmp_path / "run.toml").write_bytes(content)
    result = run("train", *pair, "--config", "run.toml", cwd=tmp_path)
    assert result.returncode == USAGE and result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("infinitybatch: --config: run.toml" + message), result.stderr


def test_a_byte_order_mark_is_skipped(pair: tuple[str, Path], tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_bytes(b"\xef\xbb\xbfepochs = 1\nmodel = 'mlp'\nwidth = 8\n")
    result = run("train", *pair, "--config", "run.toml", cwd=tmp_path)
    assert result.returncode == OK, result.stderr


@pytest.mark.parametrize("case", ACCEPTED)
def test_spellings(case: str, pair: tuple[str, Path]) -> None:
    flag, value = ACCEPTED[case]
    given = [part for part in (*SMALL, flag, value)]
    if flag in SMALL:
        given = [flag, value, *SMALL[2:]]
    result = run("train", *pair, *given)
    assert result.returncode == OK, result.stderr


@pytest.mark.parametrize("kept", ["train-labels-idx1-ubyte", "train-images-idx3-ubyte", None])
def test_files_that_are_still_compressed(kept: str | None, tmp_path: Path) -> None:
    for name, array in (
        ("train-images-idx3-ubyte", numpy.zeros((6, 8, 8))),
        ("train-labels-idx1-ubyte", numpy.arange(6)),
    ):
        (tmp_path / (name + ("" if name == kept else ".gz"))).write_bytes(idx(array))
    result = run("train", "--data", tmp_path)
    assert result.returncode == ERROR
    assert re.search(
        r"-ubyte\.gz is compressed; unpack it with: gunzip .*-ubyte\.gz", result.stderr
    )


X = torch.randn(8, 3)
Y = torch.arange(8) % 2


def step(loss: object = None) -> ib.VirtualBatch:
    return ib.VirtualBatch(
        torch.nn.Linear(3, 2), loss or torch.nn.CrossEntropyLoss(), micro_batch_size=4
    )


def without_gradients() -> None:
    with torch.no_grad():
        step().backward(X, Y)


CALLS: dict[str, tuple[Callable[[], object], str]] = {
    "a number as function": (
        lambda: ib.across_batch(3, X),
        "the first argument of across_batch must be a function .*, not int: across_batch",
    ),
    "item() in a loss": (
        lambda: step(ib.losses.coupled(lambda o, t: o.sum().item())).backward(X, Y),
        r"must return a scalar tensor, not float; remove \.item\(\)$",
    ),
    "a loss of several numbers": (
        lambda: step(ib.losses.coupled(lambda o, t: o.sum(1))).backward(X, Y),
        r"returned a tensor of shape \[8\]; it must return a scalar tensor: reduce it with \.mean\(\)",
    ),
    "a list of targets": (
        lambda: step().backward(X, list(Y)),
        r"targets is a list of 8 tensors .*; stack it into one tensor: torch\.stack\(targets\)$",
    ),
    "no_grad": (
        without_gradients,
        r"backward\(\) needs gradients: call it outside torch\.no_grad\(\)$",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_calls(case: str) -> None:
    call, message = CALLS[case]
    with pytest.raises(ib.Error, match=message) as caught:
        call()
    assert "\n" not in str(caught.value)
