"""Which module gives a sample another output in its micro-batch than in the whole batch."""

from typing import Any

import torch
from torch import Tensor, nn

from .. import _tree
from .experiment import Experiment, Micro


def first_mixing(
    experiment: Experiment, whole: Micro, pieces: list[Micro], quiet: bool, tolerance: float
) -> tuple[str, nn.Module] | None:
    """The first module, in the order of calls, whose rows differ; None if none does."""
    at_once = _rows(experiment, whole, quiet)
    apart = [_rows(experiment, piece, quiet) for piece in pieces]
    modules = dict(experiment.native.named_modules())
    for key, wanted in at_once.items():
        if not all(key in one for one in apart):
            continue
        found = torch.cat([one[key] for one in apart])
        if found.shape != wanted.shape:
            continue  # no row for each sample
        size = max(float(wanted.abs().max()), 1e-300) if wanted.numel() else 1.0
        if float((found - wanted).abs().max()) > 100 * tolerance * size:
            return key[0] or type(experiment.native).__name__, modules[key[0]]
    return None


def _rows(experiment: Experiment, micro: Micro, quiet: bool) -> dict[tuple[str, int, int], Tensor]:
    """A number for each row of each module's outputs: by (name, call, leaf)."""
    seen: dict[tuple[str, int, int], Tensor] = {}
    counts: dict[str, int] = {}

    def note(name: str, outputs: Any) -> None:
        count = counts[name] = counts.get(name, -1) + 1
        for place, leaf in enumerate(_tree.flatten(outputs)[0]):
            if isinstance(leaf, Tensor) and leaf.ndim and leaf.is_floating_point():
                flat = leaf.detach().double().reshape(len(leaf), -1)
                # No sum, which is the same for all rows after a LayerNorm.
                by = torch.arange(1, flat.shape[1] + 1, device=flat.device).double().cos()
                seen[name, count, place] = (flat * by).sum(1)

    handles = [
        module.register_forward_hook(lambda _, __, outputs, n=name: note(n, outputs))
        for name, module in experiment.native.named_modules()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    try:
        experiment.values(micro, quiet)
    finally:
        for handle in handles:
            handle.remove()
    return seen
