"""docs/several_models.md: its code runs as it is printed, one block after the other."""

import re
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = (ROOT / "docs/several_models.md").read_text()


def test_the_code_runs() -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 3
    names: dict[str, Any] = {}
    exec(compile(blocks[0], "docs/several_models.md", "exec"), names)
    assert (names["c_trainer"].steps_done, names["g_trainer"].steps_done) == (20, 4)
    assert abs(names["c_optimizer"].param_groups[0]["lr"] - 1e-3 * 0.999**20) < 1e-12
    exec(compile(blocks[1], "docs/several_models.md", "exec"), names)
    assert torch.isfinite(torch.as_tensor(names["report"].loss))
    assert all(p.grad is None for p in names["towers"].parameters())
    exec(compile(blocks[2], "docs/several_models.md", "exec"), names)
    assert names["pair"].steps_done == 8
    assert all(p.grad is None for p in names["teacher"].parameters())


def test_examples_and_tests_that_it_names_exist() -> None:
    paths = re.findall(r"`((?:examples|tests)/[\w./]+)`", DOCUMENT)
    assert len(paths) >= 6 and all((ROOT / path).exists() for path in paths)
