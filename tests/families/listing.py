"""Runs networks that nobody here wrote, one by one, and holds what comes out against a list."""

import argparse
import datetime
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

#: What a network's outcome by each strategy has to be.
GOOD = {"tape": "replays", "streaming": "exact", "wrap": "exact"}


def without_chance(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """In training mode and float64, with the probabilities in attributes of these names at 0."""
    for module in model.modules():
        for name in names:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model.double().train()


def read(results: pathlib.Path) -> dict[str, Any]:
    """The list: its runs, and the outcome of each network."""
    if not results.exists():
        return {"runs": [], "networks": {}}
    return json.loads(results.read_text())


def this_run(names: list[str], versions: dict[str, str]) -> dict[str, Any]:
    """What a reader needs to judge it. Networks' outcomes are of the latest run that names them."""
    ask = ["git", "-C", str(pathlib.Path(__file__).parent), "describe", "--always", "--dirty"]
    commit = subprocess.run(ask, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit or "unknown",
        "command": " ".join(["python", f"tests/families/{pathlib.Path(sys.argv[0]).name}", "--write", *names]),
        "versions": {"torch": torch.__version__, **versions},
        "names": names or "all",
    }  # fmt: skip


def plain(outcome: Any) -> str:
    """Without figures of roundings, which are another machine's elsewhere."""
    return re.sub(r"\d[\d.]*e-\d+", "…", json.dumps(outcome))


def differs(listed: dict[str, str], found: dict[str, str]) -> bool:
    """Whether something is not as listed, but for what is good now and was not."""
    good = tuple(strategy for strategy, wanted in GOOD.items() if found.get(strategy) == wanted)
    return any(
        plain(listed.get(key)) != plain(found.get(key))
        for key in listed.keys() | found.keys()
        if not key.startswith(good)
    )


def run_listed(
    results: pathlib.Path,
    every: Callable[[], Iterable[str]],
    outcome: Callable[[str], dict[str, str]],
    left_out: Callable[[str], str | None] = lambda name: None,
    versions: dict[str, str] | None = None,
) -> int:
    """The command of a list: the networks named, or all, compared with it or, by --write, put there.

    Args:
        results: the list, as JSON.
        every: the names of all networks.
        outcome: what the list says of one.
        left_out: why one cannot be run here; its place in the list stays as it is.
        versions: of the packages that the networks come from.

    Returns:
        1 where an outcome is not as listed.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    listed = read(results)
    about = this_run(options.names, versions or {})
    found = {}
    for name in options.names or every():
        if why := left_out(name):
            print(f"{name}: left as listed, {why}")
            continue
        found[name] = outcome(name)
        print(f"{name}: {found[name]}", flush=True)
        if options.write:
            merged = dict(sorted({**listed["networks"], **found}.items()))
            # Of the runs before it those stay whose outcomes are still listed.
            runs = [
                run for run in listed["runs"] if options.names and run["names"] != about["names"]
            ]
            text = json.dumps({"runs": [*runs, about], "networks": merged}, indent=1)
            results.write_text(text + "\n")
    for strategy, good in GOOD.items():
        count = sum(result.get(strategy) == good for result in found.values())
        print(f"{strategy}: {good} in {count} of {len(found)}")
    known = listed["networks"]
    changed = {n: result for n, result in found.items() if differs(known.get(n, {}), result)}
    print("not as listed:", changed or "none")
    return 1 if changed and not options.write else 0
