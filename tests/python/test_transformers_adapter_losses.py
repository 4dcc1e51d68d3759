"""What `infinitybatch.transformers.Trainer` takes for one batch and for a sum or mean of it, and what it
refuses by a typed error instead."""

import copy
from types import SimpleNamespace

import infinitybatch as ib
import pytest
import torch
from torch import nn

pytest.importorskip("transformers")
from hf_support import (
    NATIVE,
    PAD,
    PIECES,
    SIZES,
    STEPS,
    VOCABULARY,
    TokenTagger,
    farthest,
    language_model,
    pair,
    texts,
    trainer,
    transformers,
    untouched,
)
from infinitybatch.transformers import Trainer, TrainerMixin


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


def test_a_model_whose_own_loss_compares_samples(tmp_path):
    _, ours = pair(tmp_path, Contrasts)
    weights = copy.deepcopy(ours.model.state_dict())
    with pytest.raises(ib.Unsupported, match=r"Contrasts gives a loss of .* compute_loss_func="):
        ours.train()
    assert untouched(ours, weights)
    assert all(parameter.grad is None for parameter in ours.model.parameters())


WEIGHTS = torch.linspace(0.2, 2, VOCABULARY, dtype=torch.float64)


class TwoHeads(TokenTagger):
    """Returns auxiliary logits beside its own, and by itself a loss of both, weighted by classes."""

    def __init__(self, own: bool) -> None:
        super().__init__()
        self.aux = nn.Linear(8, VOCABULARY).double()
        self.own = own

    def forward(self, input_ids, attention_mask=None, labels=None):
        h = self.embed(input_ids).tanh()
        outputs = {"logits": self.head(h), "aux_logits": self.aux(h)}
        if labels is None or not self.own:
            return outputs
        return {"loss": two_heads_loss(outputs, labels), **outputs}


def two_heads_loss(outputs, labels, num_items_in_batch=None):
    losses = [
        nn.functional.cross_entropy(outputs[name].transpose(1, 2), labels, weight=WEIGHTS)
        for name in ("logits", "aux_logits")
    ]
    return losses[0] + 0.4 * losses[1]


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("options", [SIZES, {"micro_batch_size": 12}, {"memory_budget": "256MiB"}])
def test_auxiliary_and_weighted_losses(tmp_path, options, own):
    """Of the outputs of the whole batch; the model's own where that is one micro-batch."""
    more = {} if own else {"compute_loss_func": two_heads_loss}
    arguments = {"max_steps": 4}
    data = texts(29)
    native = trainer(
        transformers.Trainer, TwoHeads(own), tmp_path, data, NATIVE, arguments=arguments, **more
    )
    ours = trainer(
        Trainer, TwoHeads(own), tmp_path, data, PIECES, arguments=arguments, **more, **options
    )
    native.train()
    if own and options == SIZES:
        weights = copy.deepcopy(ours.model.state_dict())
        with pytest.raises(ib.Unsupported, match="a micro_batch_size, or a budget, that holds"):
            ours.train()
        assert untouched(ours, weights)
        return
    ours.train()
    assert farthest(ours.model, native.model) < 1e-10
    assert abs(ours.evaluate()["eval_loss"] - native.evaluate()["eval_loss"]) < 1e-10


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


