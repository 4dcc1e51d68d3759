"""docs/recipes/transformers.md, sentence-transformers.md and peft.md: their code runs as it is
printed, one block after the other; what they name is there."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
pytest.importorskip("transformers")
ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.filterwarnings("ignore")


def run(name: str, count: int) -> dict[str, Any]:
    page = (ROOT / "docs/recipes" / name).read_text()
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) == count
    names: dict[str, Any] = {}
    for block in blocks:
        exec(compile(block, name, "exec"), names)
    return names


def test_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    names = run("transformers.md", 4)
    assert names["trainer"].state.global_step == 2
    assert names["trainer"].last_report.micro_batch_sizes == [8] * 8
    assert names["wrapped"].last_report.micro_batch_sizes == [8] * 8
    assert "<StepReport: loss" in capsys.readouterr().out


def test_sentence_transformers() -> None:
    pytest.importorskip("sentence_transformers.sentence_transformer.losses")
    pytest.importorskip("datasets")
    names = run("sentence-transformers.md", 2)
    report = names["trainer"].last_report
    assert report.memory_budget == 64 << 20 and report.peak_bytes <= 64 << 20
    assert sum(report.micro_batch_sizes) == 256
    loaded = names["SentenceTransformer"](str(names["folder"] / "trained"), device="cpu")
    assert loaded.encode(["the cat sat"]).shape == (1, 32)


def test_every_loss_that_is_named_is_tested() -> None:
    page = (ROOT / "docs/recipes/sentence-transformers.md").read_text()
    table = re.search(r"^\| negatives in the batch.*?\n\n", page, re.MULTILINE | re.DOTALL)
    assert table is not None
    names = re.findall(r"\b[A-Z][A-Za-z]*[a-z][A-Z]?[A-Za-z]+\b", table.group())
    tests = (ROOT / "tests/python/test_sentence_transformers.py").read_text()
    assert len(names) > 15
    for name in names:
        with_suffix = name.replace("TensionInBatch", "TensionLossInBatch")
        assert re.search(rf"losses\.{with_suffix}(Loss)?\(", tests), name


def test_peft() -> None:
    pytest.importorskip("peft")
    names = run("peft.md", 3)
    assert names["model"].last_report is not None
    assert names["reference"].shape == (64, 16, 100)
    moved = [n for n, p in names["again"].named_parameters() if p.requires_grad]
    assert moved and all("lora" in name for name in moved)
    assert all(bool(torch.isfinite(p).all()) for p in names["again"].parameters())


@pytest.mark.parametrize("name", ["transformers.md", "sentence-transformers.md", "peft.md"])
def test_files_that_they_name_exist(name: str) -> None:
    page = (ROOT / "docs/recipes" / name).read_text()
    paths = re.findall(r"`(tests/[\w./]+)`", page)
    assert paths and all((ROOT / path).exists() for path in paths)
