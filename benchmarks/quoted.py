"""The latest results that may be quoted, and why others may not."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

RESULTS = Path(__file__).resolve().parent / "results"
MIB = 2**20
NATIVE_NAMES = ("native", "native whole batch")


class NotToBeQuoted(ValueError):
    """There is no run whose figures may stand in a document."""


def doubts(report: Mapping[str, Any], run: Mapping[str, Any]) -> str:
    """Why a run cannot be quoted; empty where it can."""
    if run.get("failed", True):
        return "it failed or was not finished"
    if "toy" in run["setting"]:
        return "its sizes only try the harness"
    commit = report.get("commit")
    if commit in (None, "", "unknown"):
        return "it does not say of which commit it is"
    if commit.endswith("-dirty"):
        return f"its commit is {commit}: nobody else has that code"
    if not report.get("timed", True):
        return ""
    others = run.get("others")
    quiet = run.get("quiet")
    if quiet is None or others is None:
        return "nobody knows whether the machine was quiet"
    if not quiet or any("do not trust" in note for note in run["findings"]["notes"]):
        return f"others used {others:.2f} cores meanwhile"
    return ""


@dataclass(frozen=True)
class Quoted:
    """The processes of one run, and where their figures come from."""

    source: str
    runs: list[Mapping[str, Any]]
    report: Mapping[str, Any] = field(default_factory=dict)  #: date, commit, command, machine

    @property
    def run(self) -> Mapping[str, Any]:
        return self.runs[0]

    def figures(self, process: int = 0, **wanted: Any) -> list[dict[str, Any]]:
        return [
            figure
            for figure in self.runs[process]["findings"]["figures"]
            if all(figure.get(key) == value for key, value in wanted.items())
        ]

    def figure(self, **wanted: Any) -> dict[str, Any]:
        found = self.figures(**wanted)
        if not found:
            raise NotToBeQuoted(f"{self.source} has no figure of {wanted}")
        return found[0]

    def ratio(self, key: str = "CPU over native", **wanted: Any) -> float:
        """The median of the processes' medians."""
        self.figure(**wanted)
        found = []
        for process in range(len(self.runs)):
            for figure in self.figures(process, **wanted)[:1]:
                if key == "CPU over native" and "ratios to native" in figure:
                    found.append(figure["ratios to native"]["cpu"]["median"])
                else:
                    found.append(figure[key]["median"])
        return median(found)

    def mib(self, **wanted: Any) -> str:
        return f"{self.figure(**wanted)['peak bytes'] / MIB:,.0f}"

    def native_mib(self, workload: str) -> str:
        for figure in self.figures(workload=workload):
            if figure["contestant"] in NATIVE_NAMES:
                return f"{figure['peak bytes'] / MIB:,.0f}"
        raise NotToBeQuoted(f"{self.source} has no native {workload}")


def when(report: Mapping[str, Any]) -> str:
    return report.get("time", report["date"])


def latest(suite: str, threads: int = 1, folder: Path = RESULTS) -> Quoted:
    """The latest run of a suite, with malloc tuned, that can be quoted.

    Raises:
        NotToBeQuoted: where there is none, with what is wrong with those that there are.
    """
    setting = "one thread" if threads == 1 else f"{threads} threads"
    reasons: list[str] = []
    found: list[tuple[str, str, Quoted]] = []
    for path in sorted(folder.glob("*.json")):
        if not re.search(rf"(^|-){suite}(-|$)", path.stem):
            continue
        report = json.loads(path.read_text())
        runs = [r for r in report["runs"] if r["setting"].startswith(f"{setting}, tuned malloc")]
        if not runs:
            continue
        if why := next((why for run in runs if (why := doubts(report, run))), ""):
            reasons.append(f"{path.name}: {why}")
        else:
            found.append((when(report), path.name, Quoted(path.name, runs, report)))
    if not found:
        raise NotToBeQuoted(
            f"no run of {suite} with {setting} can be quoted"
            + "".join(f"; {reason}" for reason in reasons)
            + f"; leave the machine alone and run: bash scripts/bench.sh {suite} --threads {threads}"
        )
    return max(found)[2]
