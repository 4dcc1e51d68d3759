"""The documents tell the truth: examples run as printed, maps name what is there."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
INTERNALS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs/internals").glob("*.md"))
#: Whatever lies there. CHANGELOG names what is gone.
DOCUMENTS = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"] + sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")
)


def printed_examples() -> dict[str, str]:
    """What README prints under the name of each example file."""
    readme = (ROOT / "README.md").read_text()
    blocks = re.findall(r"<!-- (examples/\S+) -->\n```\w+\n(.*?)```", readme, re.DOTALL)
    return dict(blocks)


@pytest.mark.parametrize("path", ["examples/train.py", "examples/train.cpp"])
def test_readme_prints_the_example_as_it_is_run(path):
    assert printed_examples()[path] == (ROOT / path).read_text()


def test_the_python_example_runs():
    done = subprocess.run(
        [sys.executable, ROOT / "examples/train.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert (
        len(re.findall(r"^step \d: loss \d+\.\d+, peak \d+ bytes$", done.stdout, re.MULTILINE)) == 3
    )
    peaks = [int(peak) for peak in re.findall(r"peak (\d+)", done.stdout)]
    assert max(peaks) <= 64 * 2**20


@pytest.mark.parametrize(
    ("path", "strategy"),
    [("examples/contrastive.py", r"\w+"), ("examples/minibatch_deviation.py", "cut")],
)
def test_other_python_examples_run(path, strategy):
    done = subprocess.run(
        [sys.executable, ROOT / path], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(rf"loss \d+\.\d+, peak \d+ bytes, {strategy}\n", done.stdout)


NOT_OURS = ("torch/", "ATen/", "c10/")  # headers of LibTorch
MADE_LATER = ("build", ".venv", "data", "dist")  # by the commands, not in the repository


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_path_that_a_document_names_exists(document):
    text = (ROOT / document).read_text()
    names = set(re.findall(r"`([\w.-]+(?:/[\w.*-]*)+)`", text))
    names |= set(re.findall(r"`([\w-]+\.(?:md|toml|txt|hpp|cpp|py|sh|json))`", text))
    names = {
        name
        for name in names
        if not name.startswith(NOT_OURS) and name.split("/")[0] not in MADE_LATER
    }
    missing = [
        name
        for name in names
        if not list(ROOT.glob(name)) and not ("/" not in name and list(ROOT.glob(f"*/**/{name}")))
    ]
    assert not missing


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_somewhere(document):
    file = ROOT / document
    text = re.sub(r"^```.*?^```$|`[^`\n]*`", "", file.read_text(), flags=re.M | re.S)
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)|(?:src|srcset)=\"([^\"]+)\"", text):
        (link,) = filter(None, link)
        assert link.startswith("https://") or (file.parent / link).exists(), link


@pytest.mark.parametrize("document", DOCUMENTS)
def test_cpp_of_documents_is_what_tests_compile(document):
    """README's is an example that is built; of fragments every name is used in a test of C++."""
    compiled = "".join(file.read_text() for file in sources("tests/cpp", "examples"))
    for block in re.findall(r"^```cpp\n(.*?)^```", (ROOT / document).read_text(), re.M | re.S):
        names = re.findall(r"\bib::([\w:]+)|\.(\w+)\(", block)
        missing = {name for pair in names for name in pair if name and name not in compiled}
        assert names and not missing, missing


def test_readme_shows_no_output_that_was_typed():
    """What a command prints is not in README; what `make train` demands is what it says."""
    readme = (ROOT / "README.md").read_text()
    assert "```console" not in readme
    assert not re.findall(r"^(?:done in|peak|loss) .*\d", readme, re.MULTILINE)
    demo = (ROOT / "scripts/train_demo.sh").read_text()
    (wanted,) = re.findall(r"^wanted_percent=(\d+)$", demo, re.MULTILINE)
    (budget,) = re.findall(r"^budget=(\w+)$", demo, re.MULTILINE)
    assert f"held-out accuracy is at least {wanted} % and the peak within the budget" in readme
    assert f"--data digits --model resnet --batch-size all --memory-budget {budget}" in readme


def test_readme_is_short_enough_to_be_read():
    assert len((ROOT / "README.md").read_text().split()) <= 900


def test_each_row_of_what_is_exact_names_its_test():
    rows = re.findall(r"^\| (?!what |---)(.+) \|$", (ROOT / "docs/exactness.md").read_text(), re.M)
    assert len(rows) > 25
    for row in rows:
        cells = re.split(r" \| ", row)
        assert len(cells) == 3 and all(cells), row
        assert re.fullmatch(r"`tests/[\w./]+`", cells[2]), row


def test_each_limit_says_how_it_shows_a_way_out_and_its_test():
    rows = re.findall(r"^\| (?!limit |---)(.+) \|$", (ROOT / "docs/limits.md").read_text(), re.M)
    assert len(rows) > 40
    for row in rows:
        cells = re.split(r" \| ", row)
        assert len(cells) == 4 and all(cells), row
        test = cells[3]
        assert test.startswith("none") or re.match(r"`(tests/[\w./]+)`", test), row
    known = [row for row in rows if "tests/fuzz/known.py" in row]
    assert known, "what the fuzzer knows to fail is a limit"


