"""Trains loops in every way and says what differs from the table of verdicts.

python tests/loops/run.py [loop ...]          # tell the verdicts of these loops, or of all
python tests/loops/run.py --write [loop ...]  # put them into the table
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import infinitybatch as ib  # noqa: E402
import torch  # noqa: E402

from loops import table  # noqa: E402
from loops.themes import every_loop  # noqa: E402
from loops.training import verdicts  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="put the verdicts into the table")
    parser.add_argument("names", nargs="*", help="loops; all by default")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    ib._C._assume_times((5e-3, 1e-3, 0.0))  # as in tests/conftest.py: no size hangs on a clock
    listed, loops = table.read(), every_loop()
    different = 0
    for name in arguments.names or loops:
        found = verdicts(loops[name])
        before = listed.get(name, {})
        for way, verdict in found.items():
            if not table.same(before.get(way, "not listed"), verdict):
                print(f"{name}, {way}: {verdict}; the table says {before.get(way, 'nothing')}")
                different += 1
        limit = ""
        if any(map(table.needs_limit, found.values())):
            limit = before.get("limit") or "?"
        listed[name] = {**found, "limit": limit}
    print(f"{different} verdicts differ from the table")
    if arguments.write:
        table.write({name: listed[name] for name in loops})
        return 0
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
