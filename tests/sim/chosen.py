"""The device on which tensors of a test run are made."""

import os
import pathlib
import sys


def choose(device: str, real: bool) -> None:
    """`sim` is the simulated one; with `real` it, or what torch sees, stands where tests ask for it."""
    here = pathlib.Path(__file__).parent
    sys.path[:0] = [str(here), str(here.parent / "python")]
    if device == "sim":
        import simulated_device  # noqa: F401
    if real:
        import real_device

        sys.modules["simulated_device"] = real_device
        # Tests compare bits and give budgets of some MiB: no kernels that add in any order, and no
        # workspace of 64 MiB, which the first product would leave on the device.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    import torch

    if real:
        torch.backends.cudnn.deterministic = True
        torch.backends.cudnn.allow_tf32 = False

    torch.set_default_device(device)
