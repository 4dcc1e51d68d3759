"""What contrastive losses cost that never hold the matrix of all their scores."""

from collections.abc import Callable
from functools import partial

import infinitybatch as ib
import torch
from contestants import Contestant
from harness.clock import Sample
from harness.ratios import ratio_of
from harness.results import Findings, Goal
from harness.settings import Settings
from peers.gradient_caches import SentenceTransformers, installed
from peers.tuning import fastest_that_fits
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from workloads import mlp

from suites.beside_native import NATIVE, measure_beside_native

TITLE = "Contrastive losses in tiles: time and peak beside native and sentence-transformers"
EXPLANATION = (
    "One small encoder for both sides of the pairs, InfoNCE in one direction over all of them, the "
    "whole training step in micro-batches that are equally large on all sides. "
    "Sentence-transformers' CachedMultipleNegativesRankingLoss walks its loss in micro-batches too; "
    "checkpointing is torch.utils.checkpoint of each micro-batch in front of the plain loss. "
    '"Tuned" it takes the fastest size from the given one to eight times that, and ours is given its '
    "peak as a budget. "
    "Embeddings: the same loss of two tensors alone, in both directions too. Contestants run in "
    "turn, in a new order each round; CPU is the process's time over all threads; ratios are medians "
    "of the rounds' ratios with 95 % bootstrap intervals."
)
SCALE = 20.0  # of similarities
SECONDS = 15  # of rounds for each workload
OURS, PEER = "infinitybatch", "sentence-transformers"
TUNED_PEER, AT_ITS_PEAK = f"{PEER}, tuned", f"{OURS}, at the peak of {PEER}, tuned"
TIMES, ROOM = 4, 8  # of the given size around which its own is sought, and of its peak there


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
        self.loss = ib.losses.info_nce(temperature=1 / SCALE, symmetric=False)
        self.batch = ib.VirtualBatch(self.model, self.loss, **options)

    def allow(self, budget: int) -> None:
        self.batch = ib.VirtualBatch(self.model, self.loss, memory_budget=budget)
        self()  # the planner's rehearsal

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
        peer = partial(SentenceTransformers, model, inputs, nothing, scale=SCALE)
        contestants[PEER] = peer(size=size)
        contestants[PEER]()
        # Tiles of scores grow with the size, of which it may take as much more as native would not.
        room = ROOM * contestants[PEER].peak_bytes()
        contestants[TUNED_PEER] = fastest_that_fits(lambda s: peer(size=s), TIMES * size, room)
        contestants[AT_ITS_PEAK] = at_the_peak(Tiled(model, inputs, nothing), contestants)
    return contestants


def at_the_peak(ours: Tiled, contestants: dict[str, Contestant]) -> Tiled:
    """Ours with the tuned peer's peak as its budget, of which all that is live is a part."""
    peak = contestants[TUNED_PEER].peak_bytes()
    for contestant in (*contestants.values(), ours):
        contestant()  # so that all gradients are there, as between rounds
    ours.model.zero_grad(set_to_none=True)
    ours.allow(ib.memory.stats().live + peak)
    return ours


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


# ---- the suite ----------------------------------------------------------------------------------


def workloads(toy: bool) -> dict[str, Callable[[], dict[str, Contestant]]]:
    if toy:
        return {
            "64 pairs": partial(contrastive, 64, 16),
            "64 pairs of embeddings, one direction": partial(alone, 64, 8, False),
        }
    return {
        "4,096 pairs": partial(contrastive, 4096, 64),
        "8,192 pairs": partial(contrastive, 8192, 64),
        "4,096 pairs of embeddings (256), one direction": partial(alone, 4096, 256, False),
        "4,096 pairs of embeddings (256), both directions": partial(alone, 4096, 256, True),
    }


def goals_of(name: str, samples: dict[str, list[Sample]], peaks: dict[str, int]) -> list[Goal]:
    goals = []
    for ours, peer in ((OURS, PEER), (AT_ITS_PEAK, TUNED_PEER)):
        if peer not in samples:
            continue
        ratio = ratio_of(samples[ours], samples[peer], "cpu")
        measured = f"{ratio} at {peaks[ours] / peaks[peer]:.3f} of its peak"
        met = ratio.median < 1 and peaks[ours] <= peaks[peer]
        goals.append(Goal(f"{name}: faster than {peer}, at no more than its peak", measured, met))
    return goals


def run(settings: Settings, save: Callable[[Findings], None]) -> Findings:
    findings = Findings()
    if not installed()[PEER]:
        findings.notes.append(f"Not installed, so not measured: {PEER}.")
    for name, make in workloads(settings.toy).items():
        torch.manual_seed(0)
        samples, peaks = measure_beside_native(findings, settings, name, make(), SECONDS)
        findings.goals += goals_of(name, samples, peaks)
        save(findings)
    return findings
