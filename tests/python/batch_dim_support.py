"""What tests of `batch_dim=` share: sizes, ways of running a step, training beside a twin."""

import copy
from typing import Any

import infinitybatch as ib
import torch
import torch.nn.functional as F
from support import Calls
from time_first import WORDS
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


def coupled(z: Tensor, t: Tensor) -> Tensor:
    """Not the same for rows in another order."""
    place = torch.arange(len(z), dtype=z.dtype)
    return F.cross_entropy(z * place.sin().unsqueeze(1), t) + z.mean(0).std()
