"""The table of verdicts: a text for people, a line for each loop and a cell for each way."""

import pathlib
import re
from collections.abc import Mapping

from .themes import THEMES, every_loop
from .ways import WAYS

TABLE = pathlib.Path(__file__).with_name("verdicts.md")
LIMITS = pathlib.Path(__file__).parents[2] / "docs" / "limits.md"
#: Sizes of silent errors may differ by this factor: they are another machine's elsewhere.
SIMILAR = 2.0

HEAD = """# Verdicts

What each training loop of this folder gives in eleven ways, beside native training with the whole batch. `python tests/loops/run.py --write [loop ...]` writes this table, `tests/loops/test_loops.py` compares it.

- `exact`: gradients, parameters, buffers, losses, plain Python state and generators are native's after each of three turns.
- the name of an error: it is raised. `untyped` where it is none of infinitybatch's: the loop's own code fails on a part of the batch.
- `silent 0.35`: a result that differs by this much without a word; `inf` where a difference has no size (NaN, integers, another shape, a gradient too few). `in buffers` and so on where gradients are native's.

For `silent` and `untyped` the last column names a row of docs/limits.md by its first words.

Ways: `stream` is VirtualBatch with the loss as it is, `coupled` with `ib.losses.coupled(loss)`, `wrap` is `ib.wrap`; 3 and 1 are micro-batches of so many of nine samples, `static` is four with `static_graph=True`, `budget` has room for all samples at once. `tight` is four budgets of one to three times what native's step takes, and the worst that came of them: `exact` if any step was, `refused` if none was taken.
"""

Verdicts = dict[str, str]


def cells_of(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def read() -> dict[str, Verdicts]:
    """Verdicts by loop and way; "limit" is what the last column says."""
    columns = [*(way.name for way in WAYS), "limit"]
    table = {}
    for line in TABLE.read_text().splitlines() if TABLE.exists() else []:
        if re.match(r"\| (?!loop )\w", line):
            name, *cells = cells_of(line)
            table[name] = dict(zip(columns, cells, strict=True))
    return table


def text_of(table: Mapping[str, Verdicts]) -> str:
    columns = [*(way.name for way in WAYS), "limit"]
    loops, text = every_loop(), HEAD
    width = max(map(len, loops))
    for theme, title in THEMES.items():
        header = ["loop".ljust(width), *(column.ljust(14) for column in columns)]
        text += f"\n## {title}\n\n| {' | '.join(header).rstrip()} |\n|{'---|' * len(header)}\n"
        for name, loop in loops.items():
            if loop.theme == theme:
                cells = [name.ljust(width), *(table[name][c].ljust(14) for c in columns)]
                text += f"| {' | '.join(cells).rstrip()} |\n"
    return text


def write(table: Mapping[str, Verdicts]) -> None:
    """The limits that are named stay as they are; a new one is to be filled in by hand."""
    TABLE.write_text(text_of(table))


def is_silent(verdict: str) -> bool:
    return verdict.startswith("silent")


def needs_limit(verdict: str) -> bool:
    return verdict.startswith(("silent", "untyped"))


def same(listed: str, found: str) -> bool:
    """The same verdict, and where it is silent of about the same size."""
    if not (is_silent(listed) and is_silent(found)):
        return listed == found
    (_, one, *where), (_, other, *there) = listed.split(), found.split()
    a, b = float(one), float(other)
    return where == there and (a == b or a / SIMILAR <= b <= a * SIMILAR)


def limits() -> list[str]:
    """The first column of docs/limits.md."""
    rows = re.findall(r"^\| (?!limit |---)(.+?) \| ", LIMITS.read_text(), re.MULTILINE)
    return [row.replace("`", "") for row in rows]


def named_limits(limit: str) -> list[str]:
    """The rows that a last column names; several are separated by semicolons."""
    return [words.strip() for words in limit.split(";") if words.strip()]
