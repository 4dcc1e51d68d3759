"""Refuses a torch whose binary interface is not the one that this package was compiled against.

Must be imported before the extension module: with another minor version of torch, loading that ends
in a missing symbol at best. `_build.py` is written by CMake and says what was compiled against.
"""

import torch

from ._build import TORCH_VERSION


def _minor(version: str) -> str:
    """ "2.13" of "2.13.0+cpu"."""
    return ".".join(version.split("+")[0].split(".")[:2])


def check(installed: str, built: str = TORCH_VERSION) -> None:
    """Raises ImportError if `installed` and `built` differ in their minor version."""
    if _minor(installed) != _minor(built):
        raise ImportError(
            f"infinitybatch was compiled against torch {built}, but torch {installed} is installed. "
            f"Either install the torch that it was made for (pip install 'torch=={_minor(built)}.*') "
            f"or compile infinitybatch against yours (pip install --no-build-isolation "
            f"--force-reinstall --no-deps infinitybatch, or make build in a checkout)."
        )


check(torch.__version__)
