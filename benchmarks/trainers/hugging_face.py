"""transformers' Trainer: models with their own loss, and losses given to the Trainer."""

import os
import tempfile
from typing import Any

import torch
from torch import nn

from .cases import SIZE, Case
from .row import OneStep, Row, Step

DOCUMENTATION = "https://huggingface.co/docs/transformers/en/grad_accumulation"


class Scores(nn.Module):
    """A model in transformers' form, whose loss is somebody else's."""

    def __init__(self, model: nn.Module, case: Case) -> None:
        super().__init__()
        self.model, self.case = model, case

    def forward(self, inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.model(inputs)}


class OwnLoss(Scores):
    """Its own loss is the mean over the micro-batch."""

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        outputs = self.model(inputs)
        return {"loss": self.case.loss(outputs, labels), "logits": outputs}


class OwnLossByItems(Scores):
    """Its own loss is as those of transformers' models: a sum over `num_items_in_batch`."""

    def forward(
        self, inputs: torch.Tensor, labels: torch.Tensor, **kwargs: Any
    ) -> dict[str, torch.Tensor]:
        outputs = self.model(inputs)
        items = kwargs.get("num_items_in_batch")
        return {"loss": over_items(self.case, outputs, labels, items), "logits": outputs}


def over_items(
    case: Case, outputs: torch.Tensor, labels: torch.Tensor, items: torch.Tensor | None
) -> torch.Tensor:
    if items is None:
        return case.loss(outputs, labels)
    return case.loss(outputs, labels, reduction="sum") / items


def train(case: Case, model: Scores, trainer: type | None = None, **options: Any) -> None:
    os.environ["HF_HUB_OFFLINE"] = "1"
    import transformers

    transformers.logging.set_verbosity_error()
    rows = [
        {"inputs": inputs, "labels": labels}
        for inputs, labels in zip(case.inputs, case.targets, strict=True)
    ]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=SIZE,
            gradient_accumulation_steps=case.steps,
            max_steps=1,
            max_grad_norm=0,  # its default clips to 1
            lr_scheduler_type="constant",
            train_sampling_strategy="sequential",
            remove_unused_columns=False,
            use_cpu=True,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        (trainer or transformers.Trainer)(
            model=model,
            args=arguments,
            train_dataset=rows,
            optimizers=(OneStep(model), None),
            **options,
        ).train()


def own_loss(case: Case, model: nn.Module) -> None:
    train(case, OwnLoss(model, case))


def own_loss_by_items(case: Case, model: nn.Module) -> None:
    train(case, OwnLossByItems(model, case))


def compute_loss(case: Case, model: nn.Module) -> None:
    import transformers

    class Trainer(transformers.Trainer):
        loss_is_scaled_for_ga = False  # a mean over the micro-batch, as its documentation asks

        def compute_loss(
            self, model: nn.Module, inputs: dict[str, Any], return_outputs=False, **kwargs: Any
        ) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = case.loss(outputs["logits"], labels)
            return (loss, outputs) if return_outputs else loss

    train(case, Scores(model, case), Trainer)


def compute_loss_func(case: Case, model: nn.Module) -> None:
    def loss(
        outputs: dict[str, torch.Tensor],
        labels: torch.Tensor,
        num_items_in_batch: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return over_items(case, outputs["logits"], labels, num_items_in_batch)

    train(case, Scores(model, case), compute_loss_func=loss)


def row(setting: str, step: Step) -> Row:
    return Row("Hugging Face Trainer", setting, DOCUMENTATION, step, ("transformers",))


ROWS = [
    row("model's own loss, a mean", own_loss),
    row("model's own loss over `num_items_in_batch`", own_loss_by_items),
    row("`compute_loss`, a mean", compute_loss),
    row("`compute_loss_func` over `num_items_in_batch`", compute_loss_func),
]
