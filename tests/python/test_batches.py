"""Everything that inputs and targets may be."""

import collections
import dataclasses

import infinitybatch as ib
import numpy as np
import pytest
import torch
from measure import assert_within
from support import Calls, Log, call, mlp, native, ours, worst_error
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree

Pair = collections.namedtuple("Pair", ["images", "mask"])


@dataclasses.dataclass
class Sample:
    images: torch.Tensor
    mask: torch.Tensor
    scale: float = 2.0


_pytree.register_dataclass(Sample)


class ModelOutput(collections.OrderedDict):
    """As Hugging Face's: an OrderedDict whose entries are attributes too, None left out."""

    def __init__(self, **entries):
        super().__init__({k: v for k, v in entries.items() if v is not None})

    def __getattr__(self, name):
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


_pytree.register_pytree_node(
    ModelOutput,
    lambda output: (list(output.values()), list(output.keys())),
    lambda values, keys: ModelOutput(**dict(zip(keys, values, strict=True))),
    flatten_with_keys_fn=lambda output: (
        [(_pytree.MappingKey(k), v) for k, v in output.items()],
        list(output.keys()),
    ),
)


class UserMapping(collections.UserDict):
    """A mapping that no pytree knows, as transformers.BatchEncoding."""


def net():
    return nn.Linear(6, 5).double()


X = torch.randn(11, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
MASK = (torch.rand(11, 5, generator=torch.Generator().manual_seed(2)) > 0.5).double()
Y = torch.randint(5, (11,), generator=torch.Generator().manual_seed(3))


def masked(self, images, mask, scale=2.0):
    return self.net(images) * mask * scale


def positional(*args, **kwargs):
    return args, kwargs


CASES = {
    "tensor": (lambda self, x: self.net(x), X),
    "tuple": (masked, (X, MASK)),
    "list": (masked, [X, MASK]),
    "dict": (masked, {"mask": MASK, "images": X}),
    "dict with a number": (masked, {"images": X, "mask": MASK, "scale": 0.5}),
    "dict with None": (
        lambda self, images, mask: self.net(images) * (1 if mask is None else 0),
        {"images": X, "mask": None},
    ),
    "nested": (
        lambda self, images, more: self.net(images) * more["masks"][1],
        (X, {"masks": [X, MASK]}),
    ),
    "ordered dict": (masked, collections.OrderedDict(images=X, mask=MASK)),
    "user mapping": (masked, UserMapping(images=X, mask=MASK)),
    "named tuple": (lambda self, pair: masked(self, pair.images, pair.mask), Pair(X, MASK)),
    "dataclass": (
        lambda self, s: masked(self, s.images, s.mask, s.scale),
        Sample(X, MASK, 0.5),
    ),
    "dataclass in a tuple": (
        lambda self, s, x: masked(self, s.images, s.mask, s.scale) + self.net(x),
        (Sample(X, MASK, 0.5), X),
    ),
    "model output": (masked, ModelOutput(images=X, mask=MASK)),
    "numpy": (lambda self, x: self.net(x), X.numpy()),
    "numpy in a tuple": (masked, (X.numpy(), MASK)),
    "numpy in a dataclass": (
        lambda self, s: masked(self, s.images, s.mask, s.scale),
        Sample(X.numpy(), MASK),
    ),
}


def to_torch(value):
    """What the model sees: arrays are tensors, mappings dicts."""
    if isinstance(value, UserMapping):
        value = dict(value)
    return _pytree.tree_map(
        lambda x: torch.from_numpy(x) if isinstance(x, np.ndarray) else x, value
    )


@pytest.mark.parametrize("size", [1, 4, 20])
@pytest.mark.parametrize("name", CASES)
def test_inputs_of_every_kind(name, size):
    forward, inputs = CASES[name]
    model = Calls(forward, net=net())
    criterion = nn.CrossEntropyLoss()
    plain = to_torch(inputs)
    if isinstance(plain, dict):
        plain = dict(plain)
    wanted = native(model, criterion, plain, Y)
    found = ours(model, criterion, inputs, Y, micro_batch_size=size)
    assert worst_error(found, wanted) < 1e-12


def test_the_model_is_called_with_the_kinds_that_were_given():
    seen = []

    def forward(self, *args, **kwargs):
        seen.append((args, kwargs))
        return self.net(X[:2])

    model = Calls(forward, net=net())
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=2)
    x, y = X[:2], Y[:2]
    batch.backward((x, [x, (x, "text")]), y)
    (first, (second, (third, text))), kwargs = seen.pop()
    assert kwargs == {} and text == "text"
    assert all(isinstance(t, torch.Tensor) for t in (first, second, third))
    batch.backward({"a": x, "b": Pair(x, None)}, y)
    args, kwargs = seen.pop()
    assert args == () and list(kwargs) == ["a", "b"]
    assert type(kwargs["b"]) is Pair and kwargs["b"].mask is None
    batch.backward(Sample(x, x), y)
    ((sample,), kwargs) = seen.pop()
    assert type(sample) is Sample and sample.scale == 2.0 and kwargs == {}


