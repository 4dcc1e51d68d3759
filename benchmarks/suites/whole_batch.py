"""What layers cost that see the whole batch: BatchNorm in training mode, in micro-batches."""

from collections.abc import Callable
from functools import partial

from contestants import Contestant, Native, Ours, check_agreement
from harness.clock import interleave
from harness.ratios import median, ratio_of
from harness.results import Findings, Goal, Table
from harness.settings import Settings
from torch.nn import functional
from workloads import Workload, for_whole_batch

TITLE = "BatchNorm in micro-batches: time and peak beside native"
EXPLANATION = (
    "Networks with BatchNorm in training mode. Accumulation runs the same micro-batches forward and "
    "backward once, with each a batch of its own for the layer: another gradient, and what no exact "
    "way can beat. Ours records each forward (F), takes all micro-batches from cut to cut (F), and "
    "resumes each segment for its backward (F + B), so that with no graph kept the bound is "
    "1.1 (3 F + B) / (F + B) times accumulation, with F / (F + B) measured in the same run. With a "
    "static graph the recordings are used again, and with all graphs retained nothing runs twice. "
    "Contestants run in turn, in a new order each round; CPU is the process's time over all threads; "
    "ratios are medians of the rounds' ratios with 95 % bootstrap intervals."
)
SLACK = 1.1
STATIC_BOUND = 1.15
SECONDS = 60  # of rounds for each workload
NATIVE, PASS, FORWARD = "native whole batch", "accumulation", "forward alone"
NONE, ALL = "infinitybatch, none retained", "infinitybatch, all retained"
STATIC = "infinitybatch, static graph, all retained"


class Forward(Contestant):
    """The forward of each micro-batch, in grad mode; its graph is dropped."""

    def __init__(self, *args: object, size: int) -> None:
        super().__init__(*args)
        self.size = size

    def backward(self) -> None:
        for part in self.inputs.split(self.size):
            self.model(part)


class Accumulated(Forward):
    """Each micro-batch a batch of its own, as gradient accumulation has it."""

    def backward(self) -> None:
        for inputs, targets in zip(
            self.inputs.split(self.size), self.targets.split(self.size), strict=True
        ):
            loss = functional.cross_entropy(self.model(inputs), targets, reduction="sum")
            (loss / len(self.targets)).backward()


def contestants_of(workload: Workload, size: int) -> dict[str, Contestant]:
    model = workload.model()
    inputs, targets = workload.tensors(workload.batch_size)
    ours = partial(Ours, model, inputs, targets, micro_batch_size=size)
    return {
        NATIVE: Native(model, inputs, targets),
        PASS: Accumulated(model, inputs, targets, size=size),
        FORWARD: Forward(model, inputs, targets, size=size),
        NONE: ours(),
        ALL: ours(retained_micro_batches=len(inputs)),
        STATIC: ours(retained_micro_batches=len(inputs), static_graph=True),
    }


def run(settings: Settings, save: Callable[[Findings], None]) -> Findings:
    findings = Findings()
    for workload, size in for_whole_batch(settings.toy):
        contestants = contestants_of(workload, size)
        check_agreement({n: c for n, c in contestants.items() if n not in (FORWARD, PASS)})
        samples = interleave(contestants, settings.rounds, warm_up=2, at_most=SECONDS)
        peaks = {name: contestant.peak_bytes() for name, contestant in contestants.items()}
        forward = median(samples[FORWARD], "cpu") / median(samples[PASS], "cpu")
        table = Table(
            f"**{workload.name}**, {workload.batch_size:,} samples in micro-batches of {size}; "
            f"F / (F + B) = {forward:.3f}",
            ["contestant", "CPU ÷ accumulation", "CPU ÷ native", "wall ÷ native", "peak MiB"],
        )
        for name, taken in samples.items():
            over_pass = ratio_of(taken, samples[PASS], "cpu")
            over_native = ratio_of(taken, samples[NATIVE], "cpu")
            table.rows.append(
                [
                    name,
                    str(over_pass),
                    str(over_native),
                    str(ratio_of(taken, samples[NATIVE], "wall")),
                    f"{peaks[name] / 2**20:.1f}",
                ]
            )
            findings.figures.append(
                {
                    "workload": workload.name,
                    "contestant": name,
                    "peak bytes": peaks[name],
                    "CPU over accumulation": over_pass,
                    "CPU over native": over_native,
                    "F/(F+B)": forward,
                    "samples": taken,
                }
            )
        findings.tables.append(table)
        bound = SLACK * (1 + 2 * forward)
        ratio = ratio_of(samples[NONE], samples[PASS], "cpu")
        promise = f"{workload.name}, none retained: CPU over accumulation at most {bound:.3f}"
        findings.goals.append(Goal(promise, str(ratio), ratio.median <= bound))
        ratio = ratio_of(samples[STATIC], samples[PASS], "cpu")
        promise = f"{workload.name}, static graph, all retained: at most {STATIC_BOUND}"
        findings.goals.append(Goal(promise, str(ratio), ratio.median <= STATIC_BOUND))
        save(findings)
    return findings
