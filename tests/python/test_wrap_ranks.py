"""Wrapped modules inside DistributedDataParallel, on two ranks of gloo."""

import copy
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.distributed as dist
from ranks_support import on_two_ranks
from support import Calls, Square, Tally, mlp
from torch import nn
from wrap_support import close, contrastive, grads

DDP = nn.parallel.DistributedDataParallel


def batches() -> torch.Tensor:
    """One for each rank; the second rank's is smaller than a micro-batch where a test says so."""
    torch.manual_seed(5)
    return torch.randn(2, 13, 6, dtype=torch.float64)


def numbers(module: nn.Module) -> dict[str, Any]:
    return {name: gradient.numpy() for name, gradient in grads(module).items()}


def check(found: list[Any], rows: tuple[int, int] = (13, 13)) -> None:
    torch.manual_seed(0)
    native = mlp()
    x = batches()
    losses = [contrastive(native(x[rank, : rows[rank]])) for rank in range(2)]
    (sum(losses) / 2).backward()
    for each in found:
        close({name: torch.from_numpy(g) for name, g in each.items()}, grads(native))


def two_steps(rank: int, **options: Any) -> dict[str, Any]:
    inner = mlp()
    model = DDP(ib.wrap(inner, **options))
    for _ in range(2):
        model.zero_grad()
        contrastive(model(batches()[rank])).backward()
    return numbers(inner)


def without_agreement(rank: int) -> dict[str, Any]:
    return two_steps(rank, micro_batch_size=4)


def with_agreement(rank: int) -> dict[str, Any]:
    return two_steps(rank, micro_batch_size=4, process_group=dist.group.WORLD)


def with_a_budget(rank: int) -> dict[str, Any]:
    return two_steps(rank, memory_budget="1GiB", process_group=dist.group.WORLD)


@pytest.mark.parametrize("body", [without_agreement, with_agreement, with_a_budget])
def test_ddp_around_it(body):
    check(on_two_ranks(body))


def normalised() -> nn.Module:
    """Each rank's layers see the whole of the rank's own batch, as without micro-batches."""
    torch.manual_seed(0)
    return Calls(
        lambda self, x: self.head(torch.tanh(self.norm(self.net(x)))),
        net=mlp(),
        norm=nn.BatchNorm1d(5),
        head=nn.Linear(5, 4),
    ).double()


def with_batch_norm(rank: int) -> dict[str, Any]:
    inner = normalised()
    model = DDP(ib.wrap(inner, micro_batch_size=4, process_group=dist.group.WORLD))
    for _ in range(2):
        model.zero_grad()
        contrastive(model(batches()[rank])).backward()
    return {"mean": inner.norm.running_mean.numpy(), **numbers(inner)}


def test_ops_of_the_whole_batch():
    found = on_two_ranks(with_batch_norm)
    native = normalised()
    replicas = [copy.deepcopy(native) for _ in range(2)]
    for _ in range(2):
        for replica in replicas:  # the first rank's statistics are everybody's, before each forward
            replica.load_state_dict(replicas[0].state_dict())
        outputs = [replica(x) for replica, x in zip(replicas, batches(), strict=True)]
    for output in outputs:
        (contrastive(output) / 2).backward()
    wanted = {
        n: a.grad + dict(replicas[1].named_parameters())[n].grad
        for n, a in replicas[0].named_parameters()
    }
    for each, replica in zip(found, replicas, strict=True):
        close(torch.from_numpy(each.pop("mean")), replica.norm.running_mean)
        close({name: torch.from_numpy(g) for name, g in each.items()}, wanted)


def uneven(rank: int) -> dict[str, Any]:
    """One micro-batch here, several there: both agree, in as many collectives."""
    inner = mlp()
    model = DDP(ib.wrap(inner, micro_batch_size=4, process_group=dist.group.WORLD))
    contrastive(model(batches()[rank, : (13, 3)[rank]])).backward()
    return numbers(inner)


def test_ranks_with_different_numbers_of_micro_batches():
    check(on_two_ranks(uneven), (13, 3))


class Failing(Calls):
    """No tape keeps it; told to, it raises where forward runs for the second time."""

    def __init__(self) -> None:
        super().__init__(lambda self, x: self.work(x), net=mlp())
        self.ran, self.most = Tally(), 1000

    def work(self, x: torch.Tensor) -> torch.Tensor:
        self.ran()
        if self.ran.count > self.most:
            raise RuntimeError("out of luck")
        return Square.apply(self.net(x))


def one_fails(rank: int) -> list[str]:
    inner = Failing()
    wrapped = ib.wrap(inner, micro_batch_size=4, process_group=dist.group.WORLD)
    model, x = DDP(wrapped), batches()[rank]
    said = []
    for fails in (False, True, False):
        model.zero_grad(set_to_none=True)
        # Four micro-batches forward, two of them again in backward.
        inner.ran.count, inner.most = 0, 6 if fails and rank == 1 else 1000
        try:
            contrastive(model(x)).backward()
        except (RuntimeError, ib.Error) as error:
            said.append(f"{type(error).__name__}: {error}")
            assert all(p.grad is None for p in inner.parameters())
        else:
            said.append("fine")
            assert all(p.grad is not None for p in inner.parameters())
    return said


