"""Models that cannot be trained, and steps at the wrong moment: each with its error and what the message says."""

import infinitybatch as ib
import pytest
import torch
from misuse_support import X, Y, check, step
from support import Calls, mlp
from torch import nn


def without_gradients():
    model = mlp()
    model.requires_grad_(False)
    return model


def detaching():
    return Calls(lambda self, x: self.net(x).detach(), net=mlp())


def on_meta():
    return mlp().to("meta")


def lazy():
    return nn.Sequential(nn.LazyLinear(5)).double()


def inference_parameter():
    with torch.inference_mode():
        return mlp()


class Wrapper(torch.Tensor):
    """A tensor subclass that intercepts every op, as DTensor does."""

    @staticmethod
    def __new__(cls, tensor):
        return torch.Tensor._make_wrapper_subclass(
            cls, tensor.shape, dtype=tensor.dtype, requires_grad=tensor.requires_grad
        )

    def __init__(self, tensor):
        self.tensor = tensor

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        unwrap = lambda x: x.tensor if isinstance(x, Wrapper) else x  # noqa: E731
        args, kwargs = torch.utils._pytree.tree_map(unwrap, (args, kwargs or {}))
        wrap = lambda x: Wrapper(x) if isinstance(x, torch.Tensor) else x  # noqa: E731
        return torch.utils._pytree.tree_map(wrap, func(*args, **kwargs))


def wrapped_parameter():
    model = mlp()
    model[0].weight = nn.Parameter(Wrapper(model[0].weight.detach()))
    return model


class FullyShardedDataParallel(nn.Module):
    """Stands for torch's, which needs a process group to be made."""

    __module__ = "torch.distributed.fsdp.fully_sharded_data_parallel"

    def forward(self, x):
        return x


def in_mode(mode, function):
    with mode:
        return function()


MISUSES = {
    "a model that is a function": (
        lambda: step(model=torch.sin),
        ib.InvalidType,
        "make_model",
    ),
    "model and loss swapped": (
        lambda: ib.VirtualBatch(nn.CrossEntropyLoss(), mlp(), micro_batch_size=4),
        ib.InvalidType,
        r"model is a CrossEntropyLoss and loss a Sequential.*VirtualBatch\(model, loss\)",
    ),
    "a model's class": (
        lambda: step(model=nn.Linear),
        ib.InvalidType,
        r"model is the class Linear itself; give an instance: Linear\(...\)",
    ),
    "a wrapped class": (
        lambda: ib.wrap(nn.Linear, micro_batch_size=4),
        ib.InvalidType,
        r"model is the class Linear itself; give an instance",
    ),
    "a dict of models": (lambda: step(model={"a": mlp()}), ib.InvalidType, "not dict.*make_model"),
    "a wrapped dict of models": (
        lambda: ib.wrap({"a": mlp()}, micro_batch_size=4),
        ib.InvalidType,
        "must be a torch.nn.Module, not dict",
    ),
    "parameters that are a number": (
        lambda: ib.make_model(torch.sin, 3),
        ib.InvalidType,
        "parameters must be a list of tensors, not int",
    ),
    "a model of what is not callable": (
        lambda: ib.make_model(3, []),
        ib.InvalidType,
        "must be callable",
    ),
    "parameters that are no tensors": (
        lambda: ib.make_model(torch.sin, ["weight"]),
        ib.InvalidType,
        "parameter 0 must be a tensor",
    ),
    "nothing requires grad": (
        lambda: step(model=without_gradients()),
        ib.InvalidArgument,
        "does not depend on anything that requires grad",
    ),
    "outputs are detached": (lambda: step(model=detaching()), ib.InvalidArgument, "detached"),
    "parameters on meta": (lambda: step(model=on_meta()), ib.Unsupported, "meta device"),
    "lazy parameters": (
        lambda: step(model=lazy()),
        ib.StateError,
        "parameter '0.weight' has no shape yet",
    ),
    "parameters from inference mode": (
        lambda: step(model=inference_parameter()),
        ib.Unsupported,
        "parameter '0.weight' was made in inference mode",
    ),
    "a tensor subclass": (
        lambda: step(model=wrapped_parameter()),
        ib.Unsupported,
        "parameter '0.weight' is a tensor subclass",
    ),
    "FSDP": (
        lambda: step(model=nn.Sequential(FullyShardedDataParallel())),
        ib.Unsupported,
        "FullyShardedDataParallel",
    ),
    "under no_grad": (lambda: in_mode(torch.no_grad(), step), ib.StateError, "no_grad"),
    "in inference mode": (
        lambda: in_mode(torch.inference_mode(), step),
        ib.StateError,
        "inference_mode",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(name):
    check(*MISUSES[name])


def test_errors_are_the_built_in_ones_too():
    assert issubclass(ib.Error, RuntimeError)
    assert issubclass(ib.InvalidArgument, ValueError) and issubclass(ib.InvalidType, TypeError)
    assert issubclass(ib.BatchError, ib.InvalidArgument)
    assert issubclass(ib.BudgetExceeded, torch.OutOfMemoryError)
    for name in ib.errors.__all__:
        base = UserWarning if name.endswith("Notice") else ib.Error
        assert issubclass(getattr(ib, name), base)


def test_torchs_own_errors_come_as_torchs():
    with pytest.raises(IndexError, match="out of bounds"):
        step(targets=Y + 100)
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        step(inputs=X[:, :3])


@pytest.fixture
def process_group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    yield
    torch.distributed.destroy_process_group()


def test_distributed_data_parallel(process_group):
    ddp = nn.parallel.DistributedDataParallel(mlp())
    for model in (ddp, nn.Sequential(ddp)):
        with pytest.raises(ib.Unsupported, match="DistributedDataParallel.*ddp.module"):
            step(model=model)
    step(model=ddp.module)


def test_fully_sharded(process_group):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = mlp()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ib.Unsupported, match="shards|tensor subclass"):
        step(model=model)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_gradients_inside_of_forward_are_refused(norm) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(3, 3)
            self.norm = norm(3)
            self.head = nn.Linear(3, 1)

        def forward(self, x):
            x = self.norm(self.line(x))
            (slope,) = torch.autograd.grad(x.square().sum(), x, retain_graph=True)
            return self.head(x + slope)

    model = Model()
    batch = ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=2, checkpoint_segments=2)
    with pytest.raises(ib.Unsupported, match="gradients are computed inside.*larger memory_budget"):
        batch.backward(torch.randn(4, 3), torch.randn(4, 1))
    assert all(parameter.grad is None for parameter in model.parameters())
