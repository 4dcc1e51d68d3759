"""`batch_dim=` of `VirtualBatch`: loops with time first, batch second."""

from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from batch_dim_support import WAYS, N, T, compare, coupled, tagger, twins
from support import Calls
from time_first import WORDS, LanguageModel
from torch import Tensor, nn
from wrap_support import close, grads

ALL_WAYS = {**WAYS, "segments": {"micro_batch_size": 2, "checkpoint_segments": 2}}


#: Each flattens time and batch, and no row may meet another's target.
CRITERIA: dict[str, tuple[Any, Callable[[], Tensor]]] = {
    "cross entropy": (nn.CrossEntropyLoss(ignore_index=3), lambda: torch.randint(WORDS, (T * N,))),
    "weights": (
        nn.CrossEntropyLoss(weight=torch.rand(WORDS).double()),
        lambda: torch.randint(WORDS, (T * N,)),
    ),
    "margin": (nn.MultiMarginLoss(), lambda: torch.randint(WORDS, (T * N,))),
    "multilabel": (
        nn.MultiLabelSoftMarginLoss(),
        lambda: torch.randint(2, (T * N, WORDS)).double(),
    ),
    "mse": (nn.MSELoss(), lambda: torch.randn(T * N, WORDS).double()),
    "kl": (nn.KLDivLoss(reduction="batchmean"), lambda: torch.rand(T * N, WORDS).double()),
    "cosine": (
        lambda z, t: F.cosine_similarity(z, t).mean() + z.std(0).sum(),
        lambda: torch.randn(T * N, WORDS).double(),
    ),
}


@pytest.mark.parametrize("name", CRITERIA)
def test_flattened_outputs_meet_their_targets(name: str) -> None:
    criterion, targets = CRITERIA[name]
    model, twin = twins(tagger(flat=True))
    batch = ib.VirtualBatch(model, criterion, batch_dim=1, micro_batch_size=3)
    compare(batch, model, twin, criterion, torch.randint(WORDS, (T, N)), targets())


@pytest.mark.parametrize("way", ALL_WAYS)
@pytest.mark.parametrize("kind", ["separable", "coupled"])
def test_ways_of_virtual_batch(kind: str, way: str) -> None:
    criterion = nn.CrossEntropyLoss() if kind == "separable" else coupled
    model, twin = twins(tagger(flat=True))
    batch = ib.VirtualBatch(model, criterion, batch_dim=1, **ALL_WAYS[way])
    given = torch.randint(WORDS, (T, N)), torch.randint(WORDS, (T * N,))
    compare(batch, model, twin, criterion, *given)


@pytest.mark.parametrize("size", [1, 3])
def test_batch_norm_beside_flattened_outputs(size: int) -> None:
    """Tapes are cut, and statistics are those of all rows."""

    def forward(self: Any, words: Tensor) -> Tensor:
        return self.head(self.norm(self.words(words).view(-1, 6)))

    model, twin = twins(
        Calls(
            forward,
            words=nn.Embedding(WORDS, 6),
            norm=nn.BatchNorm1d(6),
            head=nn.Linear(6, WORDS),
        )
    )
    given = torch.randint(WORDS, (T, N)), torch.randint(WORDS, (T * N,))
    for criterion in (nn.CrossEntropyLoss(), coupled):
        batch = ib.VirtualBatch(model, criterion, batch_dim=1, micro_batch_size=size)
        compare(batch, model, twin, criterion, *given)
        close(dict(model.named_buffers()), dict(twin.named_buffers()))


def test_targets_of_time_and_batch() -> None:
    """[time, batch] where outputs are [time, batch, words], flattened in the loss."""

    def loss(z: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(z.flatten(0, 1), t.flatten())

    model, twin = twins(tagger(flat=False))
    for criterion in (loss, ib.losses.coupled(loss)):
        batch = ib.VirtualBatch(model, criterion, batch_dim=1, micro_batch_size=3)
        words = torch.randint(WORDS, (T, N))
        compare(batch, model, twin, loss, words, words.roll(1, 0))


def test_labels_of_samples() -> None:
    model, twin = twins(Calls(lambda self, x: self.rnn(x)[0][-1], rnn=nn.LSTM(3, 4)))
    x, y = torch.randn(T, N, 3).double(), torch.randint(4, (N,))
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), batch_dim=1, micro_batch_size=3)
    compare(batch, model, twin, nn.CrossEntropyLoss(), x, y)


