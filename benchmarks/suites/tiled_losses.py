"""What losses cost that never hold the matrix of all their scores: contrastive ones and heads."""

from collections.abc import Callable
from functools import partial

import infinitybatch as ib
import torch
from contestants import Contestant, check_agreement
from harness.clock import Sample, interleave
from harness.ratios import median, ratio_of
from harness.results import Findings, Goal, Table
from harness.settings import Settings
from peers.gradient_caches import SentenceTransformers, installed
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from workloads import mlp

TITLE = "Losses in tiles: time and peak beside native, sentence-transformers and checkpointing"
EXPLANATION = (
    "Contrastive: one small encoder for both sides of the pairs, InfoNCE in one direction over all "
    "of them, the whole training step in micro-batches that are equally large on all sides. "
    "Sentence-transformers' CachedMultipleNegativesRankingLoss walks its loss in micro-batches too; "
    "checkpointing is torch.utils.checkpoint of each micro-batch in front of the plain loss. "
    "Embeddings alone: the same loss, in both directions too, of two tensors. Head: a linear layer "
    "from hidden states to words and its cross entropy, forward and backward, behind one small "
    "layer; checkpointing recomputes the logits of each chunk of rows, torch's own is "
    "linear_cross_entropy with its default chunks. Contestants run in turn, in a new order each "
    "round; CPU is the process's time over all threads; ratios are medians of the rounds' ratios "
    "with 95 % bootstrap intervals."
)
SCALE = 20.0  # of similarities
SECONDS = 90  # of rounds for each workload
NATIVE, OURS, PEER = "native", "infinitybatch", "sentence-transformers"
STREAMED = "infinitybatch, VirtualBatch"
PEAK, TIME = 4.8, 1.13  # what the head promises beside native


def plain_info_nce(a: torch.Tensor, b: torch.Tensor, symmetric: bool = False) -> torch.Tensor:
    a, b = functional.normalize(a, dim=-1), functional.normalize(b, dim=-1)
    scores, own = SCALE * a @ b.T, torch.arange(len(a))
    loss = functional.cross_entropy(scores, own)
    return (loss + functional.cross_entropy(scores.T, own)) / 2 if symmetric else loss


# ---- contrastive: the whole step ----------------------------------------------------------------


class Whole(Contestant):
    def backward(self) -> None:
        plain_info_nce(*self.model(self.inputs).chunk(2)).backward()


class Checkpointed(Contestant):
    def __init__(self, *args: object, size: int) -> None:
        super().__init__(*args)
        self.size = size

    def backward(self) -> None:
        parts = self.inputs.split(self.size)
        outputs = [checkpoint(self.model, part, use_reentrant=False) for part in parts]
        plain_info_nce(*torch.cat(outputs).chunk(2)).backward()


class Tiled(Contestant):
    """Both sides as one pair for each sample, so that a micro-batch holds whole pairs."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args)
        self.pairs = torch.stack(self.inputs.chunk(2), 1)
        loss = ib.losses.info_nce(temperature=1 / SCALE, symmetric=False)
        self.batch = ib.VirtualBatch(self.model, loss, **options)

    def backward(self) -> ib.StepReport:
        return self.batch.backward(self.pairs)


def contrastive(pairs: int, size: int) -> dict[str, Contestant]:
    model = mlp(64, 256, 64)
    inputs, nothing = torch.randn(2 * pairs, 64), torch.zeros(1)
    contestants: dict[str, Contestant] = {
        NATIVE: Whole(model, inputs, nothing),
        "checkpointing": Checkpointed(model, inputs, nothing, size=size),
        OURS: Tiled(model, inputs, nothing, micro_batch_size=size // 2),
    }
    if installed()[PEER]:
        contestants[PEER] = SentenceTransformers(model, inputs, nothing, size=size, scale=SCALE)
    return contestants


# ---- contrastive: the loss alone ----------------------------------------------------------------


class Embeddings(nn.Module):
    def __init__(self, pairs: int, features: int) -> None:
        super().__init__()
        self.a, self.b = (nn.Parameter(torch.randn(pairs, features)) for _ in range(2))


class Alone(Contestant):
    """A loss of two tensors, by whichever function."""

    def __init__(self, *args: object, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__(*args)
        self.loss = loss

    def backward(self) -> None:
        self.loss(self.model.a, self.model.b).backward()


def alone(pairs: int, features: int, symmetric: bool) -> dict[str, Contestant]:
    batch = (Embeddings(pairs, features), torch.zeros(1), torch.zeros(1))
    plain = partial(plain_info_nce, symmetric=symmetric)
    tiled = partial(ib.losses.info_nce, temperature=1 / SCALE, symmetric=symmetric)
    return {NATIVE: Alone(*batch, loss=plain), OURS: Alone(*batch, loss=tiled)}


# ---- heads --------------------------------------------------------------------------------------


class Language(nn.Module):
    """A layer in front of a head, which `forward` leaves to the loss."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.body = nn.Linear(width, width)
        self.head = nn.Linear(width, words, bias=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.body(hidden)


class Head(Contestant):
    """`loss(hidden, weight, targets)` with hidden (tokens, width) and targets (tokens)."""

    def __init__(self, *args: object, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__(*args)
        self.loss = loss

    def backward(self) -> None:
        hidden = self.model(self.inputs).flatten(0, 1)
        self.loss(hidden, self.model.head.weight, self.targets.flatten()).backward()


class StreamedHead(Contestant):
    def __init__(self, *args: object, size: int) -> None:
        super().__init__(*args)
        loss = ib.losses.linear_cross_entropy(self.model.head.weight)
        self.batch = ib.VirtualBatch(self.model, loss, micro_batch_size=size)

    def backward(self) -> ib.StepReport:
        return self.batch.backward(self.inputs, self.targets)


def plain_head(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, reduction: str = "mean"
) -> torch.Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight), targets, reduction=reduction)


