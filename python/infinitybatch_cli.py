"""The console script `infinitybatch` of the wheel: starts the C++ command line.

A module of its own, outside the package, because importing the package imports torch, which takes
seconds that `infinitybatch --help` need not wait for.
"""

import os
import sys
from importlib.util import find_spec
from pathlib import Path


def _folder(package: str) -> Path | None:
    """The folder of `package`, without importing it."""
    spec = find_spec(package)
    return Path(spec.origin).parent if spec and spec.origin else None


def main() -> None:
    package = _folder("infinitybatch")
    binary = package / "bin" / "infinitybatch" if package else None
    if binary is None or not binary.exists():
        sys.exit(
            "error: this installation of infinitybatch has no command line. Install the wheel, or "
            "run build/release/bin/infinitybatch in a checkout."
        )
    torch = _folder("torch")
    if torch is None:
        sys.exit(
            "error: torch is not installed in this environment. Run: pip install torch==2.13.0"
        )
    if torch.parent != package.parent:
        # The binary looks for torch beside its own package; it may be in another folder of sys.path.
        paths = [str(torch / "lib"), os.environ.get("LD_LIBRARY_PATH", "")]
        os.environ["LD_LIBRARY_PATH"] = os.pathsep.join(path for path in paths if path)
    os.execv(binary, [str(binary), *sys.argv[1:]])


if __name__ == "__main__":
    main()
