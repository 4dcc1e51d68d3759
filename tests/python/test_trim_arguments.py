"""`trim=` with any inputs: lengths by name, position or function, left padding, decoders, time first."""

from typing import Any

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
    t5,
    texts,
    token_loss,
)
from torch import nn
from torch.nn import functional
from trim_support import MASK, TOKENS, check, native, seeded
from wrap_support import close


@pytest.mark.parametrize("positional", [False, True])
def test_arguments_are_found_by_name_and_by_position(positional: bool) -> None:
    batch, model = texts(), Encoder()
    _, wanted = native(model, lambda m: contrastive(m(**batch)))
    for mask in ("attention_mask", 1):
        wrapped = ib.wrap(model, trim=ib.trim_padding(mask=mask), micro_batch_tokens=24)
        model.zero_grad()
        outputs = wrapped(*batch.values()) if positional else wrapped(**batch)
        contrastive(outputs).backward()
        check(model, wanted)
        assert len(wrapped.last_report.micro_batch_sizes) > 3
        step = ib.VirtualBatch(
            model, contrastive, trim=ib.trim_padding(mask=mask), micro_batch_tokens=24
        )
        model.zero_grad()
        step.backward(tuple(batch.values()))
        check(model, wanted)


@pytest.mark.parametrize(
    "lengths",
    [
        lambda input_ids, attention_mask: attention_mask.sum(1),
        lambda input_ids, attention_mask: attention_mask.sum(1).tolist(),
    ],
)
def test_lengths_by_a_function(lengths: Any) -> None:
    batch, model = texts(), Encoder()
    _, wanted = native(model, lambda m: contrastive(m(**batch)))
    for given in (ib.trim_padding(lengths=lengths), ib.trim_padding(mask="input_ids", padding=0)):
        model.zero_grad()
        contrastive(ib.wrap(model, trim=given, micro_batch_tokens=24)(**batch)).backward()
        check(model, wanted)
        model.zero_grad()
        ib.VirtualBatch(model, contrastive, trim=given, micro_batch_tokens=24).backward(batch)
        check(model, wanted)


