"""Caches of keys and values, as language models return them: one object that grows with each call,
which can neither be split nor joined."""

import dataclasses
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from .errors import DroppedCacheNotice, Unsupported


def is_cache(value: Any) -> bool:
    """Hugging Face's classes say so by their name."""
    return type(value).__name__.endswith("Cache")


def natively(inner: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs a call with a cache, which all rows of one batch fill together: a step of generation."""
    if torch.is_grad_enabled():
        raise Unsupported(
            "a cache among the inputs is filled by the whole batch and cannot be split into "
            "micro-batches: call the model without it, use_cache=False, or generate under "
            "torch.no_grad()"
        )
    return (inner if name == "forward" else getattr(inner, name))(*args, **kwargs)


class Dropped:
    """Leaves caches out of outputs, and tells so once."""

    def __init__(self) -> None:
        self.name = ""
        self.told = False

    def out_of(self, outputs: Any) -> Any:
        """`outputs` as the model returns them with use_cache=False."""
        if isinstance(outputs, torch.Tensor):
            return outputs
        if isinstance(outputs, Mapping):
            found = [key for key, value in outputs.items() if is_cache(value)]
            return self._without(outputs, found) if found else outputs
        if type(outputs) in (tuple, list):
            found = [i for i, value in enumerate(outputs) if is_cache(value)]
            if found:
                self.name = self.name or f"[{found[0]}]"
                return type(outputs)(None if is_cache(value) else value for value in outputs)
        return outputs

    def _without(self, outputs: Any, found: list[Any]) -> Any:
        self.name = self.name or f"[{found[0]!r}]"
        if dataclasses.is_dataclass(outputs):  # Hugging Face's: what is None is no item
            rest = {key: value for key, value in outputs.items() if key not in found}
            return type(outputs)(**rest)
        return {key: None if key in found else value for key, value in outputs.items()}

    def tell(self, stacklevel: int) -> None:
        self.told = True
        warnings.warn(
            f"IB104: outputs{self.name} is a cache, which cannot be joined over micro-batches and "
            f"which training does not need: it is left out. Call the model with use_cache=False, or "
            f"set model.config.use_cache = False",
            DroppedCacheNotice,
            stacklevel=stacklevel + 1,
        )


__all__ = ["Dropped", "is_cache", "natively"]
