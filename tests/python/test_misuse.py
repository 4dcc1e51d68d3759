"""Bad input: each mistake with its error and what the message says."""

import infinitybatch as ib
import numpy
import pytest
import torch
from support import Calls, classification, mlp
from torch import nn

X, Y = classification(12)


def step(model=None, inputs=X, targets=Y, loss=None, **options):
    options = options or {"micro_batch_size": 4}
    batch = ib.VirtualBatch(model or mlp(), loss or nn.CrossEntropyLoss(), **options)
    return batch.backward(inputs, targets)


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


def inference_inputs():
    with torch.inference_mode():
        return X.clone()


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


def returns(value):
    return Calls(lambda self, x: value(self.net(x)), net=mlp())


class Wrapped:
    """A class that no pytree knows, holding a tensor."""

    def __init__(self, tensor):
        self.tensor = tensor


class DynamicCache:
    """Named as transformers' is, which no pytree of torch knows."""


def nested():
    return torch.nested.nested_tensor([X[:4], X[4:]], layout=torch.jagged)


def unsteady():
    """A source that gives fewer rows than it was asked for."""
    return ib.BatchSource(12, lambda begin, end: X[begin : end - 1] if end - begin > 1 else X[:1])


def computed():
    return X.clone().requires_grad_() * 2


def own_loss(value):
    return ib.losses.separable(lambda o, t: value(o), lambda t, samples: samples)


def own_denominator(value):
    return ib.losses.separable(lambda o, t: o.sum(), lambda t, samples: value)


def in_mode(mode, function):
    with mode:
        return function()


