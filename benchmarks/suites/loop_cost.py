"""What a loop over micro-batches costs beside the model's work: ours, and peers where installed."""

import random
from collections.abc import Callable

import infinitybatch as ib
import torch
from harness.clock import Sample, interleave, measure
from harness.ratios import median, ratio_of
from harness.results import Findings, Goal, Table
from harness.settings import Settings
from peers.contestants import accelerate_step, lightning_fit
from torch import nn
from torch.nn import functional
from workloads import tiny_mlp

TITLE = "Cost of the loop over micro-batches"
EXPLANATION = (
    "A tiny MLP (64-128-10) whose own work is so small that the cost of the loop around it shows. "
    "Every contestant does the same: micro-batches of 8 out of tensors that exist, forward, loss, "
    "backward, and once per logical batch a step of SGD and zero_grad. The loop written by hand is "
    "`for x, y in zip(inputs.split(8), targets.split(8))`. A sample is several logical batches in a "
    "row, as in training; short logical batches are shown alone too: each then follows another "
    "contestant, whose code and data have taken the processor's caches, which costs the loop with "
    "more code behind it more. Contestants run in turn, in a new order "
    "each round; CPU is the process's time over all threads, ratios are medians of the rounds' "
    "ratios with 95 % bootstrap intervals. accelerate is used as its documentation shows "
    "(`accumulate`, prepared model and optimizer, no prepared loader), lightning's Trainer with "
    "logging, checkpoints, progress bar and summary switched off; its rounds are the logical batches "
    "of one long epoch. It does not say the same gradient: those two divide by the number of "
    "micro-batches, which is right only where all are equally long, as here."
)
SIZE = 8
# Micro-batches per logical batch, logical batches in a row, and the share of the rounds.
LENGTHS = ((8, 16, 1), (8, 1, 4), (64, 2, 1), (512, 1, 0.2))
GOAL, LIMIT = 1.05, 1.10
BY_HAND, OURS = "loop by hand", "infinitybatch"

Step = Callable[[], object]


def steps_of(count: int, in_a_row: int) -> dict[str, Step]:
    """`in_a_row` logical batches of `count` micro-batches per call."""
    inputs = torch.randn(SIZE * count, 64)
    targets = torch.randint(10, (SIZE * count,))

    def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = tiny_mlp()
        return model, torch.optim.SGD(model.parameters(), lr=1e-3)

    def by_hand() -> Step:
        model, optimizer = model_and_optimizer()
        total = len(targets)

        def step() -> None:
            for x, y in zip(inputs.split(SIZE), targets.split(SIZE), strict=True):
                loss = functional.cross_entropy(model(x), y, reduction="sum") / total
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        return step

    def ours() -> Step:
        model, optimizer = model_and_optimizer()
        batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=SIZE)

        def step() -> None:
            batch.backward(inputs, targets)
            optimizer.step()
            optimizer.zero_grad()

        return step

    steps = {BY_HAND: by_hand(), OURS: ours()}
    accelerate = accelerate_step(*model_and_optimizer(), inputs, targets, SIZE)
    steps |= {"accelerate": accelerate} if accelerate else {}

    def repeated(step: Step) -> Step:
        def run() -> None:
            for _ in range(in_a_row):
                step()

        return run

    return {name: repeated(step) for name, step in steps.items()}


def run(settings: Settings, save: Callable[[Findings], None]) -> Findings:
    findings = Findings()
    for count, in_a_row, share in LENGTHS[:1] if settings.toy else LENGTHS:
        rounds = round(share * settings.rounds)
        samples = with_lightning(steps_of(count, in_a_row), count, in_a_row, rounds)
        lengths = (
            f"{count} micro-batches, {in_a_row} in a row"
            if in_a_row > 1
            else (f"{count} micro-batches, alone")
        )
        table = Table(
            f"**{count} micro-batches of {SIZE}** per logical batch, {in_a_row} logical batches a "
            f"sample, {rounds} rounds",
            ["contestant", "CPU ÷ loop by hand", "wall ÷ loop by hand", "CPU µs per micro-batch"],
        )
        for name, taken in samples.items():
            cpu = ratio_of(taken, samples[BY_HAND], "cpu")
            wall = ratio_of(taken, samples[BY_HAND], "wall")
            each = 1e6 * median(taken, "cpu") / (count * in_a_row)
            table.rows.append([name, str(cpu), str(wall), f"{each:.0f}"])
            findings.figures.append(
                {
                    "contestant": name,
                    "micro-batches": count,
                    "in a row": in_a_row,
                    "CPU ratio": cpu,
                    "wall ratio": wall,
                    "samples": taken,
                }
            )
            if name == OURS and settings.malloc == "tuned":
                for most in (GOAL, LIMIT):
                    promise = f"{lengths}: CPU over the loop by hand at most {most - 1:.0%}"
                    findings.goals.append(Goal(promise, str(cpu), cpu.median <= most))
        findings.tables.append(table)
        missing = [name for name in ("accelerate", "lightning") if name not in samples]
        if missing:
            findings.notes.append(f"Not installed, so not measured: {', '.join(missing)}.")
        save(findings)
    return findings


def with_lightning(
    steps: dict[str, Step], count: int, in_a_row: int, rounds: int
) -> dict[str, list[Sample]]:
    """`interleave`, led by lightning's Trainer where it is installed, since it owns its loop."""
    samples: dict[str, list[Sample]] = {name: [] for name in steps}
    order = list(steps)
    shuffle = random.Random(0).shuffle
    warm_up = 5

    def others(turn: int) -> None:
        shuffle(order)
        for name in order:
            sample = measure(steps[name])
            if turn >= warm_up:
                samples[name].append(sample)

    theirs = lightning_fit(tiny_mlp, SIZE, count, in_a_row, rounds + warm_up, others)
    if theirs is None:
        return interleave(steps, rounds, warm_up)
    return samples | {"lightning": theirs[warm_up:]}
