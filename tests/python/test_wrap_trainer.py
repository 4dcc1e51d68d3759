"""Wrapped modules in the training loops of transformers and accelerate, which ask a model for its class,
its signature and its methods. Models are made of a configuration: nothing is downloaded."""

import copy
import inspect
import os
import warnings

import infinitybatch as ib
import pytest
import torch
from torch import nn
from wrap_support import close, contrastive, grads

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")
transformers.logging.set_verbosity_error()

VOCABULARY = 23


def language_model(**options):
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        resid_pdrop=0,
        embd_pdrop=0,
        attn_pdrop=0,
        **options,
    )
    return transformers.GPT2LMHeadModel(config).double()


def wrap(model):
    return ib.wrap(model, micro_batch_size=3)


def texts(count):
    """Of one length; the first labels of some are ignored, so that rows weigh differently."""
    ids = torch.randint(VOCABULARY, (count, 8), generator=torch.Generator().manual_seed(1))
    return [
        {
            "input_ids": row,
            "attention_mask": torch.ones_like(row),
            "labels": row.where(torch.arange(8) >= i % 4, -100),
        }
        for i, row in enumerate(ids)
    ]


def token_loss(outputs, labels, num_items_in_batch=None):
    logits, labels = outputs["logits"][:, :-1], labels[:, 1:]
    total = nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="sum")
    return total / ((labels != -100).sum() if num_items_in_batch is None else num_items_in_batch)


class OwnLoss(transformers.Trainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs = dict(inputs)
        labels = inputs.pop("labels")
        outputs = model(**inputs)
        loss = token_loss(outputs, labels, num_items_in_batch)
        return (loss, outputs) if return_outputs else loss


LOOPS = {
    "smoothed labels": (transformers.Trainer, {}, {"label_smoothing_factor": 0.1}),
    "its own loss": (OwnLoss, {}, {"gradient_accumulation_steps": 2}),
    "a loss function": (transformers.Trainer, {"compute_loss_func": token_loss}, {}),
}
BY_DEFAULT = (transformers.Trainer, {}, {})


def trainer(model, folder, loop=BY_DEFAULT, **more):
    kind, arguments, settings = loop
    settings = transformers.TrainingArguments(
        output_dir=str(folder),
        per_device_train_batch_size=8,
        per_device_eval_batch_size=8,
        max_steps=3,
        learning_rate=0.05,
        optim="sgd",
        lr_scheduler_type="constant",
        max_grad_norm=0.0,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        seed=0,
        **settings,
        **more,
    )
    return kind(
        model=model,
        args=settings,
        train_dataset=texts(24),
        eval_dataset=texts(13),
        **arguments,
    )


@pytest.mark.filterwarnings("ignore:IB109")  # one of them accumulates shares of one sum
@pytest.mark.parametrize("columns", [True, False])
@pytest.mark.parametrize("loop", LOOPS)
def test_trainer_trains_and_evaluates_as_natively(loop, columns, tmp_path):
    results = []
    for make in (lambda model: model, wrap):
        inner = language_model(use_cache=False)
        model = make(inner)
        run = trainer(model, tmp_path, LOOPS[loop], remove_unused_columns=columns)
        trained = run.train().training_loss
        evaluated, predicted = run.evaluate(), run.predict(texts(13))
        results.append((inner, trained, evaluated, predicted))
    assert len(model.last_report.micro_batch_sizes) > 1
    (wanted, *native), (found, *ours) = results
    close(found.state_dict(), wanted.state_dict())
    assert ours[0] == pytest.approx(native[0], rel=1e-12)
    assert ours[1].keys() == native[1].keys()
    assert ours[1]["eval_loss"] == pytest.approx(native[1]["eval_loss"], rel=1e-12)
    assert ours[2].metrics.keys() == native[2].metrics.keys()
    close(torch.as_tensor(ours[2].predictions), torch.as_tensor(native[2].predictions))


@pytest.mark.parametrize("steps", [1, 2])
def test_trainer_with_the_model_s_own_loss(steps, tmp_path):
    """A sum over the tokens that Trainer has counted; to evaluate, a mean over those of a batch."""
    results = []
    for make in (lambda model: model, wrap):
        inner = language_model(use_cache=False)
        run = trainer(make(inner), tmp_path, gradient_accumulation_steps=steps)
        run.train()
        results.append((inner.state_dict(), run.evaluate()["eval_loss"]))
    close(results[1][0], results[0][0])
    # The model computes its loss in fp32.
    assert results[1][1] == pytest.approx(results[0][1], rel=1e-6)


def test_accumulation_is_told_of_where_it_may_be_another_gradient(tmp_path):
    """A Trainer adds up what `compute_loss_func` gives for each batch, whatever that is."""

    def told(loop, steps):
        model = wrap(language_model(use_cache=False))
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always", ib.AccumulationNotice)
            trainer(model, tmp_path, loop, gradient_accumulation_steps=steps).train()
        return [str(w.message) for w in found if w.category is ib.AccumulationNotice]

    loss_function = LOOPS["a loss function"]
    (only,) = told(loss_function, 2)
    assert only.startswith("IB109: the training loop accumulates gradients of several batches")
    assert told(loss_function, 1) == []
    assert told(BY_DEFAULT, 2) == []  # a sum over the tokens that Trainer has counted


def test_what_is_saved_is_the_inner_model(tmp_path):
    inner = language_model(use_cache=False)
    assert inner.lm_head.weight is inner.transformer.wte.weight
    trainer(wrap(inner), tmp_path / "trainer").save_model(str(tmp_path / "a"))
    wrap(inner).save_pretrained(str(tmp_path / "b"))
    for folder in ("a", "b"):
        loaded = transformers.GPT2LMHeadModel.from_pretrained(
            str(tmp_path / folder), dtype=torch.float64
        )
        assert loaded.config.architectures == ["GPT2LMHeadModel"]
        close(loaded.state_dict(), inner.state_dict())
    again = type(wrap(inner)).from_pretrained(str(tmp_path / "a"), dtype=torch.float64)
    assert type(again) is transformers.GPT2LMHeadModel


def test_it_is_a_model_of_its_family():
    inner = language_model()
    model = wrap(inner)
    assert isinstance(model, (transformers.PreTrainedModel, transformers.GPT2LMHeadModel))
    assert model.__class__.__name__ == "GPT2LMHeadModel"
    assert inspect.signature(model.forward) == inspect.signature(inner.forward)
    assert transformers.utils.generic.find_labels(type(model)) == ["labels"]
    assert model.config is inner.config and model.device == inner.device
    model.gradient_checkpointing_enable()
    assert inner.is_gradient_checkpointing
    assert model.get_input_embeddings() is inner.transformer.wte
    model.resize_token_embeddings(30)
    assert inner.lm_head.weight.shape[0] == 30


@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate_prepares_it(precision):
    results = []
    for make in (lambda model: model, wrap):
        torch.manual_seed(0)
        inner = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
        model = make(inner)
        machine = accelerate.Accelerator(cpu=True, mixed_precision=precision)
        step = torch.optim.SGD(model.parameters(), lr=0.1)
        prepared, step = machine.prepare(model, step)
        x = torch.randn(13, 6, generator=torch.Generator().manual_seed(2))
        for _ in range(2):
            step.zero_grad()
            output = prepared(x)
            machine.backward(contrastive(output))
            step.step()
        assert output.dtype == torch.float32
        results.append((output, copy.deepcopy(grads(inner))))
        back = machine.unwrap_model(prepared, keep_fp32_wrapper=False)
        assert back is model and back(x).shape == (13, 5)
        accelerate.state.AcceleratorState._reset_state(True)
    assert len(model.last_report.micro_batch_sizes) == 5
    close(results[1], results[0], 1e-5 if precision == "no" else 5e-2)


def test_a_cache_among_the_outputs_is_left_out():
    inner = language_model()
    ids = torch.stack([row["input_ids"] for row in texts(7)])
    wanted = inner(ids, use_cache=False)
    model = wrap(inner)
    with pytest.warns(ib.DroppedCacheNotice, match=r"IB104: outputs\['past_key_values'\]") as told:
        found = model(ids)
    assert len(told) == 1 and told[0].filename == __file__
    assert type(found) is type(wanted) and list(found) == list(wanted)
    close(found.logits, wanted.logits)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ib.DroppedCacheNotice)
        close(model(ids).logits, wanted.logits)
        logits, cache = model(ids, return_dict=False)
    close(logits, wanted.logits)
    assert cache is None
    parameters = list(inner.parameters())
    close(
        torch.autograd.grad(contrastive(model(ids).logits.flatten(1)), parameters),
        torch.autograd.grad(contrastive(wanted.logits.flatten(1)), parameters),
    )


