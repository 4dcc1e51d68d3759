"""--model with a shared library, --amp, --ema and --metrics, and what resuming keeps of the data."""

import os
import subprocess
from pathlib import Path

import numpy
import pytest
import torch
from command_line_tools import OK, ROOT, USAGE, epochs, events, run
from safetensors.torch import load_file
from torch.nn.functional import cross_entropy

MLP = ("--model", "mlp", "--width", "16", "--depth", "1")
SIZES = ("--batch-size", "64", "--micro-batch-size", "16")
EVERYTHING = (
    *("--amp", "--ema", "0.9", "--schedule", "cosine", "--clip", "1"),
    *("--metrics", "top5,balanced-accuracy,macro-f1,perplexity"),
)


def library() -> Path:
    """examples/network.cpp, as the build makes it."""
    build = Path(os.environ.get("INFINITYBATCH_BUILD_DIR", ROOT / "build/release"))
    return build / "lib/libnetwork.so"


def losses(result) -> list:
    return [(e["epoch"], e["loss"], e["held_out_loss"]) for e in epochs(result)]


def test_a_shared_library_trains_to_the_bits_of_the_same_network_inside(pair, tmp_path):
    job = ("train", *pair, *SIZES, "--width", "16", "--epochs", "3", "--json")
    own = run(*job, "--model", library(), "--save", "m.safetensors", cwd=tmp_path)
    inside = run(*job, "--model", "mlp", "--depth", "1")
    assert losses(own) == losses(inside)
    weights = load_file(tmp_path / "m.safetensors")
    assert set(weights) == {"hidden.weight", "hidden.bias", "last.weight", "last.bias"}
    found = run("evaluate", "m.safetensors", "--micro-batch-size", "16", "--json", cwd=tmp_path)
    assert events(found)[-1]["loss"] == pytest.approx(epochs(own)[-1]["held_out_loss"], rel=1e-6)
    assert run("predict", "m.safetensors", "--output", "p.npy", cwd=tmp_path).returncode == OK
    assert numpy.load(tmp_path / "p.npy").shape == (60,)


def test_a_shared_library_goes_on_and_is_planned_for(pair, tmp_path):
    job = ("train", *pair, *SIZES, "--model", library(), "--json")
    whole = run(*job, "--epochs", "4")
    half = ("--epochs", "2", "--save", "m.safetensors", "--checkpoint-every", "2")
    begun = run(*job, *half, cwd=tmp_path)
    rest = run("train", "--resume", "m.checkpoint.safetensors", "--epochs", "4", "--json",
               cwd=tmp_path)  # fmt: skip
    assert losses(begun) + losses(rest) == losses(whole)
    planned = run("plan", *pair, "--model", library(), "--memory-budget", "8MiB")
    assert planned.returncode == OK, planned.stderr


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("./none.so", "--model ./none.so does not exist; check the path"),
        ("./text.so", "--model ./text.so cannot be loaded: "),
        ("own_nets:Net", "python -m infinitybatch train --model own_nets:Net"),
    ],
)
def test_libraries_that_are_none(model, message, pair, tmp_path):
    (tmp_path / "text.so").write_text("int main() {}")
    result = run("train", *pair, "--model", model, cwd=tmp_path)
    assert result.returncode == USAGE and message in result.stderr, result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_library_without_a_network(pair):
    # One that is loaded already: of torch.
    torch_lib = Path(torch.__file__).parent / "lib/libc10.so"
    result = run("train", *pair, "--model", torch_lib)
    assert result.returncode == USAGE and "INFINITYBATCH_NETWORK(Net)" in result.stderr


def test_a_library_for_another_torch(pair, tmp_path):
    (tmp_path / "net.c").write_text(
        'const char* infinitybatch_network_version(void) { return "interface 1, torch 1.0.0"; }\n'
        "void infinitybatch_make_network(void) {}\n"
    )
    compiler = os.environ.get("CC", "cc")
    command = [compiler, "-shared", "-fPIC", "net.c", "-o", "libnet.so"]
    subprocess.run(command, cwd=tmp_path, check=True)
    result = run("train", *pair, "--model", "./libnet.so", cwd=tmp_path)
    assert result.returncode == USAGE
    assert "was built for interface 1, torch 1.0.0, and this program has" in result.stderr


