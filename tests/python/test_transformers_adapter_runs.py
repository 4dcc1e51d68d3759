"""`infinitybatch.transformers.Trainer` in runs as people have them: half precision, skipped steps,
resumed in the middle, worker processes, other Trainers below the mixin; and what it refuses."""

import copy
import math
import shutil

import infinitybatch as ib
import pytest
import torch
from support import Log

pytest.importorskip("transformers")
from hf_support import (
    NATIVE,
    PAD,
    PIECES,
    SIZES,
    VOCABULARY,
    TokenTagger,
    collate,
    farthest,
    language_model,
    losses_of,
    pair,
    settings,
    texts,
    token_loss,
    trainer,
    transformers,
    untouched,
)
from infinitybatch.transformers import Trainer, TrainerMixin


def test_bf16_is_as_near_to_fp32_as_native(tmp_path):
    model = lambda: language_model().float()  # noqa: E731
    exact, _ = pair(tmp_path, max_steps=6)
    native, ours = pair(tmp_path, model, max_steps=6, bf16=True)
    for run in (exact, native, ours):
        run.train()
    assert farthest(ours.model, exact.model) < 2 * farthest(native.model, exact.model)
    assert losses_of(ours) == pytest.approx(losses_of(native), rel=1e-2)


def test_a_grad_scaler_skips_the_same_steps(tmp_path):
    """The first scales overflow the gradients, and are halved until they do not."""
    runs = pair(tmp_path, lambda: Steep().float(), lr_scheduler_type="constant", max_steps=12)
    for run in runs:
        run.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=3)
        run.skipped = []
        run.add_callback(_CountsSkips(run))
        run.train()
    native, ours = runs
    assert native.skipped == ours.skipped and 0 < sum(native.skipped) < 12
    assert native.accelerator.scaler.get_scale() == ours.accelerator.scaler.get_scale()
    assert farthest(ours.model, native.model) < 1e-5


class Steep(TokenTagger):
    def forward(self, input_ids, attention_mask=None, labels=None):
        outputs = super().forward(input_ids, attention_mask, labels)
        return {**outputs, "loss": 1000 * outputs["loss"]}


class _CountsSkips(transformers.TrainerCallback):
    def __init__(self, run):
        self.run = run

    def on_optimizer_step(self, *_, **__):
        self.run.skipped.append(self.run.accelerator.optimizer_step_was_skipped)


class _Average(transformers.TrainerCallback):
    """An exponential average of the weights, as people keep it."""

    def __init__(self, model):
        self.average = copy.deepcopy(model)

    @torch.no_grad()
    def on_step_end(self, args, state, control, model=None, **_):
        for mine, its in zip(self.average.parameters(), model.parameters(), strict=True):
            mine.lerp_(its, 0.1)


def test_averages_schedules_and_workers(tmp_path):
    runs = pair(tmp_path, lr_scheduler_type="cosine", warmup_steps=2, dataloader_num_workers=2)
    averages = [_Average(run.model) for run in runs]
    for run, average in zip(runs, averages, strict=True):
        run.add_callback(average)
        run.train()
    native, ours = runs
    rates = [
        [entry["learning_rate"] for entry in run.state.log_history if "loss" in entry]
        for run in runs
    ]
    assert rates[0] == rates[1]
    assert farthest(ours.model, native.model) < 1e-9
    assert farthest(averages[1].average, averages[0].average) < 1e-9


def test_resumed_in_the_middle_of_an_epoch(tmp_path):
    """Dropout included: the same bits as a run that was not interrupted."""
    model = lambda: language_model(resid_pdrop=0.1, embd_pdrop=0.1)  # noqa: E731
    options = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8}
    run = trainer(Trainer, model(), tmp_path, texts(29), PIECES, arguments=options, **SIZES)
    run.train()
    again = trainer(Trainer, model(), tmp_path, texts(29), PIECES, arguments=options, **SIZES)
    shutil.rmtree(tmp_path / "checkpoint-8")
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert again.state.global_step == 8
    assert farthest(again.model, run.model) == 0
    assert losses_of(again) == losses_of(run)


def test_a_budget_holds_in_training_and_evaluation(tmp_path):
    model = lambda: language_model(n_embd=64, n_layer=3)  # noqa: E731
    need = sum(p.numel() * 8 for p in model().parameters())
    given = {"memory_budget": 3 * need + (2 << 20)}
    native, ours = pair(tmp_path, model, texts(60), given)
    for run, batches in ((native, 32), (ours, 8)):
        run.args.per_device_train_batch_size = run._train_batch_size = batches
        run.args.max_steps = 3
        run.train()
    report = ours.last_report
    assert report.peak_bytes <= report.memory_budget == given["memory_budget"]
    assert max(report.micro_batch_sizes) < 28
    assert farthest(ours.model, native.model) < 1e-12
    native.args.per_device_eval_batch_size = ours.args.per_device_eval_batch_size = 60
    with ib.memory.limit(given["memory_budget"]):
        found = ours.evaluate(texts(60))["eval_loss"]
    assert found == pytest.approx(native.evaluate(texts(60))["eval_loss"], rel=1e-6)


