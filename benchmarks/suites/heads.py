"""What a language model's head costs whose loss never holds the logits of all tokens."""

from collections.abc import Callable
from functools import partial

import infinitybatch as ib
import torch
from contestants import Contestant
from harness.clock import Sample
from harness.ratios import ratio_of
from harness.results import Findings, Goal
from harness.settings import Settings
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from suites.beside_native import NATIVE, measure_beside_native

TITLE = "Language-model heads in tiles: time and peak beside native, checkpointing and torch's own"
EXPLANATION = (
    "A linear layer from hidden states to words and its cross entropy, forward and backward, behind "
    "one small layer. VirtualBatch streams it in four micro-batches. Checkpointing is "
    "torch.utils.checkpoint of the head and its loss on chunks of 256 tokens; torch's own is "
    "linear_cross_entropy with its default chunks. Contestants run in turn, in a new order each "
    "round; CPU is the process's time over all threads; ratios are medians of the rounds' ratios "
    "with 95 % bootstrap intervals."
)
SECONDS = 120  # of rounds
OURS, STREAMED = "infinitybatch", "infinitybatch, VirtualBatch"
PEAK, TIME = 4.8, 1.13  # what is promised beside native


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


def run(settings: Settings, save: Callable[[Findings], None]) -> Findings:
    findings = Findings()
    torch.manual_seed(0)
    if settings.toy:
        name, contestants = "100 words, 8 samples of 5 tokens", heads(100, 5, 8, 16)
    else:
        name = "40,000 words, 32 samples of 250 tokens, width 256"
        contestants = heads(40_000, 250, 32, 256)
    samples, peaks = measure_beside_native(findings, settings, name, contestants, SECONDS)
    findings.goals += goals_of(samples, peaks)
    save(findings)
    return findings


def goals_of(samples: dict[str, list[Sample]], peaks: dict[str, int]) -> list[Goal]:
    goals = []
    for key in (OURS, STREAMED):
        ratio = ratio_of(samples[key], samples[NATIVE], "cpu")
        saved = peaks[NATIVE] / peaks[key]
        goals.append(
            Goal(
                f"{key}: {PEAK} times less memory at no more than {TIME} of native's time",
                f"{saved:.1f} times less at {ratio}",
                saved >= PEAK and ratio.median <= TIME,
            )
        )
    return goals
