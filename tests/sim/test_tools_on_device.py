"""`infinitybatch.tools` on an accelerator."""

import infinitybatch as ib
import simulated_device as sim
import torch
from infinitybatch import tools

HERE = torch.get_default_device()


def test_a_snapshot_waits_and_tells_the_cache():
    history = tools.MemoryHistory()
    history.append("before", HERE)
    kept = torch.ones(1000, dtype=torch.float64)
    waits = sim.syncs().get("device", 0) + sim.waits()
    history.append("after", HERE)
    assert sim.syncs().get("device", 0) + sim.waits() > waits
    (_, before), (_, after) = history
    assert after.allocated - before.allocated >= kept.nbytes
    assert after.reserved >= after.allocated
    assert after.free_cache == after.reserved - after.allocated
    assert after.total == ib.memory.stats(HERE).total
    assert str(HERE) in str(history)


def test_a_seed_reaches_the_device_and_undo_goes_back():
    torch.manual_seed(3)
    wanted = torch.rand(2).tolist()
    torch.manual_seed(3)
    with tools.determinize(7):
        first = torch.rand(2).tolist()
    assert torch.rand(2).tolist() == wanted
    with tools.determinize(7):
        assert torch.rand(2).tolist() == first != wanted


def test_networks_on_two_kinds_of_device_are_compared():
    one = torch.nn.Linear(3, 2)
    another = torch.nn.Linear(3, 2).to("cpu")
    another.load_state_dict(one.state_dict())
    assert tools.is_equal_network(one, another)
    with torch.no_grad():
        another.bias += 1
    assert tools.compare_networks(one, another).first == "bias"
