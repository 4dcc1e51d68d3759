"""`make gpu` as far as it can be tried without a GPU: the whole script, on the simulated device."""

import json
import os
import subprocess
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.skipif(
    "INFINITYBATCH_LONG_TESTS" not in os.environ, reason="half a minute, in make test-long"
)
def test_everything_that_a_gpu_would_run_begins_and_ends(tmp_path):
    done = subprocess.run(
        ["bash", ROOT / "scripts/accelerator.sh", "sim", tmp_path],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "simulated device" in (tmp_path / "machine.txt").read_text()
    (suite,) = ElementTree.parse(tmp_path / "tests.xml").getroot()
    ran = int(suite.get("tests")) - int(suite.get("skipped"))
    # Those that need a setting of the simulated device are skipped, and no other.
    assert ran >= 30 and int(suite.get("skipped")) <= 4
    collected = (tmp_path / "collected.txt").read_text()
    for file in (ROOT / "tests/sim/files.txt").read_text().split():
        assert f"{file}::" in collected
    rows = json.loads((tmp_path / "times.json").read_text())
    # Native, by hand, a given size and two budgets; ResNet's checkpoints; three sizes, two ways.
    assert Counter(row["model"] for row in rows) == {
        "language model, 12 layers": 5,
        "encoder, contrastive": 5,
        "ResNet-50, BatchNorm": 6,
        "language model, batches of every size": 6,
    }
    assert all(row.get("peak_bytes", 0) > 0 or "budget" in row["way"] for row in rows)
