"""Outputs that flatten time and batch, without `batch_dim=`: native order, or a typed error."""

import copy
from typing import Any

import infinitybatch as ib
import pytest
import torch
from batch_dim_support import WAYS, N, T, compare, coupled, tagger, twins
from support import Calls
from time_first import WORDS
from torch import Tensor, nn
from wrap_support import close, grads


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
