"""What every strategy does, step by step, is what it did when tests/golden/golden.json was made:
which instructions run on which rows, forwards, peaks, and the bits of gradients.

Every third case, and all in make test-long. A change that is wanted: `python tests/golden/record.py --write`, and read the difference.
"""

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fault_support import LONG

FOLDER = Path(__file__).parent.parent / "golden"


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    program = subprocess.run(
        [sys.executable, FOLDER / "record.py", *([] if LONG else ["--sample"])],
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert program.returncode == 0, program.stderr
    return json.loads(program.stdout)


def differences(found: dict[str, Any], wanted: dict[str, Any]) -> list[str]:
    """By case. On another processor, or of another torch, kernels round and allocate otherwise:
    bits and peaks are not compared there, nor what a budget decides."""
    alike = found["key"] == wanted["key"]
    told = [f"{name}: in one of both" for name in found["cases"].keys() ^ wanted["cases"].keys()]
    for name, case in wanted["cases"].items():
        if not alike and "budget" in name:
            continue
        ours, wanted_case = (copy.deepcopy(c) for c in (found["cases"].get(name, case), case))
        sums = [value.pop("gradients", 0.0) for value in (ours, wanted_case)]
        if not abs(sums[0] - sums[1]) <= 1e-10 * abs(sums[1]):  # NaN, too
            told.append(f"{name}: gradients {sums}")
        if not alike:
            for each in (ours, wanted_case):
                each.pop("bits", None)
                for step in each.get("steps", []):
                    del step["peak"], step["predicted"]
        if ours != wanted_case:
            told.append(f"{name}:\n  found  {json.dumps(ours)}\n  wanted {json.dumps(wanted_case)}")
    return told


def test_every_strategy_does_what_it_did(found: dict[str, Any]) -> None:
    wanted = json.loads((FOLDER / "golden.json").read_text())
    if not LONG:
        assert len(found["cases"]) >= len(wanted["cases"]) // 3
        wanted["cases"] = {name: wanted["cases"].get(name, {}) for name in found["cases"]}
    told = differences(found, wanted)
    assert not told, f"{len(told)} of {len(wanted['cases'])} cases\n" + "\n".join(told[:5])


def test_any_change_is_told(found: dict[str, Any]) -> None:
    assert differences(found, found) == []
    name = next(name for name, case in found["cases"].items() if "steps" in case)
    for value in (float("nan"), found["cases"][name]["gradients"] * (1 + 1e-9)):
        changed = copy.deepcopy(found)
        changed["cases"][name]["gradients"] = value
        assert len(differences(changed, found)) == 1
    for key, value in (("peak", 1), ("ran", []), ("forwards", ""), ("restarts", 7)):
        changed = copy.deepcopy(found)
        changed["cases"][name]["steps"][-1][key] = value
        assert len(differences(changed, found)) == 1
    changed = copy.deepcopy(found)
    changed["cases"][name]["bits"] = "0"
    assert len(differences(changed, found)) == 1
    changed["key"] = "another processor"
    assert differences(changed, found) == []
    del changed["cases"][name]
    assert len(differences(changed, found)) == 1
