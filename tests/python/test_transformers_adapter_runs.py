"""`infinitybatch.transformers.Trainer` in runs as people have them: half precision, skipped steps,
resumed in the middle, worker processes, other Trainers below the mixin; and what it refuses."""

import copy
import math
import shutil

import infinitybatch as ib
import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
from hf_support import (
    LONG,
    NATIVE,
    PAD,
    PIECES,
    VOCABULARY,
    TokenTagger,
    collate,
    farthest,
    language_model,
    losses_of,
    settings,
    texts,
    trainer,
    transformers,
)
from infinitybatch.transformers import Trainer, TrainerMixin

STEPS = 200 if LONG else 6
SIZES = {"micro_batch_size": 5}


def pair(folder, model=language_model, data=None, ours=SIZES, **arguments):
    arguments = {"max_steps": STEPS, **arguments}
    data = texts(29) if data is None else data
    native = trainer(transformers.Trainer, model(), folder, data, NATIVE, arguments=arguments)
    return native, trainer(Trainer, model(), folder, data, PIECES, arguments=arguments, **ours)


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


@pytest.mark.parametrize("side", ["left", "right"])
def test_pieces_are_padded_as_the_tokenizer_pads(side):
    from infinitybatch._window_pieces import padded_alike

    pieces = [{"input_ids": torch.ones(2, n, dtype=torch.long)} for n in (3, 5)]
    short, long = padded_alike(pieces, 7, side)
    wanted = [7, 7, 1, 1, 1] if side == "left" else [1, 1, 1, 7, 7]
    assert short["input_ids"].tolist() == [wanted] * 2
    assert torch.equal(long["input_ids"], pieces[1]["input_ids"])


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([{"x": torch.ones(2, 3)}, {"x": torch.ones(2, 4)}], "what pads them is not known"),
        ([{"x": torch.ones(2)}, {"y": torch.ones(2)}], "must give the same entries"),
        ([{"x": "a"}, {"x": "b"}], "has no row for each sample"),
        ([{"x": torch.tensor(1)}, {"x": torch.tensor(2)}], "has no row for each sample"),
        ([{"input_ids": torch.ones(2, 3)}, {"input_ids": torch.ones(2, 4)}], "no token pads them"),
    ],
)
def test_pieces_that_are_no_batch(pieces, words):
    from infinitybatch._window_pieces import padded_alike

    with pytest.raises(ib.BatchError, match=words):
        padded_alike(pieces, None, "right")


class Contrasts(TokenTagger):
    """Computes a loss of its own that compares samples."""

    def forward(self, input_ids, attention_mask=None, labels=None):
        z = self.embed(input_ids).mean(1)
        loss = nn.functional.cross_entropy(z @ z.T, torch.arange(len(z)))
        return {"loss": loss, "logits": z}


def untouched(run, weights):
    found = run.model.state_dict()
    return all(torch.equal(found[name], value) for name, value in weights.items())


def test_a_model_whose_own_loss_compares_samples(tmp_path):
    _, ours = pair(tmp_path, Contrasts)
    weights = copy.deepcopy(ours.model.state_dict())
    with pytest.raises(ib.Unsupported, match=r"Contrasts gives a loss of .* compute_loss_func="):
        ours.train()
    assert untouched(ours, weights)
    assert all(parameter.grad is None for parameter in ours.model.parameters())


def test_an_auxiliary_loss_of_experts(tmp_path):
    def model():
        config = transformers.MixtralConfig(
            vocab_size=VOCABULARY, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
            num_attention_heads=2, num_key_value_heads=1, num_local_experts=2, pad_token_id=PAD,
            output_router_logits=True,
        )  # fmt: skip
        torch.manual_seed(0)
        return transformers.MixtralForCausalLM(config)

    _, ours = pair(tmp_path, model)
    with pytest.raises(ib.Unsupported, match="output_router_logits=False"):
        ours.train()


def test_a_loss_that_is_called_streamed_and_is_not(tmp_path):
    def loss(outputs, labels, num_items_in_batch=None):
        return outputs["logits"].mean((1, 2)).square().sum().sqrt()

    more = {"compute_loss_func": loss, "stream_loss": True, **SIZES}
    run = trainer(Trainer, language_model(), tmp_path, texts(29), PIECES, **more)
    with pytest.raises(ib.Unsupported, match="no sum or mean"):
        run.train()


