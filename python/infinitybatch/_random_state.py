"""The state of every default random generator, as values that torch.load reads with weights only."""

import random
import sys
from typing import Any

import torch

from . import _C

State = dict[str, Any]


def capture() -> State:
    """Of torch on the host and on accelerators that are in use, of Python, and of NumPy."""
    state: State = {"torch": torch.get_rng_state(), "python": random.getstate()}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        state["numpy"] = (name, torch.from_numpy(keys.astype("int64")), *rest)
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


class Snapshot:
    """The same, where it is seldom asked for: taking the values of a state, 1,250 numbers of Python
    and NumPy, takes fifty times as long as keeping it as it lies in memory."""

    def __init__(self) -> None:
        self._with_numpy = "numpy" in sys.modules
        self._with_cuda = torch.cuda.is_initialized()
        count = torch.cuda.device_count() if self._with_cuda else 0
        self._kept = _C.RandomSnapshot([torch.device("cuda", index) for index in range(count)])

    def restore(self) -> None:
        self._kept.restore()

    def values(self) -> State:
        """What `capture` would have given. Generators tell their own state alone, so they take this
        one for a moment."""
        now = Snapshot()
        self.restore()
        try:
            state = capture()
        finally:
            now.restore()
        if not self._with_numpy:
            state.pop("numpy", None)
        if not self._with_cuda:
            state.pop("cuda", None)
        return state


def values(state: State | Snapshot | None) -> State | None:
    """As `state_dict` keeps it."""
    return state.values() if isinstance(state, Snapshot) else state


def restore(state: State | Snapshot) -> None:
    if isinstance(state, Snapshot):
        state.restore()
        return
    torch.set_rng_state(state["torch"])
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        name, keys, *rest = state["numpy"]
        numpy.random.set_state((name, keys.numpy().astype("uint32"), *rest))
    if "cuda" in state and torch.cuda.is_available():
        # Another machine may have fewer devices.
        for device, own in zip(range(torch.cuda.device_count()), state["cuda"], strict=False):
            torch.cuda.set_rng_state(own, device)
