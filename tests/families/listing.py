"""Runs networks that nobody here wrote, one by one, and holds what comes out against a list."""

import argparse
import json
import pathlib
from collections.abc import Callable, Iterable

import torch
from torch import nn


def without_chance(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """In training mode and float64, with the probabilities in attributes of these names at 0."""
    for module in model.modules():
        for name in names:
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model.double().train()


def run_listed(
    results: pathlib.Path,
    every: Callable[[], Iterable[str]],
    outcome: Callable[[str], dict[str, str]],
    left_out: Callable[[str], str | None] = lambda name: None,
) -> int:
    """The command of a list: the networks named, or all, compared with it or, by --write, put there.

    Args:
        results: the list, as JSON.
        every: the names of all networks.
        outcome: what the list says of one.
        left_out: why one cannot be run here; its place in the list stays as it is.

    Returns:
        1 where an outcome is not as listed.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    listed = json.loads(results.read_text()) if results.exists() else {}
    found = {}
    for name in options.names or every():
        if why := left_out(name):
            print(f"{name}: left as listed, {why}")
            continue
        found[name] = outcome(name)
        print(f"{name}: {found[name]}", flush=True)
        if options.write:
            merged = dict(sorted({**listed, **found}.items()))
            results.write_text(json.dumps(merged, indent=1) + "\n")
    for strategy in ("streaming", "wrap"):
        count = sum(result.get(strategy) == "exact" for result in found.values())
        print(f"{strategy}: exact in {count} of {len(found)}")
    changed = {name: result for name, result in found.items() if listed.get(name) != result}
    print("not as listed:", changed or "none")
    return 1 if changed and not options.write else 0
