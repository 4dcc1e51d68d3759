"""--checkpoint-every, --resume and Ctrl-C: training goes on with the same bits, or says why not."""

import json
import re
import resource
import shlex
import signal
import subprocess

import numpy
import pytest
import torch
from command_line_tools import (
    ERROR,
    INTERRUPTED,
    OK,
    TERMINATED,
    USAGE,
    binary,
    environment,
    epochs,
    events,
    run,
)
from safetensors.torch import load_file

MLP = ("--model", "mlp", "--width", "16", "--depth", "1")
SIZES = ("--batch-size", "64", "--micro-batch-size", "16")
RESNET = ("--model", "resnet", "--width", "4")


def same(left, right) -> bool:
    a, b = load_file(left), load_file(right)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def losses(result) -> list:
    return [(e["epoch"], e["loss"], e["held_out_loss"]) for e in epochs(result)]


CASES = {optimizer: MLP for optimizer in ("sgd", "adam", "adamw", "rmsprop", "adagrad")}


@pytest.mark.parametrize("optimizer, model", [*CASES.items(), ("adam", RESNET)])
def test_six_epochs_are_three_and_three(pair, tmp_path, optimizer, model):
    job = ("train", *pair, *model, *SIZES, "--optimizer", optimizer, "--json")
    whole = run(*job, "--epochs", "6", "--save", "whole.safetensors", cwd=tmp_path)
    half = run(
        *job, "--epochs", "3", "--save", "m.safetensors", "--checkpoint-every", "3", cwd=tmp_path
    )
    rest = run(
        "train", "--resume", "m.checkpoint.safetensors", "--epochs", "6", "--json", cwd=tmp_path
    )
    assert losses(half) + losses(rest) == losses(whole)
    assert same(tmp_path / "whole.safetensors", tmp_path / "m.safetensors")
    resumed, start = events(rest)[:2]
    assert (resumed["event"], resumed["epoch"]) == ("resumed", 3)
    assert (start["event"], start["optimizer"]) == ("start", optimizer)


def test_checkpoints_are_told_and_are_models(pair, tmp_path):
    job = ("train", *pair, *MLP, "--epochs", "5", "--save", "m.safetensors", "--json")
    result = run(*job, "--checkpoint-every", "2", cwd=tmp_path)
    told = [line["epoch"] for line in events(result) if line["event"] == "checkpoint"]
    assert told == [2, 4]
    held_out = epochs(result)[3]["held_out_loss"]
    size = ("--micro-batch-size", str(epochs(result)[3]["micro_batch_size"]))
    found = run("evaluate", "m.checkpoint.safetensors", *size, "--json", cwd=tmp_path)
    assert events(found)[-1]["loss"] == pytest.approx(held_out, rel=1e-6)
    assert (
        run("export", "m.checkpoint.safetensors", "--output", "w.pt", cwd=tmp_path).returncode == OK
    )
    assert len(torch.load(tmp_path / "w.pt", weights_only=True)) == 4


def interrupt(arguments, cwd, after: int, by=signal.SIGINT) -> subprocess.CompletedProcess:
    """Sends a signal once `after` epochs are told."""
    with subprocess.Popen(
        [binary(), *map(str, arguments)], cwd=cwd, env=environment(), text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        lines = []
        for line in process.stdout:
            lines.append(line)
            if json.loads(line)["event"] == "epoch":
                after -= 1
                if after == 0:
                    process.send_signal(by)
        stderr = process.stderr.read()
    return subprocess.CompletedProcess(arguments, process.returncode, "".join(lines), stderr)


@pytest.mark.parametrize("by, code", [(signal.SIGINT, INTERRUPTED), (signal.SIGTERM, TERMINATED)])
def test_interrupted_training_goes_on_by_the_pasted_command(pair, tmp_path, by, code):
    """Many small steps: the signal falls into the middle of an epoch."""
    folder = tmp_path / "it's here"
    folder.mkdir()
    job = ("train", *pair, *RESNET, "--batch-size", "8", "--micro-batch-size", "4", "--epochs", "6")
    whole = run(*job, "--save", folder / "whole.safetensors", "--json")
    cut = interrupt((*job, "--save", folder / "m.safetensors", "--json"), tmp_path, 2, by)
    assert cut.returncode == code, cut.stderr
    message = events(cut)[-1]["message"]
    assert not (folder / "m.safetensors").exists()
    command = shlex.split(message.split("; go on with: ")[1])
    assert command[0] == "infinitybatch"
    rest = run(*command[1:], "--json")
    assert rest.returncode == OK, rest.stderr
    done = len([line for line in events(cut) if line["event"] == "epoch"])
    assert losses(rest)[-1] == losses(whole)[-1]
    assert losses(rest) == losses(whole)[done:]
    assert same(folder / "whole.safetensors", folder / "m.safetensors")
    (resumed,) = [line for line in events(rest) if line["event"] == "resumed"]
    assert resumed["step"] >= done * 30


def test_without_save_nothing_is_written(pair, tmp_path):
    job = ("train", *pair, *MLP, "--batch-size", "8", "--epochs", "1000", "--json")
    cut = interrupt(job, tmp_path, 1)
    assert cut.returncode == INTERRUPTED and "go on with" not in cut.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope="module")
