"""The notebooks run, what they assert is true, and what they show in the repository was run."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from fault_support import in_long_tests

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "docs/notebooks").glob("*.ipynb"))


def run(path: Path) -> Any:
    """As scripts/notebooks.py does."""
    spec = importlib.util.spec_from_file_location("notebooks", ROOT / "scripts/notebooks.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.run(path)


def shown(notebook: Any) -> list[str]:
    """Of each output its kind; of a text what is not a number."""
    outputs = [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
    return [
        re.sub(r"[\d.e+-]+", "#", o.text) if "text" in o else ", ".join(sorted(o.data))
        for o in outputs
    ]


@pytest.mark.parametrize(
    "path",
    [
        pytest.param(path, id=path.stem, marks=in_long_tests if path != NOTEBOOKS[-1] else ())
        for path in NOTEBOOKS
    ],
)
def test_a_notebook_runs_and_shows_what_it_showed(path: Path) -> None:
    committed = nbformat.read(path, as_version=4)
    counts = [cell.execution_count for cell in committed.cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1)), "run from its top: scripts/notebooks.py"
    assert any("image/png" in one for one in shown(committed)), "a picture"
    assert any("assert " in cell.source for cell in committed.cells), "that says what is true"
    assert shown(run(path)) == shown(committed)


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) >= 2
