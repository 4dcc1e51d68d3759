"""Steps on an accelerator beside native's and loops by hand, interleaved, written down.

python benchmarks/accelerator.py cuda --output times.json

Each network is trained on one batch in every way that its loss allows: native with the whole batch,
micro-batches by hand of one size (a cached gradient where the loss couples samples), ours with that
size and ours inside budgets. Every round runs each of them once; times are medians beside native's.
What gradients differ by from native's is told beside what native's own differ by once the last bits
of the parameters are others: with half precision and BatchNorm that may be as much as they are.
"""

import argparse
import gc
import importlib
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import infinitybatch as ib
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

SHARES = (0.5, 0.25)
WARM = 6  #: steps in which plans settle
GiB = 1 << 30
Step = Callable[[], int | None]  #: it may tell its own peak


@dataclass
class Case:
    name: str
    model: nn.Module
    inputs: torch.Tensor
    targets: torch.Tensor
    criterion: Callable
    micro_batch: int
    coupled: bool = False
    autocast: torch.dtype | None = None


class Block(nn.Module):
    """A residual block with a bottleneck and BatchNorm, as in ResNet-50."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        after = 4 * width
        self.body = nn.Sequential(
            nn.Conv2d(before, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, after, 1, bias=False), nn.BatchNorm2d(after),
        )  # fmt: skip
        self.short = nn.Sequential()
        if stride > 1 or before != after:
            self.short = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.short(x))


def resnet(width: int, depths: tuple[int, ...]) -> nn.Sequential:
    layers = [nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    layers.append(nn.MaxPool2d(3, 2, 1))
    before = width
    for stage, depth in enumerate(depths):
        for index in range(depth):
            inner = width << stage
            layers.append(Block(before, inner, 2 if stage and not index else 1))
            before = 4 * inner
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, 1000)
    )  # fmt: skip


class Transformer(nn.Module):
    """Tokens to logits of the next one, (rows, vocabulary, length), or to one embedding a row."""

    def __init__(self, vocabulary: int, length: int, width: int, layers: int, out: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.place = nn.Parameter(0.02 * torch.randn(length, width))
        layer = nn.TransformerEncoderLayer(
            width, max(1, width // 64), 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, out, bias=False)
        self.causal = out == vocabulary

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.place
        mask = None
        if self.causal:
            mask = nn.Transformer.generate_square_subsequent_mask(
                tokens.shape[1], device=tokens.device
            )
        x = self.body(x, mask=mask, is_causal=self.causal)
        if self.causal:
            return self.head(x).transpose(1, 2)
        return F.normalize(self.head(x).mean(1).float(), dim=1)


def contrast(embeddings: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """Neighbouring rows belong together; all others are negatives."""
    one, other = embeddings.unflatten(0, (-1, 2)).unbind(1)
    return F.cross_entropy(one @ other.T / 0.05, torch.arange(len(one), device=one.device))


def sizes(toy: bool) -> tuple[int, int, int, int]:
    """Of the transformers: words, length of a row, width, layers."""
    return (50, 8, 16, 1) if toy else (32_000, 1024, 768, 12)


def cases(toy: bool) -> Iterator[Case]:
    words, length, width, layers = sizes(toy)
    n = 16 if toy else 32
    tokens = torch.randint(words, (n, length))
    yield Case(
        "language model, 12 layers",
        Transformer(words, length, width, layers, words),
        tokens, tokens.roll(-1, 1), F.cross_entropy, n // 8,
        autocast=None if toy else torch.bfloat16,
    )  # fmt: skip
    n, length = (32, 4) if toy else (2048, 64)
    tokens = torch.randint(words, (n, length))
    yield Case(
        "encoder, contrastive",
        Transformer(words, length, width, layers, 32 if toy else 256),
        tokens, torch.zeros(n, dtype=torch.long), contrast, n // 16,
        coupled=True, autocast=None if toy else torch.bfloat16,
    )  # fmt: skip
    n, size = (16, 32) if toy else (256, 224)
    yield Case(
        "ResNet-50, BatchNorm",
        resnet(4, (1, 1)) if toy else resnet(64, (3, 4, 6, 3)),
        torch.randn(n, 3, size, size), torch.randint(1000, (n,)), F.cross_entropy, n // 8,
        autocast=None if toy else torch.bfloat16,
    )  # fmt: skip


def precision(case: Case) -> torch.autocast:
    device = case.inputs.device.type
    if case.autocast is None:
        return torch.autocast(device, enabled=False)
    return torch.autocast(device, dtype=case.autocast)


def native(case: Case) -> None:
    with precision(case):
        loss = case.criterion(case.model(case.inputs), case.targets)
    loss.backward()


def checkpointed(case: Case) -> None:
    with precision(case):
        outputs = checkpoint_sequential(case.model, 5, case.inputs, use_reentrant=False)
        loss = case.criterion(outputs, case.targets)
    loss.backward()


def accumulated(case: Case) -> None:
    """For means over rows of equal weight, micro-batches of equal size: the ones above."""
    for begin in range(0, len(case.inputs), case.micro_batch):
        rows = slice(begin, begin + case.micro_batch)
        with precision(case):
            loss = case.criterion(case.model(case.inputs[rows]), case.targets[rows])
        (loss * (case.micro_batch / len(case.inputs))).backward()


def cached(case: Case) -> None:
    """Embeddings first, the gradient of the loss in them, then each micro-batch with its graph."""
    parts = case.inputs.split(case.micro_batch)
    with precision(case):
        with torch.no_grad():
            embeddings = torch.cat([case.model(part) for part in parts])
        embeddings.requires_grad_()
        loss = case.criterion(embeddings, case.targets)
    loss.backward()
    for part, gradient in zip(parts, embeddings.grad.split(case.micro_batch), strict=True):
        with precision(case):
            outputs = case.model(part)
        outputs.backward(gradient)


def ours(case: Case, **options: int) -> Step:
    loss = ib.losses.coupled(case.criterion) if case.coupled else case.criterion
    batch = ib.VirtualBatch(case.model, loss, **options)

    def step() -> int:
        with precision(case):
            return batch.backward(case.inputs, case.targets).peak_bytes

    return step


def once(case: Case, step: Step) -> dict[str, float]:
    case.model.zero_grad(set_to_none=True)
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    start = time.perf_counter()
    told = step()
    torch.accelerator.synchronize()
    seconds = time.perf_counter() - start
    # Within our steps peaks are looked at, and begun anew, several times: theirs is the report's.
    peak = max(told or 0, torch.accelerator.max_memory_allocated())
    return {"seconds": seconds, "peak_bytes": peak}


def gradients(case: Case) -> list[torch.Tensor]:
    return [p.grad.to("cpu") for p in case.model.parameters()]


def difference(case: Case, wanted: list[torch.Tensor]) -> float:
    """Of all gradients together, relative to native's."""
    pairs = list(zip(gradients(case), wanted, strict=True))
    apart = sum(float((found - right).square().sum()) for found, right in pairs)
    return (apart / sum(float(right.square().sum()) for _, right in pairs)) ** 0.5