def test_shared_leaves_are_seen_whole():
    table = torch.randn(3, 5, dtype=torch.float64)
    sizes = Log()

    def forward(self, x, table):
        sizes.append((len(x), len(table)))
        return self.net(x) + table.sum(0)

    model = Calls(forward, net=net())
    wanted = native(model, nn.CrossEntropyLoss(), (X, table), Y)
    sizes.clear()
    found = ours(model, nn.CrossEntropyLoss(), (X, ib.shared(table)), Y, micro_batch_size=4)
    assert {(4, 3), (3, 3)} <= set(sizes) and {table for _, table in sizes} == {3}
    assert worst_error(found, wanted) < 1e-12


def test_batch_dim():
    """A recurrent network with time first, batch second, for inputs and for outputs."""

    def forward(self, x):
        return self.net(self.lstm(x)[0])

    model = Calls(forward, lstm=nn.LSTM(6, 4), net=nn.Linear(4, 5)).double()
    x = torch.randn(7, 11, 6, dtype=torch.float64)
    y = torch.randn(7, 11, 5, dtype=torch.float64)
    wanted = native(model, nn.MSELoss(), x, y)
    found = ours(model, nn.MSELoss(), ib.batch_dim(x, 1), ib.batch_dim(y, 1), micro_batch_size=4)
    assert worst_error(found, wanted) < 1e-12
    assert found.report.micro_batch_sizes == [4, 4, 3]


def test_marks_hold_for_whole_structures():
    def forward(self, x, tables):
        return self.net(x) + tables["a"].sum() + tables["b"][0].sum()

    tables = {"a": torch.ones(3, dtype=torch.float64), "b": [torch.ones(2, dtype=torch.float64)]}
    model = Calls(forward, net=net())
    wanted = native(model, nn.CrossEntropyLoss(), (X, tables), Y)
    for marked in (ib.shared(tables), {"a": ib.shared(tables["a"]), "b": ib.shared(tables["b"])}):
        found = ours(model, nn.CrossEntropyLoss(), (X, marked), Y, micro_batch_size=4)
        assert worst_error(found, wanted) < 1e-12
    # In a tree that goes through torch's pytree, too.
    inputs = Sample(X, ib.shared(tables))
    model = Calls(lambda self, s: forward(self, s.images, s.mask), net=net())
    wanted = native(model, nn.CrossEntropyLoss(), Sample(X, tables), Y)
    found = ours(model, nn.CrossEntropyLoss(), inputs, Y, micro_batch_size=4)
    assert worst_error(found, wanted) < 1e-12


def test_marks_say_what_they_are():
    assert repr(ib.shared(1)) == "shared(1)"
    assert repr(ib.batch_dim("x", 2)) == "batch_dim('x', 2)"


def test_batch_source():
    asked = []

    def rows(begin, end):
        asked.append((begin, end))
        return X[begin:end]

    source = ib.BatchSource(11, rows)
    assert len(source) == source.size == 11 and repr(source) == "BatchSource(size=11)"
    assert torch.equal(source.rows(2, 4), X[2:4])
    model = net()
    wanted = native(model, nn.CrossEntropyLoss(), X, Y)
    asked.clear()
    targets = ib.BatchSource(11, lambda begin, end: Y[begin:end])
    found = ours(model, nn.CrossEntropyLoss(), source, targets, micro_batch_size=4)
    assert worst_error(found, wanted) < 1e-12
    # A first step asks for some rows again, to look for mixed samples, and for slices only.
    assert asked[-6:] == [(0, 4), (4, 8), (8, 11), (0, 4), (0, 3), (3, 4)]


def test_batch_sources_of_other_shapes_get_other_plans():
    model = Calls(lambda self, x: self.net(x).mean(1), net=net())
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), memory_budget="64MiB")
    for length in (1, 50):
        x = torch.randn(11, length, 6, dtype=torch.float64)
        source = ib.BatchSource(11, lambda begin, end, x=x: x[begin:end])
        wanted = native(model, nn.CrossEntropyLoss(), x, Y)
        model.zero_grad()
        report = batch.backward(source, Y)
        torch.testing.assert_close(report.loss, wanted.loss, rtol=1e-12, atol=0)
        assert report.restarts == 0


class Sliceable:
    """Neither tensor nor pytree: rows are made when asked for."""

    def __len__(self):
        return 11

    def __getitem__(self, rows):
        return {"images": X[rows].numpy(), "mask": MASK[rows]}


def test_any_object_with_a_length_and_slices():
    model = Calls(masked, net=net())
    wanted = native(model, nn.CrossEntropyLoss(), {"images": X, "mask": MASK}, Y)
    found = ours(model, nn.CrossEntropyLoss(), Sliceable(), Y, micro_batch_size=4)
    assert worst_error(found, wanted) < 1e-12


