"""A tiny SentenceTransformer made of a configuration and a vocabulary: nothing is downloaded."""

import copy
import functools
import os
import tempfile
from pathlib import Path
from typing import Any

import torch

os.environ["HF_HUB_OFFLINE"] = "1"
import transformers  # noqa: E402
from sentence_transformers import SentenceTransformer  # noqa: E402

try:
    from sentence_transformers.base.modules.transformer import Transformer  # noqa: E402
    from sentence_transformers.sentence_transformer import losses  # noqa: E402
    from sentence_transformers.sentence_transformer.modules import Pooling  # noqa: E402
except ImportError:  # before version 6
    from sentence_transformers import losses  # noqa: E402
    from sentence_transformers.models import Pooling, Transformer  # noqa: E402

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
WORDS = "a the cat dog sat ran on under mat tree sky red blue green big small".split()


@functools.cache
def _folder() -> str:
    folder = Path(tempfile.mkdtemp(prefix="infinitybatch-"))
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join([*marks, *WORDS]))
    tokenizer = transformers.BertTokenizerFast(str(folder / "vocab.txt"))
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(marks) + len(WORDS), hidden_size=16, num_hidden_layers=2,
        num_attention_heads=2, intermediate_size=24, max_position_embeddings=32,
        hidden_dropout_prob=0, attention_probs_dropout_prob=0,
    )  # fmt: skip
    transformers.BertModel(config).save_pretrained(folder)
    return str(folder)


@functools.cache
def _loaded() -> Any:
    words = Transformer(_folder(), max_seq_length=16)
    return SentenceTransformer(modules=[words, Pooling(16)], device="cpu").double()


def sentences_model() -> Any:
    """Each time another object with the same weights, in fp64."""
    return copy.deepcopy(_loaded())


def sentences(count: int, seed: int) -> list[str]:
    draws = torch.Generator().manual_seed(seed)

    def words() -> str:
        length = int(torch.randint(3, 9, (), generator=draws))
        return " ".join(WORDS[i] for i in torch.randint(len(WORDS), (length,), generator=draws))

    return [words() for _ in range(count)]


def features(model: Any, *columns: list[str]) -> list[dict[str, Any]]:
    prepare = getattr(model, "preprocess", None) or model.tokenize
    return [prepare(column) for column in columns]


def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


__all__ = [
    "features",
    "gradients",
    "losses",
    "sentences",
    "sentences_model",
    "transformers",
]
