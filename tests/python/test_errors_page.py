"""docs/errors.md has every code, error and exit code of the sources, and says what they say."""

import importlib
import re
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/errors.md").read_text()


@pytest.fixture
def errors_page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    return importlib.import_module("errors_page")


def sources() -> str:
    files = [
        path
        for folder in ("python", "src", "include", "apps")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".pyi", ".cpp", ".hpp")
    ]
    return "\n".join(file.read_text() for file in files)


def test_the_page_is_what_the_sources_say(errors_page: ModuleType) -> None:
    assert errors_page.page() == PAGE, "make figures writes it anew"


def test_every_code_of_the_sources_is_on_the_page() -> None:
    codes = set(re.findall(r"\bIB\d{3}\b", sources()))
    assert len(codes) >= 7
    assert codes == set(re.findall(r"^### (IB\d{3}): ", PAGE, re.MULTILINE))


def test_every_error_of_both_languages_is_on_the_page() -> None:
    import infinitybatch as ib

    titles = set(re.findall(r"^### (?:IB\d{3}: )?(\w+)$", PAGE, re.MULTILINE))
    public = (getattr(ib, name) for name in ib.__all__)
    kinds = {kind for kind in public if isinstance(kind, type) and issubclass(kind, Exception)}
    assert {kind.__name__ for kind in kinds} == titles
    header = (ROOT / "include/infinitybatch/core/errors.hpp").read_text()
    assert set(re.findall(r"^class (\w+) : public", header, re.MULTILINE)) <= titles


def test_each_says_when_it_comes_and_a_way_out() -> None:
    parts = re.split(r"^### ", PAGE.split("## Exit codes")[0], flags=re.MULTILINE)[1:]
    assert len(parts) >= 16
    for part in parts:
        assert re.search(r"^- \*\*When:\*\* .{20,}$", part, re.MULTILINE), part
        assert re.search(r"^- \*\*Way out:\*\* .{20,}$", part, re.MULTILINE), part


def test_exit_codes_are_those_of_the_command_line() -> None:
    table = PAGE.split("## Exit codes")[1]
    header = (ROOT / "apps/infinitybatch/exit_code.hpp").read_text()
    numbers = re.findall(r"\w+ = (\d+),", header)
    assert re.findall(r"^\| (\d+) \|", table, re.MULTILINE) == numbers and len(numbers) >= 6


def test_a_docstring_without_a_way_out_is_refused(errors_page: ModuleType, tmp_path: Path) -> None:
    package = tmp_path / "python/infinitybatch"
    package.mkdir(parents=True)
    (package / "new.py").write_text('class NewError(RuntimeError):\n    """What it is."""\n')
    with pytest.raises(ValueError, match="NewError must say what it is, when it comes"):
        errors_page.entries(tmp_path)