def test_lengths_that_are_an_argument() -> None:
    class WithLengths(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = Encoder()

        def forward(self, ids: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            mask = torch.arange(ids.shape[1]) < lengths[:, None]
            return self.encoder(ids, mask.long())

    batch, model = texts(), WithLengths()
    ids, lengths = batch["input_ids"], batch["attention_mask"].sum(1)
    _, wanted = native(model, lambda m: contrastive(m(ids, lengths)))
    wrapped = ib.wrap(model, trim=ib.trim_padding(lengths="lengths"), micro_batch_tokens=24)
    contrastive(wrapped(ids, lengths)).backward()
    check(model, wanted)


def test_left_padding() -> None:
    batch, model = texts(left=True), Encoder()
    assert not batch["attention_mask"][0, 0]
    positions = (batch["attention_mask"].cumsum(1) - 1).clamp(min=0)

    class Positioned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = bert("Model")

        def forward(self, **given: torch.Tensor) -> torch.Tensor:
            return self.bert(**given).last_hidden_state

    model = Positioned()
    given = {**batch, "position_ids": positions}
    mask = batch["attention_mask"].unsqueeze(-1)
    _, wanted = native(model, lambda m: contrastive((m(**given) * mask).sum(1)))
    wrapped = ib.wrap(model, trim=MASK, micro_batch_tokens=24)
    outputs = wrapped(**given)
    close(outputs * mask, model(**given) * mask)
    contrastive((outputs * mask).sum(1)).backward()
    check(model, wanted)
    # Without them positions are counted from the left, where there is another number of them now.
    with pytest.raises(ib.BatchError, match=r"trimmed to \d+ of 12 positions.*position_ids"):
        ib.wrap(model, trim=MASK, micro_batch_tokens=24)(**batch)


SIDES = [
    ib.trim_padding(mask="attention_mask", inputs=["input_ids"]),
    ib.trim_padding(mask="labels", padding=-100),
]


@pytest.mark.parametrize("longest", [12, 9], ids=["as long", "shorter"])
def test_encoder_and_decoder_with_labels(longest: int) -> None:
    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = t5()

        def forward(self, **given: torch.Tensor) -> torch.Tensor:
            return self.inner(**given).logits

    source, model = texts(), Logits()
    target = texts(tuple(min(each, longest) for each in reversed(LENGTHS)), seed=4)
    labels = torch.where(target["attention_mask"].bool(), target["input_ids"], -100)
    _, wanted = native(model, lambda m: token_loss(m(**source, labels=labels), labels))
    wrapped = ib.wrap(model, trim=SIDES, micro_batch_tokens=60)
    for _ in range(2):
        model.zero_grad()
        token_loss(wrapped(**source, labels=labels), labels).backward()
        check(model, wanted)
    assert len(wrapped.last_report.micro_batch_sizes) > 2


def test_labels_as_targets_beside_decoder_inputs() -> None:
    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = t5()

        def forward(self, **given: torch.Tensor) -> torch.Tensor:
            return self.inner(**given).logits.transpose(1, 2)

    source, target, model = texts(), texts(tuple(reversed(LENGTHS)), seed=4), Logits()
    labels = torch.where(target["attention_mask"].bool(), target["input_ids"], -100)
    batch = {**source, "decoder_input_ids": model.inner._shift_right(labels)}
    loss, wanted = native(model, lambda m: TOKENS(m(**batch), labels))
    trim = [
        ib.trim_padding(mask="attention_mask", inputs=["input_ids"]),
        ib.trim_padding(mask="targets", padding=-100, inputs=["decoder_input_ids"]),
    ]
    step = ib.VirtualBatch(model, TOKENS, trim=trim, micro_batch_tokens=60)
    close(step.backward(batch, labels).loss, loss)
    check(model, wanted)


def test_two_sequences_of_one_length_have_to_be_named() -> None:
    source, target = texts(), texts(tuple(reversed(LENGTHS)), seed=4)
    trim = [MASK, ib.trim_padding(mask="decoder_attention_mask")]
    wrapped = ib.wrap(t5(), trim=trim, micro_batch_tokens=60)
    with pytest.raises(ib.BatchError, match=r"as long as two masks of trim=, 12.*inputs=\["):
        wrapped(
            **source,
            decoder_input_ids=target["input_ids"],
            decoder_attention_mask=target["attention_mask"],
        )


def test_time_first() -> None:
    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tagger = Tagger()

        def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return self.tagger(ids.T, mask.T).transpose(0, 1)

    batch, model = texts(), TimeFirst()
    ids, mask = (batch[key].T.contiguous() for key in ("input_ids", "attention_mask"))
    labels = masked_labels(batch).T

    def loss(outputs: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())

    _, wanted = native(model, lambda m: loss(m(ids, mask)))
    wrapped = ib.wrap(model, batch_dim=1, trim=ib.trim_padding(mask="mask"), micro_batch_tokens=24)
    loss(wrapped(ids, mask)).backward()
    check(model, wanted)


# ---- Lengths -------------------------------------------------------------------------------------

BATCHES: dict[str, tuple[int, ...]] = {
    "all equal": (6,) * 9,
    "one row": (5,),
    "a row without any": (3, 0, 12, 5, 1, 4, 0),
    "one that is longer than the tokens": (2, 40, 3, 1, 5, 5),
    "two lengths": (2,) * 8 + (11,) * 3,
}


@pytest.mark.parametrize("name", BATCHES)
def test_lengths(name: str) -> None:
    batch, model = texts(BATCHES[name]), Encoder()
    loss = contrastive if len(BATCHES[name]) > 1 else lambda vectors: vectors.square().sum()
    _, wanted = native(model, lambda m: loss(m(**batch)))
    wrapped = ib.wrap(model, trim=MASK, micro_batch_tokens=24)
    loss(wrapped(**batch)).backward()
    check(model, wanted)
    model.zero_grad()
    ib.VirtualBatch(model, loss, trim=MASK, micro_batch_tokens=24).backward(batch)
    check(model, wanted)


def test_ever_new_lengths() -> None:
    """One wrapped model and one VirtualBatch, batches of other shapes."""
    model = Encoder()
    wrapped = ib.wrap(model, trim=MASK, micro_batch_tokens=24)
    step = ib.VirtualBatch(model, contrastive, trim=MASK, micro_batch_tokens=24)
    for seed in range(6):
        lengths = tuple(
            int(n) for n in torch.randint(1, 14 + seed, (7 + seed,), generator=seeded(seed))
        )
        batch = texts(lengths, seed=seed)
        _, wanted = native(model, lambda m, batch=batch: contrastive(m(**batch)))
        model.zero_grad()
        contrastive(wrapped(**batch)).backward()
        check(model, wanted)
        model.zero_grad()
        step.backward(batch)
        check(model, wanted)
