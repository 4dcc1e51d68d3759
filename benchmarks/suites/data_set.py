"""A whole data set as one logical batch, through the command line and beside a loop by hand."""

import json
import os
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import infinitybatch as ib
import numpy as np
import torch
from contestants import TOLERANCE  # which finds the measure
from data_sets import ROOT, digits, enlarged, mnist, part, read
from harness.clock import Sample, interleave
from harness.ratios import Ratio, median, ratio_of
from harness.results import Findings, Goal, Table
from harness.settings import Settings
from measure import gradients, worst
from torch import nn
from torch.nn import functional

TITLE = "Whole data sets as one logical batch"
EXPLANATION = (
    "Training on real images, each epoch one step over all of them. Through the command line: "
    "MNIST's 60,000 images, and 1,000,000 made of them by moving each by up to two pixels "
    "(`data_sets.py`), both mapped from files; the native whole batch is tried at the same settings "
    "and has to run out of memory. Held-out accuracy is that on MNIST's own 10,000. Beside a loop by "
    "hand: the same convolutional network, data and micro-batch size in Python, where both make "
    "their micro-batches of the mapped bytes; they run in turn, in a new order each round, and "
    "ratios are medians of the rounds' ratios with 95 % bootstrap intervals."
)
OUT_OF_MEMORY = 3  # the command's exit code
LIMIT = 1.05
SECONDS = 120  # of rounds
MINUTES = 10
MIB = 2**20


@dataclass
class Job:
    """One call of the command line."""

    name: str
    data: Path
    budget: str
    flags: list[str]
    accuracy: float  # that must be reached
    events: list[dict[str, Any]] = field(default_factory=list)
    native_said: str = ""
    native_died: bool = False
    seconds: float = 0
    cpu: float = 0

    @property
    def shown(self) -> str:
        flags = " ".join(["--batch-size all --memory-budget", self.budget, *self.flags])
        return f"infinitybatch train --data {self.data.name} {flags}"

    def of(self, event: str) -> list[dict[str, Any]]:
        return [each for each in self.events if each["event"] == event]

    @property
    def summary(self) -> dict[str, Any]:
        return self.of("summary")[0]


def jobs(toy: bool) -> list[Job]:
    if toy:
        small = ["--model", "mlp", "--width", "32", "--epochs", "2"]
        return [
            Job("digits", digits(), "2MiB", small, 0.0),
            Job("digits, 5,000 samples", enlarged(digits(), 5000), "2MiB", small, 0.0),
        ]
    mlp = ["--model", "mlp", "--lr", "0.003", "--epochs"]
    return [
        Job("MNIST", mnist(), "32MiB", [*mlp, "20"], 0.9),
        Job("MNIST, 1,000,000 samples", enlarged(mnist(), 1_000_000), "256MiB", [*mlp, "5"], 0.6),
    ]


def program() -> str:
    found = Path(os.environ.get("INFINITYBATCH_CLI", ROOT / "build/release/bin/infinitybatch"))
    if not found.exists():
        raise RuntimeError(f"{found.name} is not built: make build, or set INFINITYBATCH_CLI")
    return str(found)


def call(job: Job, threads: int, *more: str) -> tuple[int, list[dict[str, Any]]]:
    command = [program(), "train", "--data", str(job.data), "--batch-size", "all"]
    command += ["--memory-budget", job.budget, *job.flags, *more, "--json"]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    events = [json.loads(line) for line in done.stdout.splitlines()]
    if done.returncode not in (0, OUT_OF_MEMORY):
        raise RuntimeError(f"{job.shown}: exit code {done.returncode}: {done.stderr.strip()}")
    return done.returncode, events


def carry_out(job: Job, settings: Settings) -> None:
    code, events = call(job, settings.threads, "--strategy", "native")
    job.native_died = code == OUT_OF_MEMORY
    job.native_said = events[-1].get("message", "it fits")
    start, before = time.monotonic(), os.times()
    code, job.events = call(job, settings.threads)
    job.seconds, after = time.monotonic() - start, os.times()
    job.cpu = sum(after[2:4]) - sum(before[2:4])
    if code:
        raise RuntimeError(f"{job.shown}: {job.events[-1]['message']}")
    for event in job.events:  # where the files lie is nobody's business
        event.update({key: job.data.name for key in ("data",) if key in event})


# ---- beside a loop by hand ----------------------------------------------------------------------


class Data:
    """Rows of mapped files as a model wants them: zero mean, unit deviation."""

    def __init__(self, folder: Path) -> None:
        self.images = read(part(folder, "train-images", 3))
        self.labels = np.array(read(part(folder, "train-labels", 1)), np.int64)
        self.mean, self.deviation = float(np.mean(self.images)), float(np.std(self.images))

    def inputs(self, begin: int, end: int) -> torch.Tensor:
        values = torch.from_numpy(np.array(self.images[begin:end])).float()
        return values.sub_(self.mean).div_(self.deviation).unsqueeze(1)

    def targets(self, begin: int, end: int) -> torch.Tensor:
        return torch.from_numpy(self.labels[begin:end])


