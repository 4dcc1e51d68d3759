"""`trim=` of a `BatchSource`: sorted rows are read micro-batch by micro-batch."""

from typing import Any

import infinitybatch as ib
import pytest
import torch
from text_support import Encoder, bert, contrastive, masked_labels, texts
from torch import nn
from trim_support import MASK, TOKENS, ClassesFirst, check, native
from wrap_support import close

LENGTHS = tuple(1 + (7 * i) % 12 for i in range(60))
WIDE = 32 * 1024  # bytes of each row that nobody asks for: they are surveyed in two pieces


class Reads(nn.Module):
    """Takes, beside texts, wide rows that take part."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.scale = nn.Parameter(torch.tensor(0.1, dtype=torch.float64))

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, wide: torch.Tensor
    ) -> torch.Tensor:
        return self.encoder(input_ids, attention_mask) + self.scale * wide[:, :16]


def wide_texts() -> dict[str, torch.Tensor]:
    wide = torch.randn(len(LENGTHS), WIDE // 8, generator=torch.Generator().manual_seed(5)).double()
    return {**texts(LENGTHS), "wide": wide}


class Source:
    """Notes what is read, and makes every piece in one buffer."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self.read: list[int] = []
        self.buffers: dict[str, torch.Tensor] = {}

    def __call__(self, begin: int, end: int) -> Any:
        self.read.append(end - begin)
        rows = {}
        for name, value in self.batch.items():
            buffer = self.buffers.setdefault(name, torch.empty_like(value))
            rows[name] = buffer[: end - begin].copy_(value[begin:end])
        return rows

    def rows(self) -> ib.BatchSource:
        return ib.BatchSource(len(LENGTHS), self)


def test_no_more_rows_are_read_at_once_than_a_micro_batch_has() -> None:
    batch, model = wide_texts(), Reads()
    _, wanted = native(model, lambda m: contrastive(m(**batch)))
    source = Source(batch)
    step = ib.VirtualBatch(model, contrastive, trim=MASK, micro_batch_tokens=48, micro_batch_size=8)
    for _ in range(3):
        model.zero_grad()
        step.backward(source.rows())
        check(model, wanted)
    most_surveyed = 2**20 // WIDE
    assert max(source.read) <= most_surveyed
    surveys = 3 * (-(-len(LENGTHS) // most_surveyed) + 2)
    assert len([n for n in source.read if n > 8]) <= surveys


@pytest.mark.parametrize("targets", [False, True])
def test_a_separable_loss(targets: bool) -> None:
    batch, model = texts(LENGTHS), ClassesFirst(bert())
    labels = masked_labels(batch)
    loss, wanted = native(model, lambda m: TOKENS(m(**batch), labels))
    source = Source(batch)
    trim = ib.trim_padding(mask="attention_mask", targets=targets)
    step = ib.VirtualBatch(model, TOKENS, trim=trim, micro_batch_tokens=48)
    beside = ib.BatchSource(len(LENGTHS), lambda begin, end: labels[begin:end].clone())
    report = step.backward(source.rows(), beside)
    check(model, wanted)
    close(report.loss, loss)


def test_a_mask_among_the_targets() -> None:
    batch, model = texts(LENGTHS), ClassesFirst(bert())
    labels = torch.where(batch["attention_mask"].bool(), batch["input_ids"], -100)
    loss, wanted = native(model, lambda m: TOKENS(m(**batch), labels))
    trim = ib.trim_padding(
        mask="targets", padding=-100, inputs=["input_ids", "attention_mask"], targets=True
    )
    step = ib.VirtualBatch(model, TOKENS, trim=trim, micro_batch_tokens=48)
    beside = ib.BatchSource(len(LENGTHS), lambda begin, end: labels[begin:end].clone())
    report = step.backward(Source(batch).rows(), beside)
    check(model, wanted)
    close(report.loss, loss)


@pytest.mark.parametrize("longest_first", [False, True])
def test_rows_that_a_collate_function_pads(longest_first: bool) -> None:
    """Where the first row is as long as any, only later pieces show that others are shorter."""
    batch, model = texts((max(LENGTHS), *LENGTHS[1:]) if longest_first else LENGTHS), Encoder()
    _, wanted = native(model, lambda m: contrastive(m(**batch)))

    def collated(begin: int, end: int) -> Any:
        longest = int(batch["attention_mask"][begin:end].sum(1).max())
        return {name: value[begin:end, :longest] for name, value in batch.items()}

    step = ib.VirtualBatch(model, contrastive, trim=MASK, micro_batch_tokens=48)
    step.backward(ib.BatchSource(len(LENGTHS), collated))
    check(model, wanted)


def test_lengths_of_a_function_need_all_rows() -> None:
    batch, model = texts(LENGTHS), Encoder()
    _, wanted = native(model, lambda m: contrastive(m(**batch)))
    trim = ib.trim_padding(lengths=lambda input_ids, attention_mask: attention_mask.sum(1))
    source = Source(batch)
    ib.VirtualBatch(model, contrastive, trim=trim, micro_batch_tokens=48).backward(source.rows())
    check(model, wanted)
    assert max(source.read) == len(LENGTHS)


def test_evaluate_reads_parts() -> None:
    batch, model = wide_texts(), Reads()
    source = Source(batch)
    loss = nn.CrossEntropyLoss()
    labels = torch.arange(len(LENGTHS)) % 16
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    given = [(source.rows(), labels)]
    run = ib.Trainer(model, loss, optimizer, given, trim=MASK, micro_batch_tokens=48)
    found = run.evaluate(given)
    with torch.no_grad():
        assert found.loss == pytest.approx(loss(model(**batch), labels).item(), rel=1e-12)
    assert max(source.read) <= 2**20 // WIDE
