"""What the figures were taken on, how malloc was set, and whether others were at work meanwhile."""

import os
import platform
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

# Without these glibc gives large blocks back to the kernel at every free, and native training pays
# page faults for each of its large tensors anew: micro-batching would look 20 to 40 % too good.
TUNED_MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(4 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(16 << 30),
}
#: Cores used by others from which on a run is called disturbed.
BUSY = 0.1
TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def environment(malloc: str) -> dict[str, str]:
    """This process's environment with malloc "tuned" or "untuned"."""
    kept = {name: value for name, value in os.environ.items() if name not in TUNED_MALLOC}
    return kept | TUNED_MALLOC if malloc == "tuned" else kept


def status(key: str) -> int:
    """Bytes of a line of /proc/self/status."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return 1024 * int(line.split()[1])
    raise LookupError(key)


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def commit() -> str:
    """Of the code that is measured; ends in -dirty where files differ from it."""
    ask = [
        "git",
        "-C",
        str(Path(__file__).parent),
        "describe",
        "--always",
        "--abbrev=12",
        "--dirty",
    ]
    try:
        done = subprocess.run(ask, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


def describe() -> Mapping[str, object]:
    """What a reader needs to judge the figures, and nothing that names this machine."""
    import torch

    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}, {'-'.join(platform.libc_ver())}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "vector extensions": torch.backends.cpu.get_cpu_capability(),
    }


class Bystanders:
    """CPU time that went to others between construction and `share`: the figures' honesty."""

    def __init__(self) -> None:
        self._start = self._reading()

    @staticmethod
    def _reading() -> tuple[float, float] | None:
        stat = Path("/proc/stat")
        if not stat.exists():
            return None
        # user nice system idle iowait irq softirq steal; idle and iowait are nobody's work.
        fields = [int(field) for field in stat.read_text().split("\n", 1)[0].split()[1:9]]
        busy = (sum(fields) - fields[3] - fields[4]) / TICKS_PER_SECOND
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        return busy - own, time.monotonic()

    def share(self) -> float | None:
        """Cores that others (and the hypervisor) used on average; None where nobody can tell."""
        now = self._reading()
        if now is None or self._start is None or now[1] <= self._start[1]:
            return None
        return max(0.0, (now[0] - self._start[0]) / (now[1] - self._start[1]))
