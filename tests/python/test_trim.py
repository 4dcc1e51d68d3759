"""`trim=` and `micro_batch_tokens=`: rows sorted by length and computed without their padding give the
gradient of the whole padded batch."""

import infinitybatch as ib
import pytest
import torch
from text_support import (
    LENGTHS,
    Encoder,
    Tagger,
    bert,
    contrastive,
    masked_labels,
    texts,
    token_loss,
)
from torch.nn import functional
from trim_support import MASK, SIZES, TOKENS, ClassesFirst, check, native
from wrap_support import close


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("targets", [False, True], ids=["padded back", "targets trimmed"])
def test_a_separable_loss_of_tokens(size: str, targets: bool) -> None:
    if "retained_micro_batches" in SIZES[size]:
        pytest.skip("a separable loss keeps no graphs")
    batch, model = texts(), ClassesFirst(bert())
    labels = masked_labels(batch)
    loss, wanted = native(model, lambda m: TOKENS(m(**batch), labels))
    step = ib.VirtualBatch(
        model, TOKENS, trim=ib.trim_padding(mask="attention_mask", targets=targets), **SIZES[size]
    )
    for _ in range(3):
        model.zero_grad()
        report = step.backward(batch, labels)
        check(model, wanted)
        close(report.loss, loss)


@pytest.mark.parametrize("size", SIZES)
def test_a_contrastive_loss(size: str) -> None:
    batch, model = texts(), Encoder()
    loss, wanted = native(model, lambda m: contrastive(m(**batch)))
    step = ib.VirtualBatch(model, contrastive, trim=MASK, **SIZES[size])
    for _ in range(3):
        model.zero_grad()
        report = step.backward(batch)
        check(model, wanted)
        close(report.loss, loss)


def test_a_loss_of_all_sees_outputs_with_time_in_full_and_in_order() -> None:
    batch, model = texts(), Tagger()
    labels = masked_labels(batch)
    order = torch.arange(1.0, len(labels) + 1, dtype=torch.float64)

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert outputs.shape == (*targets.shape, outputs.shape[-1])
        each = functional.cross_entropy(
            outputs.transpose(1, 2), targets, ignore_index=-100, reduction="none"
        )
        return (each.sum(1) * order).square().mean()

    wanted_loss, wanted = native(model, lambda m: loss(m(**batch), labels))
    step = ib.VirtualBatch(model, ib.losses.coupled(loss), trim=MASK, micro_batch_tokens=24)
    report = step.backward(batch, labels)
    close(report.loss, wanted_loss)
    check(model, wanted)


def test_micro_batches_are_packed_longest_first() -> None:
    batch, model = texts(), Encoder()
    step = ib.VirtualBatch(model, contrastive, trim=MASK, micro_batch_tokens=24)
    sizes = step.backward(batch).micro_batch_sizes
    lengths = sorted(LENGTHS, reverse=True)
    at = 0
    for size in sizes:
        assert size * lengths[at] <= 24
        at += size
        if at < len(lengths):
            assert (size + 1) * lengths[at - size] > 24
    assert at == len(LENGTHS)
    assert len(set(sizes)) > 2


def test_callbacks_are_told_which_samples_they_see() -> None:
    batch, model = texts(), Encoder()
    seen: list[ib.MicroBatch] = []
    step = ib.VirtualBatch(
        model, contrastive, trim=MASK, micro_batch_tokens=24, on_micro_batch=seen.append,
        keep_outputs=True,
    )  # fmt: skip
    report = step.backward(batch)
    wanted = model(**batch).detach()
    close(report.outputs, wanted)
    for each in seen:
        close(each.outputs, wanted[list(each.samples)])
    assert sorted(i for each in seen for i in each.samples) == list(range(len(LENGTHS)))
    seen.clear()
    plain = ib.VirtualBatch(model, contrastive, micro_batch_size=5, on_micro_batch=seen.append)
    plain.backward(batch)
    assert [each.samples for each in seen] == [range(0, 5), range(5, 10), range(10, 13)]


def test_rows_of_a_batch_source_are_sorted_too() -> None:
    batch, model = texts(), Encoder()
    _, wanted = native(model, lambda m: contrastive(m(**batch)))
    rows = ib.BatchSource(
        len(LENGTHS), lambda begin, end: {k: v[begin:end] for k, v in batch.items()}
    )
    ib.VirtualBatch(model, contrastive, trim=MASK, micro_batch_tokens=24).backward(rows)
    check(model, wanted)


def test_segments_of_micro_batches() -> None:
    batch, model = texts(), Encoder()
    _, wanted = native(model, lambda m: contrastive(m(**batch)))
    step = ib.VirtualBatch(
        model, contrastive, trim=MASK, micro_batch_tokens=24, checkpoint_segments=3
    )
    step.backward(batch)
    check(model, wanted)


def test_verify_compares_with_the_padded_batch() -> None:
    batch, model = texts(), ClassesFirst(bert())
    report = ib.verify(model, TOKENS, batch, masked_labels(batch), trim=MASK, micro_batch_tokens=24)
    assert report.exact, report


# ---- wrap ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_wrap_with_a_contrastive_loss(size: str) -> None:
    batch, model = texts(), Encoder()
    _, wanted = native(model, lambda m: contrastive(m(**batch)))
    wrapped = ib.wrap(model, trim=MASK, **SIZES[size])
    for _ in range(3):
        model.zero_grad()
        outputs = wrapped(**batch)
        close(outputs, model(**batch))
        contrastive(outputs).backward()
        check(model, wanted)
    with torch.no_grad():
        close(wrapped(**batch), model(**batch))


@pytest.mark.parametrize("size", SIZES)
def test_wrap_with_a_masked_language_model(size: str) -> None:
    """Logits come back in full, with one value where padding was cut off, which the loss ignores."""
    batch, model = texts(), bert()
    labels = masked_labels(batch)
    _, wanted = native(model, lambda m: token_loss(m(**batch).logits, labels))
    wrapped = ib.wrap(model, trim=MASK, **SIZES[size])
    for _ in range(2):
        model.zero_grad()
        outputs = wrapped(**batch)
        assert type(outputs).__name__ == "MaskedLMOutput"
        real = batch["attention_mask"].bool()
        close(outputs.logits[real], model(**batch).logits[real])
        token_loss(outputs.logits, labels).backward()
        check(model, wanted)
