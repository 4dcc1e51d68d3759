"""Runs benchmarks and writes dated results. See README.md beside this file.

    python benchmarks/run.py                    every suite, one thread and two
    python benchmarks/run.py time --threads 1   one of them

Each suite runs in processes of its own, one for each number of threads and each setting of malloc.
Results are written as they come: what is stopped early leaves what it has measured.
"""

import argparse
import datetime
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
MODULES = {
    "time": "time_to_native",
    "loop": "loop_cost",
    "trainer": "trainer_cost",
    "budget": "budget",
    "coupled": "coupled",
    "tape": "tape",
    "batchnorm": "whole_batch",
    "sample": "one_sample",
    "losses": "tiled_losses",
    "heads": "heads",
    "mnist": "data_set",
    "reach": "reach",
    "trainers": "trainers",
    "lengths": "lengths",
    "recompute": "kept_boundaries",
    "selective": "selective",
    "resident": "resident",
    "allocator": "allocator",
}
ROUNDS = {
    "time": 15,
    "loop": 100,
    "trainer": 20,
    "budget": 12,
    "coupled": 6,
    "tape": 200,
    "batchnorm": 15,
    "sample": 25,
    "losses": 5,
    "heads": 7,
    "mnist": 7,
    "reach": 1,
    "trainers": 1,
    "lengths": 10,
    "recompute": 5,
    "selective": 11,
    "resident": 1,
    "allocator": 4,
}
UNTUNED = {
    "time": 3,
    "loop": 0,
    "trainer": 0,
    "budget": 0,
    "coupled": 0,
    "tape": 0,
    "batchnorm": 0,
    "sample": 0,
    "losses": 0,
    "heads": 0,
    "mnist": 0,
    "reach": 0,
    "trainers": 0,
    "lengths": 0,
    "recompute": 0,
    "selective": 0,
    "resident": 0,
    "allocator": 0,
}  # rounds with malloc as it is by default
#: The peers of a suite, by the file beside peers/environment.py that lists them.
WITH_PEERS = dict.fromkeys(("loop", "coupled", "losses", "lengths"), "peers") | {
    "trainers": "trainers"
}
#: Processes for each setting, whose spread is shown: luck in where memory lies lasts for a process,
#: so many short processes tell more than few long ones.
PROCESSES = {"trainer": 5, "coupled": 5, "losses": 5, "heads": 5}
TOY_ROUNDS = 4
THREADS = [1, 2]
LOOK = 2.0  # seconds between looks at what a running suite has found


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("suites", nargs="*", metavar="suite", help=", ".join(MODULES))
    parser.add_argument("--threads", type=int, nargs="+", default=THREADS, metavar="N")
    parser.add_argument("--rounds", type=int, help="of each tuned run, in place of the suite's own")
    parser.add_argument(
        "--processes", type=int, help="for each setting, in place of the suite's own number"
    )
    parser.add_argument("--toy", action="store_true", help="sizes that only try the harness")
    parser.add_argument("--no-peers", action="store_true", help="install no other libraries")
    parser.add_argument("--output", type=Path, default=HERE / "results", metavar="FOLDER")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # settings as JSON; results to --output
    options = parser.parse_args(arguments)
    unknown = [suite for suite in options.suites if suite not in MODULES]
    if unknown:
        parser.error(f"no such suite: {', '.join(unknown)}; there are {', '.join(MODULES)}")
    options.suites = options.suites or list(MODULES)
    return options


def measure(suite: str, settings: Any, output: Path) -> None:
    """In a process of its own: runs one suite and leaves its findings as JSON, each time it has
    some more.
    """
    import torch
    from harness.results import Findings, to_json

    def save(findings: Findings) -> None:
        half_written = output.with_suffix(".part")
        half_written.write_text(to_json(findings))
        half_written.replace(output)

    torch.set_num_threads(settings.threads)
    module = importlib.import_module(f"suites.{MODULES[suite]}")
    save(module.run(settings, save))


def run_apart(
    suite: str, settings: Any, python: Path, on_more: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """`measure` in a process whose malloc is set as `settings` says.

    Args:
        on_more: called with the run as it stands each time there is more of it.
    """
    import dataclasses

    from harness.machine import BUSY, Bystanders, environment
    from harness.results import Findings

    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "findings.json")
        command = [str(python), str(HERE / "run.py"), suite, "--output", str(output)]
        command += ["--child", json.dumps(dataclasses.asdict(settings))]
        bystanders = Bystanders()
        start = time.monotonic()

        def so_far() -> dict[str, Any]:
            findings = Findings()
            if output.exists():
                findings = Findings.from_json(json.loads(output.read_text()))
            return {
                "setting": str(settings),
                "failed": True,  # until it has ended well
                "quiet": None,
                "others": bystanders.share(),
                "seconds": round(time.monotonic() - start),
                "findings": findings,
            }

        process = subprocess.Popen(command, env=environment(settings.malloc))
        seen = None
        try:
            while (code := wait(process, LOOK)) is None:
                changed = output.stat().st_mtime_ns if output.exists() else None
                if changed != seen:
                    seen = changed
                    unfinished = so_far()
                    unfinished["others"] = None  # a child's time counts as ours once it has ended
                    unfinished["findings"].notes.append("This run was not finished.")
                    on_more(unfinished)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        run = so_far()
    notes = run["findings"].notes
    run["quiet"] = run["others"] is not None and run["others"] <= BUSY
    if code:
        notes.append(f"This run failed (exit code {code}): what it had found till then.")
    run["failed"] = code != 0
    timed = getattr(importlib.import_module(f"suites.{MODULES[suite]}"), "TIMED", True)
    if timed and run["others"] is not None and run["others"] > BUSY:
        notes.append(
            f"Others used {run['others']:.2f} cores during this run: do not trust these times."
        )
    return run


