import sys
from pathlib import Path

import pytest

SIM = Path(__file__).parent / "sim"


def pytest_addoption(parser):
    parser.addoption(
        "--device",
        default="cpu",
        help="where tensors of the tests are made: cpu, an accelerator that torch sees, or sim, a "
        "simulated one",
    )


def pytest_configure(config):
    device = config.getoption("--device")
    if device == "cpu":
        return
    sys.path.insert(0, str(SIM))
    if device == "sim":
        import simulated_device  # noqa: F401
    import torch

    torch.set_default_device(device)


def pytest_ignore_collect(collection_path, config):
    # A process that knows the simulated device is another one to torch: it has an accelerator.
    if config.getoption("--device") != "sim" and SIM in collection_path.parents:
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


@pytest.fixture(autouse=True)
def times_are_assumed(request):
    """Which size a planner finds fastest hangs on no clock, but where a test is marked so."""
    package = sys.modules.get("infinitybatch")
    if package is None or request.node.get_closest_marker("real_times"):
        yield
        return
    package._C._assume_times((5e-3, 1e-3, 0.0))
    yield
    package._C._assume_times(None)


#: What takes longest begins first, so that no process is left with one of them while others idle.
LONGEST = (
    "test_packaging.py",
    "test_benchmarks.py",
    "test_families.py",
    "test_golden.py",
    "test_cut_transaction.py",
    "test_strategies.py",
    "test_checkpoints.py",
    "test_command_line_training.py",
    "test_wrap_ranks.py",
    "test_tape_ops.py",
)


def pytest_collection_modifyitems(config, items):
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(places)))  # stable
    if config.getoption("--device") == "cpu":
        return
    lines = (SIM / "left_out.txt").read_text().splitlines()
    left_out = dict(line.split(" | ") for line in lines if not line.startswith("#"))
    for item in items:
        for name, reason in left_out.items():
            if name in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=reason))
