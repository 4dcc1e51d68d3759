"""Rows that `trim=` sorts are seen in another order by no forward that could tell."""

import copy
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
from text_support import contrastive, texts
from torch import nn
from trim_support import MASK, gradients
from wrap_support import close

MIXES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "the first row": lambda h: h + h[:1],
    "neighbours": lambda h: h * h.roll(1, 0),
    "rows up to here": lambda h: h.cumsum(0),
    "all rows alike": lambda h: h - h.mean(0),
}
OTHER = (5, 1, 12, 3, 8, 2, 7, 7, 4, 9, 6, 11, 1)
Call = Callable[[Any], Any]


class Pooled(nn.Module):
    def __init__(self, mix: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.mix = nn.Embedding(29, 6), mix
        self.double()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        real = attention_mask.unsqueeze(-1)
        return self.mix((self.embed(input_ids) * real).sum(1) / real.sum(1))


class Remembering(Pooled):
    """Each row begins with what it was in the step in front."""

    def __init__(self) -> None:
        super().__init__(lambda h: h)
        self.last: torch.Tensor | None = None

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        h = super().forward(input_ids, attention_mask)
        if self.last is not None and self.last.shape == h.shape:
            h = h + 0.1 * self.last
        self.last = h.detach()
        return h


def virtual(model: nn.Module, **options: Any) -> Call:
    step = ib.VirtualBatch(model, ib.losses.coupled(lambda z, _: contrastive(z)), **options)
    return lambda batch: step.backward(batch, torch.zeros(len(batch["input_ids"])))


def wrapped(model: nn.Module, **options: Any) -> Call:
    call = ib.wrap(model, **options)
    return lambda batch: contrastive(call(**batch)).backward()


def alike(batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return batch | {"attention_mask": torch.ones_like(batch["attention_mask"])}


def is_exact(call: Call, model: nn.Module, native: nn.Module, batch: Any) -> None:
    model.zero_grad()
    native.zero_grad()
    contrastive(native(**batch)).backward()
    call(batch)
    close(gradients(model), gradients(native))


@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("made", [virtual, wrapped])
def test_one_micro_batch_of_a_given_size_is_as_the_caller_gave_it(made: Any, mix: str) -> None:
    model, batch = Pooled(MIXES[mix]), texts()
    native = copy.deepcopy(model)
    call = made(model, trim=MASK, micro_batch_size=len(batch["input_ids"]))
    is_exact(call, model, native, batch)


@pytest.mark.parametrize("rows", [2, 4, 12])
@pytest.mark.parametrize("mix", MIXES)
@pytest.mark.parametrize("made", [virtual, wrapped])
def test_of_planned_ones_there_are_two_where_rows_are_sorted(
    made: Any, mix: str, rows: int
) -> None:
    """However large the budget: what combines samples is seen, and refused."""
    model, batch = Pooled(MIXES[mix]), {name: x[:rows] for name, x in texts().items()}
    native = copy.deepcopy(model)
    call = made(model, trim=MASK, memory_budget="1GiB")
    # Nothing is sorted; what is then known of the model holds for sorted rows, too.
    for _ in range(2):
        is_exact(call, model, native, alike(batch))
    for _ in range(2):
        with pytest.raises(ib.CouplingError, match=f"leave trim out.*micro_batch_size={rows}"):
            call(batch)


SIZES: list[dict[str, Any]] = [{"micro_batch_size": 13}, {"micro_batch_tokens": 10_000}]


@pytest.mark.parametrize("size", SIZES, ids=["rows", "tokens"])
@pytest.mark.parametrize("made", [virtual, wrapped])
def test_what_a_step_leaves_for_each_row_meets_that_row(made: Any, size: dict[str, Any]) -> None:
    model = Remembering()
    native = copy.deepcopy(model)
    call = made(model, trim=MASK, **size)
    for batch in [texts(), texts(OTHER)] * 2:
        is_exact(call, model, native, batch)
        close([model.last], [native.last])


@pytest.mark.parametrize("made", [virtual, wrapped])
def test_or_is_refused_where_rows_are_sorted(made: Any) -> None:
    model = Remembering()
    call = made(model, trim=MASK, memory_budget="1GiB")
    with pytest.raises(ib.CouplingError, match="last.*leave trim out"):
        for batch in [texts(), texts(OTHER)] * 2:
            model.zero_grad()
            call(batch)
    assert gradients(model) == [None]