def wait(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        return None


def settings_of(suite: str, options: argparse.Namespace) -> list[Any]:
    from harness.settings import Settings

    rounds = TOY_ROUNDS if options.toy else options.rounds or ROUNDS[suite]
    runs = [Settings(threads, "tuned", rounds, options.toy) for threads in options.threads]
    untuned = min(rounds, UNTUNED[suite])
    if untuned and not options.toy:
        runs += [Settings(threads, "untuned", untuned, options.toy) for threads in options.threads]
    return runs


def report_on(
    suite: str,
    options: argparse.Namespace,
    command: str,
    python: Path,
    reason: str,
    save: Callable[[dict[str, Any]], None],
    began: datetime.datetime,
) -> dict[str, Any]:
    """Runs a suite under each setting. `save` gets the report whenever there is more of it."""
    from harness.results import begin_report, between

    module = importlib.import_module(f"suites.{MODULES[suite]}")
    timed = getattr(module, "TIMED", True)
    report = begin_report(module.TITLE, module.EXPLANATION, began, command, timed)
    done: list[dict[str, Any]] = report["runs"]
    processes = options.processes or (1 if options.toy else PROCESSES.get(suite, 1))
    for settings in [each for each in settings_of(suite, options) for _ in range(processes)]:
        print(f"{suite}: {settings} ...", flush=True)
        run = run_apart(
            suite, settings, python, lambda more: save({**report, "runs": [*done, more]})
        )
        if reason and not done:
            run["findings"].notes.append(f"Peers: {reason}")
        done.append(run)
        report["between runs"] = between(done)
        save(report)
        print(f"{suite}: {settings} took {run['seconds']} s", flush=True)
    return report


def peers_python(options: argparse.Namespace, suite: str) -> tuple[Path, str]:
    """The interpreter for suites with peers, and why peers are missing where they are."""
    if options.no_peers:
        return Path(sys.executable), "--no-peers was given"
    from peers.environment import prepare

    listed = WITH_PEERS[suite]
    print(f"{suite}: peers/{listed}.txt goes into build/{listed}", flush=True)
    python, reason = prepare(HERE.parent / "build" / listed, listed)
    if python is None:
        print(f"{suite}: peers could not be installed, going on without them: {reason}", flush=True)
    return python or Path(sys.executable), reason


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.child:
        from harness.settings import Settings

        measure(options.suites[0], Settings(**json.loads(options.child)), options.output)
        return 0
    if importlib.util.find_spec("infinitybatch") is None:
        print(
            "error: infinitybatch is not importable; use make bench, or set PYTHONPATH to "
            "build/release/python",
            file=sys.stderr,
        )
        return 1
    from harness.results import write

    # Where the results went is nobody's business who reads them.
    hidden = {"--output", str(options.output)}
    kept = [argument for argument in arguments if argument not in hidden]
    command = " ".join(["python", "benchmarks/run.py", *kept])
    failed = False
    for suite in options.suites:
        python, reason = Path(sys.executable), ""
        if suite in WITH_PEERS:
            python, reason = peers_python(options, suite)
        began = datetime.datetime.now()
        name = f"{began:%Y-%m-%d-%H%M%S}-{suite}"
        if options.threads != THREADS:
            name += "-threads-" + "-".join(map(str, options.threads))
        name += "-toy" if options.toy else ""
        if (options.output / f"{name}.json").exists():
            raise FileExistsError(f"{name}.json: results are never overwritten")

        def save(report: dict[str, Any], name: str = name) -> list[Path]:
            return write(report, options.output, name)

        report = report_on(suite, options, command, python, reason, save, began)
        for path in save(report):
            print(f"{suite}: wrote {os.path.relpath(path)}", flush=True)
        failed = failed or any(run["failed"] for run in report["runs"])
        for run in report["runs"]:
            for goal in run["findings"].goals:
                sign = "met   " if goal.met else "MISSED"
                print(f"  {sign} {run['setting']}: {goal.promise}: {goal.measured}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
