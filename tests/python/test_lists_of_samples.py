"""Lists with one entry for each sample, such as images of several sizes: nobody splits them."""

from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from support import Calls
from torch import nn
from wrap_support import close, grads

N = 9
Y = torch.arange(N) % 4


def of_sizes(several: bool, count: int = N) -> list[torch.Tensor]:
    return [torch.randn(3, 4 + several * i, 4, dtype=torch.float64) for i in range(count)]


def detector() -> nn.Module:
    def forward(self: Any, images: list[torch.Tensor]) -> torch.Tensor:
        return torch.stack([self.head(image.mean((1, 2))) for image in images])

    torch.manual_seed(0)
    return Calls(forward, head=nn.Linear(3, 4)).double()


OPTIONS: list[dict[str, Any]] = [{"micro_batch_size": 2}, {"memory_budget": "64MiB"}]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_targets_tell_that_they_are_samples(
    whole: bool, several: bool, options: dict[str, Any]
) -> None:
    images = of_sizes(several)
    step = ib.VirtualBatch(detector(), nn.CrossEntropyLoss(), **options)
    with pytest.raises(
        ib.BatchError, match=r"inputs.* is a list .* each of 9 samples.*torch.stack\(padded\)"
    ) as caught:
        step.backward(images if whole else (images,), Y)
    assert isinstance(caught.value.__cause__, ib.BatchError)


def test_targets_that_are_a_list_too() -> None:
    boxes = [{"boxes": torch.randn(2, 4), "labels": torch.ones(2)} for _ in range(N)]
    step = ib.VirtualBatch(
        detector(), ib.losses.coupled(lambda out, targets: out.sum()), micro_batch_size=2
    )
    with pytest.raises(ib.BatchError, match="each of 9 samples"):
        step.backward((of_sizes(True),), boxes)


def test_another_input_tells_it() -> None:
    wrapped = ib.wrap(detector(), micro_batch_size=2)
    with pytest.raises(ib.BatchError, match="each of 9 samples"):
        wrapped(of_sizes(True), torch.randn(N, 2))


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("count", [3, N])
def test_forward_fails_on_parts_of_them(count: int, several: bool) -> None:
    wrapped = ib.wrap(detector(), micro_batch_size=2)
    with pytest.raises(ib.BatchError, match=f"list of {count} tensors.*torch.stack") as caught:
        wrapped(of_sizes(several, count))
    assert type(caught.value.__cause__) is RuntimeError  # the model's own


def test_as_many_as_each_has_channels() -> None:
    step = ib.VirtualBatch(detector(), nn.CrossEntropyLoss(), micro_batch_size=1)
    with pytest.raises(ib.BatchError, match="list of 3 tensors.*torch.stack"):
        step.backward((of_sizes(False, 3),), Y[:3])


def test_a_budget_for_all_of_them_is_exact() -> None:
    model, theirs = detector(), detector()
    images = of_sizes(True)
    F.cross_entropy(theirs(images), Y).backward()
    F.cross_entropy(ib.wrap(model, memory_budget="64MiB")(images), Y).backward()
    close(grads(model), grads(theirs), 1e-12)


def test_several_inputs_in_a_list_are_split_as_ever() -> None:
    torch.manual_seed(0)
    views = [torch.randn(N, 3, dtype=torch.float64), torch.randn(N, 3, dtype=torch.float64)]

    def forward(self: Any, both: list[torch.Tensor]) -> torch.Tensor:
        return self.head(both[0] * both[1])

    model = Calls(forward, head=nn.Linear(3, 4)).double()
    F.cross_entropy(model(views), Y).backward()
    wanted = {name: grad.clone() for name, grad in grads(model).items()}
    model.zero_grad()
    ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=2).backward((views,), Y)
    close(grads(model), wanted, 1e-12)
