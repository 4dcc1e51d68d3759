"""Gradient accumulation of others around a wrapped module."""

import sys
import warnings

from .errors import AccumulationNotice

DIFFERS = (
    "divides the gradient of each batch by that number: another one than the whole batch's where "
    "batches or counts of labels differ, in the last and shorter window, and where samples are "
    "combined (BatchNorm, contrastive losses)."
)


def tell_of_accelerate(stacklevel: int) -> bool:
    """Warns (IB109) where accelerate accumulates gradients; returns whether it does."""
    accelerate = sys.modules.get("accelerate.state")
    steps = accelerate.GradientState().num_steps if accelerate else 1
    if steps <= 1:
        return False
    warnings.warn(
        f"IB109: Accelerator(gradient_accumulation_steps={steps}) {DIFFERS} Load the {steps} batches "
        f"as one and leave gradient_accumulation_steps at 1: memory_budget holds their peak",
        AccumulationNotice,
        stacklevel=stacklevel,
    )
    return True
