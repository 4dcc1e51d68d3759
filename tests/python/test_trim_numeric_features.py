"""`trim=` beside inputs that are as long as the texts by chance, and losses that read padding."""

import copy
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
from text_support import VOCABULARY, texts
from torch import nn
from torch.nn import functional as F
from trim_support import MASK, check, gradients, native
from wrap_support import close

FEATURES = 7


class Both(nn.Module):
    """Texts and numbers of each sample; nothing in it asks how many of these there are."""

    def __init__(self, read: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 6)
        self.head = nn.Linear(7, 3)
        self.read = read
        self.double()

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        numbers: torch.Tensor,
        kinds: torch.Tensor | None = None,
    ) -> torch.Tensor:
        hidden = self.embed(input_ids)
        if kinds is not None:
            hidden = hidden + self.embed(kinds)
        mask = attention_mask.unsqueeze(-1)
        pooled = (hidden * mask).sum(1) / mask.sum(1)
        return self.head(torch.cat([pooled, self.read(numbers)], 1))


READS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "their mean": lambda x: x.mean(1, keepdim=True),
    "their last": lambda x: x[:, -1:],
    "all seven": lambda x: (x * torch.linspace(1, 2, FEATURES).to(x)).sum(1, keepdim=True),
}
LENGTHS = {7: (3, 7, 1, 5, 2, 4, 6, 3), 12: (3, 9, 1, 12, 5, 2, 7, 4), 9: (2, 9, 4, 5, 3, 3, 8, 1)}


def given(longest: int, kinds: bool = False, seed: int = 0) -> dict[str, torch.Tensor]:
    batch = texts(LENGTHS[longest], seed=seed)
    draws = torch.Generator(torch.get_default_device()).manual_seed(seed + 1)
    batch["numbers"] = torch.randn(8, FEATURES, generator=draws).double()
    if kinds:
        batch["kinds"] = torch.randint(0, 3, batch["input_ids"].shape, generator=draws)
    return batch


def stepper(model: nn.Module, way: str, **options: Any) -> Callable[[Any, torch.Tensor], Any]:
    options = {"trim": MASK, "micro_batch_size": 3} | options
    if way == "wrap":
        wrapped = ib.wrap(model, **options)
        return lambda batch, targets: F.cross_entropy(wrapped(**batch), targets).backward()
    step = ib.VirtualBatch(model, nn.CrossEntropyLoss(), **options)
    return lambda batch, targets: step.backward(batch, targets)


ORDERS = {
    "other lengths first": (12, 9, 7, 7, 12),
    "as long first": (7, 7, 12, 7, 9),
    "always as long": (7, 7, 7, 7, 7),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "rows": {},
    "tokens": {"micro_batch_size": None, "micro_batch_tokens": 20},
    "budget": {"micro_batch_size": None, "memory_budget": "64MiB"},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("way", ["VirtualBatch", "wrap"])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("read", READS)
def test_numbers_as_many_as_the_longest_text_has_tokens(
    read: str, order: str, way: str, options: str
) -> None:
    model = Both(READS[read])
    step = stepper(model, way, **OPTIONS[options])
    targets = torch.arange(8) % 3
    for i, longest in enumerate(ORDERS[order]):
        batch = given(longest, kinds=i > 0, seed=i)
        model.zero_grad()
        _, wanted = native(model, lambda m, b=batch: F.cross_entropy(m(**b), targets))
        step(batch, targets)
        check(model, wanted)


class Padded(nn.Module):
    """Scores at each position, that of padding included."""

    def __init__(self, masks: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 6, padding_idx=0)
        self.head = nn.Linear(6, 2)
        self.masks = masks
        self.double()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        out = self.head(self.embed(input_ids))
        return out * attention_mask.unsqueeze(-1) if self.masks else out


def targets_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    draws = torch.Generator(torch.get_default_device()).manual_seed(3)
    full = torch.randn(*batch["input_ids"].shape, 2, generator=draws).double()
    return full * batch["attention_mask"].unsqueeze(-1)


@pytest.mark.parametrize("way", ["VirtualBatch", "coupled", "wrap"])
@pytest.mark.parametrize("zero", [False, True], ids=["a bias", "a bias that begins at zero"])
def test_a_squared_error_beside_targets_that_are_padded_with_zeros(way: str, zero: bool) -> None:
    """Natively the model's own values at padded positions count: the bias."""
    model = Padded(masks=False)
    if zero:
        nn.init.zeros_(model.head.bias)
    batch = texts()
    targets = targets_of(batch)
    step = stepper_of(model, way)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    if zero:  # then there is nothing yet
        _, wanted = native(model, lambda m: F.mse_loss(m(**batch), targets))
        step(batch, targets)
        check(model, wanted)
        optimizer.step()
        optimizer.zero_grad()
    before = copy.deepcopy(gradients(model))
    with pytest.raises(ib.BatchError, match="mask them in the loss"):
        step(batch, targets)
    assert all(grad is None for grad in gradients(model)) and before == [None] * 3


def stepper_of(model: nn.Module, way: str) -> Callable[[Any, torch.Tensor], Any]:
    options: dict[str, Any] = {"trim": MASK, "micro_batch_size": 4}
    if way == "wrap":
        wrapped = ib.wrap(model, **options)
        return lambda batch, targets: F.mse_loss(wrapped(**batch), targets).backward()
    loss = nn.MSELoss() if way == "VirtualBatch" else ib.losses.coupled(F.mse_loss)
    return ib.VirtualBatch(model, loss, **options).backward


@pytest.mark.parametrize("way", ["VirtualBatch", "coupled", "wrap"])
def test_where_the_model_masks_its_outputs_itself_it_is_exact(way: str) -> None:
    model = Padded(masks=True)
    batch = texts()
    targets = targets_of(batch)
    step = stepper_of(model, way)
    for _ in range(4):
        model.zero_grad()
        _, wanted = native(model, lambda m: F.mse_loss(m(**batch), targets))
        step(batch, targets)
        check(model, wanted)


def test_the_way_out_of_a_squared_error_beside_padding() -> None:
    model = Padded(masks=False)
    batch = texts()
    targets = targets_of(batch)
    mask = batch["attention_mask"].unsqueeze(-1)

    def loss(outputs: torch.Tensor) -> torch.Tensor:
        return ((outputs - targets).square() * mask).sum() / mask.sum()

    wrapped = ib.wrap(model, trim=MASK, micro_batch_size=4)
    _, wanted = native(model, lambda m: loss(m(**batch)))
    outputs = wrapped(**batch)
    loss(outputs).backward()
    check(model, wanted)
    close(outputs.detach() * mask, model(**batch).detach() * mask)