def test_a_compute_loss_of_the_model_s_own(tmp_path):
    class More(TrainerMixin, transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
            return (2 * loss, outputs) if return_outputs else 2 * loss

    class Twice(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            return 2 * super().compute_loss(model, inputs, False, num_items_in_batch)

    given = (tmp_path, texts(29))
    native = trainer(Twice, language_model(), *given, NATIVE)
    native.train()
    for more in ({}, {"stream_loss": True}):
        run = trainer(More, language_model(), *given, PIECES, **more, **SIZES)
        run.train()
        assert farthest(run.model, native.model) < 1e-12

    def smoothed(logits, labels, vocab_size, num_items_in_batch=None, **_):
        flat = logits[:, :-1].reshape(-1, vocab_size)
        return nn.functional.cross_entropy(flat, labels[:, 1:].flatten(), label_smoothing=0.1)

    model = language_model()
    model.loss_function = smoothed
    run = trainer(More, model, *given, PIECES, **SIZES)
    with pytest.raises(ib.BatchError, match="More computes its loss from .* stream_loss=True"):
        run.train()


def test_several_devices_are_refused():
    from infinitybatch._trainer_steps import _refuse

    args = SimpleNamespace(world_size=2, n_gpu=1, optim="sgd")
    run = SimpleNamespace(args=args, model=None, is_deepspeed_enabled=False, is_fsdp_enabled=False)
    with pytest.raises(ib.Unsupported, match=r"finds 2: use transformers.Trainer\(ib.wrap"):
        _refuse(run)
    args.world_size, args.n_gpu = 1, 4
    with pytest.raises(ib.Unsupported, match="finds 4: set CUDA_VISIBLE_DEVICES=0"):
        _refuse(run)


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
    native, ours = pair(tmp_path, IgnoresPadding, data, max_steps=2)
    loader = lambda size: lambda: torch.utils.data.DataLoader(  # noqa: E731
        [{**row, "labels": nn.functional.pad(row["labels"], (0, 10 - len(row["labels"])), value=PAD),
          "input_ids": nn.functional.pad(row["input_ids"], (0, 10 - len(row["input_ids"])), value=PAD),
          "attention_mask": (torch.arange(10) < len(row["labels"])).long()} for row in data],
        batch_size=size,
    )  # fmt: skip
    for run, size in ((native, 12), (ours, 3)):
        run.get_train_dataloader = loader(size)
        run.train()
        assert run.state.global_step == 2
    assert "no sum or mean over samples or labels" in str(ours._infinitybatch._no_mean)
    assert farthest(ours.model, native.model) < 1e-10


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


class WeighsByWords(Weighs):
    """By what stands in a text, of which no label tells."""

    def forward(self, input_ids, labels=None):
        logits = self.head(self.embed(input_ids).tanh().mean(1))
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        weight = 1 + 8.0 * (input_ids == 1).any(1)
        return {"loss": (losses * weight).sum() / weight.sum(), "logits": logits}


def trained(kind, folder, pieces, labels, model=Weighs, words=None, **more):
    """A training over batches of samples with such labels, in that order. The shortest and the longest
    stand last in each batch of 12, which the look at lengths takes."""
    ids = torch.randint(2, VOCABULARY, (len(labels), 6), generator=torch.Generator().manual_seed(4))
    if words is not None:
        ids[words, 2] = 1
    data = [
        {"input_ids": row, "labels": torch.tensor(y)} for row, y in zip(ids, labels, strict=True)
    ]
    arguments = {"max_steps": len(labels) // 12, "max_grad_norm": 0.0, "learning_rate": 1.0}
    run = trainer(kind, model(), folder, data, pieces, arguments=arguments, **more)
    run.get_train_dataloader = lambda: torch.utils.data.DataLoader(
        data, run.args.per_device_train_batch_size
    )
    return run


@pytest.mark.parametrize("steps", [0, 1, 2, 4])
def test_weights_of_classes_are_seen_where_a_class_shows_first(steps, tmp_path):
    """After so many batches of one class: in step 3 and 5 nobody looks for other reasons. From there on
    it is the loss of the whole batch, as `wrap` knows it."""
    labels = [0] * 12 * steps + [0] * 5 + [1] * 2 + [0] * 5
    native = trained(transformers.Trainer, tmp_path, NATIVE, labels)
    ours = trained(Trainer, tmp_path, PIECES, labels, micro_batch_size=5)
    for run in (native, ours):
        run.train()
    assert (ours._infinitybatch._no_mean is not None) and ours.state.global_step == steps + 1
    assert farthest(ours.model, native.model) < 1e-10


def test_weights_of_many_classes(tmp_path):
    """More than are looked at together, and the one that is weighed comes last."""
    labels = [*range(2, 13), 1]
    native = trained(transformers.Trainer, tmp_path, NATIVE, labels)
    ours = trained(Trainer, tmp_path, PIECES, labels, micro_batch_size=5)
    for run in (native, ours):
        run.train()
    assert ours._infinitybatch._no_mean is not None
    assert farthest(ours.model, native.model) < 1e-10


def test_weights_that_no_label_tells_of(tmp_path):
    """docs/limits.md: what is not noticed, and how far off it is."""
    labels, words = [0, 2] * 6, [5, 6]
    runs = [
        trained(kind, tmp_path, pieces, labels, WeighsByWords, words, **more)
        for kind, pieces, more in [
            (transformers.Trainer, NATIVE, {}),
            (Trainer, PIECES, {"micro_batch_size": 5}),
        ]
    ]
    start = torch.cat([p.detach().flatten() for p in WeighsByWords().parameters()])
    found = []
    for run in runs:
        run.train()
        found.append(torch.cat([p.detach().flatten() for p in run.model.parameters()]) - start)
    error = float((found[1] - found[0]).norm() / found[0].norm())
    assert 0.01 < error < 3


def test_a_loss_that_is_not_finite(tmp_path):
    """A training that diverges goes on as natively, and no loss is taken for another kind."""
    native, ours = pair(tmp_path, learning_rate=1e200, max_grad_norm=0.0)
    native.train(), ours.train()
    assert ours.state.global_step == native.state.global_step == STEPS
    found, wanted = (run.model.lm_head.weight.isnan().all() for run in (ours, native))
    assert found and wanted
