"""One table of contestants beside native: time and peak."""

from collections.abc import Mapping

from contestants import Contestant, check_agreement
from harness.clock import Sample, interleave
from harness.ratios import median, ratio_of
from harness.results import Findings, Table
from harness.settings import Settings

NATIVE = "native"


def measure_beside_native(
    findings: Findings,
    settings: Settings,
    name: str,
    contestants: Mapping[str, Contestant],
    seconds: float,
) -> tuple[dict[str, list[Sample]], dict[str, int]]:
    """Times contestants, the first of which is NATIVE, once they agree; notes a table and figures.

    Args:
        seconds: after which no further round begins.

    Returns:
        The samples of each, and its peak in bytes above what was there before.
    """
    check_agreement(contestants)  # which is a round to warm up too
    samples = interleave(contestants, settings.rounds, warm_up=0, at_most=seconds)
    peaks = {key: contestant.peak_bytes() for key, contestant in contestants.items()}
    findings.tables.append(table_of(name, samples, peaks))
    for key, taken in samples.items():
        findings.figures.append(
            {
                "workload": name,
                "contestant": key,
                "peak bytes": peaks[key],
                "CPU over native": ratio_of(taken, samples[NATIVE], "cpu"),
                "samples": taken,
            }
        )
    return samples, peaks


def table_of(name: str, samples: dict[str, list[Sample]], peaks: dict[str, int]) -> Table:
    table = Table(
        f"**{name}**, {len(samples[NATIVE])} rounds",
        ["contestant", "CPU s", "CPU ÷ native", "wall ÷ native", "peak MiB", "native's peak ÷ it"],
    )
    for key, taken in samples.items():
        table.rows.append(
            [
                key,
                f"{median(taken, 'cpu'):.3f}",
                str(ratio_of(taken, samples[NATIVE], "cpu")),
                str(ratio_of(taken, samples[NATIVE], "wall")),
                f"{peaks[key] / 2**20:.1f}",
                f"{peaks[NATIVE] / peaks[key]:.1f}",
            ]
        )
    return table
