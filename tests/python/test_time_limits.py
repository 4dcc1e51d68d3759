"""A test that hangs ends, whoever runs it."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_test_that_hangs_ends_with_where_it_stood(tmp_path: Path) -> None:
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    assert 0 < float(options["faulthandler_timeout"]) < 600
    hangs = tmp_path / "test_hangs.py"
    hangs.write_text("import time\n\ndef test_hangs():\n    time.sleep(600)\n")
    command = [sys.executable, "-m", "pytest", "-c", str(ROOT / "pyproject.toml"), str(hangs)]
    command += [
        "--rootdir",
        str(tmp_path),
        "-p",
        "no:cacheprovider",
        "-o",
        "faulthandler_timeout=1",
    ]
    done = subprocess.run(
        command, cwd=tmp_path, env=dict(os.environ), capture_output=True, text=True, timeout=120
    )
    assert done.returncode != 0
    assert "Timeout" in done.stderr and "in test_hangs" in done.stderr
