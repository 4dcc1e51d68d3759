"""`python -m infinitybatch audit package.module:function`: exit codes for CI."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from infinitybatch.audit.command import main

LOOPS = """
import infinitybatch as ib
import torch

def watch(weight):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.randn(n, 4), torch.randint(3, (n,))) for n in (4, 2)]
    with ib.audit.watch(model, optimizer, batches) as watched:
        for x, y in batches:
            (torch.nn.functional.cross_entropy(model(x), y) * weight(len(x))).backward()
        optimizer.step()
    return watched

def right():
    return watch(lambda n: n / 6)

def wrong():
    return watch(lambda n: 1 / 2).report

def both():
    return [right(), wrong()]

def nothing():
    return None

def undecided():
    import dataclasses
    return dataclasses.replace(wrong(), verdict="undecided", causes=())
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "audited_loops.py").write_text(LOOPS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "audited_loops", raising=False)
    return tmp_path


@pytest.mark.parametrize(
    ("function", "code", "says"),
    [
        ("right", 0, "is right"),
        ("wrong", 1, "mean_of_means"),
        ("both", 1, "mean_of_means"),
        ("undecided", 2, "undecided"),
    ],
)
def test_codes(folder: Path, capsys: pytest.CaptureFixture[str], function, code, says) -> None:
    assert main([f"audited_loops:{function}"]) == code
    assert says in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argument", "says"),
    [
        ("audited_loops", "audited_loops must be package.module:function"),
        ("no_such_module:right", "no_such_module cannot be imported"),
        ("audited_loops:no_such", "audited_loops has no function no_such"),
        ("audited_loops:nothing", "must return what ib.audit(...) or ib.audit.watch(...) gave"),
    ],
)
def test_mistakes(folder: Path, capsys: pytest.CaptureFixture[str], argument, says) -> None:
    assert main([argument]) == 2
    assert says in capsys.readouterr().err


def test_as_json(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--json", "audited_loops:both"]) == 1
    right, wrong = json.loads(capsys.readouterr().out)
    assert right["ok"] and wrong["causes"][0]["code"] == "mean_of_means"


def test_from_a_shell(folder: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "infinitybatch", "audit", "audited_loops:wrong"],
        capture_output=True,
        text=True,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == 1, done.stderr
    assert "WRONG" in done.stdout
