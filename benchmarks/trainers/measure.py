"""Measures the rows of some modules, in a process of its own: trainers change what is global to it.

python -m trainers.measure loops          prints the figures of its rows as JSON, on its last line
"""

import importlib
import importlib.metadata
import importlib.util
import json
import sys
from typing import Any

import torch

from .cases import CASES

#: In the page's order.
MODULES = ("by_hand", "loops", "hugging_face", "keras_fit", "splitting", "caches", "ours")


def figures(module: str) -> list[dict[str, Any]]:
    """A figure for each row and column; one "not installed" for a row whose packages are missing."""
    found = []
    for row in importlib.import_module(f".{module}", __package__).ROWS:
        try:
            row.versions()
        except importlib.metadata.PackageNotFoundError as error:
            found.append({"contestant": row.peer, "not installed": error.name})
        else:
            found += [row.figure(column) for column in CASES]
    return found


def import_torchvision() -> torch.library.Library | None:
    """Composer needs torchvision, others import it where it is there. Its wheel on PyPI may have been
    compiled for another build of this torch: then its operators, which no model here uses, are
    declared, so that it can be imported. They last as long as what is returned."""
    if importlib.util.find_spec("torchvision") is None:
        return None
    try:
        importlib.import_module("torchvision")
    except RuntimeError:
        library = torch.library.Library("torchvision", "DEF")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float threshold) -> Tensor")
        importlib.import_module("torchvision")
        return library
    return None


if __name__ == "__main__":
    operators = import_torchvision()
    print(json.dumps(figures(sys.argv[1])))
