"""Models whose parameters lie on two ranks of gloo: the gradient of both, or a typed error.

Torch's older FullyShardedDataParallel refuses to run without an accelerator; that its models are
refused is tested by class.
"""

from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import measure
import pytest
import torch
import torch.distributed as dist
from ranks_support import on_two_ranks
from support import Calls, mlp
from torch import nn
from torch.distributed import tensor as sharding
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from wrap_support import contrastive, opaque

CRITERION = nn.CrossEntropyLoss()
CUT = {"micro_batch_size": 4}
TYPED = (ib.Unsupported, ib.StateError, ib.BatchError)


def batch(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(13, 6, dtype=torch.float64, generator=generator)
    return x, torch.randint(5, (13,), generator=generator)


def made(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def separable(rank: int, outputs: torch.Tensor) -> torch.Tensor:
    return CRITERION(outputs, batch(rank)[1])


def coupled(_rank: int, outputs: torch.Tensor) -> torch.Tensor:
    return contrastive(outputs)


def off(
    model: nn.Module,
    make: Callable[[], nn.Module] = mlp,
    loss: Callable[[int, torch.Tensor], torch.Tensor] = coupled,
) -> float:
    """How far `.grad` is from the mean over both ranks' whole batches, at most, relatively."""
    native = made(make)
    (sum(loss(rank, native(batch(rank)[0])) for rank in range(2)) / 2).backward()
    found = measure.gradients(model)
    for name, gradient in found.items():
        if isinstance(gradient, sharding.DTensor):
            found[name] = gradient.full_tensor()
    return measure.worst(found, measure.gradients(native))


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2,))


# ---- FSDP around wrapped modules -------------------------------------------------------------


def steps(rank: int, model: nn.Module) -> nn.Module:
    for _ in range(2):
        model.zero_grad()
        contrastive(model(batch(rank)[0])).backward()
    return model


def fsdp_around(rank: int, make: Callable[[], nn.Module] = mlp, **options: Any) -> float:
    model = ib.wrap(made(make), **options)
    fully_shard(model, mesh=mesh(), reshard_after_forward=True)
    return off(steps(rank, model), make)


