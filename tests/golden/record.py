"""What every strategy does, as text: the net under changes of the engine.

    python tests/golden/record.py           prints what this tree does, as JSON
    python tests/golden/record.py --whole   with all that ran, to compare two trees
    python tests/golden/record.py --write   makes it what tests compare with
    python tests/golden/record.py --sample  every third case, which is what a quick run compares

Run in a process of its own: kernels are those of any machine, times are assumed.
"""

import os

os.environ.update(ATEN_CPU_CAPABILITY="default", MKL_CBWR="COMPATIBLE", OMP_NUM_THREADS="1")

import gc
import hashlib
import itertools
import json
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import infinitybatch as ib
import torch
from torch import nn

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "python"))
from support import Calls, Log  # noqa: E402
from wrap_support import Square  # noqa: E402

FILE = HERE / "golden.json"
STEPS = 3
HOST = {"host_budget": "64MiB", "disk": False}


def layers(*between: Callable[[], nn.Module], width: int = 32, depth: int = 3) -> nn.Sequential:
    each: list[nn.Module] = []
    for _ in range(depth):
        each += [nn.Linear(width, width), *(make() for make in between), nn.ReLU()]
    return nn.Sequential(*each, nn.Linear(width, 6))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "plain": (layers, (26, 32)),
    "batch norm": (lambda: layers(lambda: nn.BatchNorm1d(32)), (26, 32)),
    "dropout": (lambda: layers(lambda: nn.Dropout(0.3)), (26, 32)),
    "opaque": (lambda: layers(lambda: Calls(lambda self, x: Square.apply(x))), (26, 32)),
    "deep": (lambda: layers(width=48, depth=24), (2, 64, 48)),
    "batch norms": (lambda: layers(lambda: nn.BatchNorm1d(16), depth=9), (26, 16, 32)),
}


