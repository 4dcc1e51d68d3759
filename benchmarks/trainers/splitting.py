"""Trainers that are given the whole batch and split it: Composer, and Opacus' BatchMemoryManager."""

import warnings
from typing import Any

import torch
from torch import nn

from .cases import IGNORED, SIZE, Case
from .loops import loader
from .row import OneStep, Row, Step

COMPOSER = "https://docs.mosaicml.com/projects/composer/en/stable/notes/auto_microbatching.html"
COMPOSER_API = (
    "https://docs.mosaicml.com/projects/composer/en/stable/api_reference/generated/"
    "composer.Trainer.html"
)
OPACUS = "https://opacus.ai/api/batch_memory_manager.html"


def composer(by_tokens: bool) -> Step:
    """Its Trainer with a fixed size: `"auto"` needs a GPU and splits by the same rule."""

    def step(case: Case, model: nn.Module) -> None:
        from composer import DataSpec, Trainer
        from composer.models import ComposerModel

        class Model(ComposerModel):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def forward(self, batch: Any) -> torch.Tensor:
                return self.model(batch[0])

            def loss(self, outputs: torch.Tensor, batch: Any) -> torch.Tensor:
                return case.loss(outputs, batch[1])

        def count(batch: Any) -> dict[str, int]:
            return {"total": batch[1].numel(), "loss_generating": int((batch[1] != IGNORED).sum())}

        batches = loader(case, size=len(case.inputs))
        torch.set_default_dtype(torch.double)  # it adds losses up in the default type
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                Trainer(
                    model=Model(),
                    train_dataloader=DataSpec(batches, get_num_tokens_in_batch=count),
                    optimizers=OneStep(model),
                    max_duration="1ba",
                    device="cpu",
                    device_train_microbatch_size=SIZE,
                    accumulate_train_batch_on_tokens=by_tokens,
                    progress_bar=False,
                ).fit()
        finally:
            torch.set_default_dtype(torch.float)

    return step


def opacus(case: Case, model: nn.Module) -> None:
    """Without noise and with a bound that clips nothing, its gradient is meant to be the plain one."""
    from opacus import PrivacyEngine
    from opacus.utils.batch_memory_manager import BatchMemoryManager

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, optimizer, batches = PrivacyEngine().make_private(
            module=model,
            optimizer=OneStep(model),
            data_loader=loader(case, size=len(case.inputs)),
            noise_multiplier=0.0,
            max_grad_norm=1e6,
            poisson_sampling=False,
        )
        with BatchMemoryManager(
            data_loader=batches, max_physical_batch_size=SIZE, optimizer=optimizer
        ) as parts:
            for inputs, targets in parts:
                optimizer.zero_grad()
                case.loss(model(inputs), targets).backward()
                optimizer.step()


ROWS = [
    Row("Composer", "`device_train_microbatch_size`", COMPOSER, composer(False), ("mosaicml",)),
    Row(
        "Composer",
        "`accumulate_train_batch_on_tokens=True`",
        COMPOSER_API,
        composer(True),
        ("mosaicml",),
    ),
    Row(
        "Opacus",
        "`BatchMemoryManager`, no noise, no clipping",
        OPACUS,
        opacus,
        ("opacus",),
        refuses={"BatchNorm": "UnsupportedModuleError"},
    ),
]
