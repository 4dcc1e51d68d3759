"""Runs that can be repeated."""

import os
import random
import secrets
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from .. import _checks
from ..errors import InvalidArgument

_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


class Determinism:
    """What `determinize` did. A context that ends with `undo()`.

    `seed` is the one that was used; `cannot` are sentences about what stays as it is.
    """

    seed: int
    cannot: tuple[str, ...]

    def __init__(self, seed: int, cannot: tuple[str, ...], undo: list[Callable[[], Any]]) -> None:
        self.seed = seed
        self.cannot = cannot
        self._undo = undo

    def undo(self) -> None:
        """Puts switches and random states back as they were before the call; once."""
        steps, self._undo = self._undo, []
        for step in reversed(steps):
            step()

    def __enter__(self) -> "Determinism":
        return self

    def __exit__(self, *args: object) -> None:
        self.undo()

    def __repr__(self) -> str:
        return f"Determinism(seed={self.seed})"


def determinize(
    seed: int | None = None, be_deterministic: bool = True, *, strict: bool = False
) -> Determinism:
    """Seeds Python's, NumPy's and torch's random numbers, and has torch repeat itself bit for bit.

    Args:
        seed: 0 to 2^63 - 1, of which torch's generator of the CPU reads 32 bits. None is 0, or
            without `be_deterministic` one that was never used before; the returned `seed` tells.
        be_deterministic: use deterministic algorithms (cuDNN's too); False lets torch choose the
            fastest.
        strict: an op without a deterministic implementation raises; otherwise torch warns.

    Returns:
        What was done, and what cannot be done (`cannot`); `undo()`, or leaving it as a context, puts
        everything back.

    Raises:
        InvalidArgument, InvalidType: a seed out of range, or none.

    Example:
        with tools.determinize(7):
            trainer(2)
    """
    wanted = _checks.optional_whole_number("seed", seed, "the seed")
    if wanted is not None and wanted < 0:
        raise InvalidArgument(f"seed is {wanted}; it is 0 to 2^63 - 1")
    deterministic = _checks.truth("be_deterministic", be_deterministic)
    is_strict = _checks.truth("strict", strict)
    if wanted is None:
        wanted = 0 if deterministic else secrets.randbits(63)
    undo: list[Callable[[], Any]] = []
    _switch(deterministic, is_strict, undo)
    _seed(wanted, undo)
    return Determinism(wanted, _cannot(deterministic, is_strict), undo)


def _switch(deterministic: bool, strict: bool, undo: list[Callable[[], Any]]) -> None:
    mode = torch.get_deterministic_debug_mode()
    undo.append(lambda: torch.set_deterministic_debug_mode(mode))
    cudnn = torch.backends.cudnn
    switches = (("deterministic", deterministic), ("benchmark", not deterministic))
    for name, value in () if torch.backends.flags_frozen() else switches:
        undo.append(partial(setattr, cudnn, name, getattr(cudnn, name)))
        setattr(cudnn, name, value)
    torch.use_deterministic_algorithms(deterministic, warn_only=not strict)
    if deterministic and _WORKSPACE not in os.environ:
        os.environ[_WORKSPACE] = ":4096:8"  # read when cuBLAS makes its handle
        undo.append(lambda: os.environ.pop(_WORKSPACE, None))


def _seed(seed: int, undo: list[Callable[[], Any]]) -> None:
    python = random.getstate()
    undo.append(lambda: random.setstate(python))
    random.seed(seed)
    if find_spec("numpy"):
        import numpy

        legacy = numpy.random.get_state()
        undo.append(lambda: numpy.random.set_state(legacy))
        numpy.random.seed(seed if seed < 2**32 else [seed % 2**32, seed >> 32])
    torch_state = torch.get_rng_state()
    undo.append(lambda: torch.set_rng_state(torch_state))
    if torch.accelerator.is_available():
        module = torch.get_device_module()
        if module.is_initialized():  # otherwise its generators have no state to go back to
            for index in range(torch.accelerator.device_count()):
                device = torch.device(torch.accelerator.current_accelerator().type, index)  # type: ignore[union-attr]
                undo.append(partial(module.set_rng_state, module.get_rng_state(device), device))
    torch.manual_seed(seed)  # all devices


def _cannot(deterministic: bool, strict: bool) -> tuple[str, ...]:
    found = [
        "Generators of your own (torch.Generator, numpy.random.default_rng) keep their state.",
        "Another number of threads, device or version of torch rounds otherwise.",
    ]
    if deterministic and not strict:
        found.append("Ops without a deterministic implementation warn and run: strict=True raises.")
    if torch.backends.flags_frozen():
        found.append("cuDNN's switches: torch.backends.disable_global_flags() was called.")
    if deterministic and torch.cuda.is_available() and torch.cuda.is_initialized():
        found.append(f"cuBLAS may have read {_WORKSPACE} already: call determinize first.")
    if sys.flags.hash_randomization:
        found.append("Sets of strings change their order from run to run: set PYTHONHASHSEED=0.")
    return tuple(found)