def test_from_dataset():
    dataset = torch.utils.data.TensorDataset(X, Y)
    model = net()
    wanted = native(model, nn.CrossEntropyLoss(), X, Y)
    inputs, targets = ib.from_dataset(dataset)
    found = ours(model, nn.CrossEntropyLoss(), inputs, targets, micro_batch_size=4)
    assert worst_error(found, wanted) < 1e-12


@pytest.mark.parametrize("size", [1, 3, 4, 5, 20])
def test_from_batches(size):
    """Pieces of 4, 4 and 3 samples, whatever the micro-batches are."""
    dataset = torch.utils.data.TensorDataset(X, Y)
    model = net()
    wanted = native(model, nn.CrossEntropyLoss(), X, Y)
    loader = torch.utils.data.DataLoader(dataset, batch_size=4)
    inputs, targets = ib.from_batches(loader)
    assert len(inputs) == len(targets) == 11
    found = ours(model, nn.CrossEntropyLoss(), inputs, targets, micro_batch_size=size)
    assert worst_error(found, wanted) < 1e-12


def test_from_batches_of_structures():
    model = Calls(masked, net=net())
    wanted = native(model, nn.CrossEntropyLoss(), {"images": X, "mask": MASK, "scale": 2.0}, Y)
    pieces = (
        ({"images": X[i : i + 3].numpy(), "mask": MASK[i : i + 3], "scale": 2.0}, Y[i : i + 3])
        for i in range(0, 11, 3)
    )
    inputs, targets = ib.from_batches(pieces)
    for begin, end in [(0, 11), (2, 4), (3, 6), (5, 11), (10, 11)]:
        rows = inputs.rows(begin, end)
        assert torch.equal(rows["images"], X[begin:end]) and rows["scale"] == 2.0
    found = ours(model, nn.CrossEntropyLoss(), inputs, targets, micro_batch_size=4)
    assert worst_error(found, wanted) < 1e-12


def test_a_mapped_file_is_not_the_devices_memory(tmp_path):
    path = tmp_path / "images.npy"
    np.save(path, np.random.default_rng(0).normal(size=(4096, 64)).astype(np.float32))
    images = np.load(path, mmap_mode="r")  # 1 MiB, read-only
    model = nn.Linear(64, 5)
    targets = torch.randint(5, (4096,))
    budget = ib.memory.stats().live + 300 * 1024  # other tests may have left garbage
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), memory_budget=budget)
    report = batch.backward(images, targets)
    assert report.peak_bytes <= budget
    found = model.weight.grad.clone()
    model.zero_grad()
    F.cross_entropy(model(torch.from_numpy(np.array(images))), targets).backward()
    torch.testing.assert_close(found, model.weight.grad, rtol=1e-4, atol=1e-7)


OUTPUTS = {
    "tensor": lambda y: y,
    "tuple": lambda y: (y, y.exp()),
    "dict": lambda y: {"logits": y, "log": [y.sin()]},
    "named tuple": lambda y: Pair(y, y.cos()),
    "model output": lambda y: ModelOutput(loss=None, logits=y),
    "with a number": lambda y: (y, 3),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_of_every_kind(name):
    shape = OUTPUTS[name]
    model = Calls(lambda self, x: shape(self.net(x)), net=net())

    def sum_of(outputs, targets):
        assert type(outputs) is type(shape(X))
        first = _pytree.tree_leaves(outputs)[0]
        return F.cross_entropy(first, targets, reduction="sum")

    loss = ib.losses.separable(sum_of, lambda targets, samples: samples)
    wanted = native(Calls(lambda self, x: self.net(x), net=model.net), nn.CrossEntropyLoss(), X, Y)
    found = ours(model, loss, X, Y, micro_batch_size=4, keep_outputs=True)
    assert worst_error(found, wanted) < 1e-12
    with torch.no_grad():
        whole = call(model, X)
    kept = found.report.outputs
    assert type(kept) is type(whole)
    for a, b in zip(_pytree.tree_leaves(kept), _pytree.tree_leaves(whole), strict=True):
        if isinstance(a, torch.Tensor):
            assert not a.requires_grad
            assert_within({"output": a}, {"output": b})
        else:
            assert a == b


def test_targets_may_be_nothing():
    loss = ib.losses.separable(lambda outputs, targets: outputs.square().sum(), None)
    model = mlp()
    report = ib.VirtualBatch(model, loss, micro_batch_size=4).backward(X)
    assert_within({"loss": report.loss}, {"loss": model(X).square().sum()})


def test_a_batch_of_one():
    model = net()
    wanted = native(model, nn.CrossEntropyLoss(), X[:1], Y[:1])
    for options in ({"micro_batch_size": 5}, {"memory_budget": "32MiB"}, {}):
        found = ours(model, nn.CrossEntropyLoss(), X[:1], Y[:1], **options)
        assert worst_error(found, wanted) == 0
