"""Times steps on an accelerator beside native's, and writes them down.

python benchmarks/accelerator.py cuda --output times.json
"""

import argparse
import copy
import importlib
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import infinitybatch as ib
import torch
import torch.nn.functional as F
from torch import nn

ROUNDS, WARM = 20, 5


def convnet(scale: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    widths = [3, 8 * scale, 16 * scale, 16 * scale]
    layers: list[nn.Module] = []
    for before, after in zip(widths, widths[1:], strict=False):
        layers += [nn.Conv2d(before, after, 3, padding=1, stride=2), nn.BatchNorm2d(after)]
        layers.append(nn.ReLU())
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10))
    return model, torch.randn(64 * scale, 3, 32, 32), torch.randint(10, (64 * scale,))


def transformer(scale: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    width = 32 * scale
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
    body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body = nn.Embedding(100, width), body
            self.head = nn.Linear(width, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(self.embed(x)).mean(1))

    return Model(), torch.randint(100, (16 * scale, 32)), torch.randint(10, (16 * scale,))


def measure(step: Callable[[], None], rounds: int) -> dict[str, float]:
    for _ in range(WARM):
        step()
    torch.accelerator.synchronize()
    torch.accelerator.reset_peak_memory_stats()
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        step()
        torch.accelerator.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.accelerator.max_memory_allocated()
    return {"median_seconds": statistics.median(seconds), "best": min(seconds), "peak_bytes": peak}


def compare(name: str, make: Callable, scale: int, device: str, rounds: int) -> list[dict]:
    torch.manual_seed(0)
    model, inputs, targets = make(scale)
    model, inputs, targets = (x.to(device) for x in (model, inputs, targets))
    whole = copy.deepcopy(model)

    def native() -> None:
        whole.zero_grad()
        F.cross_entropy(whole(inputs), targets).backward()

    rows = [{"model": name, "way": "native, whole batch", **measure(native, rounds)}]
    n = len(inputs)
    ways = {f"micro_batch_size={size}": {"micro_batch_size": size} for size in (n, n // 2, n // 4)}
    ways["memory_budget=0.5 of native's peak"] = {
        "memory_budget": (rows[0]["peak_bytes"] + torch.accelerator.memory_allocated()) // 2
    }
    for way, options in ways.items():
        ours = copy.deepcopy(model)
        batch = ib.VirtualBatch(ours, nn.CrossEntropyLoss(), **options)

        def step(ours: nn.Module = ours, batch: ib.VirtualBatch = batch) -> None:
            ours.zero_grad()
            batch.backward(inputs, targets)

        try:
            rows.append({"model": name, "way": way, **measure(step, rounds)})
        except ib.Error as error:
            rows.append({"model": name, "way": way, "error": str(error)})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--scale", type=int, default=8, help="1: only try the harness")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    chosen = parser.parse_args()
    if chosen.device == "sim":  # to try the harness: tests/sim, which scripts/accelerator.sh finds
        importlib.import_module("simulated_device")
    results = []
    for name, make in {"convnet": convnet, "transformer": transformer}.items():
        results += compare(name, make, chosen.scale, chosen.device, chosen.rounds)
        chosen.output.write_text(json.dumps(results, indent=1) + "\n")
    for row in results:
        seconds = row.get("median_seconds")
        told = row["error"] if seconds is None else f"{1e3 * seconds:9.2f} ms"
        print(f"{row['model']:12} {row['way']:36} {told}")


if __name__ == "__main__":
    main()
