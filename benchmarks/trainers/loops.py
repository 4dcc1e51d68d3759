"""accelerate and Lightning."""

import logging
import warnings

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from .cases import IGNORED, SIZE, Case
from .row import OneStep, Row

ACCELERATE = "https://huggingface.co/docs/accelerate/usage_guides/gradient_accumulation"
LIGHTNING = "https://lightning.ai/docs/pytorch/stable/advanced/training_tricks.html"


def loader(case: Case, size: int = SIZE) -> DataLoader:
    return DataLoader(TensorDataset(case.inputs, case.targets), batch_size=size)


def accelerate(case: Case, model: nn.Module) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=case.steps)
    model, optimizer, batches = accelerator.prepare(model, OneStep(model), loader(case))
    for inputs, targets in batches:
        with accelerator.accumulate(model):
            loss = case.loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def accelerate_by_items(case: Case, model: nn.Module) -> None:
    """The guide's section on samples of variable size: the window is fetched first and its items are
    counted; what accelerate divides by is multiplied in again."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=case.steps)
    model, optimizer, batches = accelerator.prepare(model, OneStep(model), loader(case))
    window = list(batches)
    items = (
        accelerator.gather(sum((targets != IGNORED).sum() for _, targets in window)).sum().item()
    )
    for inputs, targets in window:
        loss = case.loss(model(inputs), targets, reduction="sum")
        loss = (loss * case.steps * accelerator.num_processes) / items
        accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()


def lightning(case: Case, model: nn.Module) -> None:
    import pytorch_lightning

    class Module(pytorch_lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            return case.loss(self.model(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return OneStep(self.model)

    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = pytorch_lightning.Trainer(
            accelerator="cpu",
            devices=1,
            max_epochs=1,
            accumulate_grad_batches=case.steps,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Module(), loader(case))


ROWS = [
    Row("accelerate", "`accumulate(model)`", ACCELERATE, accelerate, ("accelerate",)),
    Row(
        "accelerate",
        "sum of losses × k / `num_items_in_batch`",
        ACCELERATE + "#gradient-accumulation-on-training-samples-of-variable-size",
        accelerate_by_items,
        ("accelerate",),
    ),
    Row("Lightning", "`accumulate_grad_batches=k`", LIGHTNING, lightning, ("pytorch-lightning",)),
]
