"""Runs docs/notebooks and keeps what they print and draw in them.

make build && PYTHONPATH=build/release/python .venv/bin/python scripts/notebooks.py
"""

import os
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).resolve().parents[1] / "docs/notebooks").glob("*.ipynb"))


def run(path: Path) -> Any:
    """The notebook with new outputs.

    Raises:
        nbclient.exceptions.CellExecutionError: where a cell raises.
    """
    notebook = nbformat.read(path, as_version=4)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # small ops: threads would wait for each other
    quiet = ["--log-level=ERROR"]
    NotebookClient(notebook, timeout=300, record_timing=False, extra_arguments=quiet).execute()
    return notebook


if __name__ == "__main__":
    for path in NOTEBOOKS:
        nbformat.write(run(path), path)
        print(path.name)
    sys.exit(not NOTEBOOKS)