class Blocks(nn.Module):
    """Each wrapped and sharded by itself, so that weights are gone between forward and backward."""

    def __init__(self, wrapped: bool) -> None:
        super().__init__()
        blocks = [mlp(classes=6), nn.Sequential(nn.Linear(6, 6).double(), nn.Tanh()), mlp()]
        self.blocks = nn.ModuleList(ib.wrap(b, **CUT) if wrapped else b for b in blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def plain_blocks() -> nn.Module:
    return Blocks(wrapped=False)


def fsdp_around_blocks(rank: int) -> float:
    model = made(lambda: Blocks(wrapped=True))
    for block in model.blocks:
        fully_shard(block, mesh=mesh(), reshard_after_forward=True)
    fully_shard(model, mesh=mesh())
    return off(steps(rank, model), plain_blocks)


def fsdp_around_ranks_that_agree(rank: int) -> float:
    return fsdp_around(rank, **CUT, process_group=dist.group.WORLD)


def fsdp_around_what_no_tape_keeps(rank: int) -> float:
    return fsdp_around(rank, opaque, **CUT)


EXACT: dict[str, Callable[[int], float]] = {
    "FSDP around wrap": lambda rank: fsdp_around(rank, **CUT),
    "FSDP around wrap with a budget": lambda rank: fsdp_around(rank, memory_budget="1GiB"),
    "FSDP around ranks that agree": fsdp_around_ranks_that_agree,
    "FSDP around what no tape keeps": fsdp_around_what_no_tape_keeps,
    "FSDP around each of several blocks": fsdp_around_blocks,
}


# ---- one rank's part by itself ----------------------------------------------------------------


def inside_of_ddp(rank: int) -> float:
    """As the error says: the inner module, and its gradient averaged by hand."""
    ddp = nn.parallel.DistributedDataParallel(made(mlp))
    ib.VirtualBatch(ddp.module, CRITERION, **CUT).backward(*batch(rank))
    for parameter in ddp.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= 2
    return off(ddp.module, loss=separable)


def ddp_afterwards(rank: int) -> float:
    """DistributedDataParallel works as before once its inner module has been used."""
    ddp = nn.parallel.DistributedDataParallel(made(mlp))
    ib.VirtualBatch(ddp.module, CRITERION, **CUT).backward(*batch(rank))
    ddp.zero_grad()
    separable(rank, ddp(batch(rank)[0])).backward()
    return off(ddp.module, loss=separable)


class Hidden(nn.Module):
    """Reads a DTensor that it does not register."""

    def __init__(self, placement: Any) -> None:
        super().__init__()
        self.net = mlp()
        full = torch.linspace(1, 2, 6, dtype=torch.float64)
        self.hidden = [sharding.distribute_tensor(full, mesh(), [placement]).requires_grad_()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x * self.hidden[0].full_tensor())


def hidden_leaf(placement: Any, **options: Any) -> float:
    gradients = []
    for ours in (True, False):
        model = made(lambda: Hidden(placement))
        if ours:
            ib.VirtualBatch(model, CRITERION, **options).backward(*batch(0))
        else:
            separable(0, model(batch(0)[0])).backward()
        gradients.append({"hidden": model.hidden[0].grad.full_tensor()})
    return measure.worst(*gradients)


EXACT |= {
    "inside of DDP": inside_of_ddp,
    "DDP afterwards": ddp_afterwards,
    "a DTensor that no module lists": lambda rank: hidden_leaf(sharding.Replicate(), **CUT),
    "a sharded one, in one micro-batch": lambda rank: hidden_leaf(
        sharding.Shard(0), micro_batch_size=13
    ),
}


# ---- refused ------------------------------------------------------------------------------------


def by_fsdp(whole: bool) -> nn.Module:
    model = made(mlp)
    fully_shard(model[0], mesh=mesh())
    if whole:
        fully_shard(model, mesh=mesh())
    return model


def by_tensor_parallel() -> nn.Module:
    parts = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    return parallelize_module(made(mlp), mesh(), parts)


def with_buffer() -> nn.Module:
    model = Calls(lambda self, x: self.net(x * self.scale.full_tensor()), net=made(mlp))
    full = torch.ones(6, dtype=torch.float64)
    model.register_buffer("scale", sharding.distribute_tensor(full, mesh(), [sharding.Shard(0)]))
    return model


def distributed(tensor: torch.Tensor) -> sharding.DTensor:
    return sharding.distribute_tensor(tensor, mesh(), [sharding.Shard(0)])


def in_virtual_batch(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    ib.VirtualBatch(model, CRITERION, **CUT).backward(x, y)


def in_wrap(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    CRITERION(ib.wrap(model, **CUT)(x), y).backward()


MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "FSDP": (lambda: by_fsdp(whole=True), "FSDPSequential, which shards parameters"),
    "FSDP of a part": (lambda: by_fsdp(whole=False), "FSDPLinear, which shards parameters"),
    "tensor parallel": (by_tensor_parallel, "parameter '0.weight' is a tensor subclass"),
    "a sharded one that no module lists": (
        lambda: made(lambda: Hidden(sharding.Shard(0))),
        "runs a collective (c10d::",
    ),
    "a DTensor buffer": (with_buffer, "buffer 'scale' is a tensor subclass"),
    "DDP": (
        lambda: nn.parallel.DistributedDataParallel(made(mlp)),
        "contains DistributedDataParallel",
    ),
    "DDP of a part": (
        lambda: nn.Sequential(nn.parallel.DistributedDataParallel(made(mlp))),
        "contains DistributedDataParallel",
    ),
}
REFUSED = {
    (name, how.__name__): (make, how, said)
    for name, (make, said) in MODELS.items()
    for how in (in_virtual_batch, in_wrap)
}


def refusal(make: Callable[[], nn.Module], how: Callable[..., None], rank: int) -> str:
    """What is said; the model is as it was and still learns natively."""
    model = make()
    before = [name for name, _ in model.named_parameters()]
    try:
        how(model, *batch(rank))
    except TYPED as error:
        said = f"{type(error).__name__}: {error}"
    else:
        return "fine"
    assert all(p.grad is None for p in model.parameters())
    assert before == [name for name, _ in model.named_parameters()]
    separable(rank, model(batch(rank)[0])).backward()
    return said


def refused_batch(rank: int, how: Callable[..., None], side: int) -> str:
    model, given = made(mlp), list(batch(0))
    given[side] = distributed(given[side])
    try:
        how(model, *given)
    except TYPED as error:
        assert all(p.grad is None for p in model.parameters())
        return f"{type(error).__name__}: {error}"
    return "fine"


def everything(rank: int) -> dict[Any, Any]:
    """All of it in one pair of processes: starting them is what takes time."""
    found: dict[Any, Any] = {}
    for name, far in EXACT.items():
        found[name] = far(rank)
    for key, (make, how, _) in REFUSED.items():
        found[key] = refusal(make, how, rank)
    found["inputs"] = refused_batch(rank, in_virtual_batch, 0)
    found["targets"] = refused_batch(rank, in_virtual_batch, 1)
    found["wrapped inputs"] = refused_batch(rank, in_wrap, 0)
    total = torch.ones(1)
    dist.all_reduce(total)  # what comes of ranks that are out of step
    found["ranks"] = float(total)
    return found


@pytest.fixture(scope="module")
def found():
    return on_two_ranks(everything)


@pytest.mark.parametrize("name", EXACT)
def test_the_gradient_is_that_of_both_whole_batches(found, name):
    assert [each[name] <= 1e-12 for each in found] == [True, True], [each[name] for each in found]


@pytest.mark.parametrize("key", REFUSED, ids=" in ".join)
def test_a_model_is_refused_by_name_on_both_ranks(found, key):
    for each in found:
        assert each[key].startswith("Unsupported: ") and REFUSED[key][2] in each[key]


@pytest.mark.parametrize("side", ["inputs", "targets", "wrapped inputs"])
def test_a_distributed_batch_is_refused(found, side):
    """Its rows are the other rank's too: a slice of it would be gathered."""
    for each in found:
        assert each[side].startswith(f"Unsupported: {side.split()[-1]}")
        assert "to_local()" in each[side]


def test_ranks_are_in_step_afterwards(found):
    assert [each["ranks"] for each in found] == [2, 2]


def test_the_older_fsdp_is_known():
    from infinitybatch import _model

    assert _model._verdict(FullyShardedDataParallel) == "sharded"
