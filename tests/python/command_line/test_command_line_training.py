"""Training from the command line: metrics, memory, data formats."""

import functools
import pathlib
import re
import subprocess
import sys

import numpy
import pytest
from command_line_tools import (
    OK,
    OUT_OF_MEMORY,
    RESNET,
    ROOT,
    TIGHT,
    USAGE,
    binary,
    epochs,
    events,
    idx,
    run,
)


def test_json_lines(pair):
    result = run(
        "train", *pair, "--model", "mlp", "--epochs", "3", "--memory-budget", "64MiB", "--json"
    )
    assert result.returncode == OK, result.stderr
    lines = events(result)
    assert [line["event"] for line in lines] == ["start", "epoch", "epoch", "epoch", "summary"]
    start, *_, last, summary = lines
    assert (start["samples"], start["held_out"], start["classes"]) == (240, 60, 3)
    assert start["parameters"] == 64 * 256 + 256 + 256 * 256 + 256 + 256 * 3 + 3
    assert [line["epoch"] for line in lines[1:-1]] == [1, 2, 3]
    assert summary["loss"] == last["loss"] and summary["epochs"] == 3
    assert summary["peak_bytes"] == max(line["peak_bytes"] for line in lines[1:-1])
    assert last["peak_over_budget"] == pytest.approx(last["peak_bytes"] / (64 << 20))
    assert last["samples_per_second"] == pytest.approx(240 / last["seconds"])
    assert "epoch" in result.stderr, "people read stderr then"


def test_errors_are_events_too(pair):
    result = run("train", *pair, "--strategy", "native", "--memory-budget", "2MiB", "--json")
    assert result.returncode == OUT_OF_MEMORY
    error = events(result)[-1]
    assert error["event"] == "error" and error["exit_code"] == OUT_OF_MEMORY
    assert result.stderr.endswith(f"infinitybatch: {error['message']}\n")


def test_usage_errors_are_events_too():
    result = run("train", "--json", "--epoch", "3")
    (error,) = events(result)
    assert error["exit_code"] == result.returncode == USAGE and "--epochs" in error["message"]


def test_native_dies_and_ours_finishes_in_the_same_memory(pair):
    settings = ("train", *pair, *RESNET, "--batch-size", "all", "--memory-budget", TIGHT)
    settings += ("--seed", "3", "--epochs", "12", "--lr", "0.01")
    native = run(*settings, "--strategy", "native")
    assert native.returncode == OUT_OF_MEMORY
    assert native.stderr.count("\n") == 1
    assert re.search(
        r"--strategy native is out of memory with 240 samples at once: .* MiB.*the limit is 4 MiB.*; "
        r"leave --strategy out",
        native.stderr,
    ), native.stderr

    ours = epochs(run(*settings, "--json"))
    assert len(ours) == 12
    assert all(0 < epoch["peak_over_budget"] <= 1 for epoch in ours)
    assert all(1 <= epoch["micro_batch_size"] < 240 for epoch in ours)
    assert ours[-1]["held_out_accuracy"] > 0.95

    unlimited = tuple(a for a in settings if a not in ("--memory-budget", TIGHT))
    whole = epochs(run(*unlimited, "--strategy", "native", "--json"))
    # The first epoch is one step on the same parameters: the same loss up to rounding. Later ones
    # drift apart as fp32 trainings do.
    assert ours[0]["loss"] == pytest.approx(whole[0]["loss"], rel=1e-5)
    assert ours[1]["loss"] == pytest.approx(whole[1]["loss"], rel=1e-3)
    assert whole[0]["peak_bytes"] > 2 * (4 << 20) > 2 * max(e["peak_bytes"] for e in ours)


@pytest.mark.parametrize("strategy", ["stream", "native"])
def test_every_epoch_sees_every_sample_once(pair, strategy):
    """With a learning rate of 0 the loss is a mean over all samples, whatever their order."""
    settings = ("train", *pair, "--model", "mlp", "--lr", "0", "--epochs", "3", "--json")
    settings += ("--strategy", strategy)
    losses = [
        epoch["loss"]
        for size in (7, "all")
        for epoch in epochs(run(*settings, "--batch-size", size))
    ]
    assert losses == pytest.approx([losses[0]] * 6, rel=1e-6)


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "rmsprop", "adagrad"])
def test_micro_batches_train_as_the_whole_batch(pair, optimizer):
    settings = ("train", *pair, "--model", "convnet", "--width", "8", "--epochs", "3", "--json")
    settings += ("--optimizer", optimizer, "--batch-size", "100")
    native = epochs(run(*settings, "--strategy", "native"))
    for size in (1, 7, 1000):
        ours = epochs(run(*settings, "--micro-batch-size", size))
        assert [e["micro_batch_size"] for e in ours] == [min(size, 100)] * 3
        for a, b in zip(ours, native, strict=True):
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)
    assert native[-1]["loss"] < native[0]["loss"]


def test_same_seed_same_numbers(pair):
    settings = ("train", *pair, *RESNET, "--epochs", "2", "--micro-batch-size", "16", "--json")
    first, second, other = (
        [
            (e["loss"], e["held_out_loss"], e["held_out_accuracy"])
            for e in epochs(run(*settings, "--seed", seed))
        ]
        for seed in (5, 5, 6)
    )
    assert first == second
    assert first != other


@pytest.mark.parametrize("model", ["mlp", "convnet", "resnet", "resnet-groupnorm"])
def test_every_image_model_learns(pair, model):
    last = epochs(
        run("train", *pair, "--model", model, "--epochs", "12", "--batch-size", "60", "--json")
    )
    assert last[-1]["held_out_accuracy"] > 0.95


