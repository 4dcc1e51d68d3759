"""`python -m infinitybatch`: the command line, `audit`, and `train` with a model that Python makes.

`audit` runs here, and `--model package.module:factory` is trained here, by `infinitybatch.Trainer`;
everything else is the C++ program's.
"""

import os
import sys
from pathlib import Path


def _program() -> str:
    """The C++ command line: in the wheel, in a build, or on the path."""
    package = Path(__file__).parent  # of a build a folder of links, which are not followed
    for folder in (package / "bin", package.parent.parent / "bin"):
        if (folder / "infinitybatch").is_file():
            return str(folder / "infinitybatch")
    sys.exit(
        "infinitybatch: this installation has no command line; install the wheel, or build one: "
        "make build"
    )


def _makes_model_in_python(arguments: list[str]) -> bool:
    if arguments[:1] != ["train"]:
        return False
    after = dict(zip(arguments, [*arguments[1:], ""], strict=True))
    given = [after[name] for name in ("--model", "--resume") if name in after]
    given += [a.partition("=")[2] for a in arguments if a.startswith(("--model=", "--resume="))]
    return any(":" in value or value.endswith(".checkpoint.pt") for value in given)


def main() -> int:
    arguments = sys.argv[1:]
    if arguments[:1] == ["audit"]:
        from .audit.command import main as audit

        return audit(arguments[1:])
    if _makes_model_in_python(arguments):
        from ._command import run

        return run(arguments[1:])
    program = _program()
    os.execv(program, [program, *arguments])


if __name__ == "__main__":
    sys.exit(main())
