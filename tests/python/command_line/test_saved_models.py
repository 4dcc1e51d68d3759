"""train --save, evaluate, predict and export: files that Python reads, numbers that are the training's."""

import json
import re
import struct

import numpy
import pytest
import torch
from command_line_tools import ERROR, OK, OUT_OF_MEMORY, USAGE, events, run
from safetensors import safe_open
from safetensors.torch import load_file, save_file

MLP = ("--model", "mlp", "--width", "16", "--depth", "1", "--micro-batch-size", "50")


def event(result, name):
    assert result.returncode == OK, result.stderr
    (found,) = [line for line in events(result) if line["event"] == name]
    return found


def metadata(path) -> dict:
    with safe_open(path, "pt") as file:
        return file.metadata()


@pytest.fixture(scope="module")
def saved(pair, tmp_path_factory):
    """The last epoch of a training, and the file of its model."""
    path = tmp_path_factory.mktemp("saved") / "model.safetensors"
    result = run("train", *pair, *MLP, "--epochs", "3", "--save", path, "--json")
    assert event(result, "saved")["path"] == str(path)
    assert [file.name for file in path.parent.iterdir()] == [path.name]
    return [line for line in events(result) if line["event"] == "epoch"][-1], path


def test_weights_are_a_state_dict(saved):
    weights = load_file(saved[1])
    layers = {"layers.0": torch.nn.Linear(64, 16), "layers.1": torch.nn.Linear(16, 3)}
    torch.nn.ModuleDict({"layers": torch.nn.ModuleList(layers.values())}).load_state_dict(weights)
    description = json.loads(metadata(saved[1])["infinitybatch"])
    assert (description["model"], description["width"], description["classes"]) == ("mlp", 16, 3)


def test_evaluate_measures_what_training_measured(saved):
    last, path = saved
    found = event(run("evaluate", path, "--micro-batch-size", "50", "--json"), "evaluate")
    assert found["loss"] == last["held_out_loss"] and found["accuracy"] == last["held_out_accuracy"]
    assert (found["of"], found["samples"], found["same_data"]) == ("held-out", 60, True)
    train = event(run("evaluate", path, "--samples", "train", "--json"), "evaluate")
    assert train["samples"] == 240 and train["loss"] < found["loss"] * 2
    assert "accuracy" in run("evaluate", path).stdout


def test_running_statistics_are_saved(pair, tmp_path):
    path = tmp_path / "model.safetensors"
    resnet = ("--model", "resnet", "--width", "4", "--micro-batch-size", "60")
    result = run("train", *pair, *resnet, "--epochs", "2", "--save", path, "--json")
    last = [line for line in events(result) if line["event"] == "epoch"][-1]
    found = event(run("evaluate", path, "--micro-batch-size", "60", "--json"), "evaluate")
    assert found["loss"] == last["held_out_loss"]


def test_text_is_saved_with_its_context(folder, tmp_path):
    path = tmp_path / "model.safetensors"
    size = ("--context", "32", "--width", "16", "--depth", "1", "--micro-batch-size", "64")
    result = run(
        "train", "--data", folder / "text.txt", *size, "--epochs", "1", "--save", path, "--json"
    )
    last = [line for line in events(result) if line["event"] == "epoch"][-1]
    found = event(run("evaluate", path, "--micro-batch-size", "64", "--json"), "evaluate")
    assert found["loss"] == last["held_out_loss"]
    run("predict", path, "--output", tmp_path / "next.npy")
    assert numpy.load(tmp_path / "next.npy").shape == (found["samples"], 32)


def test_predictions_are_those_of_the_weights(saved, samples, tmp_path):
    last, path = saved
    out = tmp_path / "scores.npy"
    assert event(run("predict", path, "--output", out, "--scores", "--json"), "predict")[
        "shape"
    ] == [60, 3]
    images, labels = samples[0].astype(numpy.float64), samples[1]
    held = numpy.array([int((i + 1) * 0.2) > int(i * 0.2) for i in range(300)])
    mean = images[~held].mean()
    deviation = images[~held].std()
    weights = load_file(path)
    x = torch.from_numpy((images[held] - mean) / deviation).float().flatten(1)
    hidden = (x @ weights["layers.0.weight"].T + weights["layers.0.bias"]).relu()
    scores = hidden @ weights["layers.1.weight"].T + weights["layers.1.bias"]
    ours = numpy.load(out)
    assert ours.dtype == numpy.float32
    numpy.testing.assert_allclose(ours, scores.numpy(), rtol=1e-4, atol=1e-4)
    result = run("predict", path, "--output", tmp_path / "classes.npy", "--micro-batch-size", "7")
    assert result.returncode == OK, result.stderr
    classes = numpy.load(tmp_path / "classes.npy")
    assert classes.dtype == numpy.int64
    assert (classes == ours.argmax(1)).all()
    assert (classes == labels[held]).mean() == pytest.approx(last["held_out_accuracy"])


