"""GradCache and sentence-transformers' cached loss on plain modules, where they are installed."""

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch
from contestants import Contestant
from torch import nn

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class GradCache(Contestant):
    """luyug/GradCache as its README shows it: one encoder for both sides of the pairs."""

    def __init__(self, *args: Any, size: int, loss: Loss) -> None:
        super().__init__(*args)
        import gradcache

        # The package on PyPI is called gradcache and imports itself as grad_cache.
        sys.modules.setdefault("grad_cache", gradcache)
        from gradcache.grad_cache import GradCache as Cache

        self.cache = Cache(models=[self.model, self.model], chunk_sizes=size, loss_fn=loss)

    def backward(self) -> None:
        self.cache(*self.inputs.chunk(2))


class Embedding(nn.Module):
    """A plain module in the form of sentence-transformers' own: features in, features out."""

    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, features: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {"sentence_embedding": self.encoder(features["values"])}


class SentenceTransformers(Contestant):
    """CachedMultipleNegativesRankingLoss itself. It asks its model for no more than a sequence of
    modules gives, so that no text, tokenizer or pretrained model is needed.
    """

    def __init__(self, *args: Any, size: int, scale: float) -> None:
        super().__init__(*args)
        from sentence_transformers.sentence_transformer.losses import (
            CachedMultipleNegativesRankingLoss,
        )

        model: Any = nn.Sequential(Embedding(self.model))
        self.loss = CachedMultipleNegativesRankingLoss(model, scale=scale, mini_batch_size=size)

    def backward(self) -> None:
        features = [{"values": side} for side in self.inputs.chunk(2)]
        self.loss(features, torch.empty(0)).backward()


def installed() -> dict[str, bool]:
    """Whether each can be imported."""
    names = {"GradCache": "gradcache", "sentence-transformers": "sentence_transformers"}
    return {name: importlib.util.find_spec(module) is not None for name, module in names.items()}
