"""docs/trainer.md: its code runs as it is printed, one block after the other."""

import re
from pathlib import Path
from typing import Any

import pytest

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs/trainer.md").read_text()


def test_the_code_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"^```python\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 9
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, "docs/trainer.md", "exec"), names)
    trainer = names["trainer"]
    assert trainer.epochs_done == 10 and trainer.steps_done == 21
    assert re.match(r"epoch 2: loss \d\.\d{4} over 600 samples\n", capsys.readouterr().out)


def test_the_cpp_is_what_the_tests_compile() -> None:
    tests = Path(__file__).resolve().parents[1] / "cpp/train/test_trainer.cpp"
    for name in ("make_gradient_step", "optimizers::of", "loaders::over", "trainer.run"):
        assert name in DOCUMENT and name in tests.read_text()