def test_where_one_rank_fails_none_hands_out_and_none_waits():
    first, second = on_two_ranks(one_fails)
    assert [first[0], first[2]] == [second[0], second[2]] == ["fine", "fine"]
    assert first[1].startswith("StateError: ") and "failed on rank 1 of 2" in first[1]
    assert second[1] == "RuntimeError: out of luck"


class Unlucky(Calls):
    """Forward fails on the batch that it is told of, in its second micro-batch."""

    def __init__(self) -> None:
        super().__init__(lambda self, x: self.work(x), net=mlp())
        self.fails = torch.tensor(float("inf"), dtype=torch.float64)

    def work(self, x: torch.Tensor) -> torch.Tensor:
        if (x == self.fails).any():
            raise RuntimeError("out of luck")
        return self.net(x)


def four_steps(rank: int, spoil: Callable[..., torch.Tensor], around: Any) -> list[str]:
    """Of a loop that skips what fails; the second step fails on the second rank."""
    torch.manual_seed(0)
    inner = Unlucky()
    model = around(ib.wrap(inner, micro_batch_size=4, process_group=dist.group.WORLD))
    said = []
    for step in range(4):
        model.zero_grad(set_to_none=True)
        x = batches()[rank] + step
        try:
            spoil(inner, model, x, step == 1 and rank == 1).backward()
        except (RuntimeError, ib.Error) as error:
            said.append(f"{type(error).__name__}: {error}")
            assert all(p.grad is None for p in inner.parameters())
            continue
        said.append("fine")
        torch.manual_seed(0)
        native = mlp()
        losses = [contrastive(native(batches()[each] + step)) for each in range(2)]
        (sum(losses) / 2 if around is DDP else losses[rank]).backward()
        close(grads(inner.net), grads(native))
    return said


def in_forward(inner: Unlucky, model: nn.Module, x: torch.Tensor, fails: bool) -> torch.Tensor:
    inner.fails = x[7, 0] if fails else torch.tensor(float("inf"), dtype=x.dtype)
    return contrastive(model(x))


def in_the_loss(_: Unlucky, model: nn.Module, x: torch.Tensor, fails: bool) -> torch.Tensor:
    outputs = model(x)
    if fails:
        raise RuntimeError("out of luck")
    return contrastive(outputs)


def without_samples(_: Unlucky, model: nn.Module, x: torch.Tensor, fails: bool) -> torch.Tensor:
    outputs = model(x[:0] if fails else x)
    return outputs.sum() if fails else contrastive(outputs)


def of_other_lengths(_: Unlucky, model: nn.Module, x: torch.Tensor, fails: bool) -> torch.Tensor:
    return contrastive(model(x[:, :5] if fails else x))


SPOILT = {f.__name__: f for f in (in_forward, in_the_loss, without_samples, of_other_lengths)}


def spoilt(rank: int) -> dict[str, list[str]]:
    return {
        f"{name}, {around.__name__}": four_steps(rank, spoil, around)
        for name, spoil in SPOILT.items()
        for around in (DDP, plain)
    }


def plain(model: nn.Module) -> nn.Module:
    return model


def test_where_forward_or_the_loss_fails_on_one_rank_the_others_are_told():
    first, second = on_two_ranks(spoilt)
    for name, said in first.items():
        assert [said[0], *said[2:]] == ["fine"] * 3, (name, said)
        assert [second[name][0], *second[name][2:]] == ["fine"] * 3, (name, second[name])
        assert said[1].startswith("StateError: ") and "rank 1" in said[1], (name, said)
        assert second[name][1] != "fine", name


def skips_what_does_not_fit(rank: int) -> list[str]:
    inner = mlp()
    model = DDP(ib.wrap(inner, memory_budget="1GiB", process_group=dist.group.WORLD))
    said = []
    for step in range(4):
        # The second rank's batch does not fit in the second step.
        inner.memory = torch.zeros(1 << 27 if (rank, step) == (1, 1) else 1, dtype=torch.float64)
        model.zero_grad()
        try:
            contrastive(model(batches()[rank])).backward()
            said.append("fine")
        except (ib.BudgetExceeded, ib.StateError) as error:
            said.append(type(error).__name__)
    return said


def test_a_loop_that_skips_what_does_not_fit_leaves_nobody_waiting():
    first, second = on_two_ranks(skips_what_does_not_fit)
    assert first == ["fine", "StateError", "fine", "fine"]
    assert second == ["fine", "BudgetExceeded", "fine", "fine"]


def evaluates_alone(rank: int) -> str:
    """Nobody is asked where no gradient is wanted."""
    model = ib.wrap(mlp(), micro_batch_size=4, process_group=dist.group.WORLD)
    with torch.no_grad():
        for _ in range(3 * rank):
            model(batches()[rank])
    contrastive(model(batches()[rank])).backward()
    return "fine"


def test_a_rank_may_evaluate_alone():
    assert on_two_ranks(evaluates_alone) == ["fine", "fine"]
