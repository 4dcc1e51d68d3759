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
    SIZES,
    STEPS,
    TokenTagger,
    classifier,
    farthest,
    labelled,
    language_model,
    losses_of,
    reversed_collate,
    texts,
    token_loss,
    trainer,
    transformers,
)
from infinitybatch.transformers import Trainer, TrainerMixin
from measure import assert_within

SINGLE, MULTI = "single_label_classification", "multi_label_classification"


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
    "BatchNorm": (resnet, images, {"data_collator": transformers.default_data_collator}, {}),
    "AdamW": (TokenTagger, texts, {"arguments": {"optim": "adamw_torch", "weight_decay": 0.1}}, {}),
}


def one(kind, case, folder, pieces, steps=6, **more):
    make, data, options, _ = case
    arguments = {"max_steps": steps, **options.get("arguments", {})}
    return trainer(
        kind, make(), folder, data(29), pieces, **{**options, **more, "arguments": arguments}
    )


def both(case, folder, steps=6, kinds=(transformers.Trainer, Trainer)):
    native = one(kinds[0], case, folder, NATIVE, steps)
    return native, one(kinds[1], case, folder, PIECES, steps, **SIZES, **case[3])


def allowed(case, native, folder):
    """Models compute their own losses in fp32, whatever the model: a last bit of fp64 moves some of
    its roundings in 200 steps, and so do the samples in another order."""
    if not LONG:
        return 1e-9 if native.label_smoother else 1e-12  # the Trainer adds smoothed labels in fp32
    collator = {} if case[1] is images else {"data_collator": reversed_collate}
    moved = one(transformers.Trainer, case, folder, NATIVE, STEPS, **collator)
    moved.train()
    return max(1e-9, 10 * farthest(moved.model, native.model))


@pytest.mark.parametrize("case", CASES)
def test_it_trains_and_evaluates_as_the_whole_batch(case, tmp_path):
    case = CASES[case]
    native, ours = both(case, tmp_path, STEPS)
    wanted, found = native.train(), ours.train()
    assert max(ours.last_report.micro_batch_sizes) <= 5
    assert farthest(ours.model, native.model) < allowed(case, native, tmp_path)
    assert found.training_loss == pytest.approx(wanted.training_loss, rel=1e-6)
    assert losses_of(ours) == pytest.approx(losses_of(native), rel=1e-6)
    assert found.global_step == wanted.global_step
    evaluated, predicted = ours.evaluate(), ours.predict(ours.eval_dataset)
    assert evaluated["eval_loss"] == pytest.approx(native.evaluate()["eval_loss"], rel=1e-6)
    theirs = native.predict(native.eval_dataset)
    found, wanted = ({"logits": torch.as_tensor(p.predictions)} for p in (predicted, theirs))
    assert_within(found, wanted, least=1e-6)  # after trainings that GPT-2's loss rounds in float32


def test_a_compute_loss_of_a_subclass(tmp_path):
    native, ours = both((language_model, texts, {}, {}), tmp_path, kinds=(OwnLoss, OwnLossHere))
    native.train(), ours.train()
    assert ours.last_report.micro_batch_sizes == [5] and farthest(ours.model, native.model) < 1e-12
    assert ours.evaluate()["eval_loss"] == pytest.approx(native.evaluate()["eval_loss"], rel=1e-6)


def test_the_mean_that_accumulation_breaks(tmp_path):
    """What the Trainer itself makes of four batches: the mean of their means."""
    case = CASES["a mean over labels"]
    native = one(transformers.Trainer, case, tmp_path, NATIVE)
    accumulated = one(transformers.Trainer, case, tmp_path, PIECES)
    native.train(), accumulated.train()
    assert farthest(accumulated.model, native.model) > 1e-4