def network(width: int) -> nn.Module:
    """The command line's convnet."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i in range(3):
        layers += [
            nn.Conv2d(width if i else 1, width, 3, stride=2 if i == 1 else 1, padding=1),
            nn.ReLU(),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * width, 10))


@dataclass
class Beside:
    """Ours and a loop by hand, the same micro-batches of the same rows."""

    size: int
    peak: int
    budget: int
    samples: dict[str, list[Sample]]
    count: int

    def ratio(self, clock: str) -> Ratio:
        return ratio_of(self.samples["ours"], self.samples["loop"], clock)


def beside(folder: Path, budget: int, settings: Settings) -> Beside:
    data = Data(folder)
    count = len(data.labels)
    source = (ib.BatchSource(count, data.inputs), ib.BatchSource(count, data.targets))
    ours_model, loop_model = network(8), network(8)
    batch = ib.VirtualBatch(ours_model, nn.CrossEntropyLoss(), memory_budget=budget)
    report = batch.backward(*source)
    while report.predicted_peak_bytes is None or report.restarts:
        ours_model.zero_grad()
        report = batch.backward(*source)
    size, peak = max(report.micro_batch_sizes), 0
    del report

    def ours() -> None:
        nonlocal peak
        ours_model.zero_grad()
        peak = max(peak, batch.backward(*source).peak_bytes)

    def loop() -> None:
        loop_model.zero_grad()
        for begin in range(0, count, size):
            end = min(begin + size, count)
            scores = loop_model(data.inputs(begin, end))
            loss = functional.cross_entropy(scores, data.targets(begin, end), reduction="sum")
            (loss / count).backward()

    samples = interleave({"ours": ours, "loop": loop}, settings.rounds, warm_up=1, at_most=SECONDS)
    if not worst(gradients(ours_model), gradients(loop_model)) <= TOLERANCE:
        raise ArithmeticError("the two give different gradients; there is no point in timing")
    return Beside(size, peak, budget, samples, count)


# ---- findings -------------------------------------------------------------------------------------


def run(settings: Settings, save: Callable[[Findings], None]) -> Findings:
    findings = Findings()
    done: list[Job] = []
    for job in jobs(settings.toy):
        carry_out(job, settings)
        done.append(job)
        findings.tables = [commands_table(done)]
        findings.goals += goals_of(job)
        findings.notes.append(f"{job.name}: `{job.shown}`. Native at the same: {job.native_said}")
        findings.figures.append({"job": job.name, "command": job.shown, "events": job.events})
        save(findings)
    folder = digits() if settings.toy else mnist()
    found = beside(folder, 16 * MIB if settings.toy else 32 * MIB, settings)
    findings.tables += [epochs_table(done), beside_table(found)]
    findings.figures.append({"beside a loop by hand": found})
    cpu = found.ratio("cpu")
    promise = f"CPU over a loop by hand at most {LIMIT}"
    findings.goals.append(Goal(promise, str(cpu), cpu.median <= LIMIT))
    return findings


def goals_of(job: Job) -> list[Goal]:
    share, accuracy = job.summary["peak_over_budget"], job.summary["held_out_accuracy"]
    restarts = sum(epoch["restarts"] for epoch in job.of("epoch"))
    return [
        Goal(
            f"{job.name}: native runs out of memory in {job.budget}",
            "it does" if job.native_died else "it does not",
            job.native_died,
        ),
        Goal(f"{job.name}: peak inside the budget", f"{share:.3f}", share <= 1),
        Goal(f"{job.name}: no restarts", str(restarts), restarts == 0),
        Goal(
            f"{job.name}: held-out accuracy at least {job.accuracy:.0%}",
            f"{accuracy:.1%}",
            accuracy >= job.accuracy,
        ),
        Goal(
            f"{job.name}: the whole command in at most {MINUTES} minutes",
            f"{job.seconds:.0f} s",
            job.seconds <= 60 * MINUTES,
        ),
    ]


def commands_table(done: list[Job]) -> Table:
    table = Table(
        "**Through the command line**",
        [
            "data",
            "samples a step",
            "steps",
            "budget",
            "peak MiB",
            "micro-batch",
            "loss, first and last",
            "held-out accuracy",
            "CPU µs a sample",
            "seconds in all",
        ],
    )
    for job in done:
        epochs, samples = job.of("epoch"), job.of("start")[0]["batch_size"]
        losses = f"{epochs[0]['loss']:.3f}, {epochs[-1]['loss']:.3f}"
        table.rows.append(
            [
                job.name,
                f"{samples:,}",
                str(len(epochs)),
                job.budget,
                f"{job.summary['peak_bytes'] / MIB:.1f}",
                f"{epochs[-1]['micro_batch_size']:,}",
                losses,
                f"{job.summary['held_out_accuracy']:.1%}",
                f"{1e6 * job.cpu / (samples * len(epochs)):.1f}",
                f"{job.seconds:.0f}",
            ]
        )
    return table


def epochs_table(done: list[Job]) -> Table:
    table = Table("**Held-out accuracy** after each step", ["data", "accuracies in %"])
    for job in done:
        reached = [f"{100 * epoch['held_out_accuracy']:.0f}" for epoch in job.of("epoch")]
        table.rows.append([job.name, " ".join(reached)])
    return table


def beside_table(found: Beside) -> Table:
    table = Table(
        f"**Beside a loop by hand**, {found.count:,} samples a step, micro-batches of {found.size}",
        [
            "contestant",
            "CPU ÷ loop",
            "wall ÷ loop",
            "samples/s ÷ loop's",
            "CPU µs a sample",
            "peak ÷ budget",
        ],
    )
    for name, taken in found.samples.items():
        each = [ratio_of(taken, found.samples["loop"], clock) for clock in ("cpu", "wall")]
        speed = ratio_of(found.samples["loop"], taken, "wall")
        cost = f"{1e6 * median(taken, 'cpu') / found.count:.1f}"
        peak = f"{found.peak / found.budget:.3f}" if name == "ours" else ""
        table.rows.append([name, *map(str, each), str(speed), cost, peak])
    return table
