"""Batches that are none: each mistake with its error and what the message says."""

import infinitybatch as ib
import numpy
import pytest
import torch
from misuse_support import X, Y, check, step
from support import mlp


def inference_inputs():
    with torch.inference_mode():
        return X.clone()


def nested():
    return torch.nested.nested_tensor([X[:4], X[4:]], layout=torch.jagged)


def unsteady():
    """A source that gives fewer rows than it was asked for."""
    return ib.BatchSource(12, lambda begin, end: X[begin : end - 1] if end - begin > 1 else X[:1])


def computed():
    return X.clone().requires_grad_() * 2


MISUSES = {
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
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(name):
    check(*MISUSES[name])
