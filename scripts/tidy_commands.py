"""Writes a compilation database for clang-tidy: ours without what only g++ understands.

tidy_commands.py build/release/compile_commands.json build/tidy/compile_commands.json
"""

import json
import re
import sys
from pathlib import Path

GCC_ONLY = re.compile(
    r" -Winvalid-pch| -include \S*cmake_pch\S*| -fpch-preprocess| -Werror=invalid-pch"
    r"| -Wno-stringop-overflow| -Wno-restrict"
)
LAUNCHER = re.compile(r"^\S*cmake -E env \S+ \S*ccache ")


def files_of(compiled: str) -> list[str]:
    """The files that CMake compiles as one (INFINITYBATCH_UNITY), or this one alone."""
    if "/Unity/unity_" not in compiled:
        return [compiled]
    return re.findall(r'#include "(.+)"', Path(compiled).read_text())


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    entries = []
    for entry in json.loads(source.read_text()):
        if "cmake_pch" in entry["file"]:
            continue
        command = GCC_ONLY.sub("", LAUNCHER.sub("", entry["command"]))
        for file in files_of(entry["file"]):
            one = command.replace(entry["file"], file)
            entries.append({"directory": entry["directory"], "command": one, "file": file})
    target.write_text(json.dumps(entries, indent=1))


if __name__ == "__main__":
    main()
