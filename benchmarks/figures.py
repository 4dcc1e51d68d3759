"""Writes the documents' figures from the committed results, between their markers, and the chart.

    python benchmarks/figures.py           # tells whether the documents say what the results say
    python benchmarks/figures.py --write   # makes them say so

A figure is of the latest run that can be trusted: finished, on a quiet machine, at full size. Where
there is none, the figure cannot be quoted and the command says which run is missing.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import chart
import costs
import listed
from quoted import NotToBeQuoted
from trainers import page

ROOT = Path(__file__).resolve().parents[1]
#: By document and the name in its markers.
PARTS: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"reach": chart.sentence, "short costs": costs.short},
    "docs/costs.md": {"costs": costs.whole},
    "docs/every-trainer.md": {"trainers": page.table},
    "docs/exactness.md": {"families": listed.families},
}


def replaced(document: str, parts: dict[str, Callable[[], str]]) -> str:
    """`document` with the figures between its markers.

    Raises:
        ValueError: unless each marker stands there once.
        NotToBeQuoted: where there is no result that may be quoted.
    """
    for name, part in parts.items():
        begin = f"<!-- {name}: made by benchmarks/figures.py -->"
        end = f"<!-- end of {name} -->"
        if document.count(begin) != 1 or document.count(end) != 1:
            raise ValueError(f"the document needs {begin} and {end} once each")
        before, rest = document.split(begin)
        # On lines of their own: what stands behind a comment on its line is no Markdown.
        document = f"{before}{begin}\n\n{part().strip()}\n\n{end}{rest.split(end)[1]}"
    return document


def wanted(root: Path) -> dict[Path, str]:
    """What each file must hold."""
    found = {
        root / name: replaced((root / name).read_text(), parts) for name, parts in PARTS.items()
    }
    return found | {root / path.relative_to(ROOT): text for path, text in chart.pictures().items()}


def main(arguments: list[str], root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args(arguments)
    try:
        files = wanted(root)
    except NotToBeQuoted as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    differ = [path for path, text in files.items() if not path.exists() or path.read_text() != text]
    for path in differ:
        if options.write:
            path.parent.mkdir(exist_ok=True)
            path.write_text(files[path])
        else:
            name = path.relative_to(root)
            print(f"{name} says other figures than the results: make figures", file=sys.stderr)
    return 1 if differ and not options.write else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