@pytest.mark.parametrize("model", [MLP, ("--model", "resnet", "--width", "4")])
def test_everything_together_goes_on_with_the_same_bits(model, pair, tmp_path):
    job = ("train", *pair, *model, *SIZES, *EVERYTHING, "--json", "--epochs", "4")
    whole = run(*job, "--save", "whole.safetensors", cwd=tmp_path)
    run(*job, "--save", "m.safetensors", "--checkpoint-every", "3", cwd=tmp_path)
    rest = run("train", "--resume", "m.checkpoint.safetensors", "--json", cwd=tmp_path)
    assert losses(rest) == losses(whole)[3:]
    assert epochs(rest)[0]["held_out_metrics"] == epochs(whole)[3]["held_out_metrics"]
    one, other = load_file(tmp_path / "whole.safetensors"), load_file(tmp_path / "m.safetensors")
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_averages_are_what_is_measured_and_saved(pair, tmp_path):
    job = ("train", *pair, *MLP, *SIZES, "--epochs", "3", "--json")
    plain = run(*job, "--save", "plain.safetensors", cwd=tmp_path)
    result = run(*job, "--ema", "0.9", "--save", "m.safetensors", cwd=tmp_path)
    # Training is the same, what is measured and saved are the averages.
    assert [e["loss"] for e in epochs(result)] == [e["loss"] for e in epochs(plain)]
    last = epochs(result)[-1]["held_out_loss"]
    assert last != epochs(plain)[-1]["held_out_loss"]
    found = run("evaluate", "m.safetensors", "--micro-batch-size", "16", "--json", cwd=tmp_path)
    assert events(found)[-1]["loss"] == pytest.approx(last, rel=1e-6)
    ours, theirs = load_file(tmp_path / "m.safetensors"), load_file(tmp_path / "plain.safetensors")
    assert not any(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("strategy", ["auto", "native"])
def test_amp_is_close_and_kept_in_float32(strategy, pair, tmp_path):
    job = ("train", *pair, *MLP, "--batch-size", "64", "--epochs", "3", "--strategy", strategy)
    plain = run(*job, "--json")
    amp = run(*job, "--json", "--amp", "--save", "m.safetensors", cwd=tmp_path)
    for one, other in zip(epochs(plain), epochs(amp), strict=True):
        assert one["loss"] != other["loss"]
        assert one["loss"] == pytest.approx(other["loss"], rel=0.05)
    assert {t.dtype for t in load_file(tmp_path / "m.safetensors").values()} == {torch.float32}


def test_metrics_are_those_of_the_scores(pair, tmp_path):
    names = ("--metrics", "top5,balanced-accuracy,macro-f1,perplexity")
    job = ("train", *pair, *MLP, "--epochs", "2", "--save", "m.safetensors", *names)
    result = run(*job, "--json", cwd=tmp_path)
    told = epochs(result)[-1]["held_out_metrics"]
    found = events(run("evaluate", "m.safetensors", *names, "--json", cwd=tmp_path))[-1]
    assert found["metrics"] == pytest.approx(told, rel=1e-6)
    assert "macro-f1 0." in run("evaluate", "m.safetensors", *names, cwd=tmp_path).stdout
    table = run(*job, cwd=tmp_path).stdout
    assert "macro-f1" in table and "top5" in table
    run("predict", "m.safetensors", "--output", "s.npy", "--scores", cwd=tmp_path)
    scores = torch.from_numpy(numpy.load(tmp_path / "s.npy"))
    loss = found["loss"]
    assert told["perplexity"] == pytest.approx(float(numpy.exp(loss)), rel=1e-5)
    assert told["top5"] == 1.0  # of three classes
    assert len(scores) == 60 and cross_entropy(scores, scores.argmax(1)).item() <= loss


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--metrics", "f1"), "--metrics must be top5, balanced-accuracy, macro-f1 or perplexity"),
        (("--ema", "1"), "--ema must be a number from 0 to"),
        (("--ema", "often"), "--ema must be a number, not often"),
    ],
)
def test_misuse(flags, message, pair):
    result = run("train", *pair, *flags)
    assert result.returncode == USAGE and message in result.stderr, result.stderr


def test_what_says_how_data_are_read_is_kept(samples, tmp_path):
    images, labels = samples
    numpy.savez(tmp_path / "d.npz", pictures=images, kinds=labels)
    job = ("train", "--data", "d.npz", "--inputs", "pictures", "--labels", "kinds", *MLP, *SIZES)
    whole = run(*job, "--epochs", "2", "--json", cwd=tmp_path)
    run(*job, "--epochs", "1", "--save", "m.safetensors", "--checkpoint-every", "1", cwd=tmp_path)
    rest = run("train", "--resume", "m.checkpoint.safetensors", "--epochs", "2", "--json",
               cwd=tmp_path)  # fmt: skip
    assert losses(rest) == losses(whole)[1:]
    assert run("evaluate", "m.safetensors", cwd=tmp_path).returncode == OK
