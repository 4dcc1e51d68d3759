"""`infinitybatch.transformers.Trainer` beside transformers' own with the whole batch in one piece.

INFINITYBATCH_LONG_TESTS=1 trains 200 steps of each, else a few.
"""

import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
from hf_support import (
    LONG,
    NATIVE,
    PIECES,
    TokenTagger,
    classifier,
    farthest,
    labelled,
    language_model,
    losses_of,
    texts,
    trainer,
    transformers,
)
from infinitybatch.transformers import Trainer, TrainerMixin

SINGLE, MULTI = "single_label_classification", "multi_label_classification"


def token_loss(outputs, labels, num_items_in_batch=None):
    logits, labels = outputs["logits"][:, :-1], labels[:, 1:]
    total = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="sum")
    return total / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def contrastive(outputs, labels, num_items_in_batch=None):
    """Every sample with every other."""
    z = nn.functional.normalize(outputs["logits"], dim=1)
    return nn.functional.cross_entropy(z @ z.T / 0.3, labels.roll(1) % len(z))


class OwnLoss(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = token_loss(outputs, labels, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


class OwnLossHere(TrainerMixin, OwnLoss):
    pass


def images(count):
    draws = torch.Generator().manual_seed(3)
    return [
        {
            "pixel_values": torch.randn(3, 16, 16, dtype=torch.float64, generator=draws),
            "labels": i % 3,
        }
        for i in range(count)
    ]


def resnet():
    torch.manual_seed(0)
    config = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 12], depths=[1, 1], layer_type="basic", num_labels=3
    )
    return transformers.ResNetForImageClassification(config).double()


#: Model, data, options of both trainers, options of ours.
CASES = {
    "a model's own loss": (language_model, texts, {}, {}),
    "label smoothing": (language_model, texts, {"arguments": {"label_smoothing_factor": 0.1}}, {}),
    "a loss function": (language_model, texts, {"compute_loss_func": token_loss}, {}),
    "a loss function, streamed": (
        language_model,
        texts,
        {"compute_loss_func": token_loss},
        {"stream_loss": True},
    ),
    "a coupled loss function": (
        lambda: classifier(SINGLE),
        lambda n: labelled(n, SINGLE),
        {"compute_loss_func": contrastive},
        {},
    ),
    "one label a sample": (lambda: classifier(SINGLE), lambda n: labelled(n, SINGLE), {}, {}),
    "a mean over samples": (lambda: classifier(MULTI), lambda n: labelled(n, MULTI), {}, {}),
    "a mean over labels": (TokenTagger, texts, {}, {}),
    "a mean of means": (lambda: TokenTagger(per_sample=True), texts, {}, {}),
    "BatchNorm": (resnet, images, {"data_collator": None}, {}),
    "AdamW": (
        language_model,
        texts,
        # A larger epsilon: Adam divides what rounding leaves of a true zero by its own size.
        {"arguments": {"optim": "adamw_torch", "adam_epsilon": 1e-4, "weight_decay": 0.1}},
        {},
    ),
}


def both(case, folder, steps=6, pieces=PIECES, sizes=None, kinds=(transformers.Trainer, Trainer)):
    make, data, options, ours = CASES[case] if isinstance(case, str) else case
    runs = []
    for kind, batches, more in zip(
        kinds, (NATIVE, pieces), ({}, {**(sizes or {"micro_batch_size": 5}), **ours}), strict=True
    ):
        arguments = {"max_steps": steps, **options.get("arguments", {})}
        given = {**options, "arguments": arguments, **more}
        if given.get("data_collator", 0) is None:
            given.pop("data_collator")
            run = trainer(kind, make(), folder, data(29), batches, **given)
            run.data_collator = transformers.default_data_collator
        else:
            run = trainer(kind, make(), folder, data(29), batches, **given)
        runs.append(run)
    return runs


@pytest.mark.parametrize("case", CASES)
def test_it_trains_and_evaluates_as_the_whole_batch(case, tmp_path):
    native, ours = both(case, tmp_path, 200 if LONG else 6)
    wanted, found = native.train(), ours.train()
    assert max(ours.last_report.micro_batch_sizes) <= 5
    # The Trainer adds up smoothed labels in fp32.
    rough = LONG or case == "label smoothing"
    assert farthest(ours.model, native.model) < (1e-9 if rough else 1e-12)
    assert found.training_loss == pytest.approx(wanted.training_loss, rel=1e-6)
    assert losses_of(ours) == pytest.approx(losses_of(native), rel=1e-6)
    assert found.global_step == wanted.global_step
    evaluated, predicted = ours.evaluate(), ours.predict(ours.eval_dataset)
    assert evaluated["eval_loss"] == pytest.approx(native.evaluate()["eval_loss"], rel=1e-6)
    theirs = native.predict(native.eval_dataset)
    torch.testing.assert_close(*(torch.as_tensor(p.predictions) for p in (predicted, theirs)))


def test_a_compute_loss_of_a_subclass(tmp_path):
    case = (language_model, texts, {}, {})
    native, ours = both(case, tmp_path, kinds=(OwnLoss, OwnLossHere))
    native.train(), ours.train()
    assert ours.last_report.micro_batch_sizes == [5] and farthest(ours.model, native.model) < 1e-12
    assert ours.evaluate()["eval_loss"] == pytest.approx(native.evaluate()["eval_loss"], rel=1e-6)


def test_the_mean_that_accumulation_breaks(tmp_path):
    """What the Trainer itself makes of four batches: the mean of their means."""
    native, accumulated = both(
        "a mean over labels", tmp_path, kinds=(transformers.Trainer,) * 2, sizes={"callbacks": None}
    )
    native.train(), accumulated.train()
    assert farthest(accumulated.model, native.model) > 1e-4