def test_transformer_learns_text(folder):
    settings = (
        "--context",
        "32",
        "--batch-size",
        "32",
        "--epochs",
        "12",
        "--memory-budget",
        "16MiB",
    )
    ours = epochs(run("train", "--data", folder / "text.txt", *settings, "--json"))
    assert ours[-1]["held_out_accuracy"] > 0.9
    assert all(epoch["peak_over_budget"] <= 1 for epoch in ours)


@pytest.mark.parametrize(
    "data, labels",
    [("pair", None), ("images.idx", "labels.idx"), ("x.npy", "y.npy"), ("x.npy", "labels.idx")],
)
def test_every_format_gives_the_same_samples(folder, data, labels):
    arguments = ("--data", folder / data, *(("--labels", folder / labels) if labels else ()))
    arguments += ("--model", "mlp", "--epochs", "2", "--micro-batch-size", "50", "--json")
    ours = epochs(run("train", *arguments))
    pair = ("--data", folder / "pair", *arguments[arguments.index("--model") :])
    reference = epochs(run("train", *pair))
    assert [e["loss"] for e in ours] == [e["loss"] for e in reference]


def test_units_of_the_inputs_do_not_matter(folder, samples, tmp_path):
    numpy.save(tmp_path / "x.npy", samples[0].astype(numpy.float64) * 3 + 1000)
    settings = ("--labels", folder / "y.npy", "--model", "mlp", "--epochs", "3", "--json")
    moved = epochs(run("train", "--data", tmp_path / "x.npy", *settings))
    plain = epochs(run("train", "--data", folder / "x.npy", *settings))
    for a, b in zip(moved, plain, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-4)


@pytest.mark.parametrize("version", [1, 2, 3])
@pytest.mark.parametrize(
    "dtype", "bool int8 uint8 int16 int32 int64 float16 float32 float64".split()
)
def test_npy_versions_and_types(folder, tmp_path, samples, version, dtype):
    images = (samples[0] > 100).astype(dtype)
    with open(tmp_path / "x.npy", "wb") as file:
        numpy.lib.format.write_array(file, images, version=(version, 0))
    arguments = ("--data", tmp_path / "x.npy", "--labels", folder / "y.npy", "--model", "mlp")
    arguments += (
        "--width",
        "16",
        "--depth",
        "1",
        "--epochs",
        "1",
        "--micro-batch-size",
        "64",
        "--json",
    )
    (ours,) = epochs(run("train", *arguments))
    assert ours["loss"] == expected_loss(binary(), str(folder), samples[0].tobytes())


@functools.cache
def expected_loss(_binary, folder, images):
    """The loss of the same 0/1 images from an IDX file."""
    array = numpy.frombuffer(images, numpy.uint8).reshape(300, 8, 8) > 100
    path = pathlib.Path(folder) / "binary.idx"
    path.write_bytes(idx(array))
    arguments = ("--data", path, "--labels", pathlib.Path(folder) / "labels.idx", "--model", "mlp")
    arguments += (
        "--width",
        "16",
        "--depth",
        "1",
        "--epochs",
        "1",
        "--micro-batch-size",
        "64",
        "--json",
    )
    return epochs(run("train", *arguments))[0]["loss"]


def test_held_out_rows_are_not_trained_on(folder, samples, tmp_path):
    """Labels of held-out rows may be anything: the training loss stays the same."""
    labels = samples[1].astype(numpy.int64)
    settings = ("--model", "mlp", "--epochs", "2", "--micro-batch-size", "50", "--held-out", "0.25")

    def losses(values):
        numpy.save(tmp_path / "y.npy", values)
        data = ("--data", folder / "x.npy", "--labels", tmp_path / "y.npy")
        return epochs(run("train", *data, *settings, "--json"))

    changed = labels.copy()
    changed[3::4] = (changed[3::4] + 1) % 3
    right, wrong = losses(labels), losses(changed)
    assert [e["loss"] for e in right] == [e["loss"] for e in wrong]
    assert right[-1]["held_out_loss"] < wrong[-1]["held_out_loss"]


def test_nothing_held_out(pair):
    (epoch,) = epochs(
        run("train", *pair, "--model", "mlp", "--epochs", "1", "--held-out", "0", "--json")
    )
    assert epoch["held_out_accuracy"] is None and epoch["held_out_loss"] is None


def test_digits(tmp_path):
    """The default data, exported, found by name, trained to what the project promises."""
    export = [sys.executable, ROOT / "scripts" / "export_digits.py", tmp_path / "data" / "digits"]
    subprocess.run(export, check=True, capture_output=True)
    first = {p.name: p.read_bytes() for p in (tmp_path / "data" / "digits").iterdir()}
    subprocess.run(export, check=True, capture_output=True)
    assert first == {p.name: p.read_bytes() for p in (tmp_path / "data" / "digits").iterdir()}
    result = run("train", "--epochs", "8", "--memory-budget", "24MiB", "--json", cwd=tmp_path)
    start, *_, summary = events(result)
    assert (start["samples"], start["held_out"], start["classes"]) == (1438, 359, 10)
    assert summary["best_held_out_accuracy"] > 0.9
    assert summary["peak_over_budget"] <= 1


def test_data_folder_from_the_environment(folder, tmp_path):
    result = run(
        "train", "--data", "pair", "--model", "mlp", "--epochs", "1", cwd=tmp_path,
        INFINITYBATCH_DATA=str(folder),
    )  # fmt: skip
    assert result.returncode == OK, result.stderr
