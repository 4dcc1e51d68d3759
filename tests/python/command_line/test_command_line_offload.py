"""The default network has BatchNorm: statistics of the whole batch, and what waits for it offloaded."""

import re
import resource
import subprocess

import pytest
from command_line_tools import (
    OK,
    OUT_OF_MEMORY,
    RESNET,
    TIGHT,
    binary,
    environment,
    epochs,
    events,
    run,
)

pytestmark = pytest.mark.alone

ALL = ("--batch-size", "all", "--epochs", "2", "--seed", "3")
BOUND = ("--memory-budget", TIGHT)


def scores(result) -> list[tuple]:
    return [(e["loss"], e["held_out_loss"], e["held_out_accuracy"]) for e in epochs(result)]


def test_images_get_a_residual_network_with_batch_norm(pair):
    result = run("verify", *pair, "--width", "8", "--micro-batch-size", "7", "--json")
    assert result.returncode == OK, result.stderr
    lines = events(result)
    assert lines[-1]["model"] == "resnet" and lines[-1]["strategy"] == "cut"
    assert lines[-1]["exact"] is True and lines[-1]["why_no_fp64"] == ""
    assert "when other samples do, in layers that were given the whole batch" in result.stderr
    in_double = [e for e in lines if e["event"] == "parameter" and e["type"] == "Double"]
    # 6 convolutions, as many weights and biases of BatchNorm, the classifier's two.
    assert len(in_double) == 6 + 2 * 6 + 2
    buffers = [line for line in lines if line["event"] == "buffer"]
    assert {e["name"].rsplit(".")[-1] for e in buffers} == {
        "running_mean",
        "running_var",
        "num_batches_tracked",
    }
    assert len(buffers) == 6 * 3 and {e["type"] for e in buffers} == {"Double"}
    assert all(line["exact"] for line in in_double + buffers)


def test_group_norm_is_the_same_network_without_coupled_samples(pair):
    settings = (*pair, "--model", "resnet-groupnorm", "--width", "8", "--micro-batch-size", "7")
    result = run("verify", *settings, "--json")
    assert result.returncode == OK, result.stderr
    lines = events(result)
    assert lines[-1]["strategy"] == "stream"
    assert len([line for line in lines if line.get("type") == "Double"]) == 6 + 2 * 6 + 2


@pytest.mark.parametrize("size", ["7", "60", "240"])
def test_held_out_samples_are_measured_with_running_statistics(pair, size):
    """With a learning rate of 0 training loss stays what it is, while the running statistics, and with them
    the held-out loss, move on. Both are the whole batch's, however it is sliced."""
    settings = ("train", *pair, *RESNET, *ALL, "--lr", "0", "--json")
    ours = epochs(run(*settings, "--micro-batch-size", size))
    native = epochs(run(*settings, "--strategy", "native"))
    assert ours[1]["loss"] == pytest.approx(ours[0]["loss"], rel=1e-5)
    assert abs(ours[1]["held_out_loss"] - ours[0]["held_out_loss"]) > 1e-3
    for a, b in zip(ours, native, strict=True):
        assert a["held_out_loss"] == pytest.approx(b["held_out_loss"], rel=1e-4)
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)


def test_offload_is_what_lets_the_budget_hold(pair):
    settings = ("train", *pair, *RESNET, *ALL, *BOUND)
    result = run(*settings, "--json")
    first, second = epochs(result)
    for epoch in (first, second):
        assert epoch["steps"] == 1 and epoch["peak_over_budget"] <= 1
    assert first["offloaded_bytes"] > 4 << 20
    # Once the plan is settled, what is faster on this machine stays.
    recomputes = "computed again, not offloaded" in second["strategy_reason"]
    assert (second["offloaded_bytes"] > 4 << 20) != recomputes
    start, *lines, summary = events(result)
    assert (start["offload"], start["host_budget"]) == ("auto", None)
    assert summary["steps"] == 2
    assert summary["offloaded_bytes"] == sum(line["offloaded_bytes"] for line in lines)
    assert "MiB a step, on disk (" in result.stderr


