"""Forwards that run collectives, on two ranks of gloo: as natively where each rank's batch is one
micro-batch; else a typed error before anything is sent, for ranks split their batches unlike."""

from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import measure
import pytest
import torch
import torch.distributed as dist
from ranks_support import on_two_ranks
from support import Calls, Tally, mlp
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.nn.functional import all_gather
from wrap_support import contrastive

N = 13
ONE = {"micro_batch_size": N}
CRITERION = nn.MSELoss()


def batch(rank: int, rows: int = N) -> torch.Tensor:
    return torch.randn(rows, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(rank))


def centred(z: torch.Tensor) -> torch.Tensor:
    """By the mean over the samples of both ranks."""
    return z - torch.cat(all_gather(z.contiguous())).mean(0)


class Ran(Calls):
    def __init__(self, forward: Callable[..., torch.Tensor]) -> None:
        super().__init__(lambda self, x: self.work(x), net=mlp())
        self.calls, self.forward_of = Tally(), forward

    def work(self, x: torch.Tensor) -> torch.Tensor:
        self.calls()
        return self.forward_of(self.net(x))


def without_graph(z: torch.Tensor) -> torch.Tensor:
    mean = z.detach().mean(0)
    dist.all_reduce(mean)
    return z - mean / 2


def swallowed(z: torch.Tensor) -> torch.Tensor:
    try:
        return centred(z)
    except RuntimeError:
        return z


FORWARDS = {
    "gathered": centred,
    "without a graph": without_graph,
    "swallowed": swallowed,
    "functional": lambda z: z - functional.all_reduce(z.detach().mean(0), "avg", dist.group.WORLD),
    "a barrier": lambda z: (dist.barrier(), z)[1],
    "across the batch": lambda z: z - ib.across_batch(lambda v: centred(v) * 0.5, z),
}


def separable(model: nn.Module, x: torch.Tensor, **options: Any) -> None:
    ib.VirtualBatch(model, CRITERION, **options).backward(x, x[:, :5])


def coupled(model: nn.Module, x: torch.Tensor, **options: Any) -> None:
    loss = ib.losses.coupled(lambda z, _: contrastive(z))
    ib.VirtualBatch(model, loss, **options).backward(x)


def wrapped(model: nn.Module, x: torch.Tensor, **options: Any) -> None:
    CRITERION(ib.wrap(model, **options)(x), x[:, :5]).backward()


Run = Callable[..., None]


def made(forward: Callable[..., torch.Tensor]) -> Ran:
    torch.manual_seed(0)
    return Ran(forward)


def outcome(run: Run, forward: Callable[..., torch.Tensor], **options: Any) -> Any:
    """What is wrong, or how far from native the gradient is, and how often forward ran."""
    model, x = made(forward), batch(dist.get_rank())
    try:
        run(model, x, **options)
    except Exception as error:
        assert all(p.grad is None for p in model.parameters())
        return f"{type(error).__name__}: {error}"
    native = made(forward)
    z = native(x)
    (contrastive(z) if run is coupled else CRITERION(z, x[:, :5])).backward()
    return measure.worst(measure.gradients(model), measure.gradients(native)), model.calls.count


def at_once(rank: int) -> dict[str, Any]:
    ways: dict[str, tuple[Run, dict[str, Any]]] = {
        "separable": (separable, ONE),
        "coupled": (coupled, {**ONE, "retained_micro_batches": 1}),
        "wrap": (wrapped, ONE),
        "wrap in agreement": (wrapped, {**ONE, "process_group": dist.group.WORLD}),
    }
    return {
        f"{name}, {forward}": outcome(run, FORWARDS[forward], **options)
        for name, (run, options) in ways.items()
        for forward in FORWARDS
    }


def test_where_the_batch_is_one_micro_batch_it_is_native():
    for found in on_two_ranks(at_once):
        for name, given in found.items():
            assert not isinstance(given, str), (name, given)
            distance, calls = given
            assert distance < 1e-12 and calls == 1, (name, given)


