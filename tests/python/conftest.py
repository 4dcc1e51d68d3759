import gc
import random
import sys

import pytest


def pytest_collectstart(collector):
    """What a file of tests draws while it is imported is the same in each run: of data at random
    some in a thousand condition a gradient so badly that rounding alone passes a tolerance."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(collector, pytest.Module):
        torch.manual_seed(0)
        random.seed(0)


@pytest.fixture(autouse=True)
def one_thread_one_seed():
    """Every test starts from the same random state, on one thread (sums are then reproducible)."""
    torch = sys.modules.get("torch")
    if torch is None:  # tests of the command line need not pay for importing it
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    random.seed(0)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", autouse=True)
def no_garbage_of_other_files():
    """Modules, and torch and packages around it, are a million objects that take a second to visit:
    once in a process, for what is frozen stays so."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_garbage_of_other_tests():
    """What earlier tests left in cycles goes before a test, not while it counts live bytes."""
    gc.collect()


@pytest.fixture(autouse=True)
def switches_can_be_set(monkeypatch):
    """Torch's own test utilities, once imported, forbid its switches to be set in this process."""
    torch = sys.modules.get("torch")
    if torch is not None:
        switches = torch.backends.flags_frozen.__globals__
        monkeypatch.setitem(switches, "__allow_nonbracketed_mutation_flag", True)
