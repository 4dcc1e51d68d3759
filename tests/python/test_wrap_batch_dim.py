"""`batch_dim=` of `wrap`: loops with time first, batch second."""

import copy
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from batch_dim_support import WAYS, N, T, twins
from support import Calls
from time_first import WORDS, LanguageModel, Translator, causal, detached, stretches, text
from torch import Tensor, nn
from wrap_support import close, grads


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
