"""Gradients of weights that are products of two matrices are added to their sums as they are computed:
beside what a user hangs on the graph, and in less memory than accumulation by hand."""

import copy

import infinitybatch as ib
import pytest
import torch
from support import Log
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

X = torch.randn(24, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randint(0, 30, (24,), generator=torch.Generator().manual_seed(1))


def net(width: int = 50) -> nn.Sequential:
    torch.manual_seed(2)
    return nn.Sequential(nn.Linear(40, width), nn.Tanh(), nn.Linear(width, 30)).double()


def native(model: nn.Module) -> nn.Module:
    same = copy.deepcopy(model)
    nn.functional.cross_entropy(same(X), Y).backward()
    return same


def assert_same(model: nn.Module, wanted: nn.Module) -> None:
    for found, expected in zip(model.parameters(), wanted.parameters(), strict=True):
        assert found.grad is not None and expected.grad is not None
        torch.testing.assert_close(found.grad, expected.grad, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("coupled", [False, True])
def test_saved_tensors_are_unpacked_once(coupled: bool) -> None:
    packed, unpacked = [], []

    def pack(tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
        packed.append(len(packed))
        return packed[-1], tensor * 1

    def unpack(pair: tuple[int, torch.Tensor]) -> torch.Tensor:
        unpacked.append(pair[0])
        return pair[1]

    model = net()
    loss = nn.CrossEntropyLoss() if not coupled else ib.losses.coupled(nn.CrossEntropyLoss())
    batch = ib.VirtualBatch(model, loss, micro_batch_size=5)
    with saved_tensors_hooks(pack, unpack):
        batch.backward(X, Y)
    assert packed and len(unpacked) == len(set(unpacked)) > 0
    assert_same(model, native(model))


def test_hooks_on_modules_and_outputs_see_their_gradients() -> None:
    model, seen = net(), Log()
    model[0].register_full_backward_hook(lambda module, into, out: seen.append(out[0].shape))
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=8)
    for _ in range(3):  # the first two look at gradients of other rows
        model.zero_grad()
        seen.clear()
        batch.backward(X, Y)
    assert [tuple(shape) for shape in seen] == [(8, 50)] * 3
    assert_same(model, native(model))


def test_a_step_takes_less_than_accumulation_by_hand() -> None:
    def peak_of(step) -> int:  # noqa: ANN001
        model.zero_grad()
        step()  # the second one adds to what is there
        before = ib.memory.stats().live
        ib.memory.reset_peak()
        step()
        return ib.memory.stats().peak - before

    def by_hand() -> None:
        for rows, labels in zip(X.split(2), Y.split(2), strict=True):
            nn.functional.cross_entropy(model(rows), labels, reduction="sum").div(24).backward()

    model = net(4000)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=2)
    weight = 8 * 40 * 4000
    gradients = 8 * sum(p.numel() for p in model.parameters())
    # A step's sums stand beside `.grad` until they are handed out.
    assert peak_of(lambda: batch.backward(X, Y)) < gradients + weight / 2
    assert peak_of(by_hand) > weight
