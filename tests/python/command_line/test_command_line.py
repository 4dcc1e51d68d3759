"""Help, misuse and configuration of the command line."""

import re

import pytest
from command_line_tools import ERROR, INTERRUPTED, OK, OUT_OF_MEMORY, USAGE, events, run


@pytest.mark.parametrize(
    "command",
    [(), *((name,) for name in "train evaluate predict export plan verify bench doctor".split())],
)
def test_help_has_an_example(command):
    result = run(*command, "--help")
    assert result.returncode == OK and result.stderr == ""
    assert re.search(r"Examples?:\n  infinitybatch ", result.stdout)


def test_help_names_every_flag():
    text = run("train", "--help").stdout
    for flag in (
        "data labels model config epochs lr optimizer batch-size micro-batch-size memory-budget "
        "strategy seed device json offload host-budget offload-directory save checkpoint-every resume "
        "schedule clip"
    ).split():
        assert f"--{flag}" in text, flag


def test_help_documents_exit_codes():
    text = run("--help").stdout
    for code in (OK, ERROR, USAGE, OUT_OF_MEMORY, INTERRUPTED):
        assert re.search(rf"^  {code} ", text, re.MULTILINE), code


def test_version():
    result = run("--version")
    assert result.returncode == OK
    assert re.fullmatch(
        r"infinitybatch \d+\.\d+\.\d+ \(built with torch [\d.]+, running with .+\)\n", result.stdout
    )


