"""Losses and models for wrapped modules, and how near a gradient has to be."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import infinitybatch as ib
import torch
from measure import excess, numbered
from support import Calls, Square, classification, mlp
from torch import nn
from torch.utils import _pytree

X, Y = classification(13)


def close(found: Any, wanted: Any, tolerance: float = 1e-12, moved: Any = None) -> None:
    """Every tensor within `tolerance` of the one that native gives, relative to its norm.

    Args:
        moved: what native gives of the batch reversed; ten times what that moves is allowed.
    """
    trees = [found, wanted] if moved is None else [found, wanted, moved]
    found, wanted, *moved = (numbered(_pytree.tree_leaves(tree)) for tree in trees)
    beyond = excess(found, wanted, moved, least=tolerance)
    assert beyond == {}, beyond


def contrastive(z: torch.Tensor) -> torch.Tensor:
    """Couples every sample with every other."""
    z = nn.functional.normalize(z, dim=1)
    return nn.functional.cross_entropy(z @ z.T / 0.3, torch.arange(len(z)).roll(1))


@contextlib.contextmanager
def call_meanwhile(layer: nn.Module, call: Callable[[], Any]) -> Iterator[list[str]]:
    """While it is open `call` is made in another thread each time after `layer` has run; yields the
    words of the `StateError`s that come of it."""
    errors: list[str] = []

    def in_its_thread() -> None:
        try:
            call()
        except ib.StateError as error:
            errors.append(str(error))

    def meanwhile(*_: Any) -> None:
        thread = threading.Thread(target=in_its_thread)
        thread.start()
        thread.join()

    handle = layer.register_forward_hook(meanwhile)
    try:
        yield errors
    finally:
        handle.remove()


def grads(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def opaque(dropout: float = 0.0) -> nn.Module:
    return Calls(
        lambda self, x: nn.functional.dropout(Square.apply(self.net(x)), dropout, self.training),
        net=mlp(),
    )