MISUSES = {
    # batches
    "different sizes": (lambda: step(targets=Y[:5]), ib.BatchError, "12 samples, targets 5"),
    "sizes differ within inputs": (
        lambda: step(inputs=(X, X[:3])),
        ib.BatchError,
        r"inputs\[1\] has 3 samples, inputs\[0\] has 12",
    ),
    "sizes differ within a dict": (
        lambda: step(inputs={"x": X, "mask": X[:3]}),
        ib.BatchError,
        r"inputs\['mask'\] has 3 samples",
    ),
    "sizes differ within targets": (
        lambda: step(targets=[Y, Y[:2]]),
        ib.BatchError,
        r"targets\[1\] has 2 samples",
    ),
    "an empty batch": (
        lambda: step(inputs=X[:0], targets=Y[:0]),
        ib.BatchError,
        "inputs is empty",
    ),
    "a 0-dimensional tensor": (
        lambda: step(inputs=(X, torch.tensor(1.0))),
        ib.BatchError,
        r"inputs\[1\] is a 0-dimensional tensor.*shared",
    ),
    "no tensor at all": (lambda: step(inputs=[1, 2]), ib.BatchError, "no tensor"),
    "inputs that are a number": (lambda: step(inputs=3), ib.BatchError, "no tensor"),
    "inputs that are None": (lambda: step(inputs=None), ib.BatchError, "no tensor"),
    "everything shared": (lambda: step(inputs=ib.shared(X)), ib.BatchError, "nothing to split"),
    "a dimension that is not there": (
        lambda: step(inputs=ib.batch_dim(X, 2)),
        ib.BatchError,
        "no dimension 2",
    ),
    "a negative dimension": (lambda: ib.batch_dim(X, -1), ib.InvalidArgument, "from the front"),
    "a nested tensor": (lambda: step(inputs=nested()), ib.Unsupported, "nested tensor"),
    "a sparse tensor": (lambda: step(inputs=X.to_sparse()), ib.Unsupported, "sparse tensor"),
    "inputs from inference mode": (
        lambda: step(inputs=inference_inputs()),
        ib.Unsupported,
        "inputs was made in inference mode",
    ),
    "inputs with a graph": (
        lambda: step(inputs={"x": computed()}),
        ib.Unsupported,
        r"inputs\['x'\] was computed from something that requires grad",
    ),
    "a dataset": (
        lambda: step(inputs=torch.utils.data.TensorDataset(X, Y)),
        ib.InvalidType,
        "from_dataset",
    ),
    "an iterable dataset": (lambda: ib.from_dataset(iter([])), ib.InvalidType, "__len__"),
    "a dataset that is not of pairs": (
        lambda: step(None, *ib.from_dataset(torch.utils.data.TensorDataset(X))),
        ib.InvalidType,
        "pair",
    ),
    "a loader": (
        lambda: step(inputs=torch.utils.data.DataLoader([1, 2])),
        ib.InvalidType,
        "from_batches",
    ),
    "no pieces": (lambda: ib.from_batches([]), ib.BatchError, "empty"),
    "pieces that are no pairs": (lambda: ib.from_batches([X]), ib.InvalidType, "pair"),
    "pieces of different structure": (
        lambda: ib.from_batches([(X, Y), ([X], Y)]),
        ib.BatchError,
        "piece 1 has another structure",
    ),
    "pieces whose tensors differ": (
        lambda: ib.from_batches([((X, X[:3]), Y)]),
        ib.BatchError,
        "piece 0 needs tensors of one size",
    ),
    "a source of size 0": (lambda: ib.BatchSource(0, lambda b, e: X), ib.BatchError, "size 0"),
    "a source without a function": (lambda: ib.BatchSource(3, X), ib.InvalidType, "callable"),
    "a source that gives too little": (
        lambda: step(inputs=unsteady()),
        ib.BatchError,
        "asked for rows 0 to 4 and gave 3",
    ),
    "a list of numbers": (
        lambda: step(inputs=X.tolist()),
        ib.BatchError,
        r"inputs has no tensor.*torch.tensor\(rows\)",
    ),
    "a range": (lambda: step(inputs=range(12)), ib.BatchError, "array of numbers whose first"),
    "text": (lambda: step(inputs="hello"), ib.BatchError, "inputs has no tensor"),
    "arrays of objects": (
        lambda: step(inputs=numpy.array([object()] * 12)),
        ib.BatchError,
        "inputs has no tensor",
    ),
    "a generator": (lambda: step(inputs=(row for row in X)), ib.InvalidType, "from_batches"),
    "a generator of a wrapped model": (
        lambda: ib.wrap(mlp(), micro_batch_size=4)(row for row in X),
        ib.BatchError,
        "no tensor with a batch dimension",
    ),
    "targets that are numbers": (
        lambda: step(targets=Y.tolist()),
        ib.BatchError,
        "targets is a list with one entry for each of 12 samples",
    ),
    "targets that are text": (lambda: step(targets="abc"), ib.InvalidArgument, "needs targets"),
    "a batch_dim in words": (
        lambda: ib.batch_dim(X, "0"),
        ib.InvalidType,
        "batch_dim must be a whole number, not str",
    ),
    "a batch_dim that is a fraction": (
        lambda: ib.batch_dim(X, 1.0),
        ib.InvalidType,
        "batch_dim must be a whole number, not float",
    ),
    "a batch_dim of more than 64 bits": (
        lambda: ib.batch_dim(X, 10**30),
        ib.InvalidArgument,
        "batch_dim is a whole number of more than 64 bits",
    ),
    "a source's size in words": (
        lambda: ib.BatchSource("12", lambda b, e: X),
        ib.InvalidType,
        "the size of a BatchSource must be a whole number, not str",
    ),
    "a source's size that is a fraction": (
        lambda: ib.BatchSource(12.0, lambda b, e: X),
        ib.InvalidType,
        "whole number, not float",
    ),
    "pieces that are a number": (
        lambda: ib.from_batches(3),
        ib.InvalidType,
        r"iterable of pairs \(inputs, targets\), not int: from_batches\(loader\)",
    ),
    "across_batch with its arguments swapped": (
        lambda: ib.across_batch(X, torch.sin),
        ib.InvalidType,
        r"first argument of across_batch must be a function.*not Tensor: across_batch\(fn, x\)",
    ),
    "across_batch of a number": (
        lambda: ib.across_batch(torch.sin, 3),
        ib.InvalidType,
        "needs tensors whose first dimension is the batch",
    ),
    # the model
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
    # the moment
    "under no_grad": (lambda: in_mode(torch.no_grad(), step), ib.StateError, "no_grad"),
    "in inference mode": (
        lambda: in_mode(torch.inference_mode(), step),
        ib.StateError,
        "inference_mode",
    ),
    # options
    "micro_batch_size 0": (lambda: step(micro_batch_size=0), ib.InvalidArgument, "1 or more"),
    "micro_batch_size below 0": (
        lambda: step(micro_batch_size=-4),
        ib.InvalidArgument,
        "1 or more",
    ),
    "micro_batch_size a fraction": (
        lambda: step(micro_batch_size=2.5),
        ib.InvalidType,
        "whole number",
    ),
    "micro_batch_size true": (lambda: step(micro_batch_size=True), ib.InvalidType, "whole number"),
    "a budget of nonsense": (
        lambda: step(memory_budget="lots"),
        ib.InvalidArgument,
        "lots",
    ),
    "a budget of 0": (lambda: step(memory_budget=0), ib.InvalidArgument, "0"),
    "a budget below 0": (lambda: step(memory_budget=-1), ib.InvalidArgument, "-1"),
    "a budget of more than all": (lambda: step(memory_budget=1.5), ib.InvalidArgument, "1.5"),
    "a budget of another type": (
        lambda: step(memory_budget=[1]),
        ib.InvalidType,
        "memory_budget must be a number of bytes.*not list",
    ),
    "a budget that is true": (lambda: step(memory_budget=True), ib.InvalidType, "not bool"),
    "a budget that is not a number": (
        lambda: step(memory_budget=float("nan")),
        ib.InvalidArgument,
        'memory_budget is nan.*"512MiB"',
    ),
    "a budget of infinity": (
        lambda: step(memory_budget=float("inf")),
        ib.InvalidArgument,
        "memory_budget is inf",
    ),
    "a budget in percent": (lambda: step(memory_budget="150%"), ib.InvalidArgument, '"150%"'),
    "a budget of no text": (lambda: step(memory_budget=""), ib.InvalidArgument, 'budget is ""'),
    "a wrapped model's budget that is true": (
        lambda: ib.wrap(mlp(), memory_budget=True),
        ib.InvalidType,
        "not bool",
    ),
    "a size in words": (
        lambda: step(micro_batch_size="4"),
        ib.InvalidType,
        "micro_batch_size must be a whole number of samples, not str",
    ),
    "a loss that is text": (
        lambda: step(loss="cross_entropy"),
        ib.InvalidType,
        "loss must be a callable, a criterion.*not str",
    ),
    "a loss that is a tensor": (lambda: step(loss=X.sum()), ib.InvalidType, "not Tensor"),
    "a loss that returns nothing": (
        lambda: step(loss=lambda o, t: None),
        ib.InvalidType,
        "must return a scalar tensor, not NoneType$",
    ),
    "a loss that returns a number": (
        lambda: step(loss=lambda o, t: 1.0),
        ib.InvalidType,
        r"must return a scalar tensor, not float; remove \.item\(\)",
    ),
    "a complex loss": (
        lambda: step(loss=lambda o, t: o.sum() * 1j),
        ib.InvalidArgument,
        r"complex.*\.abs\(\)",
    ),
    "an unknown batch_coupling": (
        lambda: step(batch_coupling="off"),
        ib.InvalidArgument,
        "per_micro_batch",
    ),
    "a callback that is none": (
        lambda: step(on_micro_batch=3),
        ib.InvalidType,
        "on_micro_batch must be callable",
    ),
    "a grad_scaler that is none": (lambda: step(grad_scaler=3), ib.InvalidType, "grad_scaler"),
    "a truth value in words": (
        lambda: step(static_graph="False", micro_batch_size=4),
        ib.InvalidType,
        "static_graph is 'False'; it is True or False",
    ),
    "a truth value that is a number": (lambda: step(use_tapes=0), ib.InvalidType, "use_tapes is 0"),
    "a truth value of wrap": (
        lambda: ib.wrap(mlp(), match_native_rng=None),
        ib.InvalidType,
        "match_native_rng is None",
    ),
    "a bandwidth below 0": (
        lambda: step(offload=ib.Offload(host_bandwidth=-1)),
        ib.InvalidArgument,
        "is -1",
    ),
    "a bandwidth that is no number": (
        lambda: ib.wrap(mlp(), offload=ib.Offload(host_bandwidth=float("nan"))),
        ib.InvalidArgument,
        "host_bandwidth is nan",
    ),
    "a bandwidth in words": (
        lambda: step(offload=ib.Offload(host_bandwidth="fast")),
        ib.InvalidType,
        "host_bandwidth must be a number of bytes per second, not 'fast'",
    ),
    "a directory that is a number": (
        lambda: step(offload=ib.Offload(directory=3)),
        ib.InvalidType,
        "a path",
    ),
    "retained_micro_batches without a size": (
        lambda: step(retained_micro_batches=2),
        ib.InvalidArgument,
        "retained_micro_batches is 2 without micro_batch_size",
    ),
    "retained_micro_batches None": (
        lambda: step(retained_micro_batches=None),
        ib.InvalidType,
        "whole number of micro-batches, not NoneType",
    ),
    "micro_batch_size of more than 64 bits": (
        lambda: step(micro_batch_size=10**30),
        ib.InvalidArgument,
        r"micro_batch_size is 1e\+30",
    ),
    "a budget of more than 64 bits": (
        lambda: step(memory_budget=10**30),
        ib.InvalidArgument,
        "memory_budget is a whole number of more than 64 bits",
    ),
    "a host budget of nonsense": (
        lambda: step(offload=ib.Offload(host_budget="nope")),
        ib.InvalidArgument,
        "host_budget is .nope",
    ),
    "a limit of nonsense": (lambda: ib.memory.limit("lots"), ib.InvalidArgument, "the limit is"),
    "a device that is not there": (lambda: ib.memory.stats(99), ib.Error, "99"),
    "a device that is none": (
        lambda: ib.memory.reset_peak([1]),
        ib.InvalidType,
        "device must be a torch.device",
    ),
    "an output_batch_dim below 0": (
        lambda: ib.wrap(mlp(), output_batch_dim=-1),
        ib.InvalidArgument,
        "output_batch_dim is -1; count dimensions from the front",
    ),
    "an output_batch_dim that no output has": (
        lambda: ib.wrap(mlp(), micro_batch_size=4, output_batch_dim=7)(X),
        ib.InvalidArgument,
        "output_batch_dim is 7, but outputs have at most 2 dimensions",
    ),
    "a loss_device that is none": (
        lambda: ib.losses.coupled(lambda o: o.sum(), loss_device="foo"),
        ib.InvalidArgument,
        "loss_device is 'foo', which is not a device",
    ),
    "a criterion's class": (
        lambda: step(loss=nn.CrossEntropyLoss),
        ib.InvalidType,
        r"loss is the class CrossEntropyLoss itself.*CrossEntropyLoss\(\)",
    ),
    "a loss of the model's own in a function": (
        lambda: step(model=returns(lambda y: y.sum()), loss=ib.losses.coupled(lambda o: o)),
        ib.BatchError,
        "losses.from_model",
    ),
    # losses (those that are refused at once stand in test_losses.py)
    "a model that returns no tensor": (
        lambda: step(model=returns(lambda y: None)),
        ib.InvalidArgument,
        "0 tensor",
    ),
    "a model that returns too much": (
        lambda: step(model=returns(lambda y: (y, y))),
        ib.InvalidArgument,
        "2 tensor",
    ),
    "targets that are missing": (
        lambda: step(targets=None),
        ib.InvalidArgument,
        "targets",
    ),
    "a sum that is no tensor": (
        lambda: step(loss=own_loss(lambda o: 3.0)),
        ib.InvalidType,
        "sum must return a scalar tensor, not float",
    ),
    "a sum of many numbers": (
        lambda: step(loss=own_loss(lambda o: o)),
        ib.InvalidArgument,
        "scalar tensor",
    ),
    "a denominator that is no number": (
        lambda: step(loss=own_denominator("all")),
        ib.InvalidType,
        "denominator must return a number",
    ),
    "a denominator of three arguments": (
        lambda: ib.losses.separable(lambda o, t: o, lambda a, b, c: 1),
        ib.InvalidArgument,
        "takes 3 arguments",
    ),
    "a denominator that is a number": (
        lambda: ib.losses.separable(lambda o, t: o, 3),
        ib.InvalidType,
        "denominator must be callable",
    ),
    "a sum that is a number": (
        lambda: ib.losses.separable(3, None),
        ib.InvalidType,
        "sum must be callable",
    ),
    "a penalty that is a number": (
        lambda: ib.losses.with_penalty(nn.MSELoss(), 3),
        ib.InvalidType,
        "penalty must be callable",
    ),
    "from_model without a denominator": (
        lambda: ib.losses.from_model(3),
        ib.InvalidType,
        "denominator must be callable",
    ),
    "from_model with a model that returns no loss": (
        lambda: step(
            model=returns(lambda y: {"logits": y}), loss=ib.losses.from_model(lambda t: len(t))
        ),
        ib.InvalidType,
        "returns its loss",
    ),
    "weights of the wrong type": (
        lambda: ib.losses.cross_entropy(weight=[1, 2]),
        TypeError,
        "cross_entropy",
    ),
    "outputs that nobody knows how to join": (
        lambda: step(
            model=returns(lambda y: (y, Wrapped(y))),
            loss=own_loss(lambda o: o[0].sum()),
            keep_outputs=True,
            micro_batch_size=4,
        ),
        ib.InvalidType,
        r"outputs\[1\] is a Wrapped",
    ),
    "a language model's cache among the outputs": (
        lambda: ib.wrap(returns(lambda y: (y, [DynamicCache()])), micro_batch_size=4)(X),
        ib.InvalidType,
        r"outputs\[1\]\[0\] is a DynamicCache.*use_cache=False",
    ),
    "outputs that cannot be joined": (
        lambda: step(
            model=returns(lambda y: y.sum(0)),
            loss=own_loss(lambda o: o.sum()),
            keep_outputs=True,
            micro_batch_size=4,
        ),
        ib.BatchError,
        "keep_outputs",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(name):
    function, kind, message = MISUSES[name]
    with pytest.raises(kind, match=f"(?s){message}") as raised:
        function()
    if kind is not TypeError:
        assert isinstance(raised.value, ib.Error)
        assert len(str(raised.value)) < 600


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
