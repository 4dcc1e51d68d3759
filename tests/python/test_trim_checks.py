"""What `trim=` claims is looked at, and what cannot go with it is refused."""

import copy
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
from support import Log
from text_support import (
    Encoder,
    Tagger,
    bert,
    contrastive,
    texts,
    token_loss,
)
from torch import nn
from torch.nn import functional
from trim_support import MASK, TOKENS, ClassesFirst, check, gradients, native
from wrap_support import close


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
    # One position of padding is cut off of every row, in one micro-batch, too.
    batch, model = (
        {name: functional.pad(x, (0, 1)) for name, x in texts().items()},
        Tagger(norm=True),
    )
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
    assert 0.3 < off(wrapped_model, wanted) < 0.8
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
    """docs/limits.md says so. What stands for padding is the largest value that the model gave there:
    where that is an extremum, its gradient tells."""
    mask = texts()["attention_mask"].unsqueeze(-1)

    def largest(outputs: torch.Tensor) -> torch.Tensor:
        return outputs.amax(1).square().sum()

    def smallest(outputs: torch.Tensor) -> torch.Tensor:
        return outputs.amin(1).square().sum()

    def detached(outputs: torch.Tensor) -> torch.Tensor:
        return (outputs * mask).square().sum() * outputs.detach().square().mean()

    for loss_of in (largest, smallest, detached):
        batch, model = texts(), Tagger()
        _, wanted = native(model, lambda m, given=batch, of=loss_of: of(m(**given)))
        loss = ib.losses.coupled(lambda outputs, _, of=loss_of: of(outputs))
        step = ib.VirtualBatch(model, loss, trim=MASK, micro_batch_tokens=24)
        if loss_of is detached:
            step.backward(batch)
            assert 0.04 < off(model, wanted) < 0.9
        else:
            with pytest.raises(ib.BatchError, match="that trim= has cut off"):
                step.backward(batch)


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