def test_a_cache_among_the_inputs():
    """Each micro-batch would write its keys behind those of the one before."""
    inner = language_model()
    model = wrap(inner)
    ids = torch.stack([row["input_ids"] for row in texts(6)])
    cache = transformers.DynamicCache(config=inner.config)
    with pytest.raises(ib.Unsupported, match="use_cache=False"):
        model(ids, past_key_values=cache)
    with torch.no_grad():
        found = model(ids, past_key_values=cache)
        close(found.logits, inner(ids).logits)
        assert found.past_key_values is cache and cache.get_seq_length() == 8


@pytest.mark.parametrize("use_cache", [True, False])
def test_it_generates(use_cache):
    inner = language_model().eval()
    ids = torch.stack([row["input_ids"] for row in texts(5)])[:, :3]
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "use_cache": use_cache}
    model = wrap(inner)
    assert torch.equal(model.generate(ids, **options), inner.generate(ids, **options))
    assert (model.last_report is None) == use_cache


@pytest.mark.parametrize("settings", [{}, {"bf16": True}])
def test_its_signature_stays_through_a_trainer(settings, tmp_path):
    """accelerate sets another forward on the model; the Trainer chooses columns by its arguments."""
    inner = language_model(use_cache=False)
    wanted = inspect.signature(inner.forward)
    model = wrap(inner)
    run = trainer(model, tmp_path, LOOPS["a loss function"], **settings)
    run.train()
    assert inspect.signature(model.forward) == wanted
    assert inspect.signature(copy.deepcopy(model).forward) == wanted
    assert list(inspect.signature(type(model).forward).parameters)[0] == "self"
    assert run._signature_columns[: len(wanted.parameters)] == list(wanted.parameters)
