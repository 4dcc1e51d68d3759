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


def main() -> None:
    source, target = Path(sys.argv[1]), Path(sys.argv[2])
    entries = []
    for entry in json.loads(source.read_text()):
        if "cmake_pch" in entry["file"]:
            continue
        entry["command"] = GCC_ONLY.sub("", LAUNCHER.sub("", entry["command"]))
        entries.append(entry)
    target.write_text(json.dumps(entries, indent=1))


if __name__ == "__main__":
    main()