def test_without_offload_some_is_computed_again(pair):
    settings = ("train", *pair, *RESNET, *ALL, "--offload", "never")
    result = run(*settings, *BOUND, "--json")
    for epoch in epochs(result):
        assert epoch["offloaded_bytes"] == 0 and epoch["peak_over_budget"] <= 1
    reason = events(result)[-1]["strategy_reason"]
    assert reason.startswith("boundary activations are kept at") and reason in result.stderr
    roomy = run(*settings, "--micro-batch-size", "60", "--json")
    assert events(roomy)[-1]["strategy_reason"] == ""
    for ours, wanted in zip(epochs(result), epochs(roomy), strict=True):
        assert ours["loss"] == pytest.approx(wanted["loss"], rel=1e-5)

    tighter = run(*settings, "--memory-budget", "1MiB")
    assert tighter.returncode == OUT_OF_MEMORY and tighter.stderr.count("\n") == 1
    assert re.search("--memory-budget (is|of)", tighter.stderr)


def test_nothing_is_offloaded_where_it_fits(pair):
    settings = ("train", *pair, *RESNET, *ALL, "--micro-batch-size", "60")
    result = run(*settings, "--json")
    assert all(epoch["offloaded_bytes"] == 0 for epoch in epochs(result))
    assert "offloaded" not in result.stderr
    always = run(*settings, "--offload", "always", "--json")
    assert all(epoch["offloaded_bytes"] > 0 for epoch in epochs(always))
    assert scores(always) == scores(result), "what was offloaded came back bit for bit"


def test_the_host_takes_what_it_may_and_the_disk_the_rest(pair, tmp_path):
    settings = ("train", *pair, *RESNET, *ALL, "--micro-batch-size", "60", "--offload", "always")
    disk = run(*settings, "--offload-directory", tmp_path, "--json")
    both = run(*settings, "--host-budget", "1MiB", "--offload-directory", tmp_path, "--json")
    assert scores(both) == scores(disk)
    assert f"a step, on disk ({tmp_path})" in disk.stderr
    assert f"a step, on the host (up to 1 MiB), then on disk ({tmp_path})" in both.stderr
    assert events(both)[0]["host_budget"] == 1 << 20
    assert list(tmp_path.iterdir()) == [], "the file has no name"


@pytest.mark.parametrize("host, code", [((), OUT_OF_MEMORY), (("--host-budget", "1GiB"), OK)])
def test_a_full_disk_is_one_line_and_a_larger_host_budget_the_way_out(pair, host, code):
    """Files of this process may have 64 KiB."""
    settings = ("train", *pair, *RESNET, *ALL, "--micro-batch-size", "60", "--offload", "always")
    result = subprocess.run(
        [binary(), *map(str, settings), *host],
        env=environment(),
        capture_output=True,
        text=True,
        restore_signals=False,  # SIGXFSZ stays ignored, as Python has it
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16)),
    )
    assert result.returncode == code, result.stderr
    if code != OK:
        assert result.stderr.count("\n") == 1, result.stderr
        assert result.stderr.endswith("; see --offload-directory and --host-budget\n")


def test_config_has_the_same_names(pair, tmp_path):
    config = tmp_path / "run.toml"
    config.write_text(
        f'offload = "always"\nhost-budget = "2MiB"\noffload-directory = "{tmp_path}"\n'
    )
    settings = (*pair, *RESNET, *ALL, "--micro-batch-size", "60", "--config", config, "--json")
    result = run("train", *settings)
    assert all(epoch["offloaded_bytes"] > 0 for epoch in epochs(result))
    assert f"(up to 2 MiB), then on disk ({tmp_path})" in result.stderr
    assert events(result)[0]["offload"] == "always"


def test_plan_tells_what_is_offloaded(pair):
    settings = ("plan", *pair, *RESNET, "--batch-size", "all", *BOUND)
    result = run(*settings, "--offload", "always", "--json")
    assert result.returncode == OK, result.stderr
    plan = events(result)[-1]
    assert plan["strategy"] == "cut" and plan["segments"] == 7
    assert plan["offloads"] is True and plan["offloaded_bytes"] > 4 << 20
    assert "offloaded and restored: " in result.stderr
    copies = [
        plan[f"{when}offload_seconds_{how}"]
        for when in ("", "predicted_")
        for how in ("hidden", "waited")
    ]
    assert all(seconds >= 0 for seconds in copies) and sum(copies[:2]) > 0 and sum(copies[2:]) > 0
    assert isinstance(plan["offload_overlapped"], bool)
    assert "behind compute" in result.stderr and "predicted for a step: " in result.stderr
    roomy = run("plan", *pair, *RESNET, "--batch-size", "all", "--memory-budget", "1GiB", "--json")
    assert events(roomy)[-1]["offloads"] is False and "offloaded" not in roomy.stderr
