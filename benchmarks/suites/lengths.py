"""What padding costs, and what is left of it: texts of other lengths, beside native and a peer."""

import gc
import importlib.util
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import infinitybatch as ib
import torch
from contestants import Contestant, check_agreement
from harness.clock import Sample, interleave
from harness.clock import measure as clock
from harness.ratios import median, ratio_of
from harness.results import Findings, Goal, Table
from harness.settings import Settings
from torch import nn
from torch.nn import functional

os.environ["HF_HUB_OFFLINE"] = "1"

TITLE = (
    "Texts of other lengths: trimmed and packed micro-batches beside native and a gradient cache"
)
EXPLANATION = (
    "A small BERT of transformers with random weights, without dropout. Contrastive: pairs of texts, "
    "the loss of all similarities; the peer is sentence-transformers' "
    "CachedMultipleNegativesRankingLoss with `mini_batch_num_tokens`, which cuts trailing padding off "
    "each of its mini-batches as well, in the order of the rows. Masked language model: a separable "
    "loss over the labels that are not -100; beside it a loop by hand over rows sorted by length and "
    "trimmed, with the right denominator.\n\n"
    '"Tuned" is the fastest of several numbers of tokens, and of graphs kept. Ours may take no more '
    "memory than the tuned peer (of a masked language model: than the loop by hand): "
    "`VirtualBatch` is given that as its `memory_budget` and plans by itself, `wrap` is tuned. Lengths: "
    "log-normal with mean 33 and 285 at most, bimodal (8 and 128), and all equal.\n\n"
    "Contestants run in turn, in a new order each round; CPU is the process's time over all threads; "
    "ratios are medians of the rounds' ratios with 95 % bootstrap intervals."
)
SECONDS = 60  # of rounds for each workload
SCALE = 20.0
NATIVE, PEER, HAND = (
    "native whole batch",
    "sentence-transformers, tuned",
    "sorted loop by hand, tuned",
)
BATCH, WRAP = "infinitybatch VirtualBatch, planned", "infinitybatch wrap, tuned"
TRIM = ib.trim_padding(mask="attention_mask")
FASTER, SLACK = 1.1, 1.03
Texts = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Scale:
    """How large all of it is."""

    pairs: int
    vocabulary: int
    config: dict[str, Any]
    tokens: tuple[int, ...]  # that are tried
    longest: int


TOY = Scale(
    12, 50, {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}, (64,), 40
)
FULL = Scale(
    256, 2000, {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4},
    (512, 1024, 2048, 4096), 285,
)  # fmt: skip


def lengths_of(name: str, count: int, longest: int) -> torch.Tensor:
    draws = torch.Generator().manual_seed(7)
    if name == "equal":
        return torch.full((count,), min(48, longest))
    if name == "bimodal":
        short = torch.rand(count, generator=draws) < 0.8
        return torch.where(short, 8, min(128, longest))
    sigma = 0.8
    normal = torch.randn(count, generator=draws) * sigma + math.log(33) - sigma**2 / 2
    found = normal.exp().round().long().clamp(2, longest)
    found[0] = longest
    return found


def texts_of(lengths: torch.Tensor, vocabulary: int) -> Texts:
    draws = torch.Generator().manual_seed(8)
    full = int(lengths.max())
    ids = torch.randint(1, vocabulary, (len(lengths), full), generator=draws)
    real = (torch.arange(full) < lengths[:, None]).long()
    return {"input_ids": ids * real, "attention_mask": real}


def bert(scale: Scale, head: str) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=scale.vocabulary, intermediate_size=4 * scale.config["hidden_size"],
        max_position_embeddings=scale.longest + 1, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, **scale.config,
    )  # fmt: skip
    if head == "pooled":
        return Pooled(transformers.BertModel(config, add_pooling_layer=False))
    return Scores(transformers.BertForMaskedLM(config))


class Pooled(nn.Module):
    """One vector for each text: the mean over its tokens."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        mask = attention_mask.unsqueeze(-1).to(hidden.dtype)
        return (hidden * mask).sum(1) / mask.sum(1)


class Scores(nn.Module):
    """[samples, classes, time], as torch's criterion takes them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        return self.inner(input_ids=input_ids, attention_mask=attention_mask).logits.transpose(1, 2)


def info_nce(vectors: torch.Tensor) -> torch.Tensor:
    a, b = functional.normalize(vectors, dim=-1).chunk(2)
    return functional.cross_entropy(SCALE * a @ b.T, torch.arange(len(a)))


class Native(Contestant):
    def __init__(self, *args: Any, loss: Callable[..., torch.Tensor]) -> None:
        super().__init__(*args)
        self.loss = loss

    def backward(self) -> None:
        outputs = self.model(**self.inputs)
        beside = () if self.targets is None else (self.targets,)
        self.loss(outputs, *beside).backward()


class Features(nn.Module):
    def __init__(self, encoder: nn.Module) -> None:
        super().__init__()
        self.encoder = encoder

    def forward(self, features: Texts) -> Texts:
        given = {name: features[name] for name in ("input_ids", "attention_mask")}
        return {"sentence_embedding": self.encoder(**given)}


