"""Findings as JSON for machines and Markdown for people."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from .machine import TUNED_MALLOC, commit, describe


@dataclass
class Table:
    caption: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)


@dataclass
class Goal:
    """A promise and what was measured of it."""

    promise: str
    measured: str
    met: bool


@dataclass
class Findings:
    """What one suite found under one setting."""

    tables: list[Table] = field(default_factory=list)
    goals: list[Goal] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    figures: list[dict[str, Any]] = field(default_factory=list)  # every number, for machines

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> "Findings":
        return cls(
            [Table(**table) for table in data["tables"]],
            [Goal(**goal) for goal in data["goals"]],
            list(data["notes"]),
            list(data["figures"]),
        )


def to_json(value: Any) -> str:
    def plain(item: Any) -> Any:
        if dataclasses.is_dataclass(item) and not isinstance(item, type):
            return dataclasses.asdict(item)
        raise TypeError(f"{type(item).__name__} does not belong into results")

    return json.dumps(value, indent=1, default=plain) + "\n"


def begin_report(
    title: str, explanation: str, began: datetime, command: str, timed: bool = True
) -> dict[str, Any]:
    """What every report says in front of its runs."""
    return {
        "title": title,
        "explanation": explanation,
        "date": began.date().isoformat(),
        "time": began.isoformat(timespec="seconds"),
        "commit": commit(),
        "command": command,
        "machine": describe(),
        "timed": timed,
        "tuned malloc": " ".join(f"{name}={value}" for name, value in TUNED_MALLOC.items()),
        "runs": [],
    }


def _cells(row: Sequence[str]) -> str:
    return "| " + " | ".join(row) + " |"


def _markdown_table(table: Table) -> list[str]:
    ruler = _cells(["---"] + ["---:"] * (len(table.columns) - 1))
    return [f"{table.caption}", "", _cells(table.columns), ruler, *map(_cells, table.rows), ""]


def between(runs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Of each ratio that several processes found under one setting: the median of their medians, the
    least and the largest."""
    found: dict[tuple[str, ...], list[float]] = {}
    for run in runs:
        for figure in json.loads(to_json(run["findings"]))["figures"]:
            for key, ratio in figure.items():
                if isinstance(ratio, dict) and "median" in ratio:
                    who = (run["setting"], figure.get("workload", ""), figure.get("contestant", ""))
                    found.setdefault((*who, key), []).append(ratio["median"])
    names = ("setting", "workload", "contestant", "ratio")
    return [
        dict(zip(names, who, strict=True))
        | {"processes": len(each), "median": median(each), "least": min(each), "most": max(each)}
        for who, each in found.items()
        if len(each) > 1
    ]


def _spread(report: Mapping[str, Any]) -> list[str]:
    rows = [
        [each[name] for name in ("workload", "contestant", "ratio", "setting")]
        + [f"{each['median']:.3f}", f"{each['least']:.3f} to {each['most']:.3f}"]
        for each in report.get("between runs", [])
        if each["least"] != each["most"]
    ]
    if not rows:
        return []
    head = ["workload", "contestant", "ratio", "setting", "median of processes", "spread"]
    return ["## Between processes", "", _cells(head), _cells(["---"] * 6), *map(_cells, rows), ""]


def to_markdown(report: Mapping[str, Any]) -> str:
    """A report as `run.py` makes it: title, date, command, machine, runs."""
    lines = [f"# {report['title']}", "", report["explanation"], ""]
    lines += [f"- Date: {report['time']}", f"- Commit: {report['commit']}"]
    lines += [f"- Command: `{report['command']}`"]
    lines += [
        f"- {name[0].upper()}{name[1:]}: {value}" for name, value in report["machine"].items()
    ]
    lines += [f"- Tuned malloc: `{report['tuned malloc']}`", "", "## Goals", ""]
    goals = [
        [goal.promise, run["setting"], goal.measured, "yes" if goal.met else "**no**"]
        for run in report["runs"]
        for goal in run["findings"].goals
    ]
    lines += [_cells(["goal", "setting", "measured", "met"]), _cells(["---"] * 4)]
    lines += [_cells(row) for row in goals] + [""] + _spread(report)
    for run in report["runs"]:
        others = run["others"]
        busy = "unknown" if others is None else f"{others:.2f} cores"
        lines += [f"## {run['setting']}", ""]
        quiet = "" if run["quiet"] or not report.get("timed", True) else " **Not to be quoted.**"
        lines += [f"{run['seconds']} s. Used by others meanwhile: {busy}.{quiet}", ""]
        for table in run["findings"].tables:
            lines += _markdown_table(table)
        lines += [f"- {note}" for note in run["findings"].notes]
        lines += [""] if run["findings"].notes else []
    return "\n".join(lines).rstrip() + "\n"


def write(report: Mapping[str, Any], folder: Path, name: str) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{name}.json", folder / f"{name}.md"]
    paths[0].write_text(to_json(report))
    paths[1].write_text(to_markdown(report))
    return paths