@pytest.mark.parametrize("way", ["ragged", "singles", "budget"])
def test_ctc(way: str) -> None:
    model, twin = twins(Calls(lambda self, x: self.net(x).log_softmax(2), net=nn.Linear(4, 6)))
    x, labels = torch.randn(9, N, 4).double(), torch.randint(1, 6, (N, 3))
    targets = (labels, torch.randint(7, 10, (N,)), torch.randint(1, 4, (N,)))
    batch = ib.VirtualBatch(model, nn.CTCLoss(), batch_dim={0: 1}, **WAYS[way])
    loss = lambda z, t: nn.CTCLoss()(z, *t)  # noqa: E731
    compare(batch, model, twin, loss, x, targets)


#: Of outputs and states, flattened: the mean over words, streamed and as a loss of all.
MEAN_OVER_WORDS: dict[str, Any] = {
    "separable": ib.losses.separable(
        lambda z, t: F.nll_loss(z[0], t, reduction="sum"), lambda t, _: len(t)
    ),
    "coupled": ib.losses.coupled(lambda z, t: F.nll_loss(z[0], t)),
}


@pytest.mark.parametrize("kind", MEAN_OVER_WORDS)
def test_by_name_of_a_dict_and_of_targets(kind: str) -> None:
    model, twin = twins(LanguageModel())
    words, targets = torch.randint(WORDS, (T, N)), torch.randint(WORDS, (T * N,))
    dims = {"words": 1, "hidden": 1, "targets": 1}
    batch = ib.VirtualBatch(model, MEAN_OVER_WORDS[kind], batch_dim=dims, micro_batch_size=3)
    batch.backward({"words": words, "hidden": model.init_hidden(N)}, targets)
    F.nll_loss(twin(words, twin.init_hidden(N))[0], targets).backward()
    close(grads(model), grads(twin))


@pytest.mark.parametrize("kind", MEAN_OVER_WORDS)
def test_outputs_of_all_come_in_native_order(kind: str) -> None:
    model, twin = twins(LanguageModel())
    words, targets = torch.randint(WORDS, (T, N)), torch.randint(WORDS, (T * N,))
    wanted, state = twin(words, twin.init_hidden(N))
    loss = MEAN_OVER_WORDS[kind]
    batch = ib.VirtualBatch(model, loss, batch_dim=1, micro_batch_size=3, keep_outputs=True)
    for _ in range(3):
        found = batch.backward((words, model.init_hidden(N)), targets).outputs
        close(found, (wanted.detach(), tuple(each.detach() for each in state)))


def test_dropout_in_virtual_batch() -> None:
    model, twin = twins(tagger(flat=True, dropout=0.4))
    words, targets = torch.randint(WORDS, (T, N)), torch.randint(WORDS, (T * N,))
    for criterion in (nn.CrossEntropyLoss(), coupled):
        batch = ib.VirtualBatch(
            model, criterion, batch_dim=1, micro_batch_size=3, match_native_rng=True
        )
        for _ in range(2):
            model.zero_grad(), twin.zero_grad()
            torch.manual_seed(4)
            batch.backward(words, targets)
            torch.manual_seed(4)
            criterion(twin(words), targets).backward()
            close(grads(model), grads(twin))


def test_sources_give_rows_of_time_and_batch() -> None:
    model, twin = twins(tagger(flat=False))
    words = torch.randint(WORDS, (T, N))
    loss = lambda z, t: F.cross_entropy(z.flatten(0, 1), t.flatten())  # noqa: E731
    source = ib.BatchSource(N, lambda begin, end: words[:, begin:end])
    batch = ib.VirtualBatch(model, loss, batch_dim=1, micro_batch_size=3)
    batch.backward(source, source)
    loss(twin(words), words).backward()
    close(grads(model), grads(twin))


def test_verify_bench_and_trainer_take_it() -> None:
    model, twin = twins(tagger(flat=True))
    words, targets = torch.randint(WORDS, (T, N)), torch.randint(WORDS, (T * N,))
    given = {"batch_dim": 1, "micro_batch_size": 3}
    report = ib.verify(model, nn.CrossEntropyLoss(), words, targets, **given)
    assert report.exact, report.explain()
    ib.bench(model, nn.CrossEntropyLoss(), words, targets, rounds=1, seconds=0.01, **given)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin)]
    trainer = ib.Trainer(model, nn.CrossEntropyLoss(), optimizers[0], [(words, targets)], **given)
    trainer(2)
    for _ in range(2):
        optimizers[1].zero_grad()
        F.cross_entropy(twin(words), targets).backward()
        optimizers[1].step()
    close(dict(model.named_parameters()), dict(twin.named_parameters()))
    found = trainer.evaluate([(words, targets)]).loss
    assert found == pytest.approx(F.cross_entropy(twin(words), targets).item(), rel=1e-12)
