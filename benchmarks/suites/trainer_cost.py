"""What a Trainer costs beside the loop that it replaces."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import infinitybatch as ib
import torch
from harness.clock import interleave
from harness.ratios import median, ratio_of
from harness.results import Findings, Goal, Table
from harness.settings import Settings
from infinitybatch.callbacks import NoiseScale
from infinitybatch.histories import History, last
from infinitybatch.statistics import JsonLines
from torch import nn
from workloads import mlp

TITLE = "Cost of the trainer beside a loop by hand"
EXPLANATION = (
    "An MLP (256-512-10) and SGD over a list of logical batches in micro-batches of 128, as large as "
    "makes a step of about 10 ms, and of about 1 ms to show what each step costs. The loop by "
    "hand is `optimizer.zero_grad(); batch.backward(x, y); optimizer.step()` over the same "
    "`VirtualBatch` options, reading each loss, as the trainer does; what that costs beside native "
    "is the suite `loop`. The trainer runs epochs over the same list: bare, with a history of losses "
    "and a file of JSON lines, and with the gradient noise scale. A sample is one epoch. Contestants "
    "run in turn, in a new order each round; CPU is the process's time over all threads, ratios are "
    "medians of the rounds' ratios with 95 % bootstrap intervals; `µs more` is between the rounds of "
    "either that took least."
)
#: Samples of a logical batch, and logical batches of an epoch.
LENGTHS = {"steps of about 10 ms": (1024, 10), "steps of about 1 ms": (128, 60)}
SIZE = 128
BY_HAND, BARE = "loop by hand", "Trainer"
LIMIT = 1.01
PROMISED = "steps of about 10 ms"

Run = Callable[[], object]


def runs_of(samples: int, count: int, folder: Path) -> dict[str, Run]:
    torch.manual_seed(0)
    batches = [(torch.randn(samples, 256), torch.randint(10, (samples,))) for _ in range(count)]

    def parts() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(1)
        model = mlp(256, 512, 10)
        return model, torch.optim.SGD(model.parameters(), lr=1e-3)

    def by_hand() -> Run:
        model, optimizer = parts()
        batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=SIZE)

        def epoch() -> None:
            for x, y in batches:
                optimizer.zero_grad()
                float(batch.backward(x, y).loss)
                optimizer.step()

        return epoch

    def trainer(*callbacks: Any) -> Run:
        model, optimizer = parts()
        loss = nn.CrossEntropyLoss()
        made = ib.Trainer(
            model, loss, optimizer, batches, micro_batch_size=SIZE, callbacks=list(callbacks)
        )
        return made.epoch

    return {
        BY_HAND: by_hand(),
        BARE: trainer(),
        "Trainer, history and JSON lines": trainer(
            History(losses=last(1000)), JsonLines(folder / "run.jsonl")
        ),
        "Trainer, noise scale": trainer(NoiseScale()),
    }


def run(settings: Settings, save: Callable[[Findings], None]) -> Findings:
    findings = Findings()
    for workload, lengths in LENGTHS.items():
        samples, count = (256, 2) if settings.toy else lengths
        with tempfile.TemporaryDirectory() as folder:
            runs = runs_of(samples, count, Path(folder))
            taken = interleave(runs, settings.rounds)
        step = median(taken[BY_HAND], "wall") / count
        table = Table(
            f"**Steps of {1000 * step:.1f} ms** ({samples} samples), {count} steps an epoch, "
            f"{settings.rounds} rounds",
            [
                "contestant",
                "CPU ÷ loop by hand",
                "wall ÷ loop by hand",
                "CPU µs per step",
                "µs more",
            ],
        )
        for name, mine in taken.items():
            cpu, wall = (ratio_of(mine, taken[BY_HAND], clock) for clock in ("cpu", "wall"))
            each = 1e6 * median(mine, "cpu") / count
            # The least of all rounds: what others on the machine do is never less than nothing.
            least = [min(s.cpu for s in taken[who]) for who in (name, BY_HAND)]
            more = 1e6 * (least[0] - least[1]) / count
            table.rows.append([name, str(cpu), str(wall), f"{each:.0f}", f"{more:.0f}"])
            findings.figures.append(
                {
                    "workload": workload,
                    "contestant": name,
                    "samples": samples,
                    "steps": count,
                    "step seconds": step,
                    "CPU ratio": cpu,
                    "wall ratio": wall,
                    "CPU seconds more": more / 1e6,
                    "runs": mine,
                }
            )
            if name == BARE and workload == PROMISED and not settings.toy:
                promise = f"{workload}: CPU over the loop by hand at most 1 %"
                findings.goals.append(Goal(promise, str(cpu), cpu.median <= LIMIT))
        findings.tables.append(table)
        save(findings)
    return findings
