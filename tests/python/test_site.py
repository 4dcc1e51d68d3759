"""What `make docs` is made of: pages that load nothing, pictures of real runs. The site itself takes a
minute and is no part of `make test`."""

import importlib
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
TERMINAL = "docs/images/terminal-{}.svg"


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("scripts", "docs/site"):
        monkeypatch.syspath_prepend(str(ROOT / folder))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.html", '<script src="https://cdn.example/x.js"></script>'),
        ("a.html", '<link rel="stylesheet" href="//fonts.example/x.css">'),
        ("a.css", "@import 'https://fonts.example/x.css';"),
        ("a.svg", "<style>@font-face {src: url(https://fonts.example/x.woff2)}</style>"),
    ],
)
def test_what_would_be_loaded_from_the_network_is_found(
    name: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    no_network = importlib.import_module("no_network")
    (tmp_path / name).write_text(text)
    assert no_network.main(tmp_path) == 1
    assert "example" in capsys.readouterr().err
    (tmp_path / name).write_text('<a href="https://example.org">a link to follow</a>')
    assert no_network.main(tmp_path) == 0


def test_every_page_is_in_the_navigation() -> None:
    """By globs, so that a new page needs no line anywhere."""
    start = (ROOT / "docs/index.md").read_text()
    for tree in ("\n*\n", "recipes/index", "\nnotebooks/*\n", "\ninternals/*\n", "../ARCHITECTURE"):
        assert tree in start
    assert "\n*\n" in (ROOT / "docs/recipes/index.md").read_text()


def test_the_picture_of_a_terminal_is_that_of_the_command() -> None:
    picture = importlib.import_module("terminal_picture")
    printed = []
    for theme in picture.THEMES:
        root = ElementTree.parse(ROOT / TERMINAL.format(theme)).getroot()
        rows = [row for row in root if row.tag.endswith("text")]
        printed.append(["".join(row.itertext()) for row in rows])
    assert printed[0] == printed[1]
    text = "\n".join(printed[0])
    assert text.startswith(f"$ {picture.COMMAND}\n")
    sources = "".join(path.read_text() for path in (ROOT / "apps").rglob("*.cpp"))
    heading = next(line for line in printed[0] if line.startswith("micro-batch "))
    for word in (*re.split(r"  +", heading), "chosen", "too large"):
        assert word in text and word in sources, f"{word}: python scripts/terminal_picture.py"


def test_a_screen_is_drawn_as_a_terminal_shows_it() -> None:
    picture = importlib.import_module("terminal_picture")
    text = "10 %\r\x1b[K100 %\r\n\r\n\x1b[32mgood & <fast>\x1b[0m\n" + "x" * 100 + "\n"
    assert picture.lines_of(text) == [
        "100 %",
        "",
        "\x1b[32mgood & <fast>\x1b[0m",
        "x" * 92,
        "x" * 8,
    ]
    root = ElementTree.fromstring(picture.draw(text, "dark"))
    rows = ["".join(row.itertext()) for row in root if row.tag.endswith("text")]
    assert rows == ["100 %", "good & <fast>", "x" * 92, "x" * 8]
    assert picture.THEMES["dark"][3] in picture.draw(text, "dark")