def checkpoint(pair, tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    job = ("train", *pair, *MLP, *SIZES, "--epochs", "2", "--save", folder / "m.safetensors")
    assert run(*job, "--checkpoint-every", "1").returncode == OK
    return folder / "m.checkpoint.safetensors"


MISUSES = {
    "all done": ((), USAGE, "all 2 epochs are done; train on with more, as in: --epochs 4"),
    "width": (("--width", "32"), USAGE, "--width is 32, and .* was trained with 16; leave --width"),
    "model": (("--model", "convnet"), USAGE, "--model is convnet, and .* was trained with mlp"),
    "seed": (("--seed", "1"), USAGE, "--seed is 1, and .* was trained with 0"),
    "batch size": (("--batch-size", "32"), USAGE, "--batch-size is 32, and .* was trained with 64"),
    "optimizer": (("--optimizer", "sgd"), USAGE, "--optimizer is sgd, and .* with adam"),
    "other data": (("--data", "{folder}/x.npy", "--labels", "{folder}/y.npy", "--model", "mlp", "--epochs", "3"), ERROR, ""),
}  # fmt: skip


@pytest.mark.parametrize("case", MISUSES)
def test_what_cannot_change_on_the_way(case, checkpoint, folder, samples, tmp_path):
    arguments, code, message = MISUSES[case]
    arguments = [a.format(folder=folder) for a in arguments]
    save = ("--save", tmp_path / "m.safetensors")
    result = run("train", "--resume", checkpoint, *arguments, *save)
    if case == "other data":  # the same samples in another format are the same
        assert result.returncode == OK, result.stderr
        numpy.save(tmp_path / "y.npy", (samples[1].astype(numpy.int64) + 1) % 3)
        other = ("--labels", tmp_path / "y.npy", "--epochs", "4")
        result = run("train", "--resume", tmp_path / "m.checkpoint.safetensors", *other)
        message = "holds other samples than .*; give the same data"
    assert result.returncode == code, result.stderr
    assert result.stderr.count("\n") == 1 and (result.stdout == "" or case == "other data")
    assert re.search(message, result.stderr), result.stderr


def test_the_same_value_given_again_is_no_change(checkpoint, tmp_path):
    again = ("--width", "16", "--seed", "0", "--optimizer", "adam", "--epochs", "3")
    save = ("--save", tmp_path / "m.safetensors")
    assert run("train", "--resume", checkpoint, *again, *save).returncode == OK


def full_disk(arguments, cwd):
    """No file above 4 KiB can be written."""
    return subprocess.run(
        [binary(), *map(str, arguments)], cwd=cwd, env=environment(), text=True,
        capture_output=True, restore_signals=False, timeout=60,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)),
    )  # fmt: skip


def test_no_room_on_the_disk(pair, tmp_path):
    (tmp_path / "m.safetensors").write_text("before")
    job = ("train", *pair, *MLP, "--epochs", "1", "--save", "m.safetensors")
    result = full_disk(job, tmp_path)
    assert result.returncode == ERROR
    assert "m.safetensors cannot be written: File too large" in result.stderr
    assert [file.name for file in tmp_path.iterdir()] == ["m.safetensors"]
    assert (tmp_path / "m.safetensors").read_text() == "before"


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_scheduled_and_clipped_training_goes_on_with_the_same_bits(pair, tmp_path, schedule):
    """The learning rate of an epoch is a function of its number."""
    how = ("--schedule", schedule, "--clip", "0.5", "--epochs", "4", "--json")
    job = ("train", *pair, *MLP, "--batch-size", "8", "--micro-batch-size", "1", *how)
    whole = run(*job, "--save", "whole.safetensors", cwd=tmp_path)
    cut = interrupt((*job, "--save", "m.safetensors"), tmp_path, 2)
    assert cut.returncode == INTERRUPTED, cut.stderr
    rest = run("train", "--resume", "m.checkpoint.safetensors", "--json", cwd=tmp_path)
    assert losses(rest)[-1] == losses(whole)[-1]
    assert same(tmp_path / "whole.safetensors", tmp_path / "m.safetensors")


def test_schedules_and_clipping_are_those_of_torch(pair, tmp_path):
    """SGD, one step an epoch: weights move by lr * gradient, as far as the norm allows."""
    one = ("--optimizer", "sgd", "--lr", "0.1", "--batch-size", "all", "--micro-batch-size", "60")

    def weights(*how):
        result = run("train", *pair, *MLP, *one, *how, "--save", "m.safetensors", cwd=tmp_path)
        assert result.returncode == OK, result.stderr
        return torch.cat([v.flatten() for v in load_file(tmp_path / "m.safetensors").values()])

    first, second = weights("--epochs", "1"), weights("--epochs", "2")
    # Both halve the learning rate of the second of two epochs.
    for schedule in ("cosine", "linear"):
        scheduled = weights("--epochs", "2", "--schedule", schedule)
        torch.testing.assert_close(scheduled - first, (second - first) / 2, rtol=1e-3, atol=1e-6)
    small, tiny = (
        weights("--epochs", "1", "--clip", "2e-2"),
        weights("--epochs", "1", "--clip", "1e-2"),
    )
    assert (tiny - small).norm().item() == pytest.approx(0.1 * 1e-2, rel=1e-2)
