"""Builds a wheel for each torch and Python, and tests each in an environment of its own.

    python scripts/wheels.py [PYTHON=TORCH ...] [--tests FILE ...] [--environments DIR] [--discard]

    python scripts/wheels.py                                   # every Python and torch that is supported
    python scripts/wheels.py python3.12=2.12.1 --tests tests/python/test_wrap.py

For each pair it makes an environment with that torch (PIP_ARGS goes to pip: an index of CPU builds
saves gigabytes), compiles the wheel into dist/, installs it there and runs the tests against what
was installed, not against the checkout. How long each took and what the
tests said goes to tests/results/DATE-TIME-wheels.md. The exit status is 1 where a wheel fails.
"""

import argparse
import datetime
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("python3.11", "python3.12", "python3.13")
TORCHES = ("2.11.0", "2.12.1", "2.13.0")
NOT_OF_A_WHEEL = (  # they test a checkout, or with libraries that only its build makes
    "--ignore=tests/python/test_packaging.py",
    "--ignore=tests/python/test_setup.py",
    "--ignore=tests/python/test_documents.py",
    "--ignore=tests/python/test_failing_kernels.py",
    "--deselect=tests/python/command_line/test_own_networks.py::test_a_shared_library_trains_to_the_bits_of_the_same_network_inside",
    "--deselect=tests/python/command_line/test_own_networks.py::test_a_shared_library_goes_on_and_is_planned_for",
)


@dataclass
class Result:
    python: str
    torch: str
    wheel: str
    seconds: float
    tests: str
    passed: bool


def run(*command: str | Path, **settings: str) -> None:
    subprocess.run([str(word) for word in command], check=True, cwd=ROOT, env=os.environ | settings)


def environment(folder: Path, python: str) -> Path:
    """Its interpreter."""
    if not (folder / "bin" / "python").exists():
        run(python, "-m", "venv", folder)
    return folder / "bin" / "python"


def pip(python: Path, *arguments: str | Path) -> None:
    run(python, "-m", "pip", "install", "-q", "--disable-pip-version-check",
        *shlex.split(os.environ.get("PIP_ARGS", "")), *arguments)  # fmt: skip


def build(python: Path, torch: str) -> tuple[Path, float]:
    """The wheel and the seconds that compiling it took."""
    pip(python, f"torch=={torch}", "scikit-build-core", "ninja")
    out = ROOT / "build" / "wheels" / "new"
    shutil.rmtree(out, ignore_errors=True)
    begin = time.monotonic()
    run(
        python, "-m", "pip", "wheel", ROOT, "-q", "--no-build-isolation", "--no-deps",
        "--wheel-dir", out, f"--config-settings=build-dir={python.parents[1]}-build",
    )  # fmt: skip
    seconds = time.monotonic() - begin
    (wheel,) = out.glob("*.whl")
    (ROOT / "dist").mkdir(exist_ok=True)
    return Path(shutil.move(wheel, ROOT / "dist" / wheel.name)), seconds


def test(python: Path, wheel: Path, files: list[str]) -> tuple[str, bool]:
    """What pytest's last line says of the installed wheel, and whether all is well."""
    pip(python, "--force-reinstall", "--no-deps", wheel)
    for requirements in ("requirements-dev.txt", "requirements-loops.txt"):
        pip(python, "-r", ROOT / requirements)
    settings = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "INFINITYBATCH_BUILD_DIR", "INFINITYBATCH_CLI")
    }
    settings["INFINITYBATCH_CLI"] = str(python.parent / "infinitybatch")
    settings["OMP_WAIT_POLICY"] = "passive"
    command = [python, "-m", "pytest", "-q", "-n", "auto", "--dist", "loadfile", "-m", "not alone"]
    done = subprocess.run(
        [str(word) for word in (*command, *NOT_OF_A_WHEEL, *(files or ["tests/python", "tests/fuzz"]))],
        cwd=ROOT, env=settings, capture_output=True, text=True, check=False,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    print("\n".join(line for line in lines if line.startswith(("FAILED", "ERROR"))) or lines[-1])
    return re.sub(r"^=+ | =+$", "", lines[-1]), done.returncode == 0


def page(results: list[Result], arguments: list[str]) -> str:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    failed = [result.wheel for result in results if not result.passed]
    rows = [
        f"| {r.python} | {r.torch} | `{r.wheel}` | {r.seconds:.0f} | {r.tests} |" for r in results
    ]
    return "\n".join((
        f"# `make wheels`, {datetime.date.today()}", "",
        "| | |", "|---|---|",
        f"| Command | `make wheels` with `WHEELS=\"{shlex.join(arguments)}\"` |",
        f"| Commit | {commit} |",
        f"| Machine | {platform.machine()}, {os.cpu_count()} cores, {platform.system()} |",
        f"| Tests that failed | {', '.join(failed) or 'of no wheel'} |",
        "| Skipped | as many as each row says; `pytest -rs` says why |", "",
        "| Python | torch | wheel | seconds to build | tests of the installed wheel |",
        "|---|---|---|---|---|", *rows, "",
    ))  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pairs", nargs="*", metavar="PYTHON=TORCH")
    parser.add_argument("--tests", nargs="*", default=[], metavar="FILE", help="instead of all")
    parser.add_argument(
        "--environments", type=Path, default=ROOT / "build" / "wheels", help="where they are kept"
    )
    parser.add_argument(
        "--discard", action="store_true", help="each environment once tested: one takes 1 to 7 GB"
    )
    arguments = parser.parse_args()
    began = datetime.datetime.now()
    pairs = [pair.split("=", 1) for pair in arguments.pairs]
    if any(len(pair) != 2 for pair in pairs):
        parser.error("a pair is PYTHON=TORCH, as python3.12=2.12.1")
    if not pairs:
        missing = [python for python in PYTHONS if not shutil.which(python)]
        if missing:
            print(f"not on PATH, left out: {', '.join(missing)}", file=sys.stderr)
        pairs = [[p, torch] for p in PYTHONS if p not in missing for torch in TORCHES]
    results = []
    for python, torch in pairs:
        print(f"==> {python}, torch {torch}", flush=True)
        folder = arguments.environments.resolve() / f"{Path(python).name}-torch{torch}"
        interpreter = environment(folder, python)
        wheel, seconds = build(interpreter, torch)
        said, passed = test(interpreter, wheel, arguments.tests)
        if arguments.discard:
            shutil.rmtree(folder)
            shutil.rmtree(f"{folder}-build")
        results.append(Result(Path(python).name, torch, wheel.name, seconds, said, passed))
    out = ROOT / "tests" / "results" / f"{began:%Y-%m-%d-%H%M}-wheels.md"
    shown = sys.argv[1:]
    if "--environments" in shown:  # a place of this machine
        place = shown.index("--environments")
        del shown[place : place + 2]
    out.write_text(page(results, shown))
    print(out.read_text())
    return 0 if all(result.passed for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
