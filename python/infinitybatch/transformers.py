"""Hugging Face's Trainer with whole optimizer batches inside a memory budget.

    from infinitybatch.transformers import Trainer

    trainer = Trainer(model, arguments, train_dataset=data, memory_budget="8GiB")
    trainer.train()

Needs transformers: `pip install infinitybatch[transformers]`. See docs/recipes/transformers.md.
"""

from typing import Any

import torch
from torch import nn

try:
    import transformers
except ImportError as error:
    raise ImportError(
        "infinitybatch.transformers needs transformers: pip install infinitybatch[transformers]"
    ) from error

from ._trainer_steps import Steps
from .virtual_batch import VirtualBatch, VirtualBatchOptions

_OPTIONS = [
    n for n in VirtualBatchOptions.__annotations__ if n not in ("grad_scaler", "keep_outputs")
]


class TrainerMixin:
    """Makes one logical batch of the batches of an optimizer step; stands before a Trainer class.

        class MyTrainer(TrainerMixin, transformers.Seq2SeqTrainer): ...

    The gradient is the one that the Trainer itself computes with gradient_accumulation_steps=1 and
    all samples in one batch. Clipping, schedules, mixed precision, logs and checkpoints stay the
    Trainer's. Evaluation runs under the same budget.

    Args:
        stream_loss: whether `compute_loss` gives a sum over samples divided by `num_items_in_batch`,
            or a mean over samples or labels, so that each micro-batch can compute its share. None:
            yes for a model's own loss and for label smoothing, no for `compute_loss_func` and a
            `compute_loss` of your own, which see the outputs of the whole batch.
        memory_budget, micro_batch_size, ...: options of `VirtualBatch`.

    Raises:
        InvalidArgument, InvalidType: options that cannot be used; a wrapped model.
        Unsupported: several processes or devices, LOMO; and when training begins, a model whose own
            loss is no sum or mean over samples.
        BatchError: batches of one step that cannot be joined.
    """

    def __init__(self, *args: Any, stream_loss: bool | None = None, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
        VirtualBatch(nn.Identity(), nn.MSELoss(), **options)  # raises for what is no option
        super().__init__(*args, **kwargs)
        self._infinitybatch = Steps(self, options, stream_loss)

    @property
    def last_report(self) -> Any:
        """What the last optimizer batch did, a StepReport or WrapReport; None before."""
        return self._infinitybatch.report

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        found = super().get_batch_samples(*args, **kwargs)  # type: ignore[misc]
        self._infinitybatch.begin(len(found[0]))
        return found

    def training_step(
        self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None, *_: Any
    ) -> torch.Tensor:
        return self._infinitybatch.step(model, inputs, num_items_in_batch)

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        with self._infinitybatch.evaluating(model, inputs) as model:
            return super().prediction_step(model, inputs, *args, **kwargs)  # type: ignore[misc]


class Trainer(TrainerMixin, transformers.Trainer):
    """`transformers.Trainer` with whole optimizer batches inside a memory budget. See TrainerMixin."""


__all__ = ["Trainer", "TrainerMixin"]
