"""What recording a forward costs, and what replaying it saves."""

import ctypes
from collections.abc import Callable

import infinitybatch as ib
import torch
from harness.clock import Sample, interleave
from harness.native import load
from harness.ratios import Ratio, median, paired, ratio_of
from harness.results import Findings, Goal, Table
from harness.settings import Settings
from torch import nn
from workloads import Encoder, convnet, mlp

TITLE = "Tapes: recording beside a bare callback, replaying beside Python"
EXPLANATION = (
    "Forwards of so little work that what surrounds each op shows, in grad mode, called from Python. "
    "The bare callback is a RecordFunction callback that is given inputs and outputs, as a recorder "
    "must be, and does nothing. Recording is `infinitybatch.tape.record`, from the call to the "
    "finished tape: modes, provenance and liveness of every value, checks for writes past the "
    "dispatcher. What each adds to the plain forward is its time less the plain forward's of the "
    "same round. A replay runs the tape with a graph of its own and is compared with the same "
    "forward called from Python. Contestants run in turn, in a new order each round; CPU is the "
    "process's time; ratios are medians of the rounds' ratios with 95 % bootstrap intervals."
)
RECORDING, REPLAYING = 3.0, 1.0
PLAIN, BARE, RECORDED, REPLAYED = "plain", "bare callback", "recorded", "replayed"
CALLS = 5  # of one contestant in a row
LEAST_SECONDS = 2e-7  # a difference below is the clock's noise


class SmallOps(nn.Module):
    """Ops on four numbers."""

    def __init__(self, repeats: int) -> None:
        super().__init__()
        self.repeats = repeats
        self.weight = nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = x
        for _ in range(self.repeats):
            y = (y * self.weight).add(x, alpha=0.5).relu()
            y = torch.where(y > 0, y, self.weight)
        return y


def forwards(toy: bool) -> dict[str, tuple[nn.Module, torch.Tensor]]:
    torch.manual_seed(0)
    return {
        "ops on four numbers": (SmallOps(20 if toy else 200), torch.randn(4)),
        "MLP of 8 layers, width 16": (mlp(*[16] * 9), torch.randn(2, 16)),
        "small encoder, 4 layers": (Encoder(16, 2, 4), torch.randn(1, 4, 16)),
        "small convnet": (convnet(4, 8), torch.randn(1, 3, 8, 8)),
    }


def contestants_of(
    model: nn.Module, inputs: torch.Tensor, observer: ctypes.CDLL | None
) -> tuple[dict[str, Callable[[], object]], int]:
    """Each calls the model CALLS times; and how many ops one call has."""
    outputs, tape = ib.tape.record(model, (inputs,))
    if tape.opaque:
        raise RuntimeError(f"there is nothing to measure, the tape is opaque: {tape.opaque}")
    if not torch.equal(tape.replay(inputs), outputs):
        raise ArithmeticError("the replay gives other numbers; there is no point in timing it")

    def plain() -> None:
        for _ in range(CALLS):
            model(inputs)

    def observed() -> None:
        observer.start()
        try:
            plain()
        finally:
            observer.stop()

    def record() -> None:
        for _ in range(CALLS):
            ib.tape.record(model, (inputs,))

    def replay() -> None:
        for _ in range(CALLS):
            tape.replay(inputs)

    contestants = {PLAIN: plain, RECORDED: record, REPLAYED: replay}
    return contestants | ({BARE: observed} if observer else {}), len(tape)


def added(taken: list[Sample], plain: list[Sample]) -> list[float]:
    """Seconds that each round took more than the plain forward."""
    return [max(a.cpu - b.cpu, LEAST_SECONDS) for a, b in zip(taken, plain, strict=True)]


def run(settings: Settings, save: Callable[[Findings], None]) -> Findings:
    findings = Findings()
    observer, reason = load("bare_callback")
    if observer is None:
        findings.notes.append(f"The bare callback was not measured: {reason}")
    table = Table(
        "Per op of the tape, and what is promised",
        ["forward", "ops", "plain ns", "bare adds ns", "recording adds ns"]
        + ["recording ÷ bare", "replay ÷ plain"],
    )
    findings.tables.append(table)
    for name, (model, inputs) in forwards(settings.toy).items():
        contestants, ops = contestants_of(model, inputs, observer)
        samples = interleave(contestants, settings.rounds, warm_up=3)
        plain = samples[PLAIN]
        nanoseconds = 1e9 / (ops * CALLS)
        recording = added(samples[RECORDED], plain)
        replay = ratio_of(samples[REPLAYED], plain, "cpu")
        beside: Ratio | None = None
        if BARE in samples:
            beside = paired(recording, added(samples[BARE], plain))
            goal = f"{name}: recording adds at most {RECORDING:.0f} times what a bare callback adds"
            findings.goals.append(Goal(goal, str(beside), beside.median <= RECORDING))
        goal = f"{name}: replaying takes less than the same forward from Python"
        findings.goals.append(Goal(goal, str(replay), replay.median < REPLAYING))
        bare = median(samples[BARE], "cpu") - median(plain, "cpu") if beside else 0.0
        table.rows.append(
            [
                name,
                str(ops),
                f"{nanoseconds * median(plain, 'cpu'):.0f}",
                f"{nanoseconds * bare:.0f}" if beside else "-",
                f"{nanoseconds * sorted(recording)[len(recording) // 2]:.0f}",
                str(beside) if beside else "-",
                str(replay),
            ]
        )
        findings.figures.append(
            {
                "forward": name,
                "ops": ops,
                "recording over bare": beside,
                "replay over plain": replay,
                "samples": samples,
            }
        )
        save(findings)
    return findings
