"""What the command line's messages say to do is done, on the case that provokes them, and succeeds.
tests/python/test_followed_messages.py asks that every message is followed or says why not."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line_tools import OK, ROOT
from command_line_tools import run as program
from followed_commands import OF_PYTHON, PROGRAM, PYTHON, files
from infinitybatch._command import run

sys.path.insert(0, str(ROOT / "scripts"))

import error_messages  # noqa: E402

MESSAGES = error_messages.messages(ROOT)


@pytest.fixture(scope="module")
def filled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("filled")
    files(folder)
    return folder


@pytest.fixture(scope="module")
def done(filled: Path) -> Path:
    """With a training of one epoch in it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(filled)
        patch.syspath_prepend(str(filled))
        patch.delitem(sys.modules, "own_nets", raising=False)
        assert run([*OF_PYTHON, "--checkpoint-every", "1", "--save", "done.pt"]) == 0
    return filled


@pytest.fixture
def folder(done: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a case changes in it (unpacks, say) no other case reads."""
    monkeypatch.chdir(done)
    monkeypatch.syspath_prepend(str(done))
    monkeypatch.delitem(sys.modules, "own_nets", raising=False)
    return done


def follow(part: str, wrong: Any, right: Any, call: Callable[[Any], tuple[int, str]]) -> None:
    code, text = call(wrong)
    assert code in (1, 2, 3), text
    assert any(m.says(text.splitlines()[-1]) for m in MESSAGES if part in m.text), text
    for arguments in right if any(type(r) is tuple for r in right) else (right,):
        if isinstance(arguments, str):
            subprocess.run(arguments, shell=True, check=True)
            continue
        code, text = call(arguments)
        assert code == OK, text


def names(cases: list[Any]) -> list[str]:
    return [re.sub(r"\W+", " ", case[0])[:50] for case in cases]


@pytest.mark.parametrize(("part", "wrong", "right"), PYTHON, ids=names(PYTHON))
def test_a_message_of_python(
    part: str, wrong: Any, right: Any, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def call(arguments: tuple[str, ...]) -> tuple[int, str]:
        torch.manual_seed(0)
        try:
            code = run(list(arguments))
        except SystemExit as end:
            code = int(end.code or 0)
        return code, capsys.readouterr().err

    follow(part, wrong, right, call)


@pytest.mark.parametrize(("part", "wrong", "right"), PROGRAM, ids=names(PROGRAM))
def test_a_message_of_the_program(part: str, wrong: Any, right: Any, folder: Path) -> None:
    def call(arguments: tuple[str, ...]) -> tuple[int, str]:
        result = program(*arguments, cwd=folder)
        return result.returncode, result.stderr

    follow(part, wrong, right, call)
