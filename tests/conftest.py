import sys
from pathlib import Path

import pytest

SIM = Path(__file__).parent / "sim"


def pytest_addoption(parser):
    parser.addoption(
        "--device",
        default="cpu",
        choices=["cpu", "sim"],
        help="where tensors of the tests are made; sim: an accelerator of the tests' own",
    )


def pytest_configure(config):
    if config.getoption("--device") == "sim":
        sys.path.insert(0, str(SIM))
        import simulated_device  # noqa: F401
        import torch

        torch.set_default_device("sim")


def pytest_ignore_collect(collection_path, config):
    # A process that knows the simulated device is another one to torch: it has an accelerator.
    if config.getoption("--device") == "cpu" and SIM in collection_path.parents:
        return True
    return None


@pytest.fixture(autouse=True)
def nothing_races(request):
    """On the simulated device no test may depend on luck."""
    if request.config.getoption("--device") != "sim":
        yield
        return
    import simulated_device as sim

    sim.reset()
    yield
    assert sim.races() == []
    sim.reset()
