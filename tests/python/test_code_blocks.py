"""Every block of Python in every document runs as it is printed, page by page, from its top.

A diff runs as what it makes where a set-up stands in front of it; else it is one of a reader's own
code, and is only parsed. Comments in front of a block, which readers do not see:

    <!-- run              code that runs at this place: a set-up, or what must be true by now
    assert steps == 3
    -->
    <!-- run: file.py --> the same, from a file of the repository
    <!-- needs: keras --> the blocks up to the next heading run where it can be imported
    <!-- not run: why --> the next block is only parsed
    <!-- run by: test.py --> that test of the repository runs the page, beside native training, say
"""

import ast
import gc
import importlib.util
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    str(path.relative_to(ROOT))
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    if "docs/site" not in str(path)
)
PIECE = re.compile(
    r"^(?P<heading>#+) |^<!-- run\n(?P<hidden>.*?)^-->$|^<!-- run: (?P<file>\S+) -->$|^<!-- needs: (?P<needs>[\w.]+) -->$"
    r"|^<!-- not run: (?P<reason>[^\n]+) -->$|^ *```(?P<kind>python|diff)\n(?P<shown>.*?)^ *```$",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Block:
    """Code of a page, and why it does not run, if it does not."""

    line: int
    code: str
    not_run: str = ""


def blocks(text: str) -> list[Block]:
    found: list[Block] = []
    missing, reason, is_set_up = "", "", False
    for piece in PIECE.finditer(text):
        line = text.count("\n", 0, piece.start()) + 2  # of the code, behind the fence
        if piece["heading"]:
            missing = ""
        elif needs := piece["needs"]:
            if importlib.util.find_spec(needs) is None:
                missing = missing or f"{needs} is not installed"
        elif piece["reason"]:
            reason = piece["reason"]
        elif piece["hidden"] is not None or piece["file"]:
            code = piece["hidden"] or (ROOT / piece["file"]).read_text()
            found.append(Block(line, code, missing))
            is_set_up = True
            continue
        else:
            code = piece["shown"]
            if piece["kind"] == "diff":  # its new side, on the same lines
                code = re.sub(r"^-.*$", "", code, flags=re.MULTILINE)
                code = re.sub(r"^[ +]", "", code, flags=re.MULTILINE)
                reason = reason or ("" if is_set_up else "a diff of your own code")
            found.append(Block(line, code, reason or missing))
            reason = ""
        is_set_up = False
    return found


def run_by(text: str) -> str:
    """The test that runs a page in place of this file; empty for most."""
    found = re.search(r"^<!-- run by: (\S+) -->$", text, re.MULTILINE)
    return found[1] if found else ""


TEXTS = {page: (ROOT / page).read_text() for page in PAGES}
OTHERS = {page: run_by(text) for page, text in TEXTS.items() if run_by(text)}


def test_pages_that_another_test_runs_are_named_there() -> None:
    for page, test in OTHERS.items():
        assert Path(page).stem in (ROOT / test).read_text(), f"{page}: {test} does not name it"
        for block in blocks(TEXTS[page]):
            ast.parse(block.code, page)


@pytest.fixture
def names() -> Iterator[dict[str, Any]]:
    """Of a page; what its objects hold is gone before another one's budget counts what is there."""
    names: dict[str, Any] = {"__name__": "__main__"}
    yield names
    names.clear()
    gc.collect()


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(TEXTS[p]) and p not in OTHERS])
def test_the_code_of_a_page_runs(
    page: str,
    names: dict[str, Any],
    subtests: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    for block in blocks(TEXTS[page]):
        # Lines of a traceback are those of the page.
        code = "\n" * (block.line - 1) + block.code
        if block.not_run:
            ast.parse(code, page)
            with subtests.test():
                pytest.skip(f"{page}:{block.line}: {block.not_run}")
        else:
            exec(compile(code, page, "exec"), names)


def test_blocks_and_comments_are_found() -> None:
    text = """
<!-- run
x = 1
-->
```python
x += 1
```
<!-- not run: a fragment -->
```python
...
```
<!-- run
before = x
-->
```diff
-x = 7
+x += before + 38
 assert x == 42
```
```diff
+yours = wrap(yours)
```
<!-- needs: no_such_package -->
```python
import no_such_package
```
# Another heading
```python
# no heading
pass
```
"""
    found = blocks(text)
    assert [block.line for block in found] == [3, 6, 10, 13, 16, 21, 25, 29]
    assert [block.not_run for block in found] == [
        "", "", "a fragment", "", "", "a diff of your own code", "no_such_package is not installed", "",
    ]  # fmt: skip
    names: dict[str, Any] = {}
    for block in found[:2] + found[3:5]:
        exec(block.code, names)
    assert names["x"] == 42
    every = sum(len(re.findall(r"^ *```python$", text, re.MULTILINE)) for text in TEXTS.values())
    assert every >= 14, "blocks of the documents are found"
