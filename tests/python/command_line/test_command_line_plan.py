"""The commands plan and doctor."""

import os
import re

import infinitybatch as ib
import pytest
import torch
from command_line_tools import ERROR, OK, OUT_OF_MEMORY, RESNET, TIGHT, epochs, events, run

pytestmark = pytest.mark.alone


@pytest.mark.parametrize("model", ["resnet", "resnet-groupnorm"])
def test_plan_agrees_with_training(pair, model):
    network = ("--model", model, "--width", "16")
    settings = (*pair, *network, "--batch-size", "all", "--memory-budget", TIGHT, "--json")
    result = run("plan", *settings)
    assert result.returncode == OK, result.stderr
    *candidates, plan = events(result)
    budget = 4 << 20
    assert plan["event"] == "plan" and sum(plan["micro_batch_sizes"]) == 240
    assert plan["predicted_peak_bytes"] <= budget
    sizes = {c["micro_batch_size"]: c for c in candidates}
    assert sizes[plan["micro_batch_size"]]["feasible"]
    assert not sizes[240]["feasible"] and sizes[240]["peak_bytes"] > budget
    assert all(c["feasible"] == (c["peak_bytes"] <= budget) for c in candidates)
    # Where BatchNorm cuts the network, many small micro-batches have much to keep track of.
    smallest = 16 if model == "resnet" else 1
    peaks = [c["peak_bytes"] for c in candidates if c["micro_batch_size"] >= smallest]
    assert len(peaks) >= 5 and peaks == sorted(peaks)


@pytest.mark.parametrize("model, offloads", [("resnet", True), ("resnet-groupnorm", False)])
def test_training_has_the_peak_that_was_planned(pair, model, offloads):
    settings = (
        *pair,
        "--model",
        model,
        "--width",
        "16",
        "--batch-size",
        "all",
        "--held-out",
        "0",
        "--json",
    )
    plan = events(run("plan", *settings, "--memory-budget", TIGHT))[-1]
    assert plan["offloads"] is offloads
    if offloads:
        # Without a budget copies would overlap; this one has room for the first step, which looks
        # twice, but not for that.
        room = int(1.3 * plan["predicted_peak_bytes"])
        settings += ("--offload", "always", "--memory-budget", str(room))
    size = plan["micro_batch_size"]
    ours = epochs(run("train", *settings, "--micro-batch-size", size, "--epochs", "3"))
    # The first step has no optimizer state yet; the order of the samples, 2.4 kB, is not planned.
    assert ours[-1]["peak_bytes"] == pytest.approx(plan["predicted_peak_bytes"], rel=0.02)


def test_plan_is_a_table_for_people(pair):
    result = run("plan", *pair, *RESNET, "--batch-size", "all", "--memory-budget", TIGHT)
    assert result.returncode == OK, result.stderr
    assert result.stdout.count("<- chosen") == 1
    assert "too large" in result.stdout and "peak ÷ budget" in result.stdout


def test_plan_of_an_impossible_budget(pair):
    network = ("--model", "resnet-groupnorm", "--width", "16")
    result = run("plan", *pair, *network, "--memory-budget", "300kB")
    assert result.returncode == OUT_OF_MEMORY
    assert result.stderr.count("\n") == 1 and re.search("--memory-budget (is|of)", result.stderr)


def test_doctor_finds_this_installation_sound():
    result = run("doctor", "--json")
    assert result.returncode == OK, result.stdout + result.stderr
    *checks, summary = events(result)
    assert summary == {"event": "summary", "broken": 0, "checks": len(checks)}
    by_name = {check["name"]: check for check in checks}
    assert by_name["memory limit"]["refused"] is True
    assert by_name["gradient"]["relative_error"] <= 1e-12
    assert by_name["devices"]["devices"][0]["name"] == "cpu"
    assert by_name["memory"]["total_bytes"] > 0
    assert by_name["threads"]["threads"] >= 1
    malloc = by_name["malloc"]
    assert malloc["resident_bytes"] > malloc["malloc_used_bytes"] > malloc["tensor_bytes"] >= 0
    assert 0 < malloc["malloc_free_bytes"] < 8 * 2**20


def test_doctor_notes_what_could_be_better():
    """Two threads on one processor, and glibc's own ways with freed memory."""
    processors = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(processors)})  # the child inherits it
    try:
        plain = run("doctor", OMP_NUM_THREADS="2", MALLOC_TRIM_THRESHOLD_="")
    finally:
        os.sched_setaffinity(0, processors)
    assert plain.returncode == OK
    threads = r"^note +threads +2 threads on 1 processors.*\n +-> .*OMP_NUM_THREADS"
    assert re.search(threads, plain.stdout, re.MULTILINE), plain.stdout
    torch.empty(2**20)
    memory = ib.memory.stats()
    if memory.reserved > memory.live:  # else large blocks are malloc's
        malloc = r"^ok +malloc +large tensors come in pages"
    else:
        malloc = r"^note +malloc .*\n +-> .*MALLOC_TRIM_THRESHOLD_"
    assert re.search(malloc, plain.stdout, re.MULTILINE), plain.stdout


def test_doctor_finds_damaged_digits(tmp_path):
    (tmp_path / "data" / "digits").mkdir(parents=True)
    result = run("doctor", cwd=tmp_path)
    assert result.returncode == ERROR
    assert re.search(r"^broken +data .*\n +-> .*export_digits.py", result.stdout, re.MULTILINE)
