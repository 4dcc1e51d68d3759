"""The keywords of Trainer, for those that pass them on."""

from typing import Any, Literal

from .callbacks import Callback
from .virtual_batch import VirtualBatchOptions


class TrainerOptions(VirtualBatchOptions, total=False):
    """The keywords of Trainer, for those that pass them on."""

    targets: str | None
    schedule: Any
    schedule_by: Literal["epoch", "step"]
    clip_norm: float | None
    callbacks: Callback | list[Callback] | tuple[Callback, ...] | None
    batches_per_epoch: int | None
