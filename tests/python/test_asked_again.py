"""Sources that give other rows when they are asked again, as augmentation does that draws anew."""

import infinitybatch as ib
import pytest
import torch
from support import classification
from torch import nn
from wrap_support import contrastive

X, Y = classification(12)
TARGETS = ib.BatchSource(12, lambda begin, end: Y[begin:end])


def model_with(norm: bool) -> nn.Module:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(8) if norm else nn.Tanh()
    return nn.Sequential(nn.Linear(6, 8), middle, nn.Linear(8, 5)).double()


def augmented(begin: int, end: int) -> torch.Tensor:
    return X[begin:end] + 0.1 * torch.randn(end - begin, 6)


def flipped(begin: int, end: int) -> torch.Tensor:
    """The same numbers in another order."""
    return X[begin:end].flip(1) if torch.rand(()) < 0.5 else X[begin:end].clone()


WAYS = {
    "batch norm": (True, nn.CrossEntropyLoss()),
    "coupled": (False, ib.losses.coupled(lambda z, _: contrastive(z))),
}


@pytest.mark.parametrize("way", WAYS)
def test_other_rows_are_a_typed_error(way: str) -> None:
    norm, loss = WAYS[way]
    model = model_with(norm)
    batch = ib.VirtualBatch(model, loss, micro_batch_size=4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        ib.BatchError, match=r"other values for samples \d+ to \d+ when it was asked"
    ):
        batch.backward(ib.BatchSource(12, augmented), TARGETS)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    batch.backward(ib.BatchSource(12, lambda begin, end: X[begin:end].clone()), TARGETS)
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("way", WAYS)
def test_rows_that_do_not_lie_side_by_side(way: str) -> None:
    norm, loss = WAYS[way]
    wide = torch.zeros(12, 12, dtype=torch.float64)

    def every_other(begin: int, end: int, noise: float) -> torch.Tensor:
        wide[begin:end, ::2] = X[begin:end] + noise * torch.randn(end - begin, 6)
        return wide.clone()[begin:end, ::2]

    batch = ib.VirtualBatch(model_with(norm), loss, micro_batch_size=4)
    with pytest.raises(ib.BatchError, match="asked for them again"):
        batch.backward(ib.BatchSource(12, lambda begin, end: every_other(begin, end, 0.1)), TARGETS)
    batch.backward(ib.BatchSource(12, lambda begin, end: every_other(begin, end, 0.0)), TARGETS)


def test_the_order_of_numbers_counts() -> None:
    torch.manual_seed(1)
    batch = ib.VirtualBatch(model_with(True), nn.CrossEntropyLoss(), micro_batch_size=4)
    with pytest.raises(ib.BatchError, match="asked for them again"):
        for _ in range(20):
            batch.backward(ib.BatchSource(12, flipped), TARGETS)


def test_streamed_rows_are_asked_for_once() -> None:
    """Each is one draw of the augmentation, as natively."""
    asked = []

    def rows(begin: int, end: int) -> torch.Tensor:
        asked.append((begin, end))
        return augmented(begin, end)

    model = model_with(False)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4)
    batch.backward(ib.BatchSource(12, rows), TARGETS)
    asked.clear()
    batch.backward(ib.BatchSource(12, rows), TARGETS)
    assert asked == [(0, 1), (0, 4), (4, 8), (8, 12)]  # the first one tells what samples are
