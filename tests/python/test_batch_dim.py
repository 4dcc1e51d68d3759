"""`batch_dim=` of `wrap` and `VirtualBatch`: loops with time first, batch second."""

import copy
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from support import Calls
from time_first import WORDS, LanguageModel, Translator, causal, detached, stretches, text
from torch import Tensor, nn
from wrap_support import close, grads

N, T = 7, 5

#: Micro-batches of one size and ragged, of single samples, of all; under a budget; kept graphs.
WAYS: dict[str, dict[str, Any]] = {
    "ragged": {"micro_batch_size": 3},
    "singles": {"micro_batch_size": 1},
    "all": {"micro_batch_size": N},
    "budget": {"memory_budget": "1GiB"},
    "budget and size": {"memory_budget": "1GiB", "micro_batch_size": 2},
    "kept graphs": {"micro_batch_size": 2, "retained_micro_batches": 2},
    "no tapes": {"micro_batch_size": 2, "use_tapes": False},
    "static graph": {"micro_batch_size": 2, "static_graph": True},
    "offload": {"micro_batch_size": 2, "retained_micro_batches": 2, "offload": "always"},
}


def twins(model: nn.Module) -> tuple[nn.Module, nn.Module]:
    model = model.double()
    return model, copy.deepcopy(model)


def train(model: Any, twin: nn.Module, steps: int = 2) -> None:
    """The loop of a language model: text in stretches, the state carried over."""
    words = text()
    states = [each.init_hidden(N) for each in (model, twin)]
    for _ in range(steps):
        for data, targets in stretches(words, T):
            found = []
            for i, each in enumerate((model, twin)):
                each.zero_grad()
                outputs, states[i] = each(data, detached(states[i]))
                assert outputs.shape == (data.numel(), WORDS)
                F.nll_loss(outputs, targets).backward()
                found.append((outputs.detach(), states[i]))
            close(found[0], found[1])
            close(grads(model), grads(twin))


# ---- wrap ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
def test_a_language_model_needs_one_keyword(way: str) -> None:
    model, twin = twins(LanguageModel())
    train(ib.wrap(model, batch_dim=1, **WAYS[way]), twin)


@pytest.mark.parametrize("kind", ["GRU", "RNN"])
def test_a_state_of_one_tensor_is_carried_over(kind: str) -> None:
    model, twin = twins(LanguageModel(kind))
    train(ib.wrap(model, batch_dim=1, micro_batch_size=3), twin)


def test_gradients_go_through_the_states_of_the_stretch_before() -> None:
    model, twin = twins(LanguageModel())
    wrapped = ib.wrap(model, batch_dim=1, micro_batch_size=3)
    parts = stretches(text(), T)[:2]
    for each in (wrapped, twin):
        hidden, loss = each.init_hidden(N), 0
        for data, targets in parts:
            outputs, hidden = each(data, hidden)
            loss = loss + F.nll_loss(outputs, targets)
        loss.backward()
    close(grads(model), grads(twin))


@pytest.mark.parametrize("layers", [1, 2, 3, 4])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_states_of_as_many_layers_as_samples_are_split_by_samples(layers: int, size: int) -> None:
    model, twin = twins(Calls(lambda self, x, h: self.rnn(x, h), rnn=nn.GRU(3, 3, layers)))
    x, h = torch.randn(4, 4, 3).double(), torch.randn(layers, 4, 3).double()
    wrapped = ib.wrap(model, batch_dim=1, micro_batch_size=size)
    for _ in range(2):
        found = []
        for each in (wrapped, twin):
            each.zero_grad()
            outputs, state = each(x, h)
            (outputs.square().sum() + state.exp().sum()).backward()
            found.append((outputs.detach(), state.detach()))
        close(*found)
        close(grads(model), grads(twin))


def test_as_many_words_as_rows_of_a_micro_batch() -> None:
    """The flattened output of a micro-batch has its vocabulary along a dimension of that size."""
    model, twin = twins(LanguageModel())
    words = torch.randint(WORDS, (3, 2 * WORDS))
    wrapped = ib.wrap(model, batch_dim=1, micro_batch_size=WORDS)
    for each in (wrapped, twin):
        outputs, _ = each(words, each.init_hidden(2 * WORDS))
        F.nll_loss(outputs, words.reshape(-1)).backward()
    close(grads(model), grads(twin))


@pytest.mark.parametrize("names", [{"words": 1, "hidden": 1}, {0: 1, 1: 1}, {0: 1, "hidden": 1}])
def test_by_argument(names: dict[Any, int]) -> None:
    model, twin = twins(LanguageModel())
    wrapped = ib.wrap(model, batch_dim=names, micro_batch_size=3)
    train(wrapped, twin, steps=1)
    data, targets = stretches(text(), T)[0]
    outputs, _ = wrapped(hidden=wrapped.init_hidden(N), words=data)
    model.zero_grad(), twin.zero_grad()
    F.nll_loss(outputs, targets).backward()
    F.nll_loss(twin(data, twin.init_hidden(N))[0], targets).backward()
    close(grads(model), grads(twin))