def test_dropout_of_the_whole_batch(tmp_path):
    model = lambda: language_model(resid_pdrop=0.1, embd_pdrop=0.1)  # noqa: E731
    native, ours = pair(tmp_path, model, ours={**SIZES, "match_native_rng": True}, max_steps=6)
    for run in (native, ours):
        torch.manual_seed(0)
        run.train()
    assert farthest(ours.model, native.model) < 1e-12


def test_checkpointed_activations(tmp_path):
    native, ours = pair(tmp_path, max_steps=6, gradient_checkpointing=True)
    native.train(), ours.train()
    assert farthest(ours.model, native.model) < 1e-12


@pytest.mark.parametrize("loss", [None, "a function of outputs"])
def test_evaluation_goes_in_micro_batches(loss, tmp_path):
    more = {} if loss is None else {"compute_loss_func": token_loss}
    run = trainer(Trainer, language_model(), tmp_path, texts(29), PIECES, **SIZES, **more)
    run.args.per_device_eval_batch_size = 13
    rows = Log()
    run.model.transformer.register_forward_pre_hook(
        lambda _, args, kwargs: rows.append(len(kwargs.get("input_ids", args[0] if args else []))),
        with_kwargs=True,
    )
    run.evaluate(), run.predict(run.eval_dataset)
    assert {5, 3} <= set(rows) and rows.count(5) >= 4  # beside those that rows are looked at in


def test_a_trainer_below_the_mixin_that_generates(tmp_path):
    class Mine(TrainerMixin, transformers.Seq2SeqTrainer):
        pass

    def model():
        torch.manual_seed(0)
        config = transformers.T5Config(
            vocab_size=VOCABULARY, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2,
            dropout_rate=0, pad_token_id=PAD, decoder_start_token_id=PAD,
        )  # fmt: skip
        return transformers.T5ForConditionalGeneration(config).double()

    runs = []
    for kind, pieces, more in (
        (transformers.Seq2SeqTrainer, NATIVE, {}),
        (Mine, PIECES, SIZES),
    ):
        made = model()
        given = vars(settings(tmp_path, **pieces)).keys()
        assert "predict_with_generate" not in given
        arguments = transformers.Seq2SeqTrainingArguments(
            output_dir=str(tmp_path), predict_with_generate=True, generation_max_length=6,
            max_steps=4, learning_rate=0.05, optim="sgd", report_to=[], save_strategy="no",
            disable_tqdm=True, use_cpu=True, **pieces,
        )  # fmt: skip
        tokenizer = type("Tokenizer", (), {"pad_token_id": PAD, "padding_side": "right"})()
        run = kind(
            made,
            arguments,
            train_dataset=texts(29),
            eval_dataset=texts(7),
            data_collator=collate,
            **more,
        )
        run.processing_class = tokenizer
        run.train()
        runs.append((made, run.predict(texts(7))))
    (native, wanted), (ours, found) = runs
    assert farthest(ours, native) < 1e-12
    assert (found.predictions == wanted.predictions).all()
    assert found.metrics["test_loss"] == pytest.approx(wanted.metrics["test_loss"], rel=1e-6)


def test_a_step_that_fails_is_not_begun(tmp_path):
    """And the next run starts with a window of its own."""
    _, ours = pair(tmp_path)
    native, _ = pair(tmp_path)
    weights, calls = copy.deepcopy(ours.model.state_dict()), []

    def fails(*_):
        calls.append(0)
        if len(calls) == 7:
            raise KeyboardInterrupt

    handle = ours.model.lm_head.register_forward_hook(fails)
    with pytest.raises(KeyboardInterrupt):
        ours.train()
    handle.remove()
    assert untouched(ours, weights)
    native.train(), ours.train()
    assert farthest(ours.model, native.model) < 1e-9


def test_a_window_without_labels_in_a_micro_batch(tmp_path):
    """A mean over no label is NaN; its share of the whole is nothing."""
    data = texts(29)
    for row in data[:20]:
        row["labels"] = torch.full_like(row["labels"], -100)
    native, ours = pair(tmp_path, TokenTagger, data, {"micro_batch_size": 2}, max_steps=2)
    for run in (native, ours):
        run.get_train_dataloader = lambda run=run: torch.utils.data.DataLoader(
            data, run.args.per_device_train_batch_size, collate_fn=collate
        )
    # The first 12 have no label at all, the second 12 four.
    data[:12] = data[12:24]
    native.train(), ours.train()
    assert math.isfinite(losses_of(ours)[0])
    assert farthest(ours.model, native.model) < 1e-12
