"""Padded texts of other lengths, and small encoders that read them under a mask."""

import os
from typing import Any

import torch
from torch import nn
from torch.nn import functional

os.environ["HF_HUB_OFFLINE"] = "1"
import transformers  # noqa: E402

transformers.logging.set_verbosity_error()
VOCABULARY, PAD = 29, 0
LENGTHS = (3, 9, 1, 12, 5, 2, 7, 4, 12, 6, 3, 8, 2)


def texts(
    lengths: tuple[int, ...] = LENGTHS, left: bool = False, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Token ids and masks, padded to the longest."""
    draws = torch.Generator(torch.get_default_device()).manual_seed(seed)
    full = max(*lengths, 1)
    ids = torch.randint(1, VOCABULARY, (len(lengths), full), generator=draws)
    places = torch.arange(full)
    real = places < torch.tensor(lengths)[:, None]
    if left:
        real = real.flip(1)
    return {"input_ids": ids * real, "attention_mask": real.long()}


def masked_labels(batch: dict[str, torch.Tensor], seed: int = 1) -> torch.Tensor:
    """Some tokens of each text, and -100 elsewhere."""
    draws = torch.Generator(torch.get_default_device()).manual_seed(seed)
    chosen = torch.rand(batch["input_ids"].shape, generator=draws) < 0.6
    chosen[:, 0] = True
    return torch.where(chosen & batch["attention_mask"].bool(), batch["input_ids"], -100)


def bert(head: str = "MaskedLM", dropout: float = 0.0) -> Any:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=24, max_position_embeddings=48, hidden_dropout_prob=dropout,
        attention_probs_dropout_prob=dropout, pad_token_id=PAD,
    )  # fmt: skip
    kind = transformers.BertModel if head == "Model" else getattr(transformers, f"BertFor{head}")
    return kind(config).double()


class Encoder(nn.Module):
    """One vector for each text: the mean of its real positions."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.bert = bert("Model", dropout)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.bert(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * mask).sum(1) / mask.sum(1).clamp(min=1)


class Tagger(nn.Module):
    """Scores for each position, [samples, time, classes], by a convolution that pads with zeros."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 8, padding_idx=PAD)
        self.conv = nn.Conv1d(8, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm1d(8) if norm else None
        self.head = nn.Linear(8, VOCABULARY)
        self.double()

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.conv(self.embed(input_ids).transpose(1, 2)).transpose(1, 2)
        if self.norm is not None:
            hidden = self.norm(hidden.transpose(1, 2)).transpose(1, 2)
        return self.head(hidden * attention_mask.unsqueeze(-1))


def t5() -> Any:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=24, num_layers=1, num_decoder_layers=1,
        num_heads=2, dropout_rate=0.0, pad_token_id=PAD, decoder_start_token_id=PAD,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config).double()


def contrastive(vectors: torch.Tensor) -> torch.Tensor:
    """In the caller's order: each text's partner is the next one."""
    z = functional.normalize(vectors, dim=1)
    return functional.cross_entropy(z @ z.T / 0.3, torch.arange(len(z)).roll(1))


def token_loss(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(scores.transpose(1, 2), labels, ignore_index=-100)
