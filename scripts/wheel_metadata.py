"""Version and dependency of a wheel, from the torch that it is compiled against.

scikit-build-core calls `dynamic_metadata` (pyproject.toml). A compiled extension fits one minor
version of torch, so that a wheel for torch 2.13 is version 0.1.0+torch2.13 and depends on
torch==2.13.*: pip then chooses the wheel of the torch that it is told to keep.
"""

import importlib.metadata
import re
from pathlib import Path
from typing import Any


def project_version() -> str:
    text = (Path(__file__).parents[1] / "CMakeLists.txt").read_text()
    found = re.search(r"project\(infinitybatch VERSION ([0-9.]+)", text)
    if not found:
        raise RuntimeError("CMakeLists.txt has no project(infinitybatch VERSION ...)")
    return found.group(1)


def torch_minor() -> str:
    """ "2.13" of the torch in this environment."""
    try:
        version = importlib.metadata.version("torch")
    except importlib.metadata.PackageNotFoundError:
        raise RuntimeError(
            "infinitybatch is compiled against the torch of its environment, which has none: "
            "pip install torch==2.13.0, then pip install --no-build-isolation ."
        ) from None
    return ".".join(version.split("+")[0].split(".")[:2])


def dynamic_metadata(field: str, _settings: dict[str, Any]) -> str | list[str]:
    if field == "version":
        return f"{project_version()}+torch{torch_minor()}"
    if field == "dependencies":
        return [f"torch=={torch_minor()}.*"]
    raise RuntimeError(f"no metadata for {field}")