def test_other_data_are_used_as_a_whole_and_in_their_order(saved, samples, folder, tmp_path):
    _, path = saved
    other = ("--data", folder / "x.npy", "--labels", folder / "y.npy")
    found = event(run("evaluate", path, *other, "--json"), "evaluate")
    assert (found["of"], found["samples"], found["same_data"]) == ("all", 300, False)
    result = run("predict", path, *other, "--output", tmp_path / "classes.npy")
    assert "note: other data than the model was trained on" in result.stdout
    classes = numpy.load(tmp_path / "classes.npy")
    assert (classes == samples[1]).mean() == pytest.approx(found["accuracy"])


def test_evaluation_stays_inside_a_budget(saved):
    found = event(run("evaluate", saved[1], "--memory-budget", "24KiB", "--json"), "evaluate")
    assert found["peak_bytes"] <= 24 << 10
    assert found["loss"] == pytest.approx(saved[0]["held_out_loss"], rel=1e-6)
    assert run("evaluate", saved[1], "--memory-budget", "1KiB").returncode == OUT_OF_MEMORY


@pytest.mark.parametrize("ending", ["pt", "safetensors"])
def test_export(saved, tmp_path, ending):
    out = tmp_path / f"weights.{ending}"
    assert event(run("export", saved[1], "--output", out, "--json"), "export")["tensors"] == 4
    ours = torch.load(out, weights_only=True) if ending == "pt" else load_file(out)
    weights = load_file(saved[1])
    assert ours.keys() == weights.keys()
    assert all(torch.equal(ours[name], weights[name]) for name in weights)


def test_export_keeps_the_types_of_buffers(pair, tmp_path):
    path = tmp_path / "model.safetensors"
    resnet = ("--model", "resnet", "--width", "4", "--epochs", "1", "--save", path)
    assert run("train", *pair, *resnet).returncode == OK
    assert run("export", path, "--output", tmp_path / "weights.pt").returncode == OK
    ours = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert ours["stem.norm.num_batches_tracked"].dtype == torch.int64
    assert all(torch.equal(ours[name], value) for name, value in load_file(path).items())


