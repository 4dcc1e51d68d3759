"""Tiny Hugging Face models, made of configurations, and Trainers over them that differ in one thing."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

os.environ["HF_HUB_OFFLINE"] = "1"
import transformers  # noqa: E402
from infinitybatch.transformers import Trainer  # noqa: E402

transformers.logging.set_verbosity_error()

LONG = os.environ.get("INFINITYBATCH_LONG_TESTS", "0") != "0"
STEPS = 200 if LONG else 6
SIZES = {"micro_batch_size": 5}
VOCABULARY, PAD = 23, 0
QUIET = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}
BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 24,
    "max_position_embeddings": 16,
    "hidden_dropout_prob": 0,
    "attention_probs_dropout_prob": 0,
}


def language_model(**more: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_head=2, pad_token_id=PAD, use_cache=False,
        **{"n_embd": 16, "n_layer": 1, **QUIET, **more},
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config).double()


def classifier(problem: str) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.BertConfig(**BERT, num_labels=3, problem_type=problem, pad_token_id=PAD)
    return transformers.BertForSequenceClassification(config).double()


class TokenTagger(nn.Module):
    """Anybody's own model: a mean over the labels that count, and no `num_items_in_batch`."""

    def __init__(self, per_sample: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, 8)
        self.head = nn.Linear(8, VOCABULARY)
        self.config = transformers.PretrainedConfig(pad_token_id=PAD)
        self.per_sample = per_sample
        self.double()

    def forward(self, input_ids: Any, attention_mask: Any = None, labels: Any = None) -> Any:
        logits = self.head(self.embed(input_ids).tanh())
        if labels is None:
            return {"logits": logits}
        losses = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        counts = (labels != -100).sum(1)
        per_sample = self.per_sample
        loss = (losses.sum(1) / counts).mean() if per_sample else losses.sum() / counts.sum()
        return {"loss": loss, "logits": logits}


def texts(count: int, ragged: bool = True) -> list[dict[str, torch.Tensor]]:
    """Some first labels are ignored, so that samples weigh differently."""
    draws = torch.Generator().manual_seed(1)
    rows = []
    for i in range(count):
        length = int(torch.randint(4, 10, (), generator=draws)) if ragged else 8
        ids = torch.randint(1, VOCABULARY, (length,), generator=draws)
        rows.append({"input_ids": ids, "labels": ids.where(torch.arange(length) >= i % 3, -100)})
    return rows


def labelled(count: int, problem: str) -> list[dict[str, torch.Tensor]]:
    draws = torch.Generator().manual_seed(2)
    single = problem == "single_label_classification"
    return [
        {
            "input_ids": row["input_ids"],
            "labels": torch.randint(3, (), generator=draws)
            if single
            else torch.rand(3, dtype=torch.float64, generator=draws),
        }
        for row in texts(count)
    ]


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Padded to the longest of a batch, as data collators of transformers do it."""
    longest = max(len(row["input_ids"]) for row in rows)

    def padded(values: list[torch.Tensor], fill: int) -> torch.Tensor:
        return torch.stack(
            [nn.functional.pad(v, (0, longest - len(v)), value=fill) for v in values]
        )

    ids = [row["input_ids"] for row in rows]
    labels = [row["labels"] for row in rows]
    of_tokens = not labels[0].is_floating_point() and labels[0].dim() > 0
    return {
        "input_ids": padded(ids, PAD),
        "attention_mask": padded([torch.ones_like(x) for x in ids], 0),
        "labels": padded(labels, -100) if of_tokens else torch.stack(labels),
    }


#: One logical batch of 12: as natively in one piece, and as four batches of three.
NATIVE = {"per_device_train_batch_size": 12, "gradient_accumulation_steps": 1}
PIECES = {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 4}


def settings(folder: Path | str, **more: Any) -> Any:
    given = {
        "max_steps": 6, "learning_rate": 0.05, "optim": "sgd", "lr_scheduler_type": "linear",
        "max_grad_norm": 1.0, "per_device_eval_batch_size": 5, "report_to": [], "save_strategy": "no",
        "logging_steps": 1, "disable_tqdm": True, "use_cpu": True, "seed": 0, **more,
    }  # fmt: skip
    return transformers.TrainingArguments(output_dir=str(folder), **given)


def reversed_collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The same batch in another order: what native moves by is its own rounding."""
    return collate(rows[::-1])


def trainer(kind: Any, model: nn.Module, folder: Any, data: Any, pieces: Any, **more: Any) -> Any:
    """29 samples: the last optimizer step of an epoch has five, in two pieces."""
    arguments = more.pop("arguments", {})
    run = kind(
        model=model,
        args=settings(folder, **{**pieces, **arguments}),
        train_dataset=data,
        eval_dataset=data[:13],
        **{"data_collator": collate, **more},
    )
    run.remove_callback(transformers.PrinterCallback)
    return run


def token_loss(outputs, labels, num_items_in_batch=None):
    logits, labels = outputs["logits"][:, :-1], labels[:, 1:]
    total = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="sum")
    return total / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def pair(folder, model=language_model, data=None, ours=SIZES, **arguments):
    arguments = {"max_steps": STEPS, **arguments}
    data = texts(29) if data is None else data
    native = trainer(transformers.Trainer, model(), folder, data, NATIVE, arguments=arguments)
    return native, trainer(Trainer, model(), folder, data, PIECES, arguments=arguments, **ours)


def untouched(run, weights):
    found = run.model.state_dict()
    return all(torch.equal(found[name], value) for name, value in weights.items())


def losses_of(run: Any) -> list[float]:
    return [entry["loss"] for entry in run.state.log_history if "loss" in entry]


def farthest(found: nn.Module, wanted: nn.Module) -> float:
    """The largest distance of two models' weights: relative to the norm of each, or, where its true
    gradient is zero (the bias of keys in attention), to 1 % of the largest."""
    pairs = [
        (a.double(), b.double())
        for a, b in zip(found.state_dict().values(), wanted.state_dict().values(), strict=True)
    ]
    least = 0.01 * max(float(b.norm()) for _, b in pairs)
    return max(float((a - b).norm()) / max(float(b.norm()), least) for a, b in pairs)
