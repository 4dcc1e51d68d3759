"""Runs one measurement of a suite in a process of its own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def apart(
    module: str, arguments: list[Any], malloc: Mapping[str, str], threads: int
) -> dict[str, Any]:
    """What `python -m module` prints as JSON in its last line, given the arguments as JSON.

    Args:
        malloc: malloc's settings; those of this process are not handed on.

    Raises:
        RuntimeError: where it fails, with the end of what it says.
    """
    kept = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-m", module, json.dumps(arguments)],
        env=kept | malloc | {"PYTHONPATH": path, "OMP_NUM_THREADS": str(threads)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    return json.loads(done.stdout.splitlines()[-1])
