"""Runs tiny random models of many Hugging Face families, which nobody here wrote, by every strategy.

    python tests/families/run.py [family …]        # compare with results.json
    python tests/families/run.py --write [family …]  # write it anew

Needs the package transformers; nothing is downloaded. Each family's own configuration class is made
small and the model is random, in training mode.

tape       With dropout. "replays": outputs and the gradients of all parameters have the bits of the
           recording. "opaque", with the reason: no tape can keep it, its forward is run again.
streaming  VirtualBatch with a separable loss, micro-batch by micro-batch.
wrap       ib.wrap under a loss that couples all samples.

Both of these in float64, with nothing random, beside the native whole batch, in micro-batches of
one, two and all samples and under a budget that native passes; every output that has a row for each
sample is in the loss, and texts and sounds are padded to different lengths where the family takes a
mask ("padding" says why not, else). "exact": every parameter's gradient, buffers included, within
1e-12, or ten times what native itself moves when the batch is reversed. "as native rounds in other
orders": within ten times what native moves in other orders and with its loss scaled (some families
compute norms in float32 whatever their type). "refused": a typed error, with the reason. "native
fails": the family's own code does not run in float64. "WRONG" otherwise.
"""

import inspect
import os
import pathlib
import sys
import warnings
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
warnings.simplefilter("ignore")
sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "python"))

import infinitybatch as ib  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from compare import N, beside_native  # noqa: E402
from listing import run_listed  # noqa: E402
from tape_support import gradients, same_bits  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils._pytree import tree_leaves  # noqa: E402
from transformers import CONFIG_MAPPING, AutoModel  # noqa: E402

RESULTS = pathlib.Path(__file__).parent / "results.json"
TEXT = """albert bart bert big_bird biogpt blenderbot blenderbot-small bloom camembert canine codegen
cohere convbert ctrl data2vec-text deberta deberta-v2 distilbert electra ernie falcon flaubert fnet
gemma gemma2 gemma3_text glm gpt2 gpt_neox gptj granite helium ibert jamba layoutlm lfm2 llama
longformer longt5 m2m_100 mamba marian mbart megatron-bert mistral mixtral mobilebert modernbert
mpnet mpt mt5 nystromformer olmo olmo2 olmoe openai-gpt opt pegasus persimmon phi phi3 qwen2
qwen2_moe qwen3 recurrent_gemma rembert roberta roberta-prelayernorm roformer rwkv smollm3 splinter
squeezebert stablelm starcoder2 switch_transformers t5 umt5 xglm xlm xlm-roberta xlm-roberta-xl
xlnet yoso""".split()
IMAGES = """beit bit cvt data2vec-vision deit dinov2 focalnet hiera ijepa mobilenet_v1
mobilenet_v2 mobilevit poolformer pvt pvt_v2 regnet resnet segformer swiftformer swinv2 textnet vit
vit_mae vit_msn""".split()
AUDIO = "data2vec-audio hubert sew unispeech wav2vec2 wavlm".split()

