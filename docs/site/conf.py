"""The site of `make docs`: every page of the repository, and the reference of both languages."""

import ast
import importlib
import re
import textwrap
from itertools import takewhile
from pathlib import Path

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError

ROOT = Path(__file__).resolve().parents[2]
INCLUDE = ROOT / "include/infinitybatch"

project = "infinitybatch"
version = release = re.search(
    r"project\(infinitybatch VERSION ([\d.]+)", (ROOT / "CMakeLists.txt").read_text()
)[1]
project_copyright = "the authors of infinitybatch, MIT"

# The sources are the repository itself, so that links between documents hold there and here.
root_doc = "docs/index"
include_patterns = ["ARCHITECTURE.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/**"]
exclude_patterns = ["docs/site"]
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "breathe",
    "sphinx_copybutton",
]
myst_enable_extensions = ["colon_fence"]
myst_heading_anchors = 3
nb_execution_mode = "off"  # notebooks hold their outputs; tests/python/test_notebooks.py runs them
nb_ipywidgets_js: dict[str, dict[str, str]] = {}  # nothing is loaded from elsewhere

# Docstrings: Markdown's single backticks are code, or a link where the name is known.
default_role = "py:obj"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True, "show-inheritance": True}
maximum_signature_line_length = 88
python_use_unqualified_type_names = True

breathe_projects = {"infinitybatch": str(ROOT / "build/doxygen/xml")}
breathe_default_project = "infinitybatch"
breathe_show_include = False
suppress_warnings = ["duplicate_declaration.cpp"]  # each header opens the namespace
cpp_index_common_prefix = ["infinitybatch::"]

html_theme = "furo"
html_title = f"infinitybatch {version}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_extra_path = ["root"]  # index.html, which leads to the start page
html_copy_source = False
html_show_sphinx = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0969da", "color-brand-content": "#0969da"},
    "dark_css_variables": {"color-brand-primary": "#58a6ff", "color-brand-content": "#58a6ff"},
}
pygments_style = "friendly"
pygments_dark_style = "github-dark"

SECTION = re.compile(r"^(Args|Attributes|Returns|Raises|Yields):$")
NAMES = re.compile(r"^ +(\w+, )*\w+,$")  # of arguments that share a description


def directive(lines: list[str], at: int, outside: int) -> list[str]:
    """What stands in front of the code that begins there, with what is around it at `outside`."""
    block = list(takewhile(lambda one: not one.strip() or indent_of(one) > outside, lines[at:]))
    try:
        ast.parse(textwrap.dedent("\n".join(block)))
        language = "python"
    except SyntaxError:
        language = "text"
    return [" " * outside + f".. code-block:: {language}", ""]


def indent_of(line: str) -> int:
    return len(line) - len(line.lstrip())


def as_markdown(given: list[str]) -> list[str]:
    """Docstrings have code as Markdown has it, indented after an empty line, and bare asterisks."""
    lines: list[str] = []
    for line in given:
        joined = bool(lines) and NAMES.match(lines[-1])
        lines[-1:] = [f"{lines[-1]} {line.strip()}"] if joined else [*lines[-1:], line]
    done: list[str] = []
    code: int | None = None  # the indentation of the text in front of the block
    before = ""
    for at, line in enumerate(lines):
        if line.strip() and code is not None and indent_of(line) <= code:
            code = None
        if line.strip() and code is None:
            after_empty = at > 0 and not lines[at - 1].strip()
            shown = SECTION.match(before.strip()) is None
            if line.strip() == "Example:":
                done += ["", *directive(lines, at + 1, indent_of(line))]
                code = indent_of(line)
                continue
            if after_empty and shown and indent_of(line) >= indent_of(before) + 4:
                done += directive(lines, at, indent_of(before))
                code = indent_of(before)
        done.append(line if code is not None else re.sub(r"(`[^`]*`)|\*", escaped, line))
        before = line if line.strip() else before
    return done


def escaped(found: re.Match[str]) -> str:
    return found[1] or "\\*"


