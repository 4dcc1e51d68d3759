"""What a command cannot do it says at once: data that never end or are no data, models that no
memory holds, values that mean nothing, training that came to nothing."""

import json
import os
import pickle
import re
import signal
import subprocess
import time
import zlib

import numpy
import pytest
from command_line_tools import (
    ERROR,
    INTERRUPTED,
    OK,
    OUT_OF_MEMORY,
    USAGE,
    binary,
    environment,
)


def run(*arguments):
    return subprocess.run(
        [binary(), *map(str, arguments)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
        stdin=subprocess.DEVNULL,
    )


def refused(result, code, message):
    assert result.returncode == code, result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    assert re.search(message, result.stderr), result.stderr


@pytest.mark.parametrize("flag", ["--data", "--labels"])
def test_a_pipe_is_refused_rather_than_waited_for(flag, folder, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    data = {"--data": folder / "x.npy", "--labels": folder / "y.npy", flag: pipe}
    arguments = [str(text) for pair in data.items() for text in pair]
    result = run("train", *arguments)
    refused(result, ERROR, "pipe is a pipe, but data are read more than once; save.*cat ")


def test_a_device_is_refused(folder):
    refused(run("train", "--data", "/dev/zero"), ERROR, "/dev/zero is a device")


BINARY = {
    "image.png": b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(256)) * 40,
    "model.pt": b"PK\x03\x04\0\0\x08\x08" + pickle.dumps(list(range(3000))),
    "packed.bin": zlib.compress(numpy.random.default_rng(0).bytes(9000)).replace(b"\0", b"\x01"),
    "utf16.txt": ("plain words " * 900).encode("utf-16"),
}


@pytest.mark.parametrize("name", BINARY)
def test_binary_files_are_no_text(name, tmp_path):
    (tmp_path / name).write_bytes(BINARY[name])
    result = run("train", "--data", tmp_path / name, "--epochs", "1")
    refused(result, ERROR, f"{name} is not text: byte [0-9]+ is [0-9]+; --data takes")


def test_text_of_other_alphabets_is_text(tmp_path):
    for encoding in ("utf-8", "cp1251"):
        path = tmp_path / encoding
        path.write_bytes(("быстрая лиса\r\n\t" * 120).encode(encoding))
        arguments = ("--width", "16", "--depth", "1", "--epochs", "1", "--batch-size", "all")
        result = run("train", "--data", path, *arguments)
        assert result.returncode == OK, result.stderr


@pytest.mark.parametrize("command", ["train", "plan"])
def test_a_model_without_end_stops_at_the_budget(command, pair):
    arguments = ("--model", "mlp", "--depth", "100000", "--memory-budget", "16MiB")
    result = run(command, *pair, *arguments)
    refused(
        result, OUT_OF_MEMORY, r"the model alone \(--width 256, --depth 100000\) needs at least"
    )
    assert "--memory-budget" in result.stderr


SIZES = (
    ("mlp", "9", "3"),
    ("convnet", "8", "4"),
    ("resnet", "8", "2"),
    ("resnet-groupnorm", "8", "3"),
    ("transformer", "16", "3"),
)


@pytest.mark.parametrize(("model", "width", "depth"), SIZES)
def test_sizes_are_known_before_a_model_is_made(model, width, depth, tmp_path):
    """To the byte: one less than its parameters take is refused by them."""
    if model == "transformer":
        path = tmp_path / "text.txt"
        path.write_text("a quick brown fox\n" * 120)
        data = ["--data", path, "--context", "12"]
    else:
        images = numpy.random.default_rng(0).random((40, 8, 8), dtype=numpy.float32)
        numpy.save(tmp_path / "x.npy", images)
        numpy.save(tmp_path / "y.npy", numpy.arange(40) % 4)
        data = ["--data", tmp_path / "x.npy", "--labels", tmp_path / "y.npy"]
    job = ["plan", *data, "--model", model, "--width", width, "--depth", depth, "--json"]
    made = run(*job, "--memory-budget", "1GiB")
    assert made.returncode == OK, made.stderr
    count = json.loads(made.stdout.splitlines()[-1])["parameters"]
    alone = "the model alone"
    assert alone in run(*job, "--memory-budget", 4 * count - 1).stderr
    statistics = 4096 if model == "resnet" else 0  # of BatchNorm, which are known once it is made
    assert alone not in run(*job, "--memory-budget", 4 * count + statistics).stderr


@pytest.mark.parametrize(
    "size",
    [
        ("--model", "convnet", "--depth", "100000000"),
        ("--model", "resnet", "--depth", "1000000000000"),
        ("--model", "mlp", "--width", "1000000000000"),
        ("--model", "mlp", "--width", "1", "--depth", "1000000000"),
    ],
)
@pytest.mark.parametrize("command", ["train", "plan"])
def test_models_that_no_memory_holds(command, size, tmp_path):
    """At once, and with numbers: the last one's parameters would fit, its layers would not."""
    numpy.save(tmp_path / "x.npy", numpy.zeros((40, 8, 8), dtype=numpy.float32))
    numpy.save(tmp_path / "y.npy", numpy.arange(40) % 4)
    result = run(command, "--data", tmp_path / "x.npy", "--labels", tmp_path / "y.npy", *size)
    refused(result, OUT_OF_MEMORY, rf"{size[-2]} {size[-1]}\b.* needs at least .* [GT]iB")


def test_a_model_without_end_can_be_interrupted(pair):
    arguments = ["train", *map(str, pair), "--model", "mlp", "--width", "8", "--depth", "1500000"]
    with subprocess.Popen(
        [binary(), *arguments], env=environment(), stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            time.sleep(2)
            process.send_signal(signal.SIGINT)
            assert process.wait(timeout=30) == INTERRUPTED
            assert process.stderr.read() == "infinitybatch: interrupted\n"
        finally:
            process.kill()  # else it would grow for as long as there is memory


FLAGS = ("--memory-budget", "--host-budget", "--offload-directory", "--data", "--labels")


@pytest.mark.parametrize("flag", FLAGS)
def test_empty_values_are_mistakes(flag, pair):
    given = [] if flag == "--data" else pair
    refused(run("train", *given, flag, ""), USAGE, f"{flag}.* is empty; write .*or leave it out")


@pytest.mark.parametrize("seed", ["18446744073709551616", "99999999999999999999999", "0x10", "1.0"])
def test_seeds_do_not_wrap(seed, pair):
    refused(
        run("train", *pair, "--seed", seed),
        USAGE,
        f"--seed must be a whole number from 0 to .*, not {seed}",
    )


def test_the_largest_seed_is_one(pair):
    arguments = ("--model", "mlp", "--width", "8", "--epochs", "1", "--seed", 2**64 - 1)
    assert run("train", *pair, *arguments).returncode == OK


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])  # ends in NaN, and in some 1e20
def test_training_that_diverges_fails(optimizer, tmp_path):
    random = numpy.random.default_rng(0)
    numpy.save(tmp_path / "x.npy", random.normal(size=(120, 16)).astype("float32"))
    numpy.save(tmp_path / "y.npy", random.integers(0, 3, 120))
    data = ("--data", tmp_path / "x.npy", "--labels", tmp_path / "y.npy", "--model", "mlp")
    size = ("--batch-size", "30", "--epochs", "8", "--optimizer", optimizer)
    message = "training diverged: the loss is .*; use a smaller learning rate.*--lr"
    refused(run("train", *data, *size, "--lr", "1e6"), ERROR, message)
    assert run("train", *data, *size, "--lr", "0.001").returncode == OK