@pytest.mark.parametrize("way", ["ragged", "singles", "budget", "static graph"])
@pytest.mark.parametrize(
    "given",
    [1, {"source": 1, "target": 1, "mask": None}, {0: 1, 1: 1, 2: None}],
    ids=["int", "names", "positions"],
)
def test_a_transformer_with_time_first(given: Any, way: str) -> None:
    model, twin = twins(Translator())
    wrapped = ib.wrap(model, batch_dim=given, **WAYS[way])
    source, target = torch.randn(6, N, 8).double(), torch.randn(T, N, 8).double()
    padding = torch.zeros(N, 6, dtype=torch.bool)
    padding[2, 4:] = padding[5, 2:] = True
    labels = torch.randint(WORDS, (T, N))
    # An int would split [batch, time] along time: it is marked.
    marked = ib.batch_dim(padding, 0) if given == 1 else padding
    for _ in range(2):
        for each, mask in ((wrapped, marked), (twin, padding)):
            each.zero_grad()
            outputs = each(source, target, causal(T), mask)
            F.cross_entropy(outputs.view(-1, WORDS), labels.view(-1)).backward()
        close(grads(model), grads(twin))


def test_ctc_behind_wrap() -> None:
    model, twin = twins(Calls(lambda self, x: self.net(x).log_softmax(2), net=nn.Linear(4, 6)))
    x, labels = torch.randn(9, N, 4).double(), torch.randint(1, 6, (N, 3))
    lengths = (torch.randint(7, 10, (N,)), torch.randint(1, 4, (N,)))
    wrapped = ib.wrap(model, batch_dim=1, micro_batch_size=3)
    for each in (wrapped, twin):
        nn.CTCLoss()(each(x), labels, *lengths).backward()
    close(grads(model), grads(twin))


def test_lengths_of_one_dimension_are_split_with_the_samples() -> None:
    def forward(self: Any, x: Tensor, lengths: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, enforce_sorted=False)
        states, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], total_length=len(x))
        return states.sum(0)

    model, twin = twins(Calls(forward, rnn=nn.GRU(3, 4)))
    x, lengths = torch.randn(T, N, 3).double(), torch.randint(1, T + 1, (N,))
    wrapped = ib.wrap(model, batch_dim=1, micro_batch_size=3)
    for each in (wrapped, twin):
        each(x, lengths).square().sum().backward()
    close(grads(model), grads(twin))


def test_dropout_draws_the_numbers_of_the_whole_batch() -> None:
    model, twin = twins(LanguageModel(dropout=0.4))
    wrapped = ib.wrap(model, batch_dim=1, micro_batch_size=3, match_native_rng=True)
    data, targets = stretches(text(), T)[0]
    for _ in range(2):
        for each in (wrapped, twin):
            each.zero_grad()
            torch.manual_seed(4)
            F.nll_loss(each(data, each.init_hidden(N))[0], targets).backward()
        close(grads(model), grads(twin))


def test_without_gradients_and_without_samples() -> None:
    model, twin = twins(LanguageModel())
    wrapped = ib.wrap(model, batch_dim=1, micro_batch_size=3)
    data, _ = stretches(text(), T)[0]
    with torch.no_grad():
        close(wrapped(data, wrapped.init_hidden(N)), twin(data, twin.init_hidden(N)))
        empty, _ = ib.wrap(LanguageModel(flat=False), batch_dim=1, micro_batch_size=3)(
            data[:, :0], model.float().init_hidden(0)
        )
    assert empty.shape == (T, 0, WORDS)


def test_methods_have_arguments_of_their_own() -> None:
    class Model(LanguageModel):
        def encode(self, tokens: Tensor) -> Tensor:
            return self.words(tokens).tanh().sum(0)

    model, twin = twins(Model())
    dims = {"words": 1, "hidden": 1, "tokens": 1}
    wrapped = ib.wrap(model, batch_dim=dims, micro_batch_size=3, methods=("encode",))
    data, _ = stretches(text(), T)[0]
    close(wrapped.encode(data).detach(), twin.encode(data).detach())
    train(wrapped, twin, steps=1)


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
def test_copies_keep_it(copied: Callable[[Any], Any]) -> None:
    model, twin = twins(LanguageModel())
    train(copied(ib.wrap(model, batch_dim={"words": 1, "hidden": 1}, micro_batch_size=3)), twin, 1)


# ---- VirtualBatch --------------------------------------------------------------------------------

ALL_WAYS = {**WAYS, "segments": {"micro_batch_size": 2, "checkpoint_segments": 2}}


def tagger(flat: bool, dropout: float = 0.0) -> nn.Module:
    def forward(self: Any, words: Tensor) -> Tensor:
        scores = self.head(self.drop(self.rnn(self.words(words))[0]))
        return scores.view(-1, WORDS) if flat else scores

    return Calls(
        forward,
        words=nn.Embedding(WORDS, 6),
        rnn=nn.LSTM(6, 5),
        drop=nn.Dropout(dropout),
        head=nn.Linear(5, WORDS),
    )