MISUSES = {
    "no command": (
        (),
        USAGE,
        "a command is needed: train, evaluate, predict, export, plan, verify, bench or",
    ),
    "unknown command": (("trian",), USAGE, "trian is not known, did you mean train?"),
    "unknown flag": (
        ("train", "--epoch", "3"),
        USAGE,
        "--epoch is not known, did you mean --epochs?",
    ),
    "flag of before": (("train", "--park", "always"), USAGE, "--park is not known: use --offload"),
    "bench: no rounds": (
        ("bench", "--rounds", "0"),
        USAGE,
        "--rounds must be a whole number, at least 1, not 0",
    ),
    "bench: rounds word": (("bench", "--rounds", "many"), USAGE, "--rounds.*many"),
    "bench: no time": (
        ("bench", "--seconds", "0"),
        USAGE,
        "--seconds must be a number from 0.001 to 1000000000, not 0;",
    ),
    "bench: mistyped": (("bench", "--round", "3"), USAGE, "--round is not known.*--rounds?"),
    "bench: strategy": (("bench", "--strategy", "native"), USAGE, "--strategy is not known"),
    "bench: epochs": (("bench", "--epochs", "3"), USAGE, "--epochs is not known"),
    "bench: micro-batch 0": (("bench", "--micro-batch-size", "0"), USAGE, "at least 1, not 0"),
    "verify: optimizer": (("verify", "--optimizer", "sgd"), USAGE, "--optimizer is not known"),
    "flag of another command": (("plan", "--epochs", "3"), USAGE, "--epochs is not known"),
    "positional": (("train", "digits"), USAGE, "digits is not known"),
    "no value": (("train", "--epochs"), USAGE, "--epochs.*; see: infinitybatch train --help"),
    "no number": (("train", "--epochs", "many"), USAGE, "--epochs.*many"),
    "epochs 0": (
        ("train", "--epochs", "0"),
        USAGE,
        "--epochs must be a whole number, at least 1, not 0",
    ),
    "negative lr": (
        ("train", "--lr", "-1"),
        USAGE,
        "--lr must be a number from 0 to 1000000, not -1",
    ),
    "lr that is no number": (("train", "--lr", "nan"), USAGE, "--lr must be a number, not nan"),
    "negative seed": (
        ("train", "--seed", "-1"),
        USAGE,
        "--seed must be a whole number from 0.*, not -1",
    ),
    "held-out 1": (
        ("train", "--held-out", "1"),
        USAGE,
        "--held-out must be a number from 0 to 0.9, not 1",
    ),
    "batch size 0": (
        ("train", "--batch-size", "0"),
        USAGE,
        'neither a number of 1 or more nor "all"',
    ),
    "batch size word": (("train", "--batch-size", "everything"), USAGE, "everything is neither"),
    "micro-batch 0": (
        ("train", "--micro-batch-size", "0"),
        USAGE,
        "--micro-batch-size must be a whole number, at least 1, not 0",
    ),
    "budget word": (
        ("train", "--memory-budget", "lots"),
        USAGE,
        '"lots", which is not a valid memory budget; write',
    ),
    "budget 0": (("train", "--memory-budget", "0"), USAGE, "at least one byte; write"),
    "budget share": (("train", "--memory-budget", "1.5"), USAGE, "above 0 and at most 1; write"),
    "unknown model": (
        ("train", "--model", "vgg"),
        USAGE,
        "--model must be mlp, convnet, .* or transformer, not vgg",
    ),
    "unknown strategy": (
        ("train", "--strategy", "fast"),
        USAGE,
        "--strategy must be auto, stream or native, not fast",
    ),
    "unknown optimizer": (
        ("train", "--optimizer", "lion"),
        USAGE,
        "lion is not known; use sgd, adam",
    ),
    "lbfgs": (
        ("train", "--optimizer", "lbfgs"),
        USAGE,
        "lbfgs asks for the loss several times.*use sgd",
    ),
    "no such device": (
        ("train", "--device", "cuda:99"),
        USAGE,
        "cuda:99 is not there.*have: cpu.*; name one",
    ),
    "no device at all": (
        ("train", "--device", "gpu0"),
        USAGE,
        "gpu0 is not there.*have: cpu.*; name one",
    ),
    "native micro-batch": (
        ("train", "--strategy", "native", "--micro-batch-size", "4"),
        USAGE,
        "means nothing with --strategy native.*leave one of them out",
    ),
    "offload word": (
        ("train", "--offload", "often"),
        USAGE,
        "--offload must be auto, always or never, not often",
    ),
    "offload nothing": (
        ("plan", "--offload"),
        USAGE,
        "--offload.*; see: infinitybatch plan --help",
    ),
    "host budget word": (
        ("train", "--host-budget", "lots"),
        USAGE,
        '--host-budget is "lots", which is not a valid memory budget; write',
    ),
    "host budget 0": (
        ("verify", "--host-budget", "0"),
        USAGE,
        "--host-budget is .*at least one byte",
    ),
    "no such offload directory": (
        ("bench", "--offload-directory", "{folder}/nowhere"),
        USAGE,
        "--offload-directory .*nowhere is no folder; name one",
    ),
    "a file as offload directory": (
        ("train", "--offload-directory", "{folder}/x.npy"),
        USAGE,
        "x.npy is no folder; name one",
    ),
    "native offloads": (
        ("train", "--strategy", "native", "--offload", "always"),
        USAGE,
        "--offload always means nothing with --strategy native.*leave one of them out",
    ),
    "native host budget": (
        ("train", "--strategy", "native", "--host-budget", "1GiB"),
        USAGE,
        "--host-budget means nothing with --strategy native.*leave one of them out",
    ),
    "never into a directory": (
        ("train", "--offload", "never", "--offload-directory", "."),
        USAGE,
        "--offload-directory means nothing with --offload never; leave one of them out",
    ),
    "doctor offloads": (("doctor", "--offload", "always"), USAGE, "--offload is not known"),
    # A program in the wheel's layout knows no third place.
    "no such data": (
        ("train", "--data", "nowhere"),
        ERROR,
        "no data at nowhere(,| or) data/nowhere",
    ),
    "no such path": (("train", "--data", "a/b"), ERROR, "no data at a/b; --data takes a folder"),
    "no such labels": (
        ("train", "--data", "{folder}/x.npy", "--labels", "a/b"),
        ERROR,
        "no data at a/b; --labels takes a .npy or IDX file",
    ),
    "folder of files": (
        ("train", "--data", "{folder}"),
        ERROR,
        "images.idx: lies beside folders, which are taken for classes; .*MNIST-format",
    ),
    "labels beside a folder": (
        ("train", "--data", "{folder}/pair", "--labels", "{folder}/y.npy"),
        USAGE,
        "leave --labels out",
    ),
    "labels missing": (
        ("train", "--data", "{folder}/x.npy"),
        USAGE,
        "give their classes with --labels",
    ),
    "labels beside text": (
        ("train", "--data", "{folder}/text.txt", "--labels", "{folder}/y.npy"),
        USAGE,
        "is text, which predicts itself; leave --labels out",
    ),
    "inputs as labels": (
        ("train", "--data", "{folder}/x.npy", "--labels", "{folder}/x.npy"),
        ERROR,
        "labels are not integers",
    ),
    "images to a transformer": (
        ("train", "--data", "{folder}/pair", "--model", "transformer"),
        USAGE,
        "cannot take images or vectors.*use --model resnet",
    ),
    "text to a resnet": (
        ("train", "--data", "{folder}/text.txt", "--model", "resnet"),
        USAGE,
        "cannot take text.*use --model transformer",
    ),
    "vectors to a convnet": (
        (
            "train",
            "--data",
            "{folder}/vectors.npy",
            "--labels",
            "{folder}/y.npy",
            "--model",
            "convnet",
        ),
        USAGE,
        "takes images, but.*use --model mlp",
    ),
    "width of groups": (
        ("train", "--data", "{folder}/pair", "--model", "resnet-groupnorm", "--width", "12"),
        USAGE,
        "must be a multiple of 8",
    ),
    "context too long": (
        ("train", "--data", "{folder}/text.txt", "--context", "9000"),
        ERROR,
        "too few for two samples of 9000.*a smaller --context",
    ),
    "config missing": (("train", "--config", "{folder}/none.toml"), USAGE, "cannot be read"),
    "budget below the parameters": (
        ("train", "--data", "{folder}/pair", "--memory-budget", "100kB"),
        OUT_OF_MEMORY,
        "needs.*--memory-budget (is|of)",
    ),
    "budget below a sample": (
        ("plan", "--data", "{folder}/pair", "--width", "512", "--memory-budget", "60MiB"),
        OUT_OF_MEMORY,
        ".",
    ),
}


