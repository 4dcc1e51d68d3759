"""docs/audit.md: its code runs as it is printed, one block after the other."""

import re
from pathlib import Path
from typing import Any

import pytest
from infinitybatch.audit import causes

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs/audit.md").read_text()


def test_the_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    accelerate = pytest.importorskip("accelerate")
    blocks = re.findall(r"^```python\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    names: dict[str, Any] = {}
    exec(compile(blocks[0], "docs/audit.md", "exec"), names)
    (shown,) = re.findall(r"^```text\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert capsys.readouterr().out.startswith(shown)
    for block in blocks[1:3]:
        exec(compile(block, "docs/audit.md", "exec"), names)
    assert names["audited"]().ok
    exec(compile(blocks[3], "docs/audit.md", "exec"), names)
    accelerate.state.AcceleratorState._reset_state(True)
    accelerate.state.GradientState._reset_state()


def test_each_cause_has_its_row() -> None:
    table = DOCUMENT.split("## Causes")[1]
    listed = {
        code
        for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
        for code in re.findall(r"`(\w+)`", row)
    }
    templates = [v[0] for v in vars(causes).values() if isinstance(v, tuple) and len(v) == 3]
    known = {h.code for h in causes.HYPOTHESES if h.code} | set(templates)
    assert listed == known


def test_paths_exist() -> None:
    for path in re.findall(r"`((?:docs|tests)/[\w./]+)`", DOCUMENT):
        assert (ROOT / path).exists(), path