def test_a_compute_loss_past_its_model(tmp_path):
    class Past(TrainerMixin, transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return self.model(**inputs).loss

    run = trainer(Past, language_model(), tmp_path, texts(29), PIECES, **SIZES)
    with pytest.raises(ib.Unsupported, match=r"Past.compute_loss does not call the model"):
        run.train()


def test_what_is_refused_before_training(tmp_path):
    def made(model=None, **more):
        model = language_model() if model is None else model
        return trainer(Trainer, model, tmp_path, texts(29), PIECES, **more)

    with pytest.raises(ib.InvalidArgument, match=r"ib.unwrap\(model\)"):
        made(ib.wrap(language_model(), micro_batch_size=3))
    with pytest.raises(ib.Unsupported, match="optim='lomo'"):
        made(arguments={"optim": "lomo"})
    with pytest.raises(ib.InvalidArgument, match="micro_batch_size is 0"):
        made(micro_batch_size=0)
    with pytest.raises(TypeError, match="keep_outputs"):
        made(keep_outputs=True)


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


class IgnoresPadding(TokenTagger):
    """A mean over the labels that are no padding, which nobody says."""

    def forward(self, input_ids, attention_mask=None, labels=None):
        logits = self.head(self.embed(input_ids).tanh())
        labels = labels.where(labels != -100, PAD)
        loss = nn.functional.cross_entropy(logits.transpose(1, 2), labels, ignore_index=PAD)
        return {"loss": loss, "logits": logits}


def test_a_mean_that_shows_in_a_later_batch(tmp_path):
    """All samples of the first batch are of one length, and any mean over them is the same."""
    data = texts(12, ragged=False) + texts(12)
    for row in data:
        row["labels"] = row["input_ids"].clone()
    _, ours = pair(tmp_path, IgnoresPadding, data)
    ours.get_train_dataloader = lambda: torch.utils.data.DataLoader(
        [{**row, "labels": nn.functional.pad(row["labels"], (0, 10 - len(row["labels"])), value=PAD),
          "input_ids": nn.functional.pad(row["input_ids"], (0, 10 - len(row["input_ids"])), value=PAD),
          "attention_mask": (torch.arange(10) < len(row["labels"])).long()} for row in data],
        batch_size=3,
    )  # fmt: skip
    with pytest.raises(ib.Unsupported, match="no sum or mean over samples or labels"):
        ours.train()
    assert ours.state.global_step == 1


def test_answers_past_the_end(tmp_path):
    from infinitybatch._model_losses import Shares

    shares = Shares(nn.Identity(), lambda *_, **__: None, False)
    rows = {"input_ids": torch.ones(2, 5), "start_positions": torch.tensor([1, 5])}
    with pytest.raises(
        ib.Unsupported, match=r"inputs\['start_positions'\] has positions past the 5"
    ):
        shares.prepare([rows], None)


class Weighs(TokenTagger):
    """A mean over samples that weighs classes, and says so to nobody."""

    def forward(self, input_ids, labels=None):
        logits = self.head(self.embed(input_ids).tanh().mean(1))
        weight = torch.ones(VOCABULARY, dtype=torch.float64)
        weight[1] = 9
        return {
            "loss": nn.functional.cross_entropy(logits, labels, weight=weight),
            "logits": logits,
        }


def gradient_of_the_second_step(kind, folder, pieces, **more):
    """Of a first batch of one class and a second one of two, in samples of one length."""
    labels = [0] * 12 + [1] * 3 + [0] * 9
    ids = torch.randint(1, VOCABULARY, (24, 6), generator=torch.Generator().manual_seed(4))
    data = [
        {"input_ids": row, "labels": torch.tensor(y)} for row, y in zip(ids, labels, strict=True)
    ]
    arguments = {"max_steps": 2, "max_grad_norm": 0.0, "learning_rate": 1.0}
    run = trainer(kind, Weighs(), folder, data, pieces, arguments=arguments, **more)
    run.get_train_dataloader = lambda: torch.utils.data.DataLoader(
        data, run.args.per_device_train_batch_size
    )
    run.train()
    return torch.cat([p.detach().flatten() for p in run.model.parameters()])


def test_weights_of_classes_are_seen_in_the_second_step(tmp_path):
    """The first batch's samples weigh the same, and the next look is in the second step."""
    with pytest.raises(ib.Unsupported, match="no sum or mean over samples or labels"):
        gradient_of_the_second_step(Trainer, tmp_path, PIECES, micro_batch_size=5)


def test_weights_of_classes_between_two_looks(tmp_path, monkeypatch):
    """docs/limits.md: what is not noticed, and how far off it is."""
    from infinitybatch import _model_losses

    matching = _model_losses.Shares._matching
    looks = []

    def first_look_alone(self, kinds, *rest):
        looks.append(0)
        return matching(self, kinds, *rest) if len(looks) == 1 else kinds

    wanted = gradient_of_the_second_step(transformers.Trainer, tmp_path, NATIVE)
    monkeypatch.setattr(_model_losses.Shares, "_matching", first_look_alone)
    found = gradient_of_the_second_step(Trainer, tmp_path, PIECES, micro_batch_size=5)
    start = torch.cat([p.detach().flatten() for p in Weighs().parameters()])
    error = float((found - wanted).norm() / (wanted - start).norm())
    assert 0.01 < error < 3
