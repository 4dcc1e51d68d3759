"""The type stubs say what the extension module has."""

import ast
import inspect
import pathlib
import re

import infinitybatch
import pytest
from infinitybatch import _C

FOLDER = pathlib.Path(infinitybatch.__file__).parent / "_C"
MODULES = {"__init__": _C, "losses": _C.losses, "memory": _C.memory}


def public(names):
    return {name for name in names if not name.startswith("_")}


def stub(name):
    return ast.parse((FOLDER / f"{name}.pyi").read_text())


@pytest.mark.parametrize("name", MODULES)
def test_names(name):
    module, tree = MODULES[name], stub(name)
    stubbed = {node.name for node in tree.body if isinstance(node, (ast.ClassDef, ast.FunctionDef))}
    found = {n for n in public(vars(module)) if not inspect.ismodule(getattr(module, n))}
    assert stubbed == found
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            members = {item.name for item in node.body if isinstance(item, ast.FunctionDef)}
            assert public(members) == public(vars(getattr(module, node.name))), node.name


def test_defaults_of_losses():
    """Each option and its default, as the extension's own signature lines have them."""
    for node in stub("losses").body:
        if not isinstance(node, ast.FunctionDef) or not node.args.kwonlyargs:
            continue
        signature = getattr(_C.losses, node.name).__doc__.splitlines()[0]
        for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
            value = ast.literal_eval(default)
            assert argument.arg in signature
            if isinstance(value, float):
                text = re.search(rf"{argument.arg}: [^=]*= ([-\d.e]+)", signature)
                assert text and float(text[1]) == value, node.name


def test_reports_name_every_strategy():
    strategies = {"stream", "replay", "rerun", "cut", "checkpoint"}
    text = _C.StepReport.strategy.__doc__
    assert {name for name in strategies if f'"{name}"' in text} == strategies
