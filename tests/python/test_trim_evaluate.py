"""`Trainer.evaluate` with `trim=`: the loss of the padded set, without computing its padding."""

from typing import Any

import infinitybatch as ib
import pytest
import torch
from text_support import Encoder, Tagger, bert, contrastive, masked_labels, texts
from torch import nn
from torch.nn import functional
from trim_support import MASK, TOKENS, ClassesFirst

SIZES: dict[str, dict[str, Any]] = {
    "tokens": {"micro_batch_tokens": 24},
    "rows": {"micro_batch_size": 4},
    "both": {"micro_batch_tokens": 24, "micro_batch_size": 3},
    "budget": {"memory_budget": "1GiB"},
}


class Watched(nn.Module):
    """Notes the shapes that it is computed on."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.shapes: list[tuple[int, int]] = []

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        self.shapes.append(tuple(input_ids.shape))
        return self.inner(input_ids, attention_mask)


def trainer(model: nn.Module, loss: Any, batches: Any, **options: Any) -> ib.Trainer:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ib.Trainer(model, loss, optimizer, batches, **options)


def batches() -> list[Any]:
    parts = [texts(), texts((2, 8, 8, 3, 1, 5), seed=3)]
    return [(each, masked_labels(each)) for each in parts]


def whole(model: nn.Module, given: list[Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """One criterion's value over all tokens of all batches."""
    with torch.no_grad():
        scores = [model(**b).movedim(1, -1).flatten(0, 1) for b, _ in given]
    return torch.cat(scores), torch.cat([labels.flatten() for _, labels in given])


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("targets", [False, True], ids=["padded back", "targets trimmed"])
def test_a_separable_loss_of_tokens(size: str, targets: bool) -> None:
    model, given = Watched(ClassesFirst(bert())), batches()
    trim = ib.trim_padding(mask="attention_mask", targets=targets)
    run = trainer(model, TOKENS, given, trim=trim, **SIZES[size])
    found = run.evaluate(given)
    plain = trainer(model, TOKENS, given, micro_batch_size=4).evaluate(given)
    assert found.loss == pytest.approx(plain.loss, rel=1e-12)
    assert found.loss == pytest.approx(TOKENS(*whole(model.eval(), given)).item(), rel=1e-12)
    assert found.samples == 19
    if size == "tokens":
        assert min(length for rows, length in model.shapes if rows > 1) < 4


@pytest.mark.parametrize("size", SIZES)
def test_a_loss_of_all_in_the_callers_order(size: str) -> None:
    model, batch = Encoder(), texts()
    run = trainer(model, ib.losses.coupled(lambda o, _: contrastive(o)), [(batch, ())], trim=MASK,
                  **SIZES[size])  # fmt: skip
    found = run.evaluate([(batch, torch.zeros(13))])
    with torch.no_grad():
        wanted = contrastive(model(**batch)).item()
    assert found.loss == pytest.approx(wanted, rel=1e-12)


def test_fewer_positions_are_computed() -> None:
    model, given = Watched(ClassesFirst(bert())), batches()
    run = trainer(model, TOKENS, given, trim=MASK, micro_batch_tokens=24)
    run.evaluate(given)
    model.shapes.clear()
    run.evaluate(given)
    looked = 2 * 4 * 12  # rows beside themselves in full: once in each evaluation
    positions = sum(rows * length for rows, length in model.shapes)
    assert positions < sum(each["input_ids"].numel() for each, _ in given) + looked


def test_metrics_see_each_sample_once() -> None:
    model, given = ClassesFirst(bert()), batches()
    seen: list[int] = []

    def metric(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        assert outputs.shape[-1] == targets.shape[-1] and not outputs.requires_grad
        seen.append(len(outputs))
        return 0.0

    trainer(model, TOKENS, given, trim=MASK, micro_batch_tokens=24).evaluate(given, metric)
    assert sum(seen) == 19


@pytest.mark.parametrize("coupled", [False, True])
def test_a_loss_that_reads_padding_is_refused(coupled: bool) -> None:
    model, given = Tagger(), [(texts(), masked_labels(texts()).clamp(min=0))]

    def whole_loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(scores.transpose(1, 2), labels)

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.inner(input_ids, attention_mask).transpose(1, 2)

    loss: Any = ib.losses.coupled(whole_loss) if coupled else nn.CrossEntropyLoss()
    net = model if coupled else Scores()
    run = trainer(net, loss, given, trim=MASK, micro_batch_tokens=24)
    with pytest.raises(ib.BatchError, match="positions of outputs"):
        run.evaluate(given)


def test_a_model_that_reads_padding_is_refused() -> None:
    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(29, 4).double()

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return self.embed(input_ids).mean(1)

    given = [(texts(), torch.zeros(13, dtype=torch.long))]
    run = trainer(Mean(), nn.CrossEntropyLoss(), given, trim=MASK, micro_batch_tokens=24)
    with pytest.raises(ib.BatchError, match="differ"):
        run.evaluate(given)


def test_it_leaves_no_trace_and_stays_inside_the_budget() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(29, 64), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 4))

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
            return (self.inner(input_ids) * attention_mask.unsqueeze(-1)).sum(1)

    lengths = tuple([200, 180] + [3 + i % 11 for i in range(198)])
    batch, labels = texts(lengths), torch.arange(200) % 4
    net = Pooled()
    given = [(batch, labels)]
    with torch.no_grad():
        wanted = nn.CrossEntropyLoss()(net(**batch), labels)
    budget = ib.memory.stats("cpu").live + 3 * 2**20  # all rows in full take 40 MiB
    run = trainer(net, nn.CrossEntropyLoss(), given, memory_budget=budget, trim=MASK)
    state = torch.get_rng_state()
    with ib.memory.limit(budget + 2**14):
        found = run.evaluate(given)
    assert found.loss == pytest.approx(wanted.item(), rel=1e-5)
    assert torch.equal(state, torch.get_rng_state())
    assert all(p.grad is None for p in net.parameters()) and net.training
