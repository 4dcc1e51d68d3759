"""Losses that keep something between their calls: a step that begins again, or measures, leaves what
one call would have left."""

import copy
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from support import Tally
from torch import nn
from wrap_support import close, grads

N = 24


class Queue(nn.Module):
    """Contrasts with the embeddings of earlier batches, in tensors that are no buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = torch.zeros(64, 5, dtype=torch.float64)
        self.filled = 0
        self.log: list[int] = []
        self.steps = {"taken": 0}
        self.register_buffer("mean", torch.zeros(5, dtype=torch.float64))

    def forward(self, z: torch.Tensor) -> torch.Tensor:
        z = F.normalize(z, dim=1)
        scores = z @ torch.cat([z, self.memory[: self.filled]]).T / 0.3
        value = (torch.logsumexp(scores, 1) - (z * (z.roll(1, 0) + self.mean)).sum(1)).mean()
        with torch.no_grad():
            at = self.filled % 40
            self.memory[at : at + len(z)] = z
            self.mean.mul_(0.5).add_(z.mean(0))
        self.filled = min(64, self.filled + len(z))
        self.log.append(len(z))
        self.steps["taken"] += 1
        return value * (1 + 0.1 * self.steps["taken"])


def held(loss: Queue, how: str) -> Callable[..., torch.Tensor]:
    if how == "closure":
        return lambda z: loss(z)
    return loss.forward if how == "bound" else loss


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 5)).double()


def run_out_of_memory() -> None:
    with ib.memory.limit("1MiB"):
        torch.empty(1 << 20)


@pytest.mark.parametrize("how", ["module", "closure", "bound"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_queue_takes_each_batch_once(how: str, fails: bool) -> None:
    """A plan measures the loss, and is followed by a step that begins again."""
    theirs, model = net(), net()
    queue, ours = Queue(), Queue()
    tally = Tally()

    def hook(*_: Any) -> None:
        tally()
        if fails and tally.count == 9:
            run_out_of_memory()

    model.register_forward_pre_hook(hook)
    loss = ib.losses.coupled(held(ours, how))
    batch = ib.VirtualBatch(model, loss, memory_budget="64MiB")
    torch.manual_seed(1)
    restarts = 0
    for _ in range(4):
        x = torch.randn(N, 6, dtype=torch.float64)
        theirs.zero_grad()
        model.zero_grad()
        queue(theirs(x)).backward()
        restarts += batch.backward(x).restarts
        close(grads(model), grads(theirs), 1e-11)
        assert (ours.filled, ours.log, ours.steps) == (queue.filled, queue.log, queue.steps)
        close([ours.memory, ours.mean], [queue.memory, queue.mean])
    assert restarts == int(fails)


def test_a_failed_step_leaves_the_queue_as_it_was() -> None:
    model, queue = net(), Queue()
    x = torch.randn(N, 6, dtype=torch.float64)

    def fail(*_: Any) -> None:
        raise KeyError("mine")

    model.register_full_backward_hook(fail)
    batch = ib.VirtualBatch(model, ib.losses.coupled(queue), micro_batch_size=5)
    before = copy.deepcopy(queue)
    with pytest.raises(KeyError):
        batch.backward(x)
    assert (queue.filled, queue.log, queue.steps) == (0, [], {"taken": 0})
    assert torch.equal(queue.memory, before.memory) and torch.equal(queue.mean, before.mean)


class FailsOnce(nn.Module):
    """Lets the next backward through it run out of memory, behind the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.armed = Tally()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Failing.apply(x, self.armed)


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, armed: Tally) -> torch.Tensor:
        ctx.armed = armed
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.armed.count > 0:
            ctx.armed.count -= 1
            run_out_of_memory()
        return gradient.clone(), None


def test_cross_batch_memory() -> None:
    """A step of each batch begins again behind its loss, which has taken the batch by then."""
    losses = pytest.importorskip("pytorch_metric_learning.losses")

    def make() -> Any:
        memory = losses.CrossBatchMemory(losses.NTXentLoss(), embedding_size=5, memory_size=60)
        memory.embedding_memory = memory.embedding_memory.double()
        return memory

    theirs, model = net(), net()
    fails = FailsOnce()
    model.append(fails)
    wanted, found = make(), make()
    batch = ib.VirtualBatch(model, ib.losses.coupled(found), memory_budget="64MiB")
    torch.manual_seed(2)
    for step in range(4):
        x, y = torch.randn(N, 6, dtype=torch.float64), torch.arange(N) % 4
        theirs.zero_grad()
        model.zero_grad()
        wanted(theirs(x), y).backward()
        fails.armed.count = int(step > 0)
        report = batch.backward(x, y)
        assert report.restarts == int(step > 0)
        close(grads(model), grads(theirs), 1e-11)
        assert found.queue_idx == wanted.queue_idx
        assert found.embedding_memory.dtype == torch.float64
        close(found.embedding_memory, wanted.embedding_memory, 1e-12)
        assert torch.equal(found.label_memory, wanted.label_memory)
