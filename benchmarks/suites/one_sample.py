"""What it costs when one sample's activations do not fit, beside torch.utils.checkpoint."""

from collections.abc import Callable

from contestants import Contestant, Native, Ours, check_agreement
from harness.clock import interleave
from harness.ratios import ratio_of
from harness.results import Findings, Goal, Table
from harness.settings import Settings
from torch import nn
from torch.utils.checkpoint import checkpoint
from workloads import Workload, for_one_sample

TITLE = "One sample whose activations do not fit: time and peak beside torch.utils.checkpoint"
EXPLANATION = (
    "A logical batch of one sample. torch.utils.checkpoint (not re-entrant) wraps each block, as "
    "people write it; ours takes the same network unchanged, records its forward without a graph, "
    "cuts the tape where little waits, and plays segment after segment: with the smallest number of "
    "segments from two on whose peak is not above checkpoint's, and once more with what waits in a "
    "file, copied while segments compute. Contestants run in turn, in a new order each "
    "round; CPU is the process's time over all threads; ratios are medians of the rounds' ratios "
    "with 95 % bootstrap intervals. Peaks are above what was live before the step."
)
SECONDS = 60  # of rounds for each workload
NATIVE, CHECKPOINT = "native", "torch.utils.checkpoint, each block"
SEGMENTS, OFFLOADED = (
    "infinitybatch, checkpoint_segments",
    "infinitybatch, the same, offloaded to disk",
)
MOST_SEGMENTS = 64


class Checkpointed(Native):
    """Each of the network's blocks is computed again for its backward."""

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        blocks = self.model.blocks
        self.model.blocks = nn.ModuleList(Again(block) for block in blocks)


class Again(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: object) -> object:
        return checkpoint(self.block, x, use_reentrant=False)


def steady_peak(contestant: Contestant) -> int:
    """Of the third step: the first ones look where to cut."""
    contestant.peak_bytes()
    contestant.peak_bytes()
    return contestant.peak_bytes()


def ours_within(peak: int, *args: object) -> tuple[int, Ours]:
    """As few segments as keep the peak, from two on; where none does, the lowest peak."""
    tried: list[tuple[int, int, Ours]] = []
    for segments in range(2, MOST_SEGMENTS + 1):
        ours = Ours(*args, micro_batch_size=1, checkpoint_segments=segments)
        tried.append((steady_peak(ours), segments, ours))
        if tried[-1][0] <= peak:
            return segments, ours
    _, segments, ours = min(tried, key=lambda each: each[0])
    return segments, ours


def run(settings: Settings, save: Callable[[Findings], None]) -> Findings:
    findings = Findings()
    for workload in for_one_sample(settings.toy):
        measure(workload, settings, findings)
        save(findings)
    return findings


def measure(workload: Workload, settings: Settings, findings: Findings) -> None:
    model = workload.model()
    inputs, targets = workload.tensors(workload.batch_size)
    args = (model, inputs, targets)
    wrapped = Checkpointed(*args)
    peak = steady_peak(wrapped)
    segments, ours = ours_within(peak, *args)
    contestants: dict[str, Contestant] = {
        NATIVE: Native(*args),
        CHECKPOINT: wrapped,
        f"{SEGMENTS}={segments}": ours,
        OFFLOADED: Ours(*args, micro_batch_size=1, checkpoint_segments=segments, offload="always"),
    }
    check_agreement(contestants)
    samples = interleave(contestants, settings.rounds, warm_up=3, at_most=SECONDS)
    peaks = {name: steady_peak(contestant) for name, contestant in contestants.items()}
    table = Table(
        f"**{workload.name}**, one sample of {tuple(inputs.shape[1:])}",
        ["contestant", "CPU ÷ checkpoint", "wall ÷ checkpoint", "CPU ÷ native", "peak MiB"],
    )
    for name, taken in samples.items():
        over_peer = ratio_of(taken, samples[CHECKPOINT], "cpu")
        over_native = ratio_of(taken, samples[NATIVE], "cpu")
        table.rows.append(
            [
                name,
                str(over_peer),
                str(ratio_of(taken, samples[CHECKPOINT], "wall")),
                str(over_native),
                f"{peaks[name] / 2**20:.2f}",
            ]
        )
        findings.figures.append(
            {
                "workload": workload.name,
                "contestant": name,
                "peak bytes": peaks[name],
                "CPU over checkpoint": over_peer,
                "CPU over native": over_native,
                "samples": taken,
            }
        )
        if name in (NATIVE, CHECKPOINT, OFFLOADED):
            continue
        promise = f"{workload.name}, {name}: faster than checkpoint at no more than its peak"
        kept = peaks[name] <= peak and over_peer.median < 1.0
        findings.goals.append(Goal(promise, f"{over_peer} at {peaks[name] / peak:.2f}", kept))
    findings.tables.append(table)
