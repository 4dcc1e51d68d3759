"""What tests of `trim=` share."""

import copy
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import torch
from text_support import (
    token_loss,
)
from torch import nn
from wrap_support import close

MASK = ib.trim_padding(mask="attention_mask")
SIZES: dict[str, dict[str, Any]] = {
    "tokens": {"micro_batch_tokens": 24},
    "rows": {"micro_batch_size": 4},
    "both": {"micro_batch_tokens": 24, "micro_batch_size": 3},
    "one": {"micro_batch_tokens": 10_000},
    "longest alone": {"micro_batch_tokens": 7},
    "kept": {"micro_batch_tokens": 24, "retained_micro_batches": 2},
    "rerun": {"micro_batch_tokens": 24, "use_tapes": False},
    "tokens, budget": {"micro_batch_tokens": 24, "memory_budget": "1GiB"},
    "budget": {"memory_budget": "1GiB"},
}


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [p.grad for p in model.parameters()]


def native(model: nn.Module, run: Callable[[nn.Module], torch.Tensor]) -> Any:
    model = copy.deepcopy(model)
    loss = run(model)
    loss.backward()
    return loss.detach(), gradients(model)


def check(found: nn.Module, wanted: list[torch.Tensor | None]) -> None:
    close(gradients(found), wanted)


def separable(outputs: Any, labels: torch.Tensor) -> torch.Tensor:
    return token_loss(outputs.logits if hasattr(outputs, "logits") else outputs, labels)


TOKENS = nn.CrossEntropyLoss()


def by_token(outputs: torch.Tensor) -> torch.Tensor:
    return outputs.transpose(1, 2)


class ClassesFirst(nn.Module):
    """Scores as torch's criterion takes them, [samples, classes, time]."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        out = self.inner(input_ids=input_ids, attention_mask=attention_mask)
        return (out.logits if hasattr(out, "logits") else out).transpose(1, 2)


# ---- VirtualBatch --------------------------------------------------------------------------------


def seeded(seed: int) -> torch.Generator:
    return torch.Generator(torch.get_default_device()).manual_seed(seed)