def checkpointed_head(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    sums = [
        checkpoint(plain_head, rows, weight, own, "sum", use_reentrant=False)
        for rows, own in zip(hidden.split(256), targets.split(256), strict=True)
    ]
    return torch.stack(sums).sum() / len(targets)


def heads(words: int, tokens: int, samples: int, width: int) -> dict[str, Contestant]:
    model = Language(width, words)
    batch = (
        model,
        torch.randn(samples, tokens, width),
        torch.randint(words, (samples, tokens)),
    )
    contestants: dict[str, Contestant] = {
        NATIVE: Head(*batch, loss=plain_head),
        OURS: Head(*batch, loss=ib.losses.linear_cross_entropy),
        STREAMED: StreamedHead(*batch, size=max(samples // 4, 1)),
        "checkpointing": Head(*batch, loss=checkpointed_head),
    }
    if hasattr(nn, "LinearCrossEntropyOptions"):  # since torch 2.13
        chunked = partial(functional.linear_cross_entropy, options=nn.LinearCrossEntropyOptions())
        contestants["torch's linear_cross_entropy"] = Head(*batch, loss=chunked)
    return contestants


# ---- the suite ----------------------------------------------------------------------------------


def workloads(toy: bool) -> dict[str, Callable[[], dict[str, Contestant]]]:
    if toy:
        return {
            "64 pairs": partial(contrastive, 64, 16),
            "64 pairs of embeddings, one direction": partial(alone, 64, 8, False),
            "head of 100 words": partial(heads, 100, 5, 8, 16),
        }
    return {
        "4,096 pairs": partial(contrastive, 4096, 64),
        "8,192 pairs": partial(contrastive, 8192, 64),
        "4,096 pairs of embeddings (256), one direction": partial(alone, 4096, 256, False),
        "4,096 pairs of embeddings (256), both directions": partial(alone, 4096, 256, True),
        "head of 40,000 words, 32 samples of 250 tokens": partial(heads, 40000, 250, 32, 256),
    }


def run(settings: Settings, save: Callable[[Findings], None]) -> Findings:
    findings = Findings()
    if not installed()[PEER]:
        findings.notes.append(f"Not installed, so not measured: {PEER}.")
    for name, make in workloads(settings.toy).items():
        torch.manual_seed(0)
        contestants = make()
        check_agreement(contestants)
        samples = interleave(contestants, settings.rounds, warm_up=1, at_most=SECONDS)
        peaks = {key: contestant.peak_bytes() for key, contestant in contestants.items()}
        findings.tables.append(table_of(name, samples, peaks))
        findings.goals += goals_of(name, samples, peaks)
        for key, taken in samples.items():
            findings.figures.append(
                {
                    "workload": name,
                    "contestant": key,
                    "peak bytes": peaks[key],
                    "CPU over native": ratio_of(taken, samples[NATIVE], "cpu"),
                    "samples": taken,
                }
            )
        save(findings)
    return findings


def table_of(name: str, samples: dict[str, list[Sample]], peaks: dict[str, int]) -> Table:
    table = Table(
        f"**{name}**, {len(samples[NATIVE])} rounds",
        ["contestant", "CPU s", "CPU ÷ native", "wall ÷ native", "peak MiB", "native's peak ÷ it"],
    )
    for key, taken in samples.items():
        table.rows.append(
            [
                key,
                f"{median(taken, 'cpu'):.3f}",
                str(ratio_of(taken, samples[NATIVE], "cpu")),
                str(ratio_of(taken, samples[NATIVE], "wall")),
                f"{peaks[key] / 2**20:.1f}",
                f"{peaks[NATIVE] / peaks[key]:.1f}",
            ]
        )
    return table


def goals_of(name: str, samples: dict[str, list[Sample]], peaks: dict[str, int]) -> list[Goal]:
    goals = []
    if PEER in samples:
        ratio = ratio_of(samples[OURS], samples[PEER], "cpu")
        measured = f"{ratio} at {peaks[OURS] / peaks[PEER]:.3f} of its peak"
        met = ratio.median < 1 and peaks[OURS] <= peaks[PEER]
        goals.append(Goal(f"{name}: faster than {PEER}, at no more than its peak", measured, met))
    for key in (OURS, STREAMED) if STREAMED in samples else ():
        ratio = ratio_of(samples[key], samples[NATIVE], "cpu")
        saved = peaks[NATIVE] / peaks[key]
        goals.append(
            Goal(
                f"{name}, {key}: {PEAK} times less memory at no more than {TIME} of native's time",
                f"{saved:.1f} times less at {ratio}",
                saved >= PEAK and ratio.median <= TIME,
            )
        )
    return goals