def on_docstring(
    app: Sphinx, what: str, name: str, item: object, options: object, lines: list[str]
):
    lines[:] = as_markdown(lines)
    if what in ("attribute", "property"):
        lines.insert(0, "")  # or napoleon takes what stands in front of a colon for a type


def on_signature(
    app: Sphinx, what: str, name: str, item: object, options: object, given: str | None, back: str
) -> tuple[str | None, str]:
    """Of bindings: what pybind11 writes, as one would write it in Python."""
    if given is None:
        return given, back
    given = re.sub(r"\(self: [\w.]+(, )?", "(", given)
    for types, name in (
        ("SupportsInt | typing.SupportsIndex", "int"),
        ("SupportsFloat | typing.SupportsIndex", "float"),
    ):
        given = given.replace(f"typing.{types}", name)
    return given, back


def on_bases(app: Sphinx, name: str, item: object, options: object, bases: list[type]) -> None:
    bases[:] = [base for base in bases if base.__module__ != "pybind11_builtins"]


def on_member(app: Sphinx, what: str, name: str, item: object, skip: bool, options: object) -> bool:
    """Errors stand under infinitybatch.errors alone."""
    current = app.env.temp_data.get("autodoc:module") or app.env.ref_context.get("py:module")
    is_error = getattr(item, "__module__", "") == "infinitybatch.errors"
    return skip or (is_error and current == "infinitybatch")


def on_finish(app: Sphinx, error: Exception | None) -> None:
    if error is None:
        known = {name for name, *_ in app.env.get_domain("py").get_objects()}
        package = importlib.import_module("infinitybatch")
        public = [name for name in package.__all__ if not name.startswith("__")]
        named = {name: getattr(getattr(package, name), "__name__", name) for name in public}
        missing = [
            name
            for name, own in named.items()
            if not {own, f"infinitybatch.{name}", f"infinitybatch.errors.{own}"} & known
        ]
        if missing:
            raise ExtensionError(f"docs/api/python.md has no entry for {', '.join(missing)}")


def on_source(app: Sphinx, document: str, content: list[str]) -> None:
    """The C++ reference is every public header, folder by folder."""
    if document != "docs/api/cpp":
        return
    parts = []
    folders = [path for path in INCLUDE.iterdir() if path.is_dir()]
    first = ("step", "train")  # what most programs call
    for folder in sorted(folders, key=lambda path: (path.name not in first, path.name)):
        parts.append(f"## {folder.name}\n")
        for header in sorted(folder.glob("*.hpp")):
            if "///" in header.read_text():  # else it has nothing to tell
                name = header.relative_to(ROOT / "include")
                parts.append(f"### {name}\n\n```{{doxygenfile}} {header.name}\n```\n")
    content[0] += "\n".join(parts)


def on_inited(app: Sphinx) -> None:
    """Private members are in Doxygen's XML whatever its settings say."""
    private = re.compile(r"<sectiondef kind=\"private-.*?</sectiondef>", re.DOTALL)
    for file in Path(breathe_projects["infinitybatch"]).glob("*.xml"):
        text = file.read_text()
        if private.search(text):
            file.write_text(private.sub("", text))


def on_resolved(app: Sphinx, doctree: nodes.document, document: str) -> None:
    """Paths in tables may be broken behind a slash."""
    for entry in doctree.findall(nodes.entry):
        for code in list(entry.findall(nodes.literal)):
            first, *rest = code.astext().split("/")
            if rest and len(code.children) == 1:
                pieces = [nodes.Text(first)]
                for name in rest:
                    pieces += [nodes.Text("/"), nodes.raw("", "<wbr>", format="html")]
                    pieces.append(nodes.Text(name))
                code.children = []
                code += pieces


def setup(app: Sphinx) -> None:
    app.connect("builder-inited", on_inited)
    app.connect("doctree-resolved", on_resolved)
    app.connect("autodoc-process-docstring", on_docstring, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", on_signature)
    app.connect("autodoc-process-bases", on_bases)
    app.connect("autodoc-skip-member", on_member)
    app.connect("build-finished", on_finish)
    app.connect("source-read", on_source)
