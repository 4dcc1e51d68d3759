"""A made-up accelerator with two devices: "sim:0" and "sim:1".

Importing this module registers it with torch. The compiled half is in the .cpp files beside it.
"""

import contextlib
import ctypes
import os
import pathlib
import types
from collections.abc import Iterator

import pytest
import torch

_root = pathlib.Path(__file__).parents[2]
_build = pathlib.Path(os.environ.get("INFINITYBATCH_BUILD_DIR", _root / "build" / "release"))
_library = os.environ.get("INFINITYBATCH_SIM", _build / "lib" / "libinfinitybatch_sim.so")

_sim = ctypes.CDLL(str(_library))
_sim.sim_set.argtypes = [ctypes.c_char_p, ctypes.c_int64]
for _name in ("sim_races", "sim_syncs"):
    getattr(_sim, _name).argtypes = [ctypes.c_char_p, ctypes.c_int64]
    getattr(_sim, _name).restype = ctypes.c_int64
_sim.sim_live_blocks.restype = ctypes.c_int64

DEFAULTS = {
    "capacity": 1 << 30,
    "rounding": 1,
    "fail_after": -1,
    "blas_workspace": 0,
    "conv_workspaces": 0,
    "atomics": 0,
}


def _text(function) -> list[str]:
    buffer = ctypes.create_string_buffer(1 << 14)
    function(buffer, len(buffer) - 1)
    return buffer.value.decode().splitlines()


def races() -> list[str]:
    """What another order of the device's work could have made wrong, since `reset`."""
    return _text(_sim.sim_races)


def syncs() -> dict[str, int]:
    """How often the host waited for the device since `reset`, by cause. Those of threads that only
    copy ("side stream") are among them."""
    return {kind: int(count) for kind, count in (line.split("=") for line in _text(_sim.sim_syncs))}


def waits() -> int:
    """How often a thread that computes waited for the device since `reset`."""
    return sum(count for kind, count in syncs().items() if kind != "side stream")


def reset() -> None:
    _sim.sim_reset()


def live_blocks() -> int:
    return _sim.sim_live_blocks()


@contextlib.contextmanager
def settings(**changes: int) -> Iterator[None]:
    """Changes settings of the device for a while; `Settings` in memory.hpp says what there is."""
    assert changes.keys() <= DEFAULTS.keys()
    for name, value in changes.items():
        _sim.sim_set(name.encode(), value)
    try:
        yield
    finally:
        for name in changes:
            _sim.sim_set(name.encode(), DEFAULTS[name])


#: For tests that need two devices: a real machine may have one.
two_devices = pytest.mark.skipif(False, reason="")


class _Module(types.ModuleType):
    """What torch asks of a device's Python module."""

    is_available = staticmethod(lambda: True)
    is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: 2)
    _is_in_bad_fork = staticmethod(lambda: False)
    get_amp_supported_dtype = staticmethod(lambda: [torch.float16, torch.bfloat16])

    @staticmethod
    def get_device_properties(device=None) -> str:
        return "simulated device"

    @staticmethod
    def current_device() -> int:
        return torch.accelerator.current_device_index()

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        for device in (0, 1):
            _sim.sim_seed(device, ctypes.c_uint64(seed))

    @staticmethod
    def get_rng_state(device="sim") -> torch.Tensor:
        numbers = (ctypes.c_uint64 * 2)()
        _sim.sim_generator_state(_index(device), numbers, 0)
        return torch.frombuffer(bytearray(numbers), dtype=torch.uint8)

    @staticmethod
    def set_rng_state(state: torch.Tensor, device="sim") -> None:
        numbers = (ctypes.c_uint64 * 2).from_buffer_copy(state.numpy().tobytes())
        _sim.sim_generator_state(_index(device), numbers, 1)


def _index(device) -> int:
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.accelerator.current_device_index() if index is None else index


torch.utils.rename_privateuse1_backend("sim")
torch._register_device_module("sim", _Module("torch.sim"))
torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