def of_rounding(case: Case, wanted: list[torch.Tensor]) -> float:
    """What `difference` is where parameters are off by their last bits."""
    before = [p.detach().clone() for p in case.model.parameters()]
    with torch.no_grad():
        for p in case.model.parameters():
            p.mul_(1 + 2 * torch.finfo(p.dtype).eps * torch.randn_like(p))
    once(case, lambda: native(case))
    apart = difference(case, wanted)
    with torch.no_grad():
        for p, values in zip(case.model.parameters(), before, strict=True):
            p.copy_(values)
    return apart


def ways_of(case: Case, peak: int) -> dict[str, Step]:
    """What is tried; budgets are shares of `peak`, native's, in bytes."""
    ways: dict[str, Step] = {"native": lambda: native(case)}
    if isinstance(case.model, nn.Sequential):
        ways["native, torch.utils.checkpoint"] = lambda: checkpointed(case)
    by_hand = cached if case.coupled else accumulated
    name = "GradCache by hand" if case.coupled else "accumulation by hand"
    ways[f"{name}, {case.micro_batch}"] = lambda: by_hand(case)
    ways[f"micro_batch_size={case.micro_batch}"] = ours(case, micro_batch_size=case.micro_batch)
    for share in SHARES:
        budget = int(share * peak)
        name = f"memory_budget={budget / GiB:.2f} GiB, {share:g} of native's peak"
        ways[name] = ours(case, memory_budget=budget)
    return ways


