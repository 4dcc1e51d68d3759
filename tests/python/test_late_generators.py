"""NumPy's generator, imported for the first time while a step runs."""

import subprocess
import sys

_BEFORE = """
import sys
import threading
import torch, infinitybatch as ib
from torch import nn

assert "numpy.random" not in sys.modules, "this test is of a process that has not imported it"

class Seen(list):  # no snapshot undoes it
    __slots__ = ()

SEEN = Seen()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(4, 6).double(), nn.Linear(6, 2).double()

    def forward(self, x):
        factors = DRAW()
        SEEN.append(tuple(factors.tolist()))
        return self.last(self.first(x).tanh() * factors)

def spread(outputs, targets):
    return (outputs @ outputs.T).logsumexp(1).mean()

x, y = torch.randn(8, 4, dtype=torch.float64), torch.zeros(8, 2, dtype=torch.float64)

def check(net):
    assert len(set(SEEN)) == 1, "micro-batches drew other numbers"
    ours = [p.grad.clone() for p in net.parameters()]
    net.zero_grad()
    factors = torch.tensor(SEEN[0], dtype=torch.float64)
    spread(net.last(net.first(x).tanh() * factors), y).backward()
    for mine, p in zip(ours, net.parameters()):
        assert (mine - p.grad).norm() <= 1e-12 * max(p.grad.norm(), 1e-3)
"""


def run(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _BEFORE + code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_forward_imports_it() -> None:
    run("""
def DRAW():
    import numpy.random
    return torch.from_numpy(numpy.random.rand(6))

net = Net()
batch = ib.VirtualBatch(net, ib.losses.coupled(spread), micro_batch_size=3, match_native_rng=True)
batch.backward(x, y)
check(net)

SEEN.clear()
net.zero_grad()
spread(ib.wrap(net, micro_batch_size=3, match_native_rng=True)(x), y).backward()
check(net)
""")


def test_another_thread_is_importing_it() -> None:
    """The step waits until the module is whole."""
    run("""
import importlib.abc
import importlib.machinery

def DRAW():
    return torch.ones(6, dtype=torch.float64)

half_way, about_to_step = threading.Event(), threading.Event()

class Slow(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name != "numpy.random":
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        inner = spec.loader.exec_module

        def exec_module(module):
            half_way.set()
            about_to_step.wait()
            inner(module)

        spec.loader.exec_module = exec_module
        return spec

sys.meta_path.insert(0, Slow())
thread = threading.Thread(target=lambda: __import__("numpy.random"))
thread.start()
half_way.wait()
net = Net()
batch = ib.VirtualBatch(net, ib.losses.coupled(spread), micro_batch_size=3)
about_to_step.set()
batch.backward(x, y)
thread.join()
check(net)
""")
