"""Lists of models that nobody here wrote, by strategy: complete, and true where they can be run."""

import importlib.metadata
import importlib.util
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

FAMILIES = Path(__file__).resolve().parents[1] / "families"
RESULTS, IMAGES, FOREIGN = (
    json.loads((FAMILIES / f"{name}.json").read_text())["networks"]
    for name in ("results", "images", "foreign")
)
# Of each strategy: what is wanted, and what a family may be instead, with the reason behind it.
INSTEAD = ("refused: ", "native fails: ", "native gives no number", "as native rounds in other")
OUTCOMES = {
    "tape": ("replays", ("opaque: ", "refused: ")),
    "streaming": ("exact", INSTEAD),
    "wrap": ("exact", INSTEAD),
}
#: Of those that are run anew each time: a dozen in make test-long.
SEED, ANEW = 17, 12 if os.environ.get("INFINITYBATCH_LONG_TESTS") == "1" else 4


@pytest.mark.parametrize("strategy", OUTCOMES)
def test_nine_in_ten_are_right_and_none_is_wrong(strategy):
    wanted, others = OUTCOMES[strategy]
    found = {name: result[strategy] for name, result in RESULTS.items()}
    assert len(found) >= 40
    rest = {name: result for name, result in found.items() if result != wanted}
    assert all(result.startswith(others) for result in rest.values()), rest
    # In some sizes of micro-batches at least: [1, C, 1, 1] in those of one row is refused.
    never = [name for name in rest if wanted not in RESULTS[name].get(f"{strategy} by way", "")]
    assert len(never) <= 0.1 * len(found), never


def test_every_run_says_of_what():
    for name in ("results", "images", "foreign"):
        for run in json.loads((FAMILIES / f"{name}.json").read_text())["runs"]:
            assert run["commit"] and not run["commit"].endswith("-dirty"), name
            assert run["command"] and run["versions"]["torch"] and run["date"]


def test_what_is_left_out_has_its_reason():
    for name, result in RESULTS.items():
        assert result["padding"] == "yes" or result["padding"].startswith("no: "), name
        # Outputs that are in no loss, where there are any.
        assert result.get("outputs left out", "no row").startswith("no row"), name


def test_a_sample_is_as_listed():
    """transformers is a requirement of the tests: where it is missing this fails."""
    sample = random.Random(SEED).sample(sorted(RESULTS), ANEW)
    done = subprocess.run(
        [sys.executable, FAMILIES / "run.py", *sample], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("strategy", ["streaming", "wrap"])
def test_image_models_are_exact_and_none_is_wrong(strategy):
    wanted, others = OUTCOMES[strategy]
    found = {name: each[strategy] for name, each in IMAGES.items() if "left out" not in each}
    assert len(found) >= 40
    rest = {name: result for name, result in found.items() if result != wanted}
    assert len(rest) <= 0.1 * len(found), rest
    assert all(result.startswith(others) for result in rest.values()), rest


@pytest.mark.skipif(
    importlib.util.find_spec("timm") is None,
    reason="timm is not installed, so the image models cannot be built anew",
)
def test_the_list_of_image_models_is_true():
    done = subprocess.run(
        [sys.executable, FAMILIES / "images.py", "nfnet", "convnext", "byobnet"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


# What they write in forward depends on the samples: one buffer or parameter each is named.
COUPLED_BY_STATE = {"glow", "memory_bank", "moving_codebook"}


@pytest.mark.parametrize("strategy", ["streaming", "wrap"])
def test_foreign_networks_are_exact_or_refused_and_none_is_wrong(strategy):
    assert len(FOREIGN) >= 40
    rest = {
        name
        for name, each in FOREIGN.items()
        if each[strategy] != "exact" and not each[strategy].startswith("as native rounds")
    }
    assert rest <= COUPLED_BY_STATE, rest
    for name in rest:
        assert FOREIGN[name][strategy].startswith("refused: "), name


def as_listed(name: str) -> bool:
    package, version = FOREIGN[name]["package"].split("==")
    try:
        return importlib.metadata.version(package) == version
    except importlib.metadata.PackageNotFoundError:
        return False


@pytest.mark.skipif(
    not any(as_listed(name) for name in FOREIGN),
    reason="none of the packages of foreign.json is installed in the version that is listed",
)
def test_the_list_of_foreign_networks_is_true():
    names = [name for name in FOREIGN if as_listed(name)]
    done = subprocess.run(
        [sys.executable, FAMILIES / "foreign.py", *names],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
