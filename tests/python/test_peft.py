"""Adapters of peft under `wrap` and in Trainers: every order of wrapping gives the native gradient, or
an error."""

import warnings

import infinitybatch as ib
import pytest
import torch

pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
from hf_support import (  # noqa: E402
    LONG,
    NATIVE,
    PIECES,
    farthest,
    language_model,
    texts,
    trainer,
    transformers,
)
from infinitybatch.transformers import Trainer  # noqa: E402
from measure import assert_within  # noqa: E402

IDS = torch.stack([row["input_ids"] for row in texts(13, ragged=False)])
LORA = {"r": 2, "target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}


def lora(**more):
    return peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **{**LORA, **more})


CONFIGURATIONS = {
    "LoRA": lora,
    "DoRA": lambda: lora(use_dora=True),
    "LoRA and a whole layer": lambda: lora(modules_to_save=["lm_head"]),
    "IA3": lambda: peft.IA3Config(
        task_type="CAUSAL_LM",
        target_modules=["c_attn"],
        feedforward_modules=[],
        fan_in_fan_out=True,
    ),
    "prompt tuning": lambda: peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
    "prefix tuning": lambda: peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
}


def adapted(configuration, model=None):
    model = language_model(tie_word_embeddings=False) if model is None else model
    torch.manual_seed(7)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(model, configuration).double()


def wrapped(model):
    return ib.wrap(model, micro_batch_size=5)


def inside(configuration):
    return adapted(configuration, wrapped(language_model(tie_word_embeddings=False)))


def before(configuration):
    """Adapters that come into a module which is wrapped already."""
    inner = language_model(tie_word_embeddings=False)
    model = wrapped(inner)
    adapted(configuration, inner)
    return model


def gradients(model):
    logits = model(input_ids=IDS, attention_mask=torch.ones_like(IDS)).logits[:, -8:-1]
    torch.nn.functional.cross_entropy(logits.transpose(1, 2), IDS[:, 1:]).backward()
    return [p.grad for p in model.parameters() if p.grad is not None]


def close(found, wanted):
    assert len(found) == len(wanted) > 0
    largest = max(float(g.norm()) for g in wanted)
    for a, b in zip(found, wanted, strict=True):
        assert float((a - b).norm()) <= 1e-12 * max(float(b.norm()), 0.01 * largest)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_wrapped_around(name):
    make = CONFIGURATIONS[name]
    model = wrapped(adapted(make()))
    found = gradients(model)
    assert model.last_report.micro_batch_sizes == [5, 5, 3]
    close(found, gradients(adapted(make())))


@pytest.mark.parametrize("order", [inside, before])
@pytest.mark.parametrize("name", ["LoRA", "DoRA", "LoRA and a whole layer", "IA3"])
def test_other_orders_of_adapters_in_layers(name, order):
    make = CONFIGURATIONS[name]
    model = order(make())
    found = gradients(model)
    assert model.last_report.micro_batch_sizes == [5, 5, 3]
    close(found, gradients(adapted(make())))


def test_other_orders_of_prompts():
    """What is put before the tokens goes in around the model, so `wrap` has to be around that."""
    close(
        gradients(inside(CONFIGURATIONS["prompt tuning"]())),
        gradients(adapted(CONFIGURATIONS["prompt tuning"]())),
    )
    with pytest.raises(ib.Unsupported, match="a cache among the inputs"):
        gradients(inside(CONFIGURATIONS["prefix tuning"]()))
    for name in ("prompt tuning", "prefix tuning"):
        with pytest.raises(RuntimeError, match="does not require grad"):
            gradients(before(CONFIGURATIONS[name]()))


def test_adapters_are_switched_off_saved_and_merged(tmp_path):
    model = wrapped(adapted(lora()))
    native = adapted(lora())
    with model.disable_adapter(), native.disable_adapter(), torch.no_grad():
        assert_within({"logits": model(IDS).logits}, {"logits": native(IDS).logits})
    model.save_pretrained(str(tmp_path))
    loaded = peft.PeftModel.from_pretrained(
        language_model(tie_word_embeddings=False), str(tmp_path)
    ).double()
    merged = model.merge_and_unload()
    assert type(merged) is transformers.GPT2LMHeadModel
    with torch.no_grad():
        assert_within({"logits": loaded(IDS).logits}, {"logits": native(IDS).logits})
        assert_within({"logits": merged(IDS).logits}, {"logits": native(IDS).logits})


@pytest.mark.parametrize("way", ["around", "adapter"])
def test_trainings(way, tmp_path):
    """`transformers.Trainer(ib.wrap(model))`, and infinitybatch's Trainer with the model as it is."""
    steps = {"max_steps": 200 if LONG else 6, "label_names": ["labels"]}
    if way == "around":
        steps["label_smoothing_factor"] = 0.1  # a loss that is computed of the outputs
    data, models = texts(29), [adapted(lora()) for _ in range(2)]
    native = trainer(transformers.Trainer, models[0], tmp_path, data, NATIVE, arguments=steps)
    if way == "around":
        given = (transformers.Trainer, wrapped(models[1]), tmp_path, data, NATIVE)
        ours = trainer(*given, arguments=steps)
    else:
        given = (Trainer, models[1], tmp_path, data, PIECES)
        ours = trainer(*given, arguments=steps, micro_batch_size=5)
    start = {name: value.clone() for name, value in models[1].state_dict().items()}
    wanted, found = native.train().training_loss, ours.train().training_loss
    assert found == pytest.approx(wanted, rel=1e-6)
    # GPT-2 computes its own loss in fp32: native moves by 1e-8 in 200 steps of samples in another order.
    assert farthest(models[1], models[0]) < (1e-7 if LONG else 1e-12)
    moved = {n for n, v in models[1].state_dict().items() if not torch.equal(v, start[n])}
    assert moved and all("lora" in name for name in moved)
    assert ours.evaluate()["eval_loss"] == pytest.approx(native.evaluate()["eval_loss"], rel=1e-6)
