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
    # Each half of the samples had numbers of its own, the same ones in both of its forwards.
    ours = [p.grad.clone() for p in net.parameters()]
    for first in SEEN:
        for second in SEEN:
            net.zero_grad()
            factors = torch.tensor([first] * 4 + [second] * 4, dtype=torch.float64)
            spread(net.last(net.first(x).tanh() * factors), y).backward()
            pairs = list(zip(ours, net.parameters()))
            if all((mine - p.grad).norm() <= 1e-12 * max(p.grad.norm(), 1e-3) for mine, p in pairs):
                return
    raise AssertionError(f"no such gradient of {SEEN}")
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
options = {"micro_batch_size": 4, "retained_micro_batches": 0, "use_tapes": False}
ib.VirtualBatch(net, ib.losses.coupled(spread), **options).backward(x, y)
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
batch = ib.VirtualBatch(net, ib.losses.coupled(spread), micro_batch_size=4)
about_to_step.set()
batch.backward(x, y)
thread.join()
check(net)
""")