def measure(case: Case, rounds: int, seconds: float) -> list[dict]:
    """Every way that the loss allows, in about so many seconds."""
    begin = time.perf_counter()
    once(case, lambda: native(case))
    peak = once(case, lambda: native(case))["peak_bytes"]
    wanted = gradients(case)
    told = {"model": case.name, "rows": len(case.inputs)}
    told["gradient_apart_by_rounding"] = of_rounding(case, wanted)
    ways = ways_of(case, peak)
    rows = {way: told | {"way": way} for way in ways}
    seen: dict[str, list[dict]] = {way: [] for way in ways}
    try:
        for way, step in ways.items():  # plans settle
            start = time.perf_counter()
            for index in range(WARM):
                if index >= 2 and time.perf_counter() - start > seconds / len(ways) / 2:
                    break
                try:
                    once(case, step)
                except (ib.Error, torch.OutOfMemoryError) as error:
                    rows[way]["error"] = f"{type(error).__name__}: {error}"
                    break
            if "error" not in rows[way]:
                rows[way]["gradient_apart"] = difference(case, wanted)
            rows[way]["seconds_of_first_steps"] = time.perf_counter() - start
            print(f"  {way}: {time.perf_counter() - start:.2f} s", file=sys.stderr, flush=True)
        steps = {way: step for way, step in ways.items() if "error" not in rows[way]}
        for index in range(rounds):
            if index >= 2 and time.perf_counter() - begin > seconds:
                break
            for way, step in steps.items():
                seen[way].append(once(case, step))
    except KeyboardInterrupt:  # what there is
        print("interrupted", file=sys.stderr)
    for way, found in seen.items():
        pairs = list(zip(found, seen["native"], strict=False))
        if not pairs:
            continue
        rows[way] |= {
            "rounds": len(pairs),
            "median_seconds": statistics.median(one["seconds"] for one, _ in pairs),
            "time_over_native": statistics.median(
                one["seconds"] / base["seconds"] for one, base in pairs
            ),
            "peak_bytes": max(one["peak_bytes"] for one, _ in pairs),
        }
    return list(rows.values())


def best(case: Case, step: Step) -> dict[str, float]:
    """Of some steps, in most of which nobody looks at rows, and plans are settled."""
    return min((once(case, step) for _ in range(6)), key=lambda found: found["seconds"])


def reach(device: str, toy: bool) -> Iterator[dict]:
    """The largest batch: native until the device's memory ends, ours in a fixed budget."""
    words, length, width, layers = sizes(toy)
    model = Transformer(words, length, width, layers, words).to(device)
    half = None if toy else torch.bfloat16
    name = "language model, batches of every size"
    budget = (torch.accelerator.max_memory_allocated() + (1 << 20)) if toy else 8 * GiB
    batch = ib.VirtualBatch(model, F.cross_entropy, memory_budget=budget)
    native_lives = True
    n = 16
    for _ in range(3 if toy else 6):
        tokens = torch.randint(words, (n, length), device=device)
        case = Case(name, model, tokens, tokens.roll(-1, 1), F.cross_entropy, n, autocast=half)

        def ours(case: Case = case) -> int:
            with precision(case):
                return batch.backward(case.inputs, case.targets).peak_bytes

        row = {"model": name, "rows": n}
        first = once(case, ours)["seconds"]
        told = {"way": f"memory_budget={budget / GiB:g} GiB", "seconds_of_first_step": first}
        yield row | told | best(case, ours)
        if native_lives:
            try:
                yield row | {"way": "native"} | best(case, lambda case=case: native(case))
            except RuntimeError as error:  # out of memory, or a product of more than 2³¹ numbers
                yield row | {"way": "native", "error": str(error).splitlines()[0]}
                native_lives = False
        model.zero_grad(set_to_none=True)
        gc.collect()
        torch.accelerator.empty_cache()
        n *= 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--toy", action="store_true", help="only try the harness")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seconds", type=float, default=60, help="for each network, about")
    parser.add_argument("--only", nargs="*", default=[], help="beginnings of names of networks")
    chosen = parser.parse_args()
    if chosen.device == "sim":  # to try the harness: tests/sim, which scripts/accelerator.sh finds
        importlib.import_module("simulated_device")
    torch.manual_seed(0)
    results: list[dict] = []
    for case in cases(chosen.toy):
        if chosen.only and not case.name.startswith(tuple(chosen.only)):
            continue
        case.model = case.model.to(chosen.device)
        case.inputs, case.targets = (x.to(chosen.device) for x in (case.inputs, case.targets))
        found = measure(case, chosen.rounds, chosen.seconds)
        results += found
        for row in found:
            told = row.get("error", "not measured")
            if "time_over_native" in row:
                told = (
                    f"{row['time_over_native']:6.3f} of native's time, "
                    f"{row['peak_bytes'] / GiB:7.3f} GiB, "
                    f"gradient {row.get('gradient_apart', float('nan')):.1e} apart "
                    f"(rounding: {row['gradient_apart_by_rounding']:.1e})"
                )
            print(f"{row['model']:28} {row['way']:52} {told}", flush=True)
        chosen.output.write_text(json.dumps(results, indent=1) + "\n")
        del case
        gc.collect()
        torch.accelerator.empty_cache()
    if not chosen.only or "reach" in chosen.only:
        for row in reach(chosen.device, chosen.toy):
            results.append(row)
            print(row, flush=True)
            chosen.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
