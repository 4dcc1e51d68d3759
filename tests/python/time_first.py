"""Models and data of loops with time first, batch second."""

from typing import Any

import torch
from torch import Tensor, nn

WORDS = 11


class LanguageModel(nn.Module):
    """Words to scores and a state for the next stretch of text; time and batch are flattened."""

    def __init__(self, kind: str = "LSTM", dropout: float = 0.0, flat: bool = True) -> None:
        super().__init__()
        self.drop = nn.Dropout(dropout)
        self.words = nn.Embedding(WORDS, 6)
        self.rnn = getattr(nn, kind)(6, 5, 2)
        self.head = nn.Linear(5, WORDS)
        self.flat = flat

    def forward(self, words: Tensor, hidden: Any) -> tuple[Tensor, Any]:
        states, hidden = self.rnn(self.drop(self.words(words)), hidden)
        scores = self.head(self.drop(states))
        scores = scores.view(-1, WORDS) if self.flat else scores
        return nn.functional.log_softmax(scores, dim=-1), hidden

    def init_hidden(self, samples: int) -> Any:
        zeros = next(self.parameters()).new_zeros(2, samples, 5)
        return (zeros, zeros.clone()) if isinstance(self.rnn, nn.LSTM) else zeros


def detached(hidden: Any) -> Any:
    return hidden.detach() if isinstance(hidden, Tensor) else tuple(map(detached, hidden))


def text(steps: int = 12, samples: int = 7) -> Tensor:
    return torch.randint(WORDS, (steps + 1, samples))


def stretches(words: Tensor, length: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs [time, batch] and targets [time * batch]; the last ones may be shorter."""
    inputs, targets = words[:-1], words[1:]
    return [
        (inputs[i : i + length], targets[i : i + length].reshape(-1))
        for i in range(0, len(inputs), length)
    ]


class Translator(nn.Module):
    """nn.Transformer with time first, a mask of [time, time] and one of [batch, time]."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.net = nn.Transformer(8, 2, 1, 1, 16, dropout=dropout)
        self.head = nn.Linear(8, WORDS)

    def forward(
        self, source: Tensor, target: Tensor, mask: Tensor, padding: Tensor | None = None
    ) -> Tensor:
        states = self.net(
            source,
            target,
            tgt_mask=mask,
            src_key_padding_mask=padding,
            memory_key_padding_mask=padding,
        )
        return self.head(states)


def causal(steps: int) -> Tensor:
    return torch.full((steps, steps), float("-inf"), dtype=torch.float64).triu(1)
