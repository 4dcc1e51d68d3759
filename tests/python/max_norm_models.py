"""Models whose embeddings are scaled by forward, and their comparison with native."""

import copy
from typing import Any

import infinitybatch as ib
import torch
from support import Calls, Result, native, result_of, worst_error
from torch import nn
from torch.nn import functional as F

TOLERANCE = 1e-12


WORDS, LENGTH, SAMPLES = 40, 5, 12


CRITERION = nn.CrossEntropyLoss()


def tokens(n: int = SAMPLES) -> torch.Tensor:
    """Words occur in several micro-batches, and some in none."""
    return torch.randint(WORDS - 8, (n, LENGTH))


def labels(n: int = SAMPLES) -> torch.Tensor:
    return torch.randint(4, (n,))


def table(**options: Any) -> nn.Embedding:
    return nn.Embedding(WORDS, 6, **{"max_norm": 1.5, **options})


def reader(embedding: nn.Module, *rest: nn.Module) -> nn.Module:
    return Calls(
        lambda self, x: self.head(self.rest(self.embedding(x).tanh().mean(1))),
        embedding=embedding,
        rest=nn.Sequential(*rest),
        head=nn.Linear(6, 4),
    ).double()


def bag_of(**options: Any) -> nn.Module:
    bag = nn.EmbeddingBag(WORDS, 6, **options)
    return Calls(lambda self, x: self.head(self.bag(x)), bag=bag, head=nn.Linear(6, 4)).double()


def weighted(**options: Any) -> nn.Module:
    """The weights of the words in a bag are learned."""
    bag = nn.EmbeddingBag(WORDS, 6, mode="sum", **options)
    return Calls(
        lambda self, x: self.head(self.bag(x, per_sample_weights=self.importance[x].sigmoid())),
        bag=bag,
        importance=nn.Parameter(torch.randn(WORDS)),
        head=nn.Linear(6, 4),
    ).double()


def with_offsets(**options: Any) -> nn.Module:
    """Bags of several sizes, one of them empty for some samples, in one row of indices."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        counts = x[:, 0] % LENGTH
        kept = torch.arange(LENGTH)[None] < counts[:, None]
        offsets = F.pad(counts.cumsum(0), (1, 0))
        if not self.bag.include_last_offset:
            offsets = offsets[:-1]
        return self.head(self.bag(x[kept], offsets))

    bag = nn.EmbeddingBag(WORDS, 6, **options)
    return Calls(forward, bag=bag, head=nn.Linear(6, 4)).double()


def functional() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.embedding(x, self.words, max_norm=1.0).mean(1))

    return Calls(forward, words=nn.Parameter(torch.randn(WORDS, 6)), head=nn.Linear(6, 4)).double()


def by_hand() -> nn.Module:
    """Rewritten once, read twice."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        torch.embedding_renorm_(self.words.detach(), x, 1.0, 2.0)
        return self.head((F.embedding(x, self.words) * F.embedding(x, self.words).tanh()).mean(1))

    return Calls(forward, words=nn.Parameter(torch.randn(WORDS, 6)), head=nn.Linear(6, 4)).double()


def twice() -> nn.Module:
    """Two lookups of one table, and one of another."""
    return Calls(
        lambda self, x: self.head(
            self.words(x[:, :2]).mean(1) * self.words(x[:, 2:]).mean(1) + self.more(x).mean(1)
        ),
        words=table(),
        more=table(max_norm=0.3),
        head=nn.Linear(6, 4),
    ).double()


def frozen() -> nn.Module:
    model = reader(table())
    model.embedding.weight.requires_grad_(False)
    return model


def changed_in_place() -> nn.Module:
    return Calls(
        lambda self, x: self.head(self.embedding(x).tanh_().mean(1)),
        embedding=table(),
        head=nn.Linear(6, 4),
    ).double()


MODELS = {
    "Embedding": lambda: reader(table()),
    "of norm 1": lambda: reader(table(norm_type=1.0, max_norm=3.0)),
    "of the largest": lambda: reader(table(norm_type=float("inf"), max_norm=1.0)),
    "padding": lambda: reader(table(padding_idx=3)),
    "sparse": lambda: reader(table(sparse=True)),
    "frozen": frozen,
    "bag, sum": lambda: bag_of(max_norm=1.0, mode="sum"),
    "bag, mean": lambda: bag_of(max_norm=1.0, mode="mean", padding_idx=2),
    "bag, max": lambda: bag_of(max_norm=1.0, mode="max"),
    "bag, sparse": lambda: bag_of(max_norm=1.0, mode="sum", sparse=True),
    "bag, offsets": lambda: with_offsets(max_norm=1.0),
    "bag, weighted": lambda: weighted(max_norm=1.0),
    "a function": functional,
    "by hand": by_hand,
    "twice": twice,
    "changed in place": changed_in_place,
    "scaled by frequency too": lambda: reader(table(scale_grad_by_freq=True)),
    "bag, scaled by frequency too": lambda: bag_of(max_norm=1.0, scale_grad_by_freq=True),
}


def coupling(outputs: torch.Tensor, _: Any = None) -> torch.Tensor:
    """Couples every sample with every other."""
    z = F.normalize(outputs, dim=1)
    return F.cross_entropy(z @ z.T / 0.3, torch.arange(len(z)).roll(1))


def assert_as_native(
    model: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor | None,
    loss: Any,
    ways: list[dict[str, Any]],
    **options: Any,
) -> list[Result]:
    """Gradients within 1e-12, and every weight as the whole batch leaves it, bit for bit."""
    plain = loss if y is not None else coupling
    wanted = native(model, lambda o, t: plain(o) if y is None else plain(o, t), x, y)
    results = []
    for way in ways:
        own = copy.deepcopy(model)
        batch = ib.VirtualBatch(own, loss, **way, **options)
        report = batch.backward(x) if y is None else batch.backward(x, y)
        found = result_of(own, report.loss)
        found.report = report
        assert worst_error(found, wanted) <= TOLERANCE, way
        torch.testing.assert_close(found.loss, wanted.loss, rtol=TOLERANCE, atol=0)
        assert_same_weights(own, wanted.model)
        for name, b in wanted.buffers.items():
            torch.testing.assert_close(found.buffers[name], b, rtol=TOLERANCE, atol=1e-15)
        results.append(found)
    return results


SIZES = [{"micro_batch_size": size} for size in (1, 5, 12)] + [{"memory_budget": "64MiB"}]


def assert_same_weights(own: nn.Module, wanted: nn.Module) -> None:
    """Bit for bit."""
    for (name, a), b in zip(own.named_parameters(), wanted.parameters(), strict=True):
        assert torch.equal(a, b), name
