"""`trim=` under a `memory_budget`: rows of other lengths are packed by the bytes that they are predicted
to take, uneven in number, and what is predicted is what is measured."""

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
from support import Log
from text_support import Encoder, bert, contrastive, masked_labels, texts
from torch import nn
from torch.nn import functional
from trim_support import MASK, TOKENS, ClassesFirst, check, native
from wrap_support import close

FULL = 40
PAIRS = ib.losses.coupled(lambda outputs, _: contrastive(outputs))


def log_normal(count: int = 48, seed: int = 0, longest: int = FULL) -> tuple[int, ...]:
    draws = torch.Generator().manual_seed(seed)
    found = (torch.randn(count, generator=draws) * 0.7 + 2.1).exp().long().clamp(1, longest)
    found[seed % count] = longest
    return tuple(found.tolist())


LENGTHS: dict[str, tuple[int, ...]] = {
    "log-normal": log_normal(),
    "bimodal": tuple(5 if i % 3 else 36 for i in range(48)),
    "equal": (24,) * 48,
}


class Attention(nn.Module):
    """Attention by hand, whose scores take the square of the length, and one vector for each text; or,
    with `time`, scores of each token."""

    def __init__(self, width: int = 24, time: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(29, width)
        self.project = nn.Linear(width, 3 * width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.head = nn.Linear(width, 29) if time else None
        self.double()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(input_ids)
        q, k, v = self.project(hidden).chunk(3, dim=-1)
        scores = q @ k.transpose(1, 2) / q.shape[-1] ** 0.5
        scores = scores.masked_fill(attention_mask[:, None, :] == 0, -1e30)
        hidden = hidden + scores.softmax(-1) @ v
        hidden = hidden + self.down(functional.gelu(self.up(hidden)))
        if self.head is not None:
            return self.head(hidden).transpose(1, 2)
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * mask).sum(1) / mask.sum(1)


def share_of_native(
    model: nn.Module, run: Callable[[nn.Module], torch.Tensor], share: float
) -> int:
    """A budget: what is live now and gradients, and of the rest that a native step takes a part."""
    live = ib.memory.stats().live
    with ib.memory.peak() as whole:
        native(model, run)
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    return live + 2 * gradients + int(share * (whole.peak - live - 2 * gradients))


def counting(model: nn.Module) -> list[tuple[int, int]]:
    """Shapes that it is called with from now on."""
    shapes = Log()
    model.register_forward_pre_hook(
        lambda _, args, kwargs: shapes.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    return shapes


def inside(report: Any, budget: int) -> None:
    assert report.peak_bytes <= budget
    if report.predicted_peak_bytes is not None:
        off = report.predicted_peak_bytes - report.peak_bytes
        assert abs(off) <= 0.01 * report.peak_bytes, (report.predicted_peak_bytes, report)


# ---- exact, inside the budget --------------------------------------------------------------------


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("targets", [False, True], ids=["padded back", "targets trimmed"])
def test_a_separable_loss_of_tokens(lengths: str, targets: bool) -> None:
    batch, model = texts(LENGTHS[lengths]), Attention(time=True)
    labels = masked_labels(batch)
    budget = share_of_native(model, lambda m: TOKENS(m(**batch), labels), 0.35)
    loss, wanted = native(model, lambda m: TOKENS(m(**batch), labels))
    trim = ib.trim_padding(mask="attention_mask", targets=targets)
    step = ib.VirtualBatch(model, TOKENS, trim=trim, memory_budget=budget)
    reports = []
    for _ in range(48):  # sizes are timed on a few micro-batches a step
        model.zero_grad()
        reports.append(step.backward(batch, labels))
        check(model, wanted)
        close(reports[-1].loss, loss)
        inside(reports[-1], budget)
    assert all(report.restarts == 0 for report in reports[-6:])
    assert reports[-1].predicted_peak_bytes is not None
    if lengths != "equal":
        sizes = reports[-1].micro_batch_sizes
        assert max(sizes) > sizes[0], sizes
        assert "packed" in step.plan(batch, labels).reason


@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_contrastive_loss(lengths: str) -> None:
    batch, model = texts(LENGTHS[lengths]), Attention()
    budget = share_of_native(model, lambda m: contrastive(m(**batch)), 0.35)
    loss, wanted = native(model, lambda m: contrastive(m(**batch)))
    step = ib.VirtualBatch(model, PAIRS, trim=MASK, memory_budget=budget)
    reports = []
    for _ in range(10):
        model.zero_grad()
        reports.append(step.backward(batch))
        check(model, wanted)
        close(reports[-1].loss, loss)
        inside(reports[-1], budget)
    assert all(report.restarts == 0 for report in reports[-5:])
    if lengths != "equal":
        sizes = reports[-1].micro_batch_sizes
        assert max(sizes) > sizes[0], sizes


@pytest.mark.parametrize("lengths", LENGTHS)
def test_wrap(lengths: str) -> None:
    batch, model = texts(LENGTHS[lengths]), Attention()
    budget = share_of_native(model, lambda m: contrastive(m(**batch)), 0.45)
    _, wanted = native(model, lambda m: contrastive(m(**batch)))
    wrapped = ib.wrap(model, trim=MASK, memory_budget=budget)
    for _ in range(10):
        model.zero_grad()
        outputs = wrapped(**batch)
        contrastive(outputs).backward()
        check(model, wanted)
        inside(wrapped.last_report, budget)
    assert wrapped.last_report.restarts == 0
    with torch.no_grad():
        for _ in range(3):
            close(wrapped(**batch), model(**batch))


def test_a_wrapped_model_whose_outputs_have_time() -> None:
    batch, model = texts(LENGTHS["log-normal"]), Attention(time=True)
    labels = masked_labels(batch)
    budget = share_of_native(model, lambda m: TOKENS(m(**batch), labels), 0.8)
    _, wanted = native(model, lambda m: TOKENS(m(**batch), labels))
    wrapped = ib.wrap(model, trim=MASK, memory_budget=budget)
    for _ in range(8):
        model.zero_grad()
        TOKENS(wrapped(**batch), labels).backward()
        check(model, wanted)
        inside(wrapped.last_report, budget)


def test_a_model_of_transformers() -> None:
    """Whose attention leaves a mask out where no position is padded: another story."""
    batch, model = texts(LENGTHS["log-normal"]), ClassesFirst(bert())
    labels = masked_labels(batch)
    budget = share_of_native(model, lambda m: TOKENS(m(**batch), labels), 0.4)
    loss, wanted = native(model, lambda m: TOKENS(m(**batch), labels))
    step = ib.VirtualBatch(
        model, TOKENS, trim=ib.trim_padding(mask="attention_mask", targets=True),
        memory_budget=budget,
    )  # fmt: skip
    for _ in range(10):
        model.zero_grad()
        report = step.backward(batch, labels)
        check(model, wanted)
        close(report.loss, loss)
        assert report.peak_bytes <= budget
    encoder = Encoder()
    _, wanted = native(encoder, lambda m: contrastive(m(**batch)))
    wrapped = ib.wrap(encoder, trim=MASK, memory_budget="1GiB")
    for _ in range(4):
        encoder.zero_grad()
        contrastive(wrapped(**batch)).backward()
        check(encoder, wanted)


def test_two_sequences_keep_inside_the_budget_as_well() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = Attention(), Attention()

        def forward(self, **given: torch.Tensor) -> torch.Tensor:
            a = self.one(given["a"], given["a_mask"])
            return a * self.other(given["b"], given["b_mask"])

    a, b = texts(log_normal(seed=1)), texts(log_normal(seed=2, longest=30))
    batch = {
        "a": a["input_ids"], "a_mask": a["attention_mask"],
        "b": b["input_ids"], "b_mask": b["attention_mask"],
    }  # fmt: skip
    model = Two()
    _, wanted = native(model, lambda m: contrastive(m(**batch)))
    budget = share_of_native(model, lambda m: contrastive(m(**batch)), 0.5)
    trim = [ib.trim_padding(mask="a_mask"), ib.trim_padding(mask="b_mask")]
    step = ib.VirtualBatch(model, PAIRS, trim=trim, memory_budget=budget)
    for _ in range(5):
        model.zero_grad()
        report = step.backward(batch)
        check(model, wanted)
        assert report.peak_bytes <= budget


# ---- ever new lengths ----------------------------------------------------------------------------


def batches(count: int) -> list[dict[str, torch.Tensor]]:
    return [texts(log_normal(40 + i % 7, seed=i, longest=25 + i % 16)) for i in range(count)]


def test_a_stream_of_new_lengths_needs_no_probes() -> None:
    model = Attention(time=True)
    given = batches(40)
    labels = [masked_labels(batch) for batch in given]
    budget = share_of_native(model, lambda m: TOKENS(m(**given[15]), labels[15]), 0.4)
    trim = ib.trim_padding(mask="attention_mask", targets=True)
    step = ib.VirtualBatch(model, TOKENS, trim=trim, memory_budget=budget)
    shapes = counting(model)
    more, restarts = [], []
    for batch, beside in zip(given, labels, strict=True):
        shapes.clear()
        report = step.backward(batch, beside)
        inside(report, budget)
        more.append(len(shapes) - len(report.micro_batch_sizes))
        restarts.append(report.restarts)
    # Rows are looked at in steps 1, 2, 4, ..., 32.
    assert all(n == 0 for n in more[17:31] + more[33:]), more
    assert sum(restarts[20:]) == 0, restarts
    predicted = report.predicted_peak_bytes
    assert predicted is not None


def test_a_wrapped_model_is_not_rehearsed_at_each_new_length() -> None:
    model = Attention()
    given = batches(40)
    budget = share_of_native(model, lambda m: contrastive(m(**given[15])), 0.6)
    wrapped = ib.wrap(model, trim=MASK, memory_budget=budget)
    shapes = counting(model)
    more, restarts = [], []
    for batch in given:
        shapes.clear()
        contrastive(wrapped(**batch)).backward()
        report = wrapped.last_report
        inside(report, budget)
        more.append(len(shapes) - len(report.micro_batch_sizes))
        restarts.append(report.restarts)
    assert all(n == 0 for n in more[17:31] + more[33:]), more
    assert sum(restarts[20:]) == 0, restarts


def test_batches_of_one_length_each_share_what_was_learned() -> None:
    model = Attention()
    lengths = [
        30,
        12,
        21,
        40,
        17,
        26,
        33,
        9,
        38,
        14,
        29,
        24,
        11,
        36,
        19,
        31,
        23,
        28,
        16,
        35,
        13,
        27,
    ]
    given = [texts((n,) * 40) for n in lengths]
    budget = share_of_native(model, lambda m: contrastive(m(**given[3])), 0.5)
    wrapped = ib.wrap(model, trim=MASK, memory_budget=budget)
    shapes = counting(model)
    more = []
    for batch in given:
        model.zero_grad()
        _, wanted = native(model, lambda m, b=batch: contrastive(m(**b)))
        shapes.clear()
        contrastive(wrapped(**batch)).backward()
        more.append(len(shapes) - len(wrapped.last_report.micro_batch_sizes))
        check(model, wanted)
        inside(wrapped.last_report, budget)
    assert all(n == 0 for n in more[17:]), more


# ---- what does not fit ---------------------------------------------------------------------------


def test_a_longest_row_that_only_fits_alone() -> None:
    lengths = (160, *log_normal(47))
    batch, model = texts(lengths), Attention(time=True)
    labels = masked_labels(batch)
    one = {name: value[:1] for name, value in batch.items()}
    live = ib.memory.stats().live
    with ib.memory.peak() as alone:
        native(model, lambda m: TOKENS(m(**one), labels[:1]))
    gradients = sum(p.numel() * p.element_size() for p in model.parameters())
    budget = live + gradients + int(1.7 * (alone.peak - live))
    loss, wanted = native(model, lambda m: TOKENS(m(**batch), labels))
    trim = ib.trim_padding(mask="attention_mask", targets=True)
    step = ib.VirtualBatch(model, TOKENS, trim=trim, memory_budget=budget)
    for _ in range(12):
        model.zero_grad()
        report = step.backward(batch, labels)
        check(model, wanted)
        close(report.loss, loss)
        assert report.peak_bytes <= budget
    assert report.restarts == 0
    assert report.micro_batch_sizes[0] == 1 and max(report.micro_batch_sizes) > 2


def test_a_row_that_does_not_fit_leaves_others_as_they_were() -> None:
    model = Attention(time=True)
    batch, labels = texts(log_normal()), masked_labels(texts(log_normal()))
    budget = share_of_native(model, lambda m: TOKENS(m(**batch), labels), 0.4)
    trim = ib.trim_padding(mask="attention_mask", targets=True)
    step = ib.VirtualBatch(model, TOKENS, trim=trim, memory_budget=budget)
    for _ in range(4):
        step.backward(batch, labels)
    longer = texts((400, *log_normal(20)))
    with contextlib.suppress(ib.BudgetExceeded):  # or it is cut into segments
        assert step.backward(longer, masked_labels(longer)).peak_bytes <= budget
    model.zero_grad()
    _, wanted = native(model, lambda m: TOKENS(m(**batch), labels))
    report = step.backward(batch, labels)
    check(model, wanted)
    assert report.peak_bytes <= budget


class Counted(Attention):
    """Goes through so many forwards, and raises what no answer is found to. Numbers in Python would be
    put back where a step begins again."""

    def __init__(self) -> None:
        super().__init__()
        self.left = itertools.count(-600)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        if next(self.left) == 0:
            raise KeyboardInterrupt("a step goes on for ever")
        return super().forward(input_ids, attention_mask)


@pytest.mark.parametrize("share", [1.1, 1.5, 0.5])
def test_longest_rows_of_which_two_do_not_fit_are_no_end(share: float) -> None:
    """They lie in front of a length that is to be learned, and were tried for ever."""
    model = Counted()
    batches = [texts((12, *[5] * 15)), texts((40, 40, *[6] * 14))]
    longest = {name: value[:1] for name, value in batches[1].items()}
    budget = share_of_native(Attention(), lambda m: m(**longest).square().sum(), share)
    step = ib.VirtualBatch(model, PAIRS, trim=MASK, memory_budget=budget)
    for batch in (batches[0], *batches * 3):
        model.zero_grad()
        _, wanted = native(Attention(), lambda m, b=batch: contrastive(m(**b)))
        try:
            report = step.backward(batch)
        except ib.BudgetExceeded:
            assert share < 1 or batch is not batches[0], "one row of the longest fits"
            continue
        check(model, wanted)
        assert report.peak_bytes <= budget
