"""Methods of a wrapped module beside forward, which compute past its micro-batches."""

import functools
import inspect
import threading
import types
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from .errors import UnwrappedMethodNotice


class Watch:
    """Sees, while it is open, which methods run submodules on a batch outside of micro-batches, with
    gradients. Inside a second `with` it looks away."""

    def __init__(self, inner: nn.Module) -> None:
        self.modules = set(inner.modules()) - {inner}
        self.thread = threading.get_ident()
        self.depth = 0
        self.running: list[str] = []  # methods, the innermost last
        self.past: list[str] = []

    def __enter__(self) -> None:
        self.depth += 1
        if self.depth == 1:
            register = torch.nn.modules.module.register_module_forward_pre_hook
            self.handle = register(self._before_forward)

    def __exit__(self, *_: Any) -> None:
        self.depth -= 1
        if self.depth == 0:
            self.handle.remove()

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if threading.get_ident() != self.thread or self.depth != 1 or not self.running:
            return
        if module not in self.modules or not torch.is_grad_enabled():
            return
        rows = any(isinstance(a, torch.Tensor) and a.dim() and len(a) > 1 for a in args)
        if rows and self.running[-1] not in self.past:
            self.past.append(self.running[-1])


def own_methods(kind: type[nn.Module]) -> Iterator[tuple[str, types.FunctionType]]:
    """Public methods that `kind` has beside those of nn.Module and its special ones."""
    seen = set(vars(nn.Module))
    for base in kind.__mro__:
        if base is nn.Module:
            return
        for name, value in vars(base).items():
            if name in seen or name.startswith("_"):
                continue
            seen.add(name)
            waits = inspect.isgeneratorfunction(value) or inspect.iscoroutinefunction(value)
            if isinstance(value, types.FunctionType) and not waits:
                yield name, value


def watched(name: str, method: types.FunctionType) -> Any:
    """`method`, which tells where its first call with gradients runs submodules on a batch."""

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        state = self._infinitybatch
        watch = state.watch
        if watch is None:
            if name in state.judged or not torch.is_grad_enabled() or not _can_watch(state):
                return method(self, *args, **kwargs)
            watch = state.watch = Watch(state.inner)
            try:
                with watch:
                    result = call(self, *args, **kwargs)
            finally:
                state.watch = None
            for past in watch.past:
                text = _text(type(self).__name__, past)
                warnings.warn(text, UnwrappedMethodNotice, stacklevel=2)
            return result
        state.judged.add(name)
        watch.running.append(name)
        try:
            return method(self, *args, **kwargs)
        finally:
            watch.running.pop()

    return call


def _can_watch(state: Any) -> bool:
    if torch.compiler.is_compiling():
        return False
    # torch warns of hooks on all modules where a compiled one runs.
    return not any(type(m).__name__ == "OptimizedModule" for m in state.inner.modules())


def _text(kind: str, name: str) -> str:
    return (
        f"IB105: {kind}.{name} runs submodules on the whole batch at once, past the wrapped forward: "
        f"the gradient is exact, but micro-batches and memory_budget do not apply. Call the model "
        f'itself, or compute {name} in micro-batches, too: ib.wrap(model, methods=("{name}",))'
    )


__all__ = ["Watch", "own_methods", "watched"]
