"""Gradient caching: GradCache, and sentence-transformers beside its plain loss."""

import os
import sys
import tempfile
from typing import Any

import torch
from torch import nn

from .cases import OF_PAIRS, SEED, SIZE, Case, Pairs
from .row import OneStep, Row, Step

GRAD_CACHE = "https://github.com/luyug/GradCache"
LOSSES = "https://sbert.net/docs/package_reference/sentence_transformer/losses.html"


def grad_cache(case: Case, model: nn.Module) -> None:
    """As its README: representations of all chunks, one loss of them, chunks again."""
    import gradcache

    # The package on PyPI is called gradcache and imports itself as grad_cache.
    sys.modules.setdefault("grad_cache", gradcache)
    from gradcache.grad_cache import GradCache

    optimizer = OneStep(model)
    if isinstance(model, Pairs):

        def of_pairs(anchors: torch.Tensor, positives: torch.Tensor) -> torch.Tensor:
            return case.loss(torch.stack([anchors, positives], 1), case.targets)

        encoders = [model.encoder, model.encoder]
        GradCache(models=encoders, chunk_sizes=SIZE, loss_fn=of_pairs)(*case.inputs.unbind(1))
    else:

        def of_labels(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return case.loss(outputs, labels)

        cache = GradCache(models=[model], chunk_sizes=SIZE, loss_fn=of_labels)
        cache(case.inputs, labels=case.targets)
    optimizer.step()


def sentence_transformers(loss: str, batch: int | None, **options: int) -> Step:
    """SentenceTransformerTrainer with a loss of in-batch negatives.

    Args:
        batch: the loader's batch size, accumulated; None: the whole batch.
        options: the loss's own.
    """

    def step(case: Case, model: nn.Module) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        import transformers
        from datasets import Dataset
        from sentence_transformers import (
            SentenceTransformer,
            SentenceTransformerTrainer,
            SentenceTransformerTrainingArguments,
        )
        from sentence_transformers.base.modules import InputModule
        from sentence_transformers.base.sampler import DefaultBatchSampler
        from sentence_transformers.sentence_transformer import losses

        transformers.logging.set_verbosity_error()
        assert isinstance(model, Pairs)
        rows = case.inputs.flatten(0, 1)

        class Encoder(InputModule):
            """Texts are numbers of rows."""

            def __init__(self) -> None:
                super().__init__()
                self.encoder = model.encoder

            def preprocess(self, inputs: list[str], **_: Any) -> dict[str, torch.Tensor]:
                return {"input_values": rows[[int(text) for text in inputs]]}

            def forward(self, features: dict[str, Any], **_: Any) -> dict[str, Any]:
                return features | {"sentence_embedding": self.encoder(features["input_values"])}

            def save(self, *_: Any, **__: Any) -> None:
                raise NotImplementedError(
                    "abstract in sentence-transformers; nothing is saved here"
                )

        def in_order(dataset: Dataset, **sampling: Any) -> DefaultBatchSampler:
            return DefaultBatchSampler(torch.utils.data.SequentialSampler(dataset), **sampling)

        count = len(case.inputs)
        texts = {
            side: [str(2 * row + place) for row in range(count)]
            for place, side in enumerate(("anchor", "positive"))
        }
        encoder = SentenceTransformer(modules=[Encoder()], device="cpu")
        with tempfile.TemporaryDirectory() as folder:
            arguments = SentenceTransformerTrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=batch or count,
                gradient_accumulation_steps=case.steps if batch else 1,
                batch_sampler=in_order,
                max_steps=1,
                max_grad_norm=0,  # its default clips to 1
                lr_scheduler_type="constant",
                use_cpu=True,
                save_strategy="no",
                logging_strategy="no",
                report_to=[],
                disable_tqdm=True,
            )
            SentenceTransformerTrainer(
                model=encoder,
                args=arguments,
                train_dataset=Dataset.from_dict(texts),
                loss=getattr(losses, loss)(encoder, **options),
                optimizers=(OneStep(model), None),
                callbacks=[seeder()],
            ).train()

    return step


def seeder() -> Any:
    """Sets the seed in front of a step: the cached loss keeps the random state that it finds there."""
    import transformers

    class Seeder(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            torch.manual_seed(SEED)

    return Seeder()


def of_pairs(setting: str, link: str, step: Step, by_side: bool) -> Row:
    return Row(
        "sentence-transformers",
        setting,
        f"{LOSSES}#{link}",
        step,
        ("sentence-transformers", "transformers"),
        cases=OF_PAIRS,
        not_for={
            "equal parts": "its losses are of pairs: see contrastive",
            "ignored labels": "its losses are of pairs",
        },
        by_side=by_side,
        seeds=False,
    )


PLAIN, CACHED = "MultipleNegativesRankingLoss", "CachedMultipleNegativesRankingLoss"
ROWS = [
    Row("GradCache", "`chunk_sizes`", GRAD_CACHE, grad_cache, ("gradcache",), seeds=False),
    of_pairs(
        f"`{PLAIN}`, `gradient_accumulation_steps=k`",
        PLAIN.lower(),
        sentence_transformers(PLAIN, SIZE),
        by_side=False,
    ),
    of_pairs(
        f"`{CACHED}`, `mini_batch_size`",
        CACHED.lower(),
        sentence_transformers(CACHED, None, mini_batch_size=SIZE),
        by_side=True,
    ),
]
