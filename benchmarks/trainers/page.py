"""The table of docs/every-trainer.md, made of the latest result."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from quoted import RESULTS, NotToBeQuoted, Quoted, latest

#: Of every row, in the table's order; trainers/cases.py has a batch for each.
COLUMNS = ("equal parts", "ragged mean", "ignored labels", "contrastive", "BatchNorm", "dropout")
PEERS = (
    "PyTorch by hand",
    "accelerate",
    "Lightning",
    "Hugging Face Trainer",
    "Keras",
    "Composer",
    "Opacus",
    "GradCache",
    "sentence-transformers",
    "infinitybatch",
)
EXACT = 1e-12
Figure = Mapping[str, Any]


def cell(figure: Figure) -> str:
    """A relative error with two digits, "exact", "another draw", "refused: ..." or "n/a: ..."."""
    for reason in ("n/a", "refused"):
        if reason in figure:
            return f"{reason}: {figure[reason]}"
    if figure["error"] <= EXACT:
        return "exact"
    other = figure.get("error of another draw", figure["error"])
    return "another draw" if other <= EXACT else f"{other:.2g}"


def by_row(figures: Sequence[Figure]) -> list[list[Figure]]:
    """The figures of each row, in the order of the columns.

    Raises:
        NotToBeQuoted: where a cell is missing or there twice.
    """
    rows: dict[tuple[str, str], dict[str, Figure]] = {}
    for figure in figures:
        row = rows.setdefault((figure["contestant"], figure["setting"]), {})
        if figure["workload"] in row:
            raise NotToBeQuoted(f"{figure['contestant']}: {figure['workload']} is there twice")
        row[figure["workload"]] = figure
    for (peer, setting), row in rows.items():
        if missing := [column for column in COLUMNS if column not in row]:
            raise NotToBeQuoted(f"{peer}, {setting}: no figure of {', '.join(missing)}")
    return [[row[column] for column in COLUMNS] for row in rows.values()]


def label(row: Sequence[Figure]) -> str:
    first = row[0]
    version = next(iter(first["versions"].values()), "")
    name = f"[{first['contestant']}]({first['documentation']})"
    return f"{' '.join(filter(None, (name, version)))}: {first['setting']}"


def cells(row: Sequence[Figure]) -> list[str]:
    return [cell(figure) for figure in row]


def provenance(found: Quoted, rows: Sequence[Sequence[Figure]]) -> str:
    report = found.report
    versions = {"torch": report["machine"]["torch"], "Python": report["machine"]["python"]}
    for row in rows:
        versions |= {name: v for name, v in row[0]["versions"].items() if name != "torch"}
    listed = ", ".join(f"{name} {version}" for name, version in versions.items())
    return (
        f"Measured on {report['date']} at commit {report['commit']} by `{report['command']}`, with "
        f"{listed} (`benchmarks/results/{found.source}`)."
    )


def table(folder: Path = RESULTS) -> str:
    """
    Raises:
        NotToBeQuoted: where a peer is missing.
    """
    found = latest("trainers", folder=folder)
    rows = by_row(found.figures())
    measured = [row[0]["contestant"] for row in rows]
    if missing := [peer for peer in PEERS if peer not in measured]:
        raise NotToBeQuoted(f"{found.source} has no figures of {', '.join(missing)}")
    rows.sort(key=lambda row: PEERS.index(row[0]["contestant"]))  # stable
    lines = [["trainer", *COLUMNS], ["---"] * (1 + len(COLUMNS))]
    lines += [[label(row), *cells(row)] for row in rows]
    drawn = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"\n\n{drawn}\n\n{provenance(found, rows)}\n\n"