def compare(
    batch: ib.VirtualBatch, model: nn.Module, twin: nn.Module, loss: Any, *given: Any
) -> None:
    inputs, targets = given
    for _ in range(3):
        model.zero_grad(), twin.zero_grad()
        report = batch.backward(inputs, targets)
        wanted = loss(twin(inputs), targets)
        wanted.backward()
        close(report.loss, wanted.detach())
        close(grads(model), grads(twin))


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


def coupled(z: Tensor, t: Tensor) -> Tensor:
    """Not the same for rows in another order."""
    place = torch.arange(len(z), dtype=z.dtype)
    return F.cross_entropy(z * place.sin().unsqueeze(1), t) + z.mean(0).std()


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


# ---- Outputs that are flattened without the option -----------------------------------------------


@pytest.mark.parametrize("way", ["ragged", "singles", "budget", "static graph", "kept graphs"])
@pytest.mark.parametrize("order", ["time first", "batch first"])
def test_a_loss_of_all_sees_flattened_outputs_in_native_order(order: str, way: str) -> None:
    def forward(self: Any, words: Tensor) -> Tensor:
        scores = self.head(torch.tanh(self.words(words)))
        scores = scores.transpose(0, 1) if order == "time first" else scores
        return scores.reshape(-1, WORDS)

    def loss(z: Tensor, t: Tensor) -> Tensor:
        return coupled(z, (t.T if order == "time first" else t).reshape(-1))

    model, twin = twins(Calls(forward, words=nn.Embedding(WORDS, 6), head=nn.Linear(6, WORDS)))
    words, targets = torch.randint(WORDS, (N, T)), torch.randint(WORDS, (N, T))
    compare(ib.VirtualBatch(model, loss, **WAYS[way]), model, twin, loss, words, targets)
    wrapped = ib.wrap(model, **WAYS[way])
    for _ in range(2):
        model.zero_grad(), twin.zero_grad()
        loss(wrapped(words), targets).backward()
        loss(twin(words), targets).backward()
        close(grads(model), grads(twin))


@pytest.mark.parametrize("way", ["wrap", "coupled", "separable"])
def test_samples_that_are_combined_later_are_seen_in_flattened_outputs(way: str) -> None:
    """By a number on the host, which no recording shows: rows are compared in steps 2, 4, 8."""
    shift = [0.0]

    def forward(self: Any, words: Tensor) -> Tensor:
        states = torch.tanh(self.words(words))
        if shift[0]:
            states = states + shift[0] * float(words.double().mean())
        return self.head(states).view(-1, WORDS)

    model, _ = twins(Calls(forward, words=nn.Embedding(WORDS, 6), head=nn.Linear(6, WORDS)))
    words, targets = torch.randint(WORDS, (T, N)), torch.randint(WORDS, (T * N,))
    if way == "wrap":
        wrapped = ib.wrap(model, batch_dim=1, micro_batch_size=3)
        step = lambda: coupled(wrapped(words), targets).backward()  # noqa: E731
    else:
        loss = coupled if way == "coupled" else nn.CrossEntropyLoss()
        batch = ib.VirtualBatch(model, loss, batch_dim=1, micro_batch_size=3)
        step = lambda: batch.backward(words, targets)  # noqa: E731
    step()
    shift[0] = 0.5
    with pytest.raises(ib.CouplingError, match="forward combines samples"):
        for _ in range(3):
            step()


def test_a_head_that_begins_at_zero() -> None:
    """All rows are alike then, and tell no order."""
    model, _ = twins(tagger(flat=True))
    nn.init.zeros_(model.head.weight), nn.init.zeros_(model.head.bias)
    twin = copy.deepcopy(model)
    words, targets = torch.randint(WORDS, (T, N)), torch.randint(WORDS, (T * N,))
    for criterion in (nn.CrossEntropyLoss(), coupled):
        batch = ib.VirtualBatch(model, criterion, batch_dim=1, micro_batch_size=3)
        compare(batch, model, twin, criterion, words, targets)
    wrapped = ib.wrap(model, batch_dim=1, micro_batch_size=3)
    model.zero_grad(), twin.zero_grad()
    coupled(wrapped(words), targets).backward()
    coupled(twin(words), targets).backward()
    close(grads(model), grads(twin))


def test_lengths_of_time_may_change_between_steps() -> None:
    model, twin = twins(tagger(flat=True))
    batches = [
        ib.VirtualBatch(model, criterion, batch_dim=1, micro_batch_size=3)
        for criterion in (nn.CrossEntropyLoss(), coupled)
    ]
    wrapped = ib.wrap(model, batch_dim=1, micro_batch_size=3)
    for steps in (5, 3, 1, N, 2 * N):
        words, targets = torch.randint(WORDS, (steps, N)), torch.randint(WORDS, (steps * N,))
        for i, criterion in enumerate((nn.CrossEntropyLoss(), coupled)):
            model.zero_grad(), twin.zero_grad()
            batches[i].backward(words, targets)
            criterion(twin(words), targets).backward()
            close(grads(model), grads(twin))
        model.zero_grad()
        coupled(wrapped(words), targets).backward()
        close(grads(model), grads(twin))
