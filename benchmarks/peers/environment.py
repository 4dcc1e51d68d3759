"""Makes the environment in which peers are measured: theirs on top of the torch that runs ours."""

import hashlib
import importlib.metadata
import os
import subprocess
import sys
import venv
from pathlib import Path

HERE = Path(__file__).parent
LINES_OF_REASON = 6


def own_packages() -> list[str]:
    """Where this interpreter's packages are. Nested environments' .pth files are resolved already."""
    names = ("site-packages", "dist-packages")
    return [path for path in sys.path if Path(path).name in names]


def python_of(folder: Path) -> Path:
    return folder / ("Scripts" if os.name == "nt" else "bin") / "python"


def requirements(listed: str) -> list[Path]:
    """What pip installs with all that it needs, and what alone: its own needs name another torch."""
    files = [HERE / f"{listed}.txt", HERE / f"{listed}-alone.txt"]
    return [file for file in files if file.exists()]


def is_complete(python: Path, files: list[Path]) -> bool:
    """Whether all peers are there: some may have been the parent's, which is another one now."""
    lines = [line for file in files for line in file.read_text().splitlines()]
    names = [line.split("==")[0] for line in lines if "==" in line]
    ask = f"import importlib.metadata as m; [m.version(name) for name in {names}]"
    return subprocess.run([python, "-c", ask], capture_output=True).returncode == 0


def prepare(folder: Path, listed: str) -> tuple[Path | None, str]:
    """Installs what is missing.

    Args:
        listed: the name of a list of peers beside this file.

    Returns:
        The environment's interpreter and "", or None and the reason in one line.
    """
    files = requirements(listed)
    wanted = (
        "".join(file.read_text() for file in files)
        + importlib.metadata.version("torch")
        + sys.version
    )
    stamp = folder / ".installed"
    digest = hashlib.sha256(wanted.encode()).hexdigest()
    python = python_of(folder)
    done = python.exists() and stamp.exists() and stamp.read_text() == digest
    if done and is_complete(python, files):
        return python, ""
    try:
        venv.create(folder, with_pip=True, clear=True)
        ask = "import sysconfig; print(sysconfig.get_path('purelib'))"
        purelib = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=True)
        Path(purelib.stdout.strip(), "parent.pth").write_text("\n".join(own_packages()) + "\n")
        torch_stays = folder / "constraints.txt"
        torch_stays.write_text(f"torch=={importlib.metadata.version('torch').split('+')[0]}\n")
        install = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        for file, how in zip(files, (["-c", torch_stays], ["--no-deps"]), strict=False):
            subprocess.run([*install, *how, "-r", file], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        said = (getattr(error, "stderr", "") or str(error)).strip().splitlines()
        wrong = [line for line in said if line.startswith("ERROR")] or said
        return None, " ".join(wrong[-LINES_OF_REASON:])
    if not is_complete(python, files):
        return None, "pip installed them, and they are not there"
    stamp.write_text(digest)
    return python, ""
