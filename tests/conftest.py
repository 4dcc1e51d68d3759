import functools
import os
import sys
import weakref
from pathlib import Path

import pytest

SIM = Path(__file__).parent / "sim"
#: What has something to say on a real device too.
ON_REAL = (
    "test_training.py",
    "test_two_devices.py",
    "test_offload_to_host.py",
    "test_histories_on_device.py",
)


def pytest_addoption(parser):
    parser.addoption(
        "--device",
        default="cpu",
        help="where tensors of the tests are made: cpu, an accelerator that torch sees, or sim, a "
        "simulated one",
    )


def is_real(config):
    """Whether the device is treated as a real one. `make test` tries with the simulated one what
    `make gpu` does."""
    return config.getoption("--device") not in ("cpu", "sim") or "INFINITYBATCH_DRY" in os.environ


def pytest_configure(config):
    device = config.getoption("--device")
    if device == "cpu":
        return
    sys.path.insert(0, str(SIM))
    from chosen import choose

    choose(device, is_real(config))


def pytest_ignore_collect(collection_path, config):
    # A process that knows the simulated device is another one to torch: it has an accelerator.
    if SIM not in collection_path.parents:
        return None
    if config.getoption("--device") == "cpu":
        return True
    return is_real(config) and collection_path.name not in ON_REAL or None


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


@pytest.fixture(autouse=True)
def budgets_hold(request, monkeypatch):
    """No report tells of a peak above its budget, whatever a test looks at: those of every step of
    a VirtualBatch, and the last one of every wrapped model. On an accelerator a first plan may pass
    it, and is then given up: a restart (docs/limits.md)."""
    package = sys.modules.get("infinitybatch")
    if package is None:
        yield
        return
    backward, wrap = package.VirtualBatch.backward, package.wrap
    wrapped, above = [], []
    on_host = request.config.getoption("--device") == "cpu"

    def note(report):
        budget = None if report is None else report.memory_budget
        told = budget is not None and (on_host or report.restarts == 0)
        if told and not report.peak_bytes <= budget:
            above.append(f"peak of {report.peak_bytes} with a budget of {budget}")

    @functools.wraps(backward)
    def noted_backward(self, *args, **kwargs):
        report = backward(self, *args, **kwargs)
        note(report)
        return report

    @functools.wraps(wrap)
    def noted_wrap(*args, **kwargs):
        model = wrap(*args, **kwargs)
        wrapped.append(weakref.ref(model))
        return model

    monkeypatch.setattr(package.VirtualBatch, "backward", noted_backward)
    monkeypatch.setattr(package, "wrap", noted_wrap)
    yield
    for model in wrapped:
        note(getattr(model(), "last_report", None))
    assert not above, above[:3]


#: What takes longest begins first, so that no process is left with one of them while others idle.
LONGEST = (
    "test_packaging.py",
    "test_command_line_training.py",
    "test_offload.py",
    "test_predictions.py",
    "test_wrap_budget.py",
    "test_golden.py",
    "test_notebooks.py",
    "test_code_blocks.py",
    "test_coupled_transaction.py",
    "test_benchmarks.py",
    "test_command_line.py",
    "test_coupled_budget.py",
    "test_cut_transaction.py",
    "test_checkpoints_coupled.py",
    "test_same_rows.py",
    "test_match_native_rng.py",
    "test_transaction.py",
    "test_strategies.py",
    "test_wrap_offload.py",
    "test_wrap_offloaded_graphs.py",
    "test_loops.py",
    "test_families.py",
    "test_failing_kernels.py",
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
            if "the simulated device" in reason and is_real(config):
                continue
            if name in item.nodeid:
                item.add_marker(pytest.mark.skip(reason=reason))
