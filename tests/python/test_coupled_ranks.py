"""A loss over the batches of several ranks: it gathers their outputs by itself."""

import copy
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.distributed as dist
from ranks_support import on_two_ranks
from support import Calls, Tally, mlp
from torch import nn
from torch.distributed.nn.functional import all_gather
from wrap_support import close, contrastive, grads

DDP = nn.parallel.DistributedDataParallel
N = 24  # of each rank


class Gathered(nn.Module):
    """InfoNCE over the samples of all ranks, with a temperature of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.tensor(0.3, dtype=torch.float64))
        self.calls = Tally()

    def forward(self, z: torch.Tensor, _: Any = None) -> torch.Tensor:
        self.calls()
        return self.of_all(torch.cat(all_gather(z.contiguous())))

    def of_all(self, z: torch.Tensor) -> torch.Tensor:
        # Outside of the normalisation, or the temperature's gradient would be rounding around zero.
        return contrastive(z) * self.log_scale.exp() + z.pow(2).mean()


def batches() -> torch.Tensor:
    torch.manual_seed(5)
    return torch.randn(2, N, 6, dtype=torch.float64)


def average(*modules: nn.Module) -> None:
    """As DistributedDataParallel does."""
    for parameter in (p for module in modules for p in module.parameters()):
        dist.all_reduce(parameter.grad)
        parameter.grad /= 2


def numbers(*modules: nn.Module) -> list[dict[str, Any]]:
    return [{name: g.numpy() for name, g in grads(module).items()} for module in modules]


def check(found: list[Any]) -> None:
    """Beside the native batch of all ranks on one."""
    torch.manual_seed(0)
    native, loss = mlp(), Gathered()
    loss.of_all(native(batches().flatten(0, 1))).backward()
    for model, temperature in found:
        for wanted, given in ((native, model), (loss, temperature)):
            close({name: torch.from_numpy(g) for name, g in given.items()}, grads(wanted))


def steps(rank: int, count: int = 1, **options: Any) -> list[Any]:
    torch.manual_seed(0)
    model, loss = mlp(), Gathered()
    step = ib.VirtualBatch(model, ib.losses.coupled(loss), **options)
    for _ in range(count):
        model.zero_grad()
        loss.zero_grad()
        step.backward(batches()[rank])
    assert loss.calls.count == count
    average(model, loss)
    return numbers(model, loss)


def virtual_batches(rank: int) -> dict[str, Any]:
    """Ranks may split their batches as they like: each computes its loss once in a step."""
    return {
        "fixed size": steps(rank, micro_batch_size=7),
        "other sizes": steps(rank, micro_batch_size=4 + rank, retained_micro_batches=99 * rank),
        # One of them measures more sizes than the other, and both until they are settled.
        "budgets": steps(rank, count=4, memory_budget="64MiB" if rank else "80KiB"),
        "whole-batch draws": steps(rank, micro_batch_size=7 + rank, match_native_rng=True),
    }


def wrapped(rank: int, **options: Any) -> list[Any]:
    torch.manual_seed(0)
    inner, loss = mlp(), Gathered()
    model, value = DDP(ib.wrap(inner, **options)), DDP(loss)
    for _ in range(2):
        model.zero_grad()
        value.zero_grad()
        value(model(batches()[rank])).backward()
    return numbers(inner, loss)


def wrapped_models(rank: int) -> dict[str, Any]:
    return {
        "other sizes": wrapped(rank, micro_batch_size=5 + rank),
        "agreement": wrapped(rank, micro_batch_size=5, process_group=dist.group.WORLD),
        "budgets": wrapped(rank, memory_budget="64MiB" if rank else "1GiB"),
    }


@pytest.mark.parametrize("body", [virtual_batches, wrapped_models])
def test_the_gradient_is_that_of_the_batch_of_all_ranks(body):
    ranks = on_two_ranks(body)
    for way in ranks[0]:
        check([each[way] for each in ranks])


def begin_again_on_one(rank: int) -> list[Any]:
    """The first rank's replay gives other outputs than its recording, so that its step would begin
    again, and its loss talk to a rank that has gone on."""
    model, loss = mlp(), Gathered()
    table = torch.zeros(5, dtype=torch.float64)
    shifted = Calls(lambda self, x: self.net(x) + table, net=model)

    def value(z: torch.Tensor, _: Any) -> torch.Tensor:
        result = loss(z)
        if rank == 0 and loss.calls.count == 1:
            table.numpy()[0] = 1  # no version tells of it
        return result

    step = ib.VirtualBatch(shifted, ib.losses.coupled(value), micro_batch_size=7)
    if rank == 0:
        before = copy.deepcopy(grads(model))
        with pytest.raises(ib.Unsupported, match=r"has run a collective \(c10d::"):
            step.backward(batches()[rank])
        assert grads(model) == before
        table.zero_()
    else:
        step.backward(batches()[rank])
    assert loss.calls.count == 1
    # The next step finds both ranks where they have to be.
    for module in (model, loss):
        module.zero_grad()
    step.backward(batches()[rank])
    assert loss.calls.count == 2
    average(model, loss)
    return numbers(model, loss)


def test_a_loss_that_has_talked_to_other_ranks_is_not_computed_again():
    check(on_two_ranks(begin_again_on_one))