def separable(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(outputs, targets)


def coupled(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    centred = (outputs - targets).flatten(1)
    return (centred - centred.mean(0)).pow(2).sum(1).pow(2).mean()


LOSSES = {"separable": separable, "coupled": coupled}
#: Options, and the budget as a share of what native takes beside parameters and batch; None without.
WAYS: dict[str, tuple[dict[str, Any], float | None]] = {
    "size": ({"micro_batch_size": 4}, None),
    "size, static graph": ({"micro_batch_size": 4, "static_graph": True}, None),
    "size, native numbers": ({"micro_batch_size": 4, "match_native_rng": True}, None),
    "size, kept graphs": ({"micro_batch_size": 4, "retained_micro_batches": 2}, None),
    "size, offload": ({"micro_batch_size": 4, "offload": ib.Offload("always", **HOST)}, None),
    "budget": ({"offload": "never"}, 0.7),
    "budget, offload": ({"offload": ib.Offload("always", **HOST)}, 0.7),
    "budget, recompute": ({"offload": "never"}, 0.4),
    "segments": ({"micro_batch_size": 1, "checkpoint_segments": 3}, None),
}


LONGEST = 40
QUIET = ("load", "free", "loss", "hand out")  # say nothing that others do not


def shown(lines: list[str]) -> Any:
    """What ran; of what is long the beginning, its length and a hash, as that is told by a diff of
    two trees' own output."""
    runs = runs_of([line for line in lines if not line.startswith(QUIET)])
    if len(runs) <= LONGEST or "--whole" in sys.argv:
        return runs
    digest = hashlib.sha256("\n".join(runs).encode()).hexdigest()[:16]
    return [*runs[: LONGEST // 4], f"... {len(runs)} in all, {digest}"]


def runs_of(lines: list[str]) -> list[str]:
    """Equal lines in a row as one."""
    counted = ((line, len(list(same))) for line, same in itertools.groupby(lines))
    return [line if count == 1 else f"{line} (x{count})" for line, count in counted]


def step_of(api: str, model: nn.Module, loss: str, options: dict[str, Any]) -> Callable[..., Any]:
    if api == "VirtualBatch":
        criterion = nn.MSELoss() if loss == "separable" else ib.losses.coupled(coupled)
        return ib.VirtualBatch(model, criterion, **options).backward
    wrapped = ib.wrap(model, **options)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> Any:
        LOSSES[loss](wrapped(inputs), targets).backward()
        return wrapped.last_report

    return step


def record(api: str, model: str, loss: str, way: str) -> dict[str, Any]:
    make, shape = MODELS[model]
    torch.manual_seed(0)
    net = make().double()
    inputs = torch.randn(*shape, dtype=torch.float64)
    targets = torch.randn(*shape[:-1], 6, dtype=torch.float64)
    options, share = WAYS[way]
    live = lambda: ib.memory.stats("cpu").live  # noqa: E731
    if share is not None:
        with ib.memory.peak() as scope:
            before = live()
            LOSSES[loss](net(inputs), targets).backward()
        options = {**options, "memory_budget": live() + int(share * (scope.peak - before))}
        net.zero_grad()
    forwards: list[str] = Log()
    net.register_forward_pre_hook(
        lambda _, given: forwards.append(
            f"{len(given[0])}{'' if torch.is_grad_enabled() else ' no grad'}"
        )
    )
    step, found = step_of(api, net, loss, options), []
    ib._C._keep_log(True)
    for _ in range(STEPS):
        net.zero_grad()
        forwards.clear()
        gc.collect()
        before = live()
        try:
            with ib.memory.peak() as scope:
                report = step(inputs, targets)
        except ib.Error as error:
            return {"refused": f"{type(error).__name__}: {str(error).splitlines()[0][:60]}"}
        finally:
            ran = ib._C._take_log()
        above = lambda value: None if value is None else value - before  # noqa: B023, E731
        found.append(
            {
                "strategy": report.strategy,
                "sizes": " ".join(runs_of([str(size) for size in report.micro_batch_sizes])),
                "forwards": ", ".join(shown(list(forwards))),
                "ran": shown(ran),
                "peak": above(scope.peak),
                "predicted": above(report.predicted_peak_bytes),
                "restarts": report.restarts,
            }
        )
    gradients = [parameter.grad for parameter in net.parameters()]
    bits = hashlib.sha256(b"".join(gradient.numpy().tobytes() for gradient in gradients))
    return {
        "steps": found,
        "gradients": sum(float(gradient.abs().sum()) for gradient in gradients),
        "bits": bits.hexdigest()[:16],
    }


def cases() -> list[tuple[str, str, str, str]]:
    every = itertools.product(("VirtualBatch", "wrap"), MODELS, LOSSES, WAYS)
    return [
        (api, model, loss, way)
        for api, model, loss, way in every
        if (way != "size, native numbers" or model == "dropout")
        and (way != "segments" or (model == "deep" and api == "VirtualBatch"))
        and (way != "size, kept graphs" or loss == "coupled" or api == "wrap")
        and (model != "deep" or way in ("budget", "budget, offload", "segments"))
        and ((way == "budget, recompute") == (model == "batch norms"))
        and (model != "batch norms" or api == "VirtualBatch")
    ]


def key() -> str:
    """Where bits are the same: what decides which kernels run."""
    names = [line for line in open("/proc/cpuinfo") if line.startswith("model name")]
    return f"torch {torch.__version__}, {(names or [platform.processor()])[0].strip()}"


def record_all() -> dict[str, Any]:
    torch.set_num_threads(1)
    ib._C._assume_times((5e-3, 1e-3, 1e-9))
    chosen = cases()[:: 3 if "--sample" in sys.argv else 1]
    return {"key": key(), "cases": {" | ".join(case): record(*case) for case in chosen}}


if __name__ == "__main__":
    text = json.dumps(record_all(), indent=1, sort_keys=True)
    if "--write" in sys.argv:
        FILE.write_text(text + "\n")
    else:
        print(text)