class Peer(Contestant):
    """CachedMultipleNegativesRankingLoss with mini-batches by tokens."""

    def __init__(self, *args: Any, tokens: int) -> None:
        super().__init__(*args)
        from sentence_transformers.sentence_transformer.losses import (
            CachedMultipleNegativesRankingLoss,
        )

        model: Any = nn.Sequential(Features(self.model))
        self.loss = CachedMultipleNegativesRankingLoss(
            model, scale=SCALE, mini_batch_size=128, mini_batch_num_tokens=tokens
        )

    def backward(self) -> None:
        half = len(self.inputs["input_ids"]) // 2
        sides = [{k: v[:half] for k, v in self.inputs.items()}]
        sides += [{k: v[half:] for k, v in self.inputs.items()}]
        self.loss(sides, torch.empty(0)).backward()


class ByHand(Contestant):
    """What people write: rows sorted by length, packed, trimmed, and one denominator."""

    def __init__(self, *args: Any, tokens: int) -> None:
        super().__init__(*args)
        self.tokens = tokens

    def backward(self) -> None:
        lengths = self.inputs["attention_mask"].sum(1)
        order = lengths.argsort(descending=True)
        count = (self.targets != -100).sum()
        begin = 0
        while begin < len(order):
            longest = int(lengths[order[begin]])
            rows = order[begin : begin + max(1, self.tokens // longest)]
            scores = self.model(**{k: v[rows, :longest] for k, v in self.inputs.items()})
            total = functional.cross_entropy(
                scores, self.targets[rows, :longest], reduction="sum", ignore_index=-100
            )
            (total / count).backward()
            begin += len(rows)


class Planned(Contestant):
    """A VirtualBatch that may take `room` bytes above what was there. All others have run before."""

    def __init__(self, *args: Any, loss: Any, room: float, **options: Any) -> None:
        super().__init__(*args)
        self.given = args  # counts as live: it has to stay
        budget = ib.memory.stats().live + int(0.99 * room)
        self.batch = ib.VirtualBatch(self.model, loss, memory_budget=budget, **options)

    def backward(self) -> ib.StepReport:
        return self.batch.backward(self.inputs, self.targets)

    def settle(self, at_most: int = 60) -> bool:
        """False where nothing fits."""
        try:
            for _ in range(at_most):
                report = self()
                if report.predicted_peak_bytes is not None and report.restarts == 0:
                    break
        except ib.BudgetExceeded:
            return False
        return True


class Wrapped(Native):
    def __init__(self, *args: Any, loss: Any, **options: Any) -> None:
        super().__init__(*args, loss=loss)
        self.model = ib.wrap(self.model, **options)


def tuned(makers: list[Callable[[], Contestant]], room: float) -> Contestant | None:
    """The fastest that needs no more than `room` bytes above what was there."""
    tried: dict[str, Contestant] = {}
    for number, make in enumerate(makers):
        contestant = make()
        for _ in range(2):
            contestant()  # checks of first steps
        if contestant.peak_bytes() <= room:
            tried[str(number)] = contestant
    if len(tried) < 2:
        return next(iter(tried.values()), None)
    once = interleave(tried, 1, warm_up=0)
    best = sorted(tried, key=lambda each: median(once[each], "cpu"))[:2]
    samples = interleave({name: tried[name] for name in best}, 3, warm_up=1)
    return tried[min(best, key=lambda each: median(samples[each], "cpu"))]


def with_planned(found: dict[str, Contestant], planned: Callable[[], Planned]) -> None:
    gc.collect()  # of what was tuned
    for contestant in found.values():
        contestant()
    gc.collect()  # of peers whose losses are cycles
    ours = planned()
    if ours.settle():
        found[BATCH] = ours


def contrastive(scale: Scale, texts: Texts) -> dict[str, Contestant]:
    batch = (bert(scale, "pooled"), texts, None)
    found: dict[str, Contestant] = {NATIVE: Native(*batch, loss=info_nce)}
    room = found[NATIVE].peak_bytes()
    if importlib.util.find_spec("sentence_transformers") is not None:
        peer = tuned([lambda n=n: Peer(*batch, tokens=n) for n in scale.tokens], math.inf)
        assert peer is not None
        found[PEER] = peer
        room = peer.peak_bytes()
    choices = [
        {"micro_batch_tokens": tokens, "trim": TRIM, "retained_micro_batches": kept}
        for tokens in scale.tokens
        for kept in (0, 2, 4, 6)
    ]
    loss = ib.losses.coupled(lambda outputs, _: info_nce(outputs))
    wrapped = tuned([lambda c=c: Wrapped(*batch, loss=info_nce, **c) for c in choices], room)
    if wrapped is not None:
        found[WRAP] = wrapped
    with_planned(found, lambda: Planned(*batch, loss=loss, room=room, trim=TRIM))
    return found


def masked_language(scale: Scale, texts: Texts) -> dict[str, Contestant]:
    draws = torch.Generator().manual_seed(9)
    chosen = torch.rand(texts["input_ids"].shape, generator=draws) < 0.15
    chosen[:, 0] = True
    labels = torch.where(chosen & texts["attention_mask"].bool(), texts["input_ids"], -100)
    batch = (bert(scale, "scores"), texts, labels)
    loss = nn.CrossEntropyLoss()
    found: dict[str, Contestant] = {NATIVE: Native(*batch, loss=loss)}
    hand = tuned([lambda n=n: ByHand(*batch, tokens=n) for n in scale.tokens], math.inf)
    assert hand is not None
    found[HAND] = hand
    room = 1.02 * hand.peak_bytes()
    trim = ib.trim_padding(mask="attention_mask", targets=True)
    with_planned(found, lambda: Planned(*batch, loss=loss, room=room, trim=trim))
    return found


TASKS = {"contrastive": contrastive, "masked language model": masked_language}


def run(settings: Settings, save: Callable[[Findings], None]) -> Findings:
    scale = TOY if settings.toy else FULL
    findings = Findings()
    if importlib.util.find_spec("sentence_transformers") is None:
        findings.notes.append("Not installed, so not measured: sentence-transformers.")
    for task in TASKS:
        for kind in ("log-normal", "bimodal", "equal"):
            measure(task, kind, scale, settings, findings)
            save(findings)
    return findings


def collected(run: Callable[[], object]) -> Sample:
    """What a peer has left in cycles would lie in memory that ours was given."""
    gc.collect()
    return clock(run)


def measure(task: str, kind: str, scale: Scale, settings: Settings, findings: Findings) -> None:
    count = 2 * scale.pairs if task == "contrastive" else scale.pairs
    lengths = lengths_of(kind, count, scale.longest)
    contestants = TASKS[task](scale, texts_of(lengths, scale.vocabulary))
    for contestant in contestants.values():
        contestant()
    check_agreement(contestants)
    samples = interleave(
        contestants, settings.rounds, warm_up=1, at_most=SECONDS, measure=collected
    )
    gc.collect()
    peaks = {name: contestant.peak_bytes() for name, contestant in contestants.items()}
    name = f"{task}, {kind}"
    findings.tables.append(table_of(name, lengths, samples, peaks))
    findings.goals += goals_of(name, kind, samples, peaks)
    for who, taken in samples.items():
        findings.figures.append(
            {
                "workload": name,
                "contestant": who,
                "peak bytes": peaks[who],
                "CPU over native": ratio_of(taken, samples[NATIVE], "cpu"),
                "samples": taken,
            }
        )


def table_of(
    name: str, lengths: torch.Tensor, samples: dict[str, list[Sample]], peaks: dict[str, int]
) -> Table:
    share = float(lengths.sum()) / float(len(lengths) * lengths.max())
    beside = PEER if PEER in samples else HAND
    table = Table(
        f"**{name}**, {len(lengths):,} texts of {int(lengths.min())} to {int(lengths.max())} tokens, "
        f"{100 * share:.0f} % of positions real",
        ["contestant", "CPU ÷ native", "wall ÷ native", f"CPU ÷ {beside}", "peak MiB"],
    )
    for who, taken in samples.items():
        table.rows.append(
            [
                who,
                str(ratio_of(taken, samples[NATIVE], "cpu")),
                str(ratio_of(taken, samples[NATIVE], "wall")),
                str(ratio_of(taken, samples[beside], "cpu")) if beside in samples else "-",
                f"{peaks[who] / 2**20:.1f}",
            ]
        )
    return table


def goals_of(
    name: str, kind: str, samples: dict[str, list[Sample]], peaks: dict[str, int]
) -> list[Goal]:
    goals = []
    for ours in (BATCH, WRAP):
        if PEER not in samples:
            continue
        promise = (
            f"{name}, {ours}: at least {FASTER} times as fast as {PEER}, at no more than its peak"
        )
        if kind == "equal":
            promise = (
                f"{name}, {ours}: at most {SLACK} of the time of {PEER}, at no more than its peak"
            )
        if ours not in samples:
            goals.append(Goal(promise, "its peak is too little for what was tried", False))
            continue
        ratio = ratio_of(samples[ours], samples[PEER], "cpu")
        most = SLACK if kind == "equal" else 1 / FASTER
        measured = f"{ratio} at {peaks[ours] / peaks[PEER]:.3f} of its peak"
        goals.append(Goal(promise, measured, ratio.median <= most and peaks[ours] <= peaks[PEER]))
    if HAND in samples:
        promise = f"{name}, {BATCH}: at most {SLACK} of the time of {HAND}"
        if BATCH not in samples:
            return [*goals, Goal(promise, "its peak is too little for what was tried", False)]
        ratio = ratio_of(samples[BATCH], samples[HAND], "cpu")
        goals.append(Goal(promise, str(ratio), ratio.median <= SLACK))
    return goals
