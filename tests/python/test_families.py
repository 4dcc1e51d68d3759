"""The list of Hugging Face families that replay from a tape: complete, and true where it can be run."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

FAMILIES = Path(__file__).resolve().parents[1] / "families"
RESULTS = json.loads((FAMILIES / "results.json").read_text())


def test_nine_in_ten_replay_and_none_is_wrong():
    replayed = [name for name, result in RESULTS.items() if result == "replays"]
    assert len(RESULTS) >= 40
    assert len(replayed) >= 0.9 * len(RESULTS)
    others = {name: result for name, result in RESULTS.items() if result != "replays"}
    assert all(result.startswith(("opaque: ", "refused: ")) for result in others.values()), others


@pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None,
    reason="transformers is not installed, so the families cannot be built anew",
)
def test_the_list_is_true():
    sample = ["bert", "gpt2", "t5", "vit", "wav2vec2"]
    done = subprocess.run(
        [sys.executable, FAMILIES / "run.py", *sample], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
