"""scripts/setup.sh says what it will do before it does it, and does only what is needed."""

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TORCH = Path(find_spec("torch").origin).parent


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A copy of what set-up needs, without a .venv."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    for name in ("requirements-dev.txt", "requirements-loops.txt"):
        shutil.copy(ROOT / name, tmp_path)
    return tmp_path


@pytest.fixture
def bare_python(tmp_path) -> str:
    """An interpreter that sees no torch."""
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True, env=clean()
    )
    return str(tmp_path / "bare" / "bin" / "python")


def clean(**extra: str) -> dict[str, str]:
    hidden = ("PYTHONPATH", "PYTHON", "TORCH", "TORCH_ROOT", "PIP_ARGS", "VIRTUAL_ENV")
    return {k: v for k, v in os.environ.items() if k not in hidden} | extra


def dry_run(checkout: Path, ok: bool = True, **settings: str) -> str:
    done = subprocess.run(
        ["bash", checkout / "scripts" / "setup.sh", "--dry-run"],
        capture_output=True,
        text=True,
        env=clean(**settings),
        check=False,
    )
    assert (done.returncode == 0) == ok, done.stdout + done.stderr
    assert not (checkout / ".venv").exists(), "a dry run changed something"
    return done.stdout + done.stderr


def test_without_torch_the_pinned_one_is_named_with_its_size(checkout, bare_python):
    said = dry_run(checkout, PYTHON=bare_python)
    assert "torch==2.13.0" in said
    assert "2.7 GB" in said


def test_torch_of_the_interpreter_is_reused(checkout):
    said = dry_run(checkout, PYTHON=sys.executable)
    assert f"{TORCH.parent} is reused" in said
    assert "2.7 GB" not in said


def test_torch_root_is_reused(checkout, bare_python):
    said = dry_run(checkout, PYTHON=bare_python, TORCH_ROOT=str(TORCH))
    assert f"{TORCH.parent.resolve()} is reused" in said


def test_an_active_venv_of_ours_is_not_made_from_itself(checkout):
    python = checkout / ".venv" / "bin" / "python"
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", checkout / ".venv"], check=True, env=clean()
    )
    (checkout / ".venv" / ".infinitybatch-setup").write_text(f"reuse {TORCH.parent}\n")
    done = subprocess.run(
        ["bash", checkout / "scripts" / "setup.sh", "--dry-run"],
        capture_output=True,
        text=True,
        env=clean(PATH=f"{python.parent}:{os.environ['PATH']}"),
        check=True,
    )
    assert f"{TORCH.parent} is reused" in done.stdout
    assert str(python) not in done.stdout


def test_a_wished_torch_is_installed_even_where_one_is_there(checkout):
    said = dry_run(checkout, PYTHON=sys.executable, TORCH="torch==2.12.0")
    assert "pip installs 'torch==2.12.0'" in said
    assert "reused, nothing" not in said


def test_missing_system_packages_are_named(checkout, tmp_path, bare_python):
    # A compiler that finds no header, as on a machine without the libraries.
    (tmp_path / "bin").mkdir()
    compiler = tmp_path / "bin" / "c++"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o755)
    said = dry_run(checkout, PYTHON=bare_python, PATH=f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    assert "apt-get" in said
    for name in (
        "libcli11-dev",
        "libgtest-dev",
        "libminizip-dev",
        "libstb-dev",
        "nlohmann-json3-dev",
    ):
        assert name in said
    assert "cmake" not in said.split("apt-get")[1].splitlines()[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"PYTHON": "/no/such/python"}, "no such program"),
        ({"TORCH_ROOT": "/"}, "not an installed torch package"),
    ],
)
def test_wrong_settings_are_errors(checkout, settings, message):
    assert message in dry_run(checkout, ok=False, **settings)


def test_the_old_interpreter_is_refused(checkout, tmp_path):
    old = tmp_path / "python3.10"
    old.write_text("#!/bin/sh\nexit 1\n")  # what the version check of an old one does
    old.chmod(0o755)
    assert "not Python 3.11 or newer" in dry_run(checkout, ok=False, PYTHON=str(old))
