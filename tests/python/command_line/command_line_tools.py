"""Runs the command line as its users do: a process, its output, its exit code.

INFINITYBATCH_BINARY (or INFINITYBATCH_CLI) names the program.
"""

import json
import os
import pathlib
import struct
import subprocess

import numpy
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[3]
OK, ERROR, USAGE, OUT_OF_MEMORY, INTERRUPTED, TERMINATED = 0, 1, 2, 3, 130, 143
TIMEOUT_SECONDS = 300
RESNET = ("--model", "resnet", "--width", "16")
# Plain training of all 240 images needs 10 MiB with that network, micro-batches of a few 1 MiB.
TIGHT = "4MiB"


def binary() -> str:
    for name in ("INFINITYBATCH_BINARY", "INFINITYBATCH_CLI"):
        if os.environ.get(name):
            return os.environ[name]
    pytest.fail("set INFINITYBATCH_BINARY to the infinitybatch program; `make test` does")


def environment(**changes) -> dict[str, str]:
    """UTF-8, and one thread, unless a test says otherwise: two that wait for each other on a busy machine take
    a hundred times as long."""
    return {**os.environ, "OMP_NUM_THREADS": "1", "LC_ALL": "C.UTF-8", **changes}


def run(*arguments, cwd=None, **changes) -> subprocess.CompletedProcess:
    return subprocess.run(
        [binary(), *map(str, arguments)],
        cwd=cwd,
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
        stdin=subprocess.DEVNULL,
    )


def events(result: subprocess.CompletedProcess) -> list[dict]:
    """Every line of stdout must be JSON; NaN and Infinity are not."""

    def refuse(constant):
        raise ValueError(f"{constant} is no JSON")

    return [json.loads(line, parse_constant=refuse) for line in result.stdout.splitlines()]


def epochs(result: subprocess.CompletedProcess) -> list[dict]:
    assert result.returncode == OK, result.stderr
    return [event for event in events(result) if event["event"] == "epoch"]


def idx(array: numpy.ndarray) -> bytes:
    header = struct.pack(">BBBB", 0, 0, 8, array.ndim) + struct.pack(
        f">{array.ndim}I", *array.shape
    )
    return header + array.astype(numpy.uint8).tobytes()