def test_what_differs_without_a_word_says_by_how_much():
    """Each row has a number for its error and a test, or the reason why it has none."""
    text = (ROOT / "docs/limits.md").read_text()
    (table,) = re.findall(r"^## A different result without a word$(.*?)^## ", text, re.M | re.S)
    rows = re.findall(r"^\| (?!limit |---)(.+) \|$", table, re.M)
    assert len(rows) > 20
    for row in rows:
        _, shows, _, test = re.split(r" \| ", row)
        assert re.search(r"(?<![\w.-])\.?\d", re.sub(r"`[^`]*`", "", shows)), f"no size: {row}"
        assert test != "none", f"neither a test nor why there is none: {row}"
        for name in re.findall(r"`(tests/[\w./]+)`", test):
            assert (ROOT / name).exists(), name


def paragraphs(text: str) -> list[str]:
    """Without figures; rows of tables and items of lists stand for themselves."""
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    return re.split(r"\n\s*\n|\n(?=[-|])", prose)


def test_architecture_is_short_enough_to_be_held():
    assert len((ROOT / "ARCHITECTURE.md").read_text().split()) <= 2500


@pytest.mark.parametrize("document", ["ARCHITECTURE.md", *INTERNALS])
def test_no_paragraph_is_a_wall(document):
    for paragraph in paragraphs((ROOT / document).read_text()):
        words = len(paragraph.split())
        assert words <= 120, f"{words} words: {paragraph[:80]} …"


def test_each_mechanism_has_a_page_that_architecture_links_to():
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert len(INTERNALS) > 10
    for document in INTERNALS:
        page = (ROOT / document).read_text()
        assert f"]({document})" in text, f"{document}: no link"
        assert 150 <= len(page.split()) <= 600, document
        assert "```" in page, f"{document}: no figure"
        assert re.search(r"^Tests: `tests/", page, re.MULTILINE), f"{document}: no tests"


def table(heading: str) -> list[list[str]]:
    """Rows of the map's table that begins with this column."""
    text = (ROOT / "ARCHITECTURE.md").read_text()
    (found,) = re.findall(rf"^\| {heading} \|.*?\n\|[-|]+\|\n((?:\|.*\|\n)+)", text, re.MULTILINE)
    return [row.strip("| ").split(" | ") for row in found.splitlines()]


@pytest.fixture(scope="module")
def words_of_the_code() -> set[str]:
    files = sources("src", "include", "python")
    return {word for file in files for word in re.findall(r"\w+", file.read_text())}


@pytest.mark.parametrize("document", ["ARCHITECTURE.md", *INTERNALS])
def test_names_of_the_code_are_names_of_the_code(document, words_of_the_code):
    text = re.sub(r"^```.*?^```$", "", (ROOT / document).read_text(), flags=re.M | re.S)
    for name in re.findall(r"`([A-Za-z_]\w*(?:::\w+|\.\w+)*)(?:\(.*?\))?`", text):
        if (ROOT / name).exists():
            continue
        missing = set(re.findall(r"\w+", name)) - words_of_the_code
        assert not missing, f"{name}: no such name"


def library() -> list[str]:
    """Folders of the map, from the top down."""
    return [re.fullmatch(r"`src/(\w+)/`", row[0]).group(1) for row in table("folder")]


def sources(*folders: str) -> list[Path]:
    kinds = {".cpp", ".hpp", ".py", ".pyi"}
    return [
        path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in kinds
    ]


def test_the_map_has_every_folder_of_the_library():
    assert sorted(library()) == sorted(os.listdir(ROOT / "src"))


def test_folders_use_what_the_map_says():
    """What a folder includes is what stands in its row, and lies below it."""
    folders = library()
    for at, (_, _, uses, _) in enumerate(table("folder")):
        files = sources(f"src/{folders[at]}", f"include/infinitybatch/{folders[at]}")
        includes = re.findall(
            r"#include (?:<infinitybatch/|\")(\w+)/", "".join(file.read_text() for file in files)
        )
        below = set(folders[at + 1 :])
        said = below if uses == "all below" else set(uses.split(", ")) - {"LibTorch"}
        assert said <= below, f"src/{folders[at]}: arrows point down"
        assert set(includes) - {folders[at]} == said, f"src/{folders[at]}: the map says {uses}"


def test_line_counts_of_the_map_are_within_a_tenth():
    rows = [(f"src/{name}", row[3]) for name, row in zip(library(), table("folder"), strict=True)]
    rows += [(row[0].strip("`"), row[2]) for row in table("beside it")]
    for folder, said in rows:
        both = [folder, folder.replace("src/", "include/infinitybatch/", 1)]
        files = sources(*(both if folder.startswith("src/") else both[:1]))
        lines = sum(len(file.read_text().splitlines()) for file in files)
        assert abs(int(said.replace(",", "")) - lines) <= lines / 10, f"{folder} has {lines} lines"


def test_changelog_knows_the_version_being_built():
    version = re.search(
        r"project\(infinitybatch VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text()
    )
    assert f"## [{version.group(1)}]" in (ROOT / "CHANGELOG.md").read_text()


def test_results_of_long_commands_say_how_they_were_made():
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
    results = sorted((ROOT / "tests/results").glob("*.md"))
    assert results
    for result in results:
        name = re.fullmatch(r"\d{4}-\d\d-\d\d-(?:\d{4}-)?(.+)", result.stem)
        assert name and name.group(1) in targets, f"{result.name}: no such command"
        text = result.read_text()
        assert f"`make {name.group(1)}`" in text, result.name
        for word in ("Commit", "Machine", "torch", "failed", "Skipped"):
            assert word in text, f"{result.name} does not say: {word}"
