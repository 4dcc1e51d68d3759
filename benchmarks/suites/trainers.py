"""The gradient of every trainer: relative errors beside the native whole batch."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.results import Findings, Table
from harness.settings import Settings
from trainers.measure import MODULES
from trainers.page import COLUMNS, by_row, cells, label

TITLE = "The gradient of every trainer"
EXPLANATION = (
    "Each trainer takes one step of plain SGD at learning rate 1 on one logical batch of 12 or 13 "
    "samples in micro-batches of 4, in double precision, without clipping. What the step takes from "
    "the weights is compared with the gradient of the native whole batch: the largest relative error "
    "of a parameter. Each trainer's rows are measured in a process of their own. Nothing here is a "
    "time."
)
TIMED = False
TOY = ("by_hand", "ours")  # what needs no peer
LAST_LINES = 12


def measured(module: str) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "trainers.measure", module]
    folder = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        print("\n".join(done.stderr.splitlines()[-LAST_LINES:]), file=sys.stderr)
        raise RuntimeError(f"the rows of trainers/{module}.py could not be measured")
    return json.loads(done.stdout.splitlines()[-1])


def run(settings: Settings, save: Callable[[Findings], None]) -> Findings:
    table = Table("Relative errors", ["trainer", *COLUMNS])
    findings = Findings([table])
    for module in TOY if settings.toy else MODULES:
        for figure in measured(module):
            if "not installed" in figure:
                name = figure["not installed"]
                findings.notes.append(
                    f"{figure['contestant']} is left out: {name} is not installed"
                )
            else:
                findings.figures.append(figure)
        table.rows = [[label(row), *cells(row)] for row in by_row(findings.figures)]
        save(findings)
    return findings
