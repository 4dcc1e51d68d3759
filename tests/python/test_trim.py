"""`trim=` and `micro_batch_tokens=`: rows sorted by length and computed without their padding give the
gradient of the whole padded batch."""

import copy
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
from support import Log
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
from wrap_support import close

MASK = ib.trim_padding(mask="attention_mask")
SIZES: dict[str, dict[str, Any]] = {
    "tokens": {"micro_batch_tokens": 24},
    "rows": {"micro_batch_size": 4},
    "both": {"micro_batch_tokens": 24, "micro_batch_size": 3},
    "one": {"micro_batch_tokens": 10_000},
    "longest alone": {"micro_batch_tokens": 7},
    "kept": {"micro_batch_tokens": 24, "retained_micro_batches": 2},
    "rerun": {"micro_batch_tokens": 24, "use_tapes": False},
    "tokens, budget": {"micro_batch_tokens": 24, "memory_budget": "1GiB"},
    "budget": {"memory_budget": "1GiB"},
}


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [p.grad for p in model.parameters()]


def native(model: nn.Module, run: Callable[[nn.Module], torch.Tensor]) -> Any:
    model = copy.deepcopy(model)
    loss = run(model)
    loss.backward()
    return loss.detach(), gradients(model)


def check(found: nn.Module, wanted: list[torch.Tensor | None]) -> None:
    close(gradients(found), wanted)


