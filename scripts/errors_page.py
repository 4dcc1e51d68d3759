"""Writes docs/errors.md: every error, warning and exit code, from the sources that define them.

    python scripts/errors_page.py           # tells whether the page says what the sources say
    python scripts/errors_page.py --write   # makes it say so (make figures does)

A class's docstring says what it is in its first paragraph, when it comes in the next ones, and the
way out behind "Way out:".
"""

import ast
import inspect
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs/errors.md"
INTRODUCTION = """# Errors and warnings

<!-- made by scripts/errors_page.py from the sources: make figures -->

Each message says what is wrong in your own terms, then numbers, then one way out. Exceptions of your model, loss, hooks and callbacks come back as the very objects that were raised. A step that fails leaves parameters, `.grad`, buffers, optimizer and random state as they were.
"""
ERRORS = """
## Errors

All of them are `ib.Error`, in Python with the built-in class beside it as well, in C++ (`infinitybatch::Error`) a `c10::Error`.
"""
WARNINGS = """
## Warnings

Each begins with its code and comes as a class of its own, a UserWarning: `warnings.filterwarnings("error", category=ib.CoupledLossNotice)` makes an error of one, `"ignore"` silences it.
"""
EXIT_CODES = """
## Exit codes of the command line

| code | when |
|---|---|
"""


@dataclass(frozen=True)
class Entry:
    """A class of an error or a warning."""

    name: str
    bases: list[str]
    what: str
    when: str
    way_out: str

    @property
    def code(self) -> str:
        found = re.match(r"(IB\d{3}): ", self.what)
        return found[1] if found else ""


def entry(node: ast.ClassDef) -> Entry:
    """
    Raises:
        ValueError: for a docstring without its parts.
    """
    text = inspect.cleandoc(ast.get_docstring(node) or "")
    found = re.fullmatch(r"(.+?)\n\n(.+?)\n\nWay out: (.+)", text, re.DOTALL)
    if found is None:
        raise ValueError(
            f"the docstring of {node.name} must say what it is, when it comes, and 'Way out:'"
        )
    bases = list(map(ast.unparse, node.bases))
    return Entry(node.name, bases, *(" ".join(part.split()) for part in found.groups()))


def entries(root: Path = ROOT) -> list[Entry]:
    """Of all public classes that are errors or warnings, as they stand in the package's files."""
    files = sorted((root / "python/infinitybatch").rglob("[!_]*.py"))
    nodes = [
        node
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    known = {"Exception", "RuntimeError", "ValueError", "TypeError", "UserWarning"}
    while True:
        kin = {
            node.name
            for node in nodes
            if any(ast.unparse(base).split(".")[-1] in known for base in node.bases)
        }
        if kin <= known:
            return [entry(node) for node in nodes if node.name in known]
        known |= kin


def section(one: Entry) -> str:
    title = f"{one.code}: {one.name}" if one.code else one.name
    what = one.what.removeprefix(f"{one.code}: ")
    beside = [f"`{base}`" for base in one.bases if base not in ("UserWarning", "Error")]
    also = f" Caught as {', '.join(beside)} too." if beside else ""
    text = (
        f"\n### {title}\n\n{what[0].upper()}{what[1:]}{also}\n\n"
        f"- **When:** {one.when.removeprefix('Comes ')}\n- **Way out:** {one.way_out}\n"
    )
    return text.replace("docs/limits.md", "[limits](limits.md)")


def page(root: Path = ROOT) -> str:
    found = entries(root)
    errors = [one for one in found if not one.code]
    warnings = sorted((one for one in found if one.code), key=lambda one: one.code)
    codes = re.findall(
        r"(\w+) = (\d+),?\s*(?:///< (.+))?",
        (root / "apps/infinitybatch/exit_code.hpp").read_text(),
    )
    rows = [f"| {number} | {meaning or name} |\n" for name, number, meaning in codes]
    return (
        INTRODUCTION
        + ERRORS
        + "".join(map(section, errors))
        + WARNINGS
        + "".join(map(section, warnings))
        + EXIT_CODES
        + "".join(rows)
    )


def main(arguments: list[str]) -> int:
    wanted = page()
    if "--write" in arguments:
        PAGE.write_text(wanted)
    elif not PAGE.exists() or PAGE.read_text() != wanted:
        print("docs/errors.md does not say what the sources say: make figures", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
