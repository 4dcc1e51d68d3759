"""What tests ask of the simulated device, where a real one stands in its place."""

import contextlib

import pytest
import torch

two_devices = pytest.mark.skipif(
    torch.accelerator.device_count() < 2, reason="this machine has one device"
)


HAS_BY_ITSELF = {"atomics", "blas_workspace", "conv_workspaces"}


def races() -> list[str]:
    """A real device does not tell."""
    return []


def waits() -> int:
    return 0


def reset() -> None:
    pass


def settings(**changes: int) -> contextlib.AbstractContextManager[None]:
    if not changes.keys() <= HAS_BY_ITSELF:
        pytest.skip(f"a real device has no setting {', '.join(changes)}")
    return contextlib.nullcontext()