def separable(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return token_loss(outputs.logits if hasattr(outputs, "logits") else outputs, labels)


TOKENS = nn.CrossEntropyLoss()


def by_token(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.transpose(1, 2)


class ClassesFirst(nn.Module):
    """Scores as torch's criterion takes them, [samples, classes, time]."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        out = self.inner(input_ids=input_ids, attention_mask=attention_mask)
        return (out.logits if hasattr(out, "logits") else out).transpose(1, 2)


# ---- VirtualBatch --------------------------------------------------------------------------------


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
    """Logits come back in full: zeros where padding was cut off, which the loss ignores."""
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


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_dropout_draws_the_same_numbers_again() -> None:
    """Masks are those of micro-batches; the gradient is the one of the outputs that they gave."""
    batch, model = texts(), Encoder(dropout=0.3)
    found = []
    for use_tapes in (True, False):
        torch.manual_seed(5)
        wrapped = ib.wrap(model, trim=MASK, micro_batch_tokens=24, use_tapes=use_tapes)
        model.zero_grad()
        outputs = wrapped(**batch)
        contrastive(outputs).backward()
        found.append([outputs.detach(), *gradients(model)])
    close(found[1], found[0])


# ---- What is refused -----------------------------------------------------------------------------


class NoMask(nn.Module):
    """A mean over all positions, padding included."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(29, 6)
        self.double()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.embed(input_ids).mean(1)


def both(model: nn.Module, loss: Any, batch: Any, **options: Any) -> list[Callable[[], Any]]:
    step = ib.VirtualBatch(model, loss, **options)
    wrapped = ib.wrap(model, **options)
    return [lambda: step.backward(batch), lambda: loss(wrapped(**batch)).backward()]


def test_a_model_that_reads_padding() -> None:
    batch, model = texts(), NoMask()
    for run in both(model, contrastive, batch, trim=MASK, micro_batch_tokens=24):
        with pytest.raises(
            ib.BatchError, match=r"sample \d+, trimmed to \d+ of 12.*leave trim out"
        ):
            run()
        assert all(each is None for each in gradients(model))


def test_a_mask_that_marks_too_much() -> None:
    batch, model = texts(), Encoder()
    wrong = batch["attention_mask"].clone()
    wrong[:, 2:] = 0

    class OtherMask(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, input_ids: Any, attention_mask: Any, wrong: Any) -> Any:
            return self.inner(input_ids, attention_mask)

    given = {**batch, "wrong": wrong}
    trim = ib.trim_padding(mask="wrong")
    for run in both(OtherMask(), contrastive, given, trim=trim, micro_batch_tokens=24):
        with pytest.raises(ib.BatchError, match="marks padding alone"):
            run()


def test_a_loss_that_reads_padding() -> None:
    batch, model = texts(), Tagger()

    def mean(outputs: torch.Tensor) -> torch.Tensor:
        return outputs.square().mean() + outputs.mean() ** 2 + outputs[:, -1].sum()

    for run in both(model, mean, batch, trim=MASK, micro_batch_tokens=24):
        with pytest.raises(ib.BatchError, match="positions of outputs.*ignore_index=-100"):
            run()
        assert all(each is None for each in gradients(model))
    step = ib.VirtualBatch(model, nn.MSELoss(), trim=MASK, micro_batch_tokens=24)
    with pytest.raises(ib.BatchError, match="positions of outputs"):
        step.backward(batch, torch.ones(13, 12, 29, dtype=torch.float64))


def test_targets_that_count_padding() -> None:
    batch, model = texts(), ClassesFirst(Tagger())
    trim = ib.trim_padding(mask="attention_mask", targets=True)
    step = ib.VirtualBatch(model, TOKENS, trim=trim, micro_batch_tokens=24)
    labels = batch["input_ids"]  # whose padding is a class
    with pytest.raises(ib.BatchError, match=r"divides by 156 with all targets and by \d+"):
        step.backward(batch, labels)
    coupled = ib.VirtualBatch(model, ib.losses.coupled(token_loss), trim=trim, micro_batch_tokens=9)
    with pytest.raises(ib.InvalidArgument, match="leave targets=True out"):
        coupled.backward(batch, labels)


def test_layers_of_the_whole_batch() -> None:
    batch, model = texts(), Tagger(norm=True)
    mask = batch["attention_mask"].unsqueeze(-1)

    def loss(outputs: torch.Tensor) -> torch.Tensor:
        return (outputs * mask[: len(outputs)]).square().sum()

    before = copy.deepcopy(model.state_dict())
    for tokens in (24, 10_000):
        for run in both(model, loss, batch, trim=MASK, micro_batch_tokens=tokens):
            with pytest.raises(ib.CouplingError, match="batch_norm.*leave trim out"):
                run()
            close(model.state_dict(), before, tolerance=0)
    model.eval()
    _, wanted = native(model, lambda m: loss(m(**batch)))
    loss(ib.wrap(model, trim=MASK, micro_batch_tokens=24)(**batch)).backward()
    check(model, wanted)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no trim": ({"micro_batch_tokens": 24}, "micro_batch_tokens counts positions.*trim="),
    "no tokens": ({"micro_batch_tokens": 0, "trim": MASK}, "1 or more"),
    "static": ({"micro_batch_size": 4, "trim": MASK, "static_graph": True}, "leave one of them"),
    "rng": ({"micro_batch_size": 4, "trim": MASK, "match_native_rng": True}, "leave one of them"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_do_not_go_together(name: str) -> None:
    options, message = REFUSED[name]
    for make in (lambda: ib.wrap(Encoder(), **options), lambda: ib.VirtualBatch(Encoder(), contrastive, **options)):  # fmt: skip
        with pytest.raises(ib.InvalidArgument, match=message):
            make()


def test_what_trim_padding_takes() -> None:
    with pytest.raises(ib.InvalidArgument, match="a mask or lengths"):
        ib.trim_padding()
    with pytest.raises(ib.InvalidArgument, match="a mask or lengths"):
        ib.trim_padding("mask", lengths="lengths")
    with pytest.raises(ib.InvalidType, match="padding must be a number"):
        ib.trim_padding("mask", padding="0")  # type: ignore[arg-type]
    with pytest.raises(ib.InvalidType, match=r"trim must be what ib.trim_padding"):
        ib.wrap(Encoder(), trim="attention_mask", micro_batch_size=4)  # type: ignore[arg-type]
    with pytest.raises(ib.InvalidArgument, match="targets=True of trim means nothing for wrap"):
        ib.wrap(Encoder(), trim=ib.trim_padding("m", targets=True), micro_batch_size=4)
    batch = texts()
    with pytest.raises(ib.BatchError, match="'masks', which is none of inputs"):
        ib.wrap(Encoder(), trim=ib.trim_padding("masks"), micro_batch_size=4)(**batch)
    too_long = ib.trim_padding(lengths=lambda ids, mask: mask.sum(1) + 1)
    with pytest.raises(ib.BatchError, match="length 13, but there are 12 positions"):
        ib.wrap(Encoder(), trim=too_long, micro_batch_size=4)(*batch.values())


def test_an_input_that_requires_grad() -> None:
    class Embedded(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(6, 3).double()

        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return (self.head(x).tanh() * mask.unsqueeze(-1)).sum(1)

    mask = texts()["attention_mask"]
    x = torch.randn(13, 12, 6, dtype=torch.float64, requires_grad=True)
    wrapped = ib.wrap(Embedded(), trim=ib.trim_padding(mask="mask"), micro_batch_tokens=24)
    with pytest.raises(ib.InvalidArgument, match="requires grad and would be trimmed"):
        wrapped(x, mask)


# ---- What is not noticed -------------------------------------------------------------------------


def off(found: nn.Module, wanted: list[torch.Tensor]) -> float:
    pairs = [(a, b) for a, b in zip(gradients(found), wanted, strict=True) if b is not None]
    return max(float((a - b).norm() / b.norm()) for a, b in pairs if b.norm() > 1e-9)


def test_a_mask_that_is_wrong_in_other_rows_than_the_one_that_is_looked_at() -> None:
    """docs/limits.md says so; `verify` tells."""
    batch = texts((12,) * 8 + (5,) * 10)
    wrong = batch["attention_mask"].clone()
    wrong[2, 4:] = 0  # among the short ones now
    wrapped_model = Twice(Encoder())
    given = {**batch, "wrong": wrong}
    _, wanted = native(wrapped_model, lambda m: contrastive(m(**given)))
    trim = ib.trim_padding(mask="wrong")
    wrapped = ib.wrap(wrapped_model, trim=trim, micro_batch_tokens=24)
    contrastive(wrapped(**given)).backward()
    assert 1e-3 < off(wrapped_model, wanted) < 1
    assert not ib.verify(
        wrapped_model, contrastive, given, None, trim=trim, micro_batch_tokens=24
    ).exact


class Twice(nn.Module):
    """A model with one more argument, which it does not read."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Any, attention_mask: Any, wrong: Any) -> Any:
        return self.inner(input_ids, attention_mask)


def test_a_loss_that_hangs_on_padding_without_a_gradient_there() -> None:
    batch, model = texts(), Tagger()
    loss = ib.losses.coupled(lambda outputs, _: (outputs - 3).amax(1).square().sum())
    _, wanted = native(model, lambda m: (m(**batch) - 3).amax(1).square().sum())
    step = ib.VirtualBatch(model, loss, trim=MASK, micro_batch_tokens=24)
    try:
        step.backward(batch)
    except ib.BatchError:
        return  # a zero that was put there is the maximum, and its gradient tells
    assert off(model, wanted) < 1


def test_rows_are_compared_in_the_first_step_alone() -> None:
    batch = texts()
    for wraps in (True, False):
        model = Encoder()
        rows = Log()
        model.register_forward_pre_hook(
            lambda _, args, kwargs, rows=rows: rows.append(len(kwargs["input_ids"])),
            with_kwargs=True,
        )
        options: dict[str, Any] = {"trim": MASK, "micro_batch_size": 5}
        wrapped = ib.wrap(model, **options)
        step = ib.VirtualBatch(model, contrastive, **options)
        counts = []
        for _ in range(3):
            rows.clear()
            if wraps:
                contrastive(wrapped(**batch)).backward()
            else:
                step.backward(batch)
            counts.append(list(rows))
        assert counts[2] == [5, 5, 3]  # step 3 looks at no rows
        assert counts[0].count(1) >= 4  # two lengths, in full and trimmed


def test_padding_that_changes_sides_is_looked_at_again() -> None:
    """Right padding says nothing of what a model makes of positions that are counted from the left."""
    model = bert("Model")
    wrapped = ib.wrap(model, trim=MASK, micro_batch_tokens=24)
    for _ in range(2):
        wrapped(**texts())
    with pytest.raises(ib.BatchError, match="position_ids"):
        wrapped(**texts(left=True))
    wrapped(**texts())


def test_a_model_of_sentence_transformers() -> None:
    """Its features are one argument, and come back among its outputs."""
    sentence_support = pytest.importorskip("sentence_support")
    inner = sentence_support.sentences_model()
    words = sentence_support.WORDS
    texts_ = [" ".join(words[i % 11 : i % 11 + 1 + i % 6]) for i in range(12)]
    features = inner.tokenize(texts_)
    wanted_model = copy.deepcopy(inner)
    contrastive(wanted_model(dict(features))["sentence_embedding"]).backward()
    wrapped = ib.wrap(inner, trim=MASK, micro_batch_tokens=16)
    contrastive(wrapped(dict(features))["sentence_embedding"]).backward()
    check(inner, gradients(wanted_model))
    assert len(wrapped.last_report.micro_batch_sizes) > 2
