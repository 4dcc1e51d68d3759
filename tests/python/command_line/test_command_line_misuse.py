"""Flags that would cost hours, or a file, or give a result that says nothing: each is refused."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
from command_line_tools import ERROR, OK, USAGE, run

SMALL = ("--model", "mlp", "--width", "8", "--depth", "1", "--epochs", "1")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    random = numpy.random.default_rng(0)
    numpy.save(tmp_path / "x.npy", random.normal(size=(60, 6)).astype("float32"))
    numpy.save(tmp_path / "y.npy", random.integers(0, 3, 60))
    numpy.save(tmp_path / "zeros.npy", numpy.zeros(60, "int64"))
    numpy.save(tmp_path / "fives.npy", numpy.full(60, 5))
    return tmp_path


TRAIN = ("train", "--data", "x.npy", "--labels", "y.npy", *SMALL)

# Arguments, exit code, what stderr begins with after the program's name.
REFUSED = {
    "samples of one class": (
        ("train", "--data", "x.npy", "--labels", "zeros.npy", *SMALL),
        ERROR,
        "x.npy: all samples are of one class, which leaves nothing to learn; give labels of two",
    ),
    "samples of one class that is not the first": (
        ("bench", "--data", "x.npy", "--labels", "fives.npy", "--model", "mlp"),
        ERROR,
        "x.npy: all samples are of one class",
    ),
    "a measure twice": (
        (*TRAIN, "--metrics", "top5,macro-f1,top5"),
        USAGE,
        "--metrics names top5 twice; name it once",
    ),
    "a batch beyond all data": (
        (*TRAIN, "--batch-size", "99999999999999999"),
        USAGE,
        "--batch-size 99999999999999999 is more than 1099511627776; .*--batch-size all",
    ),
    "a batch beyond all numbers": (
        (*TRAIN, "--batch-size", "9" * 30),
        USAGE,
        "--batch-size 9+ is more than 1099511627776; ",
    ),
    "a batch in halves": (
        (*TRAIN, "--batch-size", "1.5"),
        USAGE,
        '--batch-size 1.5 is neither a number of 1 or more nor "all"',
    ),
}


def refuses(arguments: tuple[str, ...], code: int, message: str, folder: Path) -> None:
    result = run(*arguments, cwd=folder)
    said = result.stderr.splitlines()[-1]
    assert result.returncode == code, result.stderr
    assert re.match("infinitybatch: " + message, said), said


@pytest.mark.parametrize("case", REFUSED)
def test_arguments(case: str, data: Path) -> None:
    refuses(*REFUSED[case], data)


# The file that would be written over, and the arguments.
OVERWRITES: dict[str, Callable[[Path], tuple[str, ...]]] = {
    "x.npy": lambda folder: (
        *("predict", "model.safetensors", "--data", "x.npy", "--labels", "y.npy"),
        *("--output", "x.npy"),
    ),
    "y.npy": lambda folder: (
        *("predict", "model.safetensors", "--data", "x.npy", "--labels", "y.npy"),
        *("--output", str(folder / "y.npy")),
    ),
    "link.npy": lambda folder: ("predict", "model.safetensors", "--output", "link.npy"),
    "model.safetensors": lambda folder: (
        *("export", "model.safetensors", "--output", "./model.safetensors"),
    ),
}


@pytest.mark.parametrize("file", OVERWRITES)
def test_no_file_is_written_over_that_is_read(file: str, data: Path) -> None:
    (data / "link.npy").symlink_to("x.npy")
    assert run(*TRAIN, "--save", "model.safetensors", cwd=data).returncode == OK
    before = (data / file).read_bytes()
    refuses(OVERWRITES[file](data), USAGE, "--output .* is the file that .* reads, and would", data)
    assert (data / file).read_bytes() == before