SIZES = {
    2: """num_hidden_layers n_layer n_layers num_layers encoder_layers decoder_layers
    num_key_value_heads type_vocab_size num_experts_per_tok eos_token_id sep_token_id""",
    0: "pad_token_id",
    1: "bos_token_id decoder_start_token_id",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads
    decoder_attention_heads num_local_experts num_experts rotary_dim""",
    8: "head_dim d_kv d_head state_size patch_size",
    16: "embedding_size",
    32: """hidden_size d_model n_embd dim image_size moe_intermediate_size attention_hidden_size
    embedding_dim emb_dim d_embed word_embed_proj_dim lru_width""",
    64: """intermediate_size d_ff encoder_ffn_dim decoder_ffn_dim ffn_dim vocab_size
    max_position_embeddings n_positions n_ctx n_inner hidden_dim d_inner""",
}
SMALL = {name: size for size, names in SIZES.items() for name in names.split()}
# Left alone, one group after the other, where a family does not take a size with the others.
GROUPS = [
    set(),
    {"head_dim"},
    {"head_dim", "num_key_value_heads"},
    {"head_dim", "pad_token_id", "bos_token_id", "eos_token_id"},
    {name for size in (0, 1, 4, 8, 16) for name in SIZES[size].split()},
    {name for size in (0, 1, 4, 8, 16, 32) for name in SIZES[size].split()},
]
# Sizes that fit together as they come, or cannot be set.
AS_THEY_COME = {
    "focalnet": {"patch_size"},
    "swinv2": {"patch_size", "num_hidden_layers"},
    "xlnet": {"max_position_embeddings"},
}
#: Sizes that other families do not have.
OWN_SIZES: dict[str, dict[str, Any]] = {
    "hiera": {"embed_dim": 16, "num_heads": [1, 2, 4, 8], "depths": [1, 1, 2, 1]},
}
MOST_PARAMETERS = 60_000_000


def is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def build(family: str) -> torch.nn.Module:
    kind, failure = CONFIG_MAPPING[family], None
    ours = {name: size for name, size in SMALL.items() if is_size(getattr(kind(), name, None))}
    for group in GROUPS:
        skipped = group | AS_THEY_COME.get(family, set())
        try:
            sizes = {name: size for name, size in ours.items() if name not in skipped}
            config = kind(**sizes, **OWN_SIZES.get(family, {}))
            with torch.device("meta"):
                parameters = AutoModel.from_config(config).parameters()
            if sum(p.numel() for p in parameters) > MOST_PARAMETERS:
                raise ValueError("too large")
            torch.manual_seed(0)
            return AutoModel.from_config(config).train()
        except Exception as error:  # configurations refuse with errors of every kind
            failure = error
    raise RuntimeError(f"{family} cannot be made small") from failure


#: Of the five samples, relative to the longest.
LENGTHS = (0.75, 1.0, 0.5, 1.0, 0.875)


def inputs_of(
    family: str, model: torch.nn.Module, n: int = 2, padded: bool = False
) -> dict[str, Any]:
    config, known = model.config, inspect.signature(model.forward).parameters
    if family in IMAGES:
        size = getattr(config, "image_size", 32)
        side = max(32, size if isinstance(size, int) else size[0])
        if family == "textnet":  # takes images of any size; its own are 640 pixels wide
            side = 64
        return {"pixel_values": torch.randn(n, getattr(config, "num_channels", 3), side, side)}
    if family in AUDIO:
        sounds = {"input_values": torch.randn(n, 4000)}
        if padded:
            sounds["attention_mask"] = lengths_mask(n, 4000)
            sounds["input_values"] *= sounds["attention_mask"]
        return sounds
    ids = torch.randint(3, 64, (n, 16))
    inputs: dict[str, Any] = {"input_ids": ids}
    if "attention_mask" in known:
        inputs["attention_mask"] = lengths_mask(n, 16) if padded else torch.ones_like(ids)
        ids.masked_fill_(inputs["attention_mask"] == 0, getattr(config, "pad_token_id", None) or 0)
    if getattr(config, "is_encoder_decoder", False):
        inputs["decoder_input_ids"] = ids[:, :8].clone()
    if "use_cache" in known:
        inputs["use_cache"] = False
    return inputs


def lengths_mask(n: int, longest: int) -> torch.Tensor:
    lengths = torch.tensor([int(LENGTHS[i % len(LENGTHS)] * longest) for i in range(n)])
    return (torch.arange(longest) < lengths[:, None]).long()


def on_tape(family: str) -> str:
    model = build(family)
    inputs = inputs_of(family, model)

    def forward(inputs: dict[str, Any]) -> list[torch.Tensor]:
        return [t for t in tree_leaves(dict(model(**inputs))) if isinstance(t, torch.Tensor)]

    outputs, tape = ib.tape.record(forward, (inputs,), buffers=list(model.buffers()))
    if tape.refusal is not None:
        return "refused: " + tape.refusal
    if tape.opaque is not None:
        return "opaque: " + tape.opaque
    again = tape.replay(inputs)
    parameters = [p for p in model.parameters() if p.requires_grad]
    pairs = [*zip(again, outputs, strict=True)]
    pairs += zip(gradients(again, parameters), gradients(outputs, parameters), strict=True)
    return "replays" if all(same_bits(a, b) for a, b in pairs) else "WRONG"


# Of configurations: what draws random numbers in training.
RANDOM = ("drop", "mask_time_prob", "mask_feature_prob", "apply_spec_augment", "noise")


def build_without_chance(family: str) -> nn.Module:
    model = build(family)
    for config in {
        id(m.config): m.config for m in model.modules() if hasattr(m, "config")
    }.values():
        for name, value in vars(config).items():
            if any(word in name for word in RANDOM) and isinstance(value, int | float):
                setattr(config, name, type(value)(0))
        if hasattr(config, "use_cache"):
            config.use_cache = False  # caches are no outputs of a batch
        if hasattr(config, "_experts_implementation"):
            config._experts_implementation = "eager"  # the default has no kernel for float64
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and (name == "p" or any(word in name for word in RANDOM)):
                setattr(module, name, 0.0)
    return model.double()


def inputs_without_chance(family: str, model: nn.Module, padded: bool) -> dict[str, Any]:
    torch.manual_seed(1)
    inputs = inputs_of(family, model, N, padded)
    return {k: v.double() if v.__class__ is torch.Tensor and v.is_floating_point() else v
            for k, v in inputs.items()}  # fmt: skip


def outcome(family: str) -> dict[str, str]:
    why = "" if family not in IMAGES else "images are not padded"
    if not why and "attention_mask" not in inspect.signature(build(family).forward).parameters:
        why = "it takes no mask"
    for padded in [False] if why else [True, False]:
        model = build_without_chance(family)
        beside = beside_native(model, inputs_without_chance(family, model, padded))
        if not padded or not beside["streaming"].startswith("native "):
            break
        why = beside["streaming"]
    return {
        "tape": on_tape(family),
        **beside,
        "padding": "yes" if padded else f"no: {why}",
    }


if __name__ == "__main__":
    versions = {"transformers": transformers.__version__}
    every = sorted(TEXT + IMAGES + AUDIO)
    sys.exit(run_listed(RESULTS, lambda: every, outcome, versions=versions))
