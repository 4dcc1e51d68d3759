"""The benchmarks' harness: its arithmetic, its fairness, and every suite at toy sizes."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from fault_support import LONG

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_ratios_pair_rounds_and_the_interval_holds_the_truth():
    from harness.ratios import paired

    random = np.random.default_rng(0)
    held = 0
    for _ in range(100):
        # Rounds differ by a factor of 100, which unpaired medians would not survive.
        theirs = 10 ** random.uniform(-1, 1, 40)
        ratio = paired(theirs * random.normal(1.2, 0.05, 40), theirs)
        assert ratio.low <= ratio.median <= ratio.high < ratio.low + 0.1
        held += ratio.low < 1.2 < ratio.high
    assert 88 <= held <= 99
    with pytest.raises(ValueError, match="do not pair"):
        paired([1.0], [1.0, 2.0])


def test_contestants_run_in_turn_and_in_changing_order():
    from harness.clock import interleave

    ran = []
    names = ["a", "b", "c"]
    samples = interleave({name: lambda n=name: ran.append(n) for name in names}, 20, warm_up=1)
    assert {name: len(taken) for name, taken in samples.items()} == dict.fromkeys(names, 20)
    rounds = [ran[i : i + 3] for i in range(0, len(ran), 3)]
    assert all(sorted(order) == names for order in rounds)
    assert {order[0] for order in rounds} == set(names)


def test_a_contestant_with_another_gradient_is_not_timed():
    from contestants import Loop, Native, Ours, check_agreement

    batch = (torch.nn.Linear(4, 3), torch.randn(10, 4), torch.randint(3, (10,)))

    class WrongMean(Loop):
        """What is written where nobody thinks of the short last micro-batch."""

        def backward(self):
            for x, y in zip(
                self.inputs.split(self.size), self.targets.split(self.size), strict=True
            ):
                (torch.nn.functional.cross_entropy(self.model(x), y) / 3).backward()

    right = {
        "native": Native(*batch),
        "ours": Ours(*batch, micro_batch_size=4),
        "loop": Loop(*batch, micro_batch_size=4),
    }
    check_agreement(right)
    with pytest.raises(ArithmeticError, match="wrong gives another gradient"):
        check_agreement(right | {"wrong": WrongMean(*batch, micro_batch_size=4)})

    class LastIsNan(Native):
        def backward(self):
            super().backward()
            list(self.model.parameters())[-1].grad.fill_(float("nan"))

    with pytest.raises(ArithmeticError, match="wrong gives another gradient"):
        check_agreement(right | {"wrong": LastIsNan(*batch)})


def test_what_is_compiled_for_a_benchmark_is_loaded_or_the_reason_is_told(monkeypatch):
    from harness.native import load

    observer, reason = load("bare_callback")
    assert observer is not None, reason
    observer.start()
    assert torch.ones(2).add(1).sum() == 4
    observer.stop()
    monkeypatch.setenv("CXX", "no-such-compiler")
    missing, reason = load("bare_callback")
    assert missing is None and "no-such-compiler" in reason


def test_gradient_caches_of_others_are_optional():
    from peers.gradient_caches import installed

    assert set(installed()) == {"GradCache", "sentence-transformers"}


def test_sizes_of_the_sweep_are_all_that_there_are():
    from suites.sweep import even_sizes, grid_sizes

    assert even_sizes(10) == [1, 2, 3, 4, 5, 10]
    assert grid_sizes(10) == [1, 2, 3, 4, 5, 7, 9]


SUITES = "time loop trainer budget coupled tape batchnorm sample losses heads mnist trainers lengths recompute selective resident allocator".split()
#: Every one takes two minutes with others beside it.
RUN = SUITES if LONG else "budget coupled recompute resident".split()


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The folder that one run of all suites wrote: each start imports torch, which takes seconds."""
    folder = tmp_path_factory.mktemp("results")
    command = [sys.executable, str(BENCHMARKS / "run.py"), *RUN]
    command += ["--toy", "--no-peers", "--threads", "1", "--output", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(folder.glob("*.json"))) == len(RUN)
    return folder


@pytest.mark.parametrize("suite", RUN)
def test_every_suite_runs_and_its_results_are_complete(suite, results):
    (found,) = results.glob(f"*-{suite}-threads-1-toy.json")
    report = json.loads(found.read_text())
    (run,) = report["runs"]
    assert run["setting"] == "one thread, tuned malloc, toy sizes"
    assert run["findings"]["figures"]
    assert all(
        len(row) == len(t["columns"]) for t in run["findings"]["tables"] for row in t["rows"]
    )
    text = found.with_suffix(".md").read_text()
    assert "MALLOC_MMAP_THRESHOLD_" in text and report["machine"]["torch"] in text
    # Nothing in what is committed names the machine.
    assert str(results) not in found.read_text() + text
    assert str(BENCHMARKS) not in found.read_text() + text


@pytest.mark.skipif(not LONG, reason="half a minute, in make test-long")
def test_a_build_beside_itself_has_its_own_peaks(tmp_path):
    package = os.environ["PYTHONPATH"].split(os.pathsep)[0]
    command = [sys.executable, str(BENCHMARKS / "builds.py"), package, package, "--rounds", "3"]
    command += ["--only", "loop", "recording", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (found,) = tmp_path.glob("*-builds.json")
    (run,) = json.loads(found.read_text())["runs"]
    figures = {figure["workload"]: figure for figure in run["findings"]["figures"]}
    assert len(figures) == 3
    for workload, figure in figures.items():
        older, newer = figure["peak bytes"]
        assert older == newer and (older is None) == (workload == "recording")
        assert len(figure["samples"]["older"]) == len(figure["samples"]["newer"]) == 3
        assert 0.2 < figure["CPU"]["median"] < 5


def test_no_such_suite_is_said_in_one_line(tmp_path):
    command = [sys.executable, str(BENCHMARKS / "run.py"), "tiem", "--output", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert (
        "no such suite: tiem; there are time, loop, trainer, budget, coupled, tape, batchnorm, sample, losses, heads, mnist"
        in done.stderr
    )


def test_peers_that_were_only_beside_an_environment_are_missed(tmp_path, monkeypatch):
    from peers import environment

    monkeypatch.setattr(environment, "HERE", tmp_path)
    wanted, alone = tmp_path / "some.txt", tmp_path / "some-alone.txt"

    def complete():
        return environment.is_complete(Path(sys.executable), environment.requirements("some"))

    wanted.write_text(f"# beside torch\ntorch=={torch.__version__}\n")
    assert complete()
    alone.write_text("no-such-peer==1.0\n")
    assert not complete()
    alone.unlink()
    wanted.write_text(f"torch=={torch.__version__}\nno-such-peer==1.0\n")
    assert not complete()