@pytest.mark.parametrize("case", MISUSES)
def test_misuse(case, folder, tmp_path):
    arguments, code, message = MISUSES[case]
    result = run(*(a.format(folder=folder) for a in arguments), cwd=tmp_path)
    assert result.returncode == code, result.stderr
    assert result.stderr.count("\n") == 1, "errors are one line"
    assert re.match(r"infinitybatch: (?!infinitybatch)", result.stderr)
    assert re.search(message, result.stderr), result.stderr
    assert code == OUT_OF_MEMORY or result.stdout == ""


def test_config_has_the_flags_names_and_flags_win(pair, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text(
        '# a run\nmodel = "mlp"\nwidth = 32 # units\nepochs = 3\nlr = 0.01\n'
        'memory-budget = "64 MiB"\nbatch-size = "all"\n'
    )
    result = run("train", *pair, "--config", config, "--epochs", "2", "--json")
    start = events(result)[0]
    assert result.returncode == OK, result.stderr
    assert (start["model"], start["width"], start["epochs"], start["lr"]) == ("mlp", 32, 2, 0.01)
    assert start["memory_budget"] == 64 << 20 and start["batch_size"] == 240


def test_verify_finds_the_step_exact(pair):
    result = run(
        "verify", *pair, "--model", "mlp", "--batch-size", "100", "--micro-batch-size", "7"
    )
    assert result.returncode == OK, result.stderr
    assert "fp64: exact in" in result.stdout
    assert "100 of 100 samples" in result.stdout


def test_verify_tells_machines_every_parameter(pair):
    result = run("verify", *pair, "--model", "mlp", "--micro-batch-size", "16", "--json")
    assert result.returncode == OK, result.stderr
    lines = events(result)
    assert lines[-1]["event"] == "verify"
    assert lines[-1]["exact"] is True
    assert lines[-1]["strategy"] == "stream"
    parameters = [line for line in lines if line["event"] == "parameter"]
    assert {line["type"] for line in parameters} == {"Double", "Float"}
    assert all(line["error"] <= line["allowed"] for line in parameters)


STRATEGIES = ["native", "stream", "retain-none", "rerun", "retain-half", "retain-all"]


def test_bench_shows_every_strategy(pair):
    batch = ("--batch-size", "100", "--micro-batch-size", "7")
    result = run("bench", *pair, "--model", "mlp", *batch, "--rounds", "3")
    assert result.returncode == OK, result.stderr
    rows = [line.split()[0] for line in result.stdout.splitlines() if "iB" in line and "[" in line]
    assert rows == STRATEGIES
    assert "100 samples, 3 rounds in turn; times over native" in result.stdout


def test_bench_tells_machines_every_time(pair):
    size = ("--micro-batch-size", "16")
    result = run("bench", *pair, "--model", "mlp", *size, "--rounds", "4", "--json")
    assert result.returncode == OK, result.stderr
    *strategies, end = events(result)
    assert end["event"] == "bench" and end["reference"] == "native" and end["rounds"] == 4
    assert end["model"] == "mlp" and end["micro_batch_size"] == 16
    assert [line["name"] for line in strategies] == STRATEGIES
    for line in strategies:
        assert line["event"] == "strategy" and line["timed"] is True
        assert len(line["cpu_seconds"]) == len(line["wall_seconds"]) == 4
        assert line["cpu"]["lower"] <= line["cpu"]["median"] <= line["cpu"]["upper"]
        assert line["peak_bytes"] > end["live_bytes"]
    assert max(strategies[1]["micro_batch_sizes"]) == 16


def test_bench_says_when_nothing_fits_the_budget(pair):
    result = run("bench", *pair, "--model", "mlp", "--memory-budget", "100KiB", "--json")
    assert result.returncode == OUT_OF_MEMORY
    assert result.stderr.count("\n") >= 1
    assert events(result)[-1]["event"] == "error"


BAD_CONFIGS = {
    "unknown key": ("epoch = 3\n", r"the key 'epoch' is not known, did you mean epochs\?"),
    "key of before": ('park = "always"\n', "the key 'park' is not known: use offload"),
    "underscore": ("batch_size = 3\n", r"did you mean batch-size\?"),
    "section": ("[train]\nepochs = 3\n", r"line 1: \[train\] is a section"),
    "list": ("epochs = [1\n", r"line 1: epochs = \[1 is a list; each key has one value"),
    "negative seed": ("seed = -1\n", "--seed must be a whole number"),
    "no value": ("epochs =\n", "line 1: expected a value after 'epochs ='"),
    "no key": ("\nwhatever\n", "line 2: 'whatever' is not: key = value"),
    "bad value": ('epochs = "many"\n', "--epochs.*many.*; see: infinitybatch train --help"),
    "out of range": ("epochs = 0\n", "--epochs must be a whole number, at least 1, not 0"),
    "offload": ('offload = "often"\n', "--offload must be auto, always or never, not often; see"),
    "itself": ('config = "other.toml"\n', "the key 'config' is not known"),
}


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_bad_config(case, pair, tmp_path):
    content, message = BAD_CONFIGS[case]
    (tmp_path / "run.toml").write_text(content)
    result = run("train", *pair, "--config", "run.toml", cwd=tmp_path)
    assert result.returncode == USAGE, result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stderr.startswith("infinitybatch: --config: run.toml")
    assert re.search(message, result.stderr), result.stderr
