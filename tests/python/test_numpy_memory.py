"""NumPy arrays whose memory torch has no tensors of are taken by a copy."""

from collections.abc import Callable

import infinitybatch as ib
import numpy
import pytest
import torch
from torch import nn

ROWS = 7


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def gradients(net: nn.Module) -> torch.Tensor:
    return torch.cat([p.grad.reshape(-1) for p in net.parameters() if p.grad is not None])


def rows() -> numpy.ndarray:
    return numpy.random.default_rng(1).standard_normal((ROWS, 4))


def of_records() -> numpy.ndarray:
    records = numpy.zeros(ROWS, dtype=[("tag", "i4"), ("x", "f8", 4)])
    records["x"] = rows()
    return records["x"]  # 36 bytes from row to row, 8 from number to number


ARRAYS: dict[str, Callable[[], numpy.ndarray]] = {
    "reversed": lambda: rows()[::-1],
    "columns reversed": lambda: rows()[:, ::-1],
    "big endian": lambda: rows().astype(">f8"),
    "big endian, reversed": lambda: rows().astype(">f8")[::-1],
    "a field of records": of_records,
    "transposed": lambda: numpy.ascontiguousarray(rows().T).T,
    "read-only": lambda: numpy.broadcast_to(rows()[:1], (ROWS, 4)),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_inputs_and_targets(name: str) -> None:
    x = ARRAYS[name]()
    y = numpy.arange(ROWS * 2, dtype=">f8").reshape(ROWS, 2)[::-1]
    native, ours = model(), model()
    criterion = nn.MSELoss()
    criterion(
        native(torch.tensor(x.tolist(), dtype=torch.float64)), torch.tensor(y.tolist()).double()
    ).backward()
    before = x.tobytes()
    ib.VirtualBatch(ours, criterion, micro_batch_size=3).backward(x, y)
    wanted = gradients(native)
    assert (gradients(ours) - wanted).norm() <= 1e-12 * wanted.norm()
    assert x.tobytes() == before


def test_classes_of_a_big_endian_file() -> None:
    x, y = rows(), numpy.array([0, 1, 1, 0, 1, 0, 0], dtype=">i8")
    native, ours = model(), model()
    criterion = nn.CrossEntropyLoss()
    criterion(native(torch.from_numpy(x)), torch.tensor(y.tolist())).backward()
    ib.VirtualBatch(ours, criterion, micro_batch_size=2).backward(x, y)
    wanted = gradients(native)
    assert (gradients(ours) - wanted).norm() <= 1e-12 * wanted.norm()


def test_a_type_without_tensors() -> None:
    net = model()
    batch = ib.VirtualBatch(net, nn.MSELoss(), micro_batch_size=3)
    x, y = rows().astype(numpy.longdouble), torch.zeros(ROWS, 2, dtype=torch.float64)
    with pytest.raises(ib.BatchError, match=r"a NumPy array of longdouble|float128") as refused:
        batch.backward(x, y)
    assert "x.astype(numpy.float64)" in str(refused.value)
    batch.backward(x.astype(numpy.float64), y)
