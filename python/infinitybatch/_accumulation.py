"""Gradient accumulation of others around a wrapped module."""

import sys
import warnings
from collections.abc import Mapping
from typing import Any

from .errors import AccumulationNotice

DIFFERS = (
    "divides the gradient of each batch by that number: another one than the whole batch's where "
    "batches or counts of labels differ, in the last and shorter window, and where samples are "
    "combined (BatchNorm, contrastive losses)."
)


def tell_of_accumulation(arguments: Mapping[str, Any], stacklevel: int) -> bool:
    """Warns (IB109) where accelerate, or a Trainer of Hugging Face, accumulates gradients; returns
    whether it does.

    Args:
        arguments: what forward is called with, by name.
    """
    accelerate = sys.modules.get("accelerate.state")
    if accelerate is None:
        return False
    state = accelerate.GradientState()
    if state.num_steps > 1:
        steps = state.num_steps
        text = (
            f"Accelerator(gradient_accumulation_steps={steps}) {DIFFERS} Load the {steps} batches "
            f"as one and leave gradient_accumulation_steps at 1: memory_budget holds their peak"
        )
    elif state.sync_gradients or _is_summed(arguments):
        return False
    else:  # transformers.Trainer counts for itself
        text = (
            "the training loop accumulates gradients of several batches: another gradient than the "
            "whole batch's unless the loss is a sum divided by num_items_in_batch. Set "
            "gradient_accumulation_steps=1 and per_device_train_batch_size to the whole batch, or "
            "take infinitybatch.transformers.Trainer, whose logical batch is all of them"
        )
    warnings.warn(f"IB109: {text}", AccumulationNotice, stacklevel=stacklevel)
    return True


def _is_summed(arguments: Mapping[str, Any]) -> bool:
    """Whether a model of transformers is asked for its own loss as a share of several batches'."""
    wanted = ("labels", "num_items_in_batch")
    return all(arguments.get(name) is not None for name in wanted)
