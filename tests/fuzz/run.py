"""Runs random programs beside native, and prints what is found, minimised, as scripts.

python tests/fuzz/run.py --seeds 0:1000
python tests/fuzz/run.py --seeds 17:18 --script   # a case as a script, whatever it does
python tests/fuzz/run.py --known                  # whether known failures still fail
"""

import argparse
import collections
import faulthandler
import json
import pathlib
import sys
import time

TESTS = pathlib.Path(__file__).parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "sim")]

import torch  # noqa: E402
from chosen import choose  # noqa: E402

from fuzz.case import Case  # noqa: E402
from fuzz.found import Outcome  # noqa: E402
from fuzz.known import KNOWN, known  # noqa: E402
from fuzz.minimise import minimised  # noqa: E402
from fuzz.schedules import KINDS, tried  # noqa: E402
from fuzz.script import script_of  # noqa: E402

#: No program takes nearly as long, unless a step of it begins again for ever.
SECONDS = 120


def report(case: Case, outcome: Outcome, minimise: bool, folder: str | None) -> None:
    first = case
    if minimise:
        case, outcome = minimised(case, outcome)
    text = f"seed {case.seed}: {outcome.signature}\n{case}\n{outcome.text[:600]}"
    script = script_of(case, text)
    print(script if folder is None else text + "\n", flush=True)
    if folder is not None:
        place = pathlib.Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{case.seed}.py").write_text(script)
        with (place / "found.jsonl").open("a") as log:
            print(
                json.dumps(
                    {
                        "seed": case.seed,
                        "signature": outcome.signature,
                        "case": str(case),
                        "first": str(first),
                        "text": outcome.text[:600],
                    }
                ),
                file=log,
            )


def still_known() -> int:
    """1 where a known failure passes, so that it has to leave the list."""
    gone = 0
    for each in KNOWN:
        for seed in each.seeds:
            case, outcome = tried(each.kind, seed)
            fails = outcome.kind == "finding" and known(case, outcome) is each
            gone |= not fails
            print(f"{'still fails' if fails else 'PASSES NOW'}: seed {seed}: {each.reason}")
    return int(gone)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seeds", default="0:200", help="from and up to, without the last")
    parser.add_argument("--kind", default="any", choices=KINDS, help="of programs")
    parser.add_argument("--device", default="cpu", help="cpu, sim (a simulated accelerator), cuda")
    parser.add_argument("--script", action="store_true", help="print the cases, run none")
    parser.add_argument("--known", action="store_true", help="run the known failures alone")
    parser.add_argument("--as-is", action="store_true", help="do not minimise")
    parser.add_argument("--folder", help="where scripts go, in place of being printed")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.device != "cpu":
        choose(options.device, real=options.device != "sim")
    if options.known:
        return still_known()
    begin, end = map(int, options.seeds.split(":"))
    if options.script:
        for seed in range(begin, end):
            case = KINDS[options.kind](seed)
            print(script_of(case, str(case)))
        return 0
    kinds: collections.Counter[str] = collections.Counter()
    schedules: collections.Counter[str] = collections.Counter()
    since = time.perf_counter()
    for seed in range(begin, end):
        print(f"\rseed {seed} ", end="", file=sys.stderr, flush=True)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        case, outcome = tried(options.kind, seed)
        faulthandler.cancel_dump_traceback_later()
        schedules.update(outcome.schedules)
        kind = outcome.kind
        if kind == "finding" and (reason := known(case, outcome)) is not None:
            kind = f"known: {reason.reason}"
        elif kind == "finding":
            report(case, outcome, not options.as_is, options.folder)
        elif kind == "invalid":
            kind = f"invalid: {outcome.signature}"
        kinds[kind] += 1
    for kind, count in sorted(kinds.items()):
        print(f"{count:6}  {kind}")
    for name, count in sorted(schedules.items()):
        print(f"{count:6}  exact with the schedule {name!r}")
    print(f"{end - begin} seeds in {time.perf_counter() - since:.1f} s")
    return int(kinds["finding"] > 0)


if __name__ == "__main__":
    sys.exit(main())