def in_micro_batches(rank: int) -> dict[str, Any]:
    """As many or other micro-batches on the ranks, of like or unlike sizes."""
    found = {}
    for forward, function in FORWARDS.items():
        for sizes in ((4, 4), (7, 4), (5, 7)):
            given = {"micro_batch_size": sizes[rank]}
            for run in (separable, coupled, wrapped):
                name = f"{forward}, {sizes}, {run.__name__}"
                found[name] = outcome(run, function, **given)
    group = {"process_group": dist.group.WORLD}
    for forward, function in FORWARDS.items():  # one rank's batch is one micro-batch
        uneven = {"micro_batch_size": (N, 4)[rank]}
        found[f"{forward}, agreement"] = outcome(wrapped, function, **uneven, **group)
    found["static_graph"] = outcome(separable, centred, **ONE, static_graph=True)
    return found


def test_in_micro_batches_it_is_refused_before_anything_is_sent():
    for found in on_two_ranks(in_micro_batches):
        for name, said in found.items():
            assert isinstance(said, str) and said.startswith("Unsupported: "), (name, said)
            assert "collective" in said and "in the loss" in said, (name, said)


def under_budgets(rank: int) -> dict[str, Any]:
    budget = {"memory_budget": ("64MiB", "1GiB")[rank]}
    return {run.__name__: outcome(run, centred, **budget) for run in (separable, wrapped)}


def test_under_a_budget_it_is_native_or_refused_on_all_ranks():
    first, second = on_two_ranks(under_budgets)
    for name in first:
        both = (first[name], second[name])
        refused = [isinstance(o, str) and o.startswith("Unsupported: forward runs") for o in both]
        assert all(refused) or max(distance for distance, _ in both) < 1e-12, both


def begun_again(rank: int) -> list[str]:
    """Forward has run a collective when memory runs out in the loss, and would run it again."""
    model = made(without_graph)

    def large(z: torch.Tensor, _: Any) -> torch.Tensor:
        return contrastive(z) + z.new_ones(1 << 18).cumsum(0)[-1] * 0

    options = {**ONE, "retained_micro_batches": 1, "memory_budget": "2MiB"}
    said = []
    for loss in (large, lambda z, _: contrastive(z)):
        before = model.calls.count
        try:
            ib.VirtualBatch(model, ib.losses.coupled(loss), **options).backward(batch(rank))
        except ib.Error as error:
            said.append(f"{type(error).__name__}: {error}")
        else:
            said.append("fine")
        assert model.calls.count == before + 1
        model.zero_grad()
    return said


def test_a_step_whose_forward_has_run_a_collective_is_not_begun_again():
    for short, after in on_two_ranks(begun_again):
        assert "has run a collective (c10d::allreduce_) and cannot be retried" in short
        assert after == "fine"


def losses_of_micro_batches(rank: int) -> str:
    def mean(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        total = (outputs - targets).pow(2).sum()
        dist.all_reduce(total.detach().clone())
        return total

    loss = ib.losses.separable(mean, denominator=lambda targets: targets.numel())
    x = batch(rank)
    with pytest.raises(
        ib.Unsupported, match=r"the loss runs a collective \(c10d::allreduce_\)"
    ) as e:
        ib.VirtualBatch(mlp(), loss, micro_batch_size=4 + rank).backward(x, x[:, :5])
    return str(e.value)


def test_a_loss_of_micro_batches_must_not_either():
    for said in on_two_ranks(losses_of_micro_batches):
        assert "ib.losses.coupled(loss)" in said


def trains(rank: int) -> str:
    model = mlp()
    given = (model, CRITERION, torch.optim.SGD(model.parameters()), [(batch(rank), batch(rank))])
    with pytest.raises(ib.Unsupported, match="works in one process, and there are 2") as e:
        ib.Trainer(*given, micro_batch_size=4)
    return str(e.value)


def test_trainer_refuses_several_processes(monkeypatch):
    for said in on_two_ranks(trains):
        assert "(torch.distributed)" in said and "DDP(ib.wrap(model, process_group=" in said
    monkeypatch.setenv("WORLD_SIZE", "2")  # of torchrun, in front of init_process_group
    assert "(WORLD_SIZE)" in trains(0)


def test_every_operator_of_torch_distributed_asks_first():
    names = {
        name.partition("::")[2]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("c10d::")
    }
    assert len(names) > 15
    asks = {
        name
        for name in names
        if "collectives.cpp" in torch._C._dispatch_dump(f"c10d::{name}").split("BackendSelect:")[-1]
        and "BackendSelect:" in torch._C._dispatch_dump(f"c10d::{name}")
    }
    assert names - asks <= {"check_for_nan"}, names - asks