def broken_files(path, folder):
    """Files that are no saved model, and what is said of them."""
    content = path.read_bytes()
    weights = load_file(path)
    strangers = {"of others": ({}, "describe no model of infinitybatch")}
    known = metadata(path)
    strangers["one missing"] = (known, "has no tensor layers.0.bias, which its model has")
    strangers["one more"] = (known, "holds a tensor layers.9.bias.*of another model")
    strangers["shape"] = (known, r"layers.0.bias is Float of \[3\], the model's is Float of \[16\]")
    strangers["type"] = (known, "layers.0.bias is Double of .*of another model")
    strangers["description"] = ({"infinitybatch": "{}"}, "description of its model is damaged")
    without = {name: value for name, value in weights.items() if name != "layers.0.bias"}
    tensors = {
        "one missing": without,
        "one more": weights | {"layers.9.bias": torch.zeros(3)},
        "shape": weights | {"layers.0.bias": torch.zeros(3)},
        "type": weights | {"layers.0.bias": torch.zeros(16).double()},
    }
    for name, (said, message) in strangers.items():
        save_file(tensors.get(name, weights), folder / f"{name}.safetensors", said)
        yield name, message
    length = struct.unpack("<Q", content[:8])[0]
    raw = {
        "cut": (content[:-9], "is cut off: .* ends at byte"),
        "cut header": (content[: length // 2], "is no safetensors file"),
        "empty": (b"", "is no safetensors file"),
        "text": (b"weights of a model\n" * 20, "is no safetensors file"),
        "no json": (struct.pack("<Q", 8) + b"{]  1234", "is no safetensors file"),
        "list": (struct.pack("<Q", 8) + b"[1, 2]  ", "is no safetensors file"),
        "offsets": (content.replace(b'"data_offsets":[0,', b'"data_offsets":[9,'), "damaged"),
    }
    for name, (data, message) in raw.items():
        (folder / f"{name}.safetensors").write_bytes(data)
        yield name, message
    yield "not there", "there is no such file"


def test_files_that_are_no_saved_model(saved, tmp_path):
    for name, message in broken_files(saved[1], tmp_path):
        result = run("evaluate", tmp_path / f"{name}.safetensors")
        assert result.returncode == ERROR, (name, result.stderr)
        assert result.stderr.count("\n") == 1 and result.stdout == ""
        assert re.search(f"{name}.safetensors: .*{message}", result.stderr), (name, result.stderr)


MISUSES = {
    "folder of nowhere": (("train", "--save", "a/b.safetensors"), USAGE, "a is not there; make it with: mkdir -p a"),
    "a folder": (("train", "--save", "here.safetensors"), USAGE, "--save here.safetensors is a folder; name a file"),
    "another ending": (("train", "--save", "model.pt"), USAGE, "does not end in .safetensors, as in: --save model.safetensors"),
    "checkpoints nowhere": (("train", "--checkpoint-every", "2"), USAGE, "--checkpoint-every needs a place.*--save"),
    "checkpoints never": (("train", "--checkpoint-every", "0"), USAGE, "--checkpoint-every must be a whole number, at least 1, not 0"),
    "no file": (("evaluate",), USAGE, "file is required; see: infinitybatch evaluate --help"),
    "no output": (("predict", "{model}"), USAGE, "--output is required"),
    "predict: ending": (("predict", "{model}", "--output", "x.csv"), USAGE, "does not end in .npy, as in: --output x.npy"),
    "export: ending": (("export", "{model}", "--output", "x.onnx"), USAGE, "does not end in .pt or .safetensors"),
    "text for images": (("evaluate", "{model}", "--data", "{folder}/text.txt"), ERROR, "has samples of 64, and the model in .* takes 1x8x8"),
    "samples of other data": (
        ("evaluate", "{model}", "--data", "{folder}/x.npy", "--labels", "{folder}/y.npy", "--samples", "train"),
        USAGE,
        "--samples train is of the data that the model was trained on",
    ),
    "unknown samples": (("evaluate", "{model}", "--samples", "some"), USAGE, "--samples must be held-out or train, not some"),
    "epochs": (("evaluate", "{model}", "--epochs", "3"), USAGE, "--epochs is not known"),
    "resume: weights": (("train", "--resume", "{model}"), ERROR, "weights alone.*--resume .*model.checkpoint.safetensors"),
    "resume: nothing": (("train", "--resume", "none.safetensors"), ERROR, "none.safetensors: there is no such file"),
}  # fmt: skip


@pytest.mark.parametrize("case", MISUSES)
def test_misuse(case, saved, folder, tmp_path):
    (tmp_path / "here.safetensors").mkdir()
    arguments, code, message = MISUSES[case]
    result = run(*(a.format(model=saved[1], folder=folder) for a in arguments), cwd=tmp_path)
    assert result.returncode == code, result.stderr
    assert result.stderr.count("\n") == 1 and result.stdout == ""
    assert re.search(message, result.stderr), result.stderr


def test_data_that_have_changed_are_noticed(samples, tmp_path):
    numpy.save(tmp_path / "x.npy", samples[0].astype(numpy.float32))
    numpy.save(tmp_path / "y.npy", samples[1].astype(numpy.int64))
    data = ("--data", "x.npy", "--labels", "y.npy")
    assert (
        run(
            "train", *data, *MLP, "--epochs", "1", "--save", "m.safetensors", cwd=tmp_path
        ).returncode
        == OK
    )
    assert run("evaluate", "m.safetensors", cwd=tmp_path).returncode == OK
    numpy.save(tmp_path / "x.npy", samples[0].astype(numpy.float32) ** 2)
    result = run("evaluate", "m.safetensors", cwd=tmp_path)
    assert result.returncode == ERROR and "holds other samples than m.safetensors" in result.stderr


def test_nothing_held_out_nothing_to_measure(pair, tmp_path):
    path = tmp_path / "m.safetensors"
    assert (
        run("train", *pair, *MLP, "--epochs", "1", "--held-out", "0", "--save", path).returncode
        == OK
    )
    result = run("evaluate", path)
    assert result.returncode == USAGE and "nothing was held out" in result.stderr
    assert run("evaluate", path, "--samples", "train").returncode == OK
