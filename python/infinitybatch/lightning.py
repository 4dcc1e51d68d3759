"""A callback for Lightning's Trainer: forward and backward in micro-batches, the module unchanged.

    from infinitybatch.lightning import InfinityBatch

    trainer = Trainer(callbacks=[InfinityBatch(memory_budget="8GiB", module="encoder")])

Works with the packages `lightning` and `pytorch_lightning`; see docs/recipes/lightning.md.
"""

import inspect
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from torch import distributed, nn

from ._accumulation import DIFFERS
from .errors import AccumulationNotice, InvalidArgument, InvalidType, UnwrappedMethodNotice
from .wrap import Wrapped, wrap

_PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def _package() -> Any:
    """The one of Lightning's two packages that is in use, or else the one that is installed."""
    for name in sorted(_PACKAGES, key=lambda name: name not in sys.modules):
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
    raise ModuleNotFoundError(
        "infinitybatch.lightning needs Lightning: pip install lightning", name="lightning"
    )


class InfinityBatch(_package().Callback):  # type: ignore[misc]
    """Computes the LightningModule, or submodules of it, micro-batch by micro-batch, as `wrap` does.

    In place from `setup` to `teardown`, in fitting, validation, test and prediction, for automatic
    and manual optimization. Parameters, optimizers and checkpoints are those of the module.

    Args:
        memory_budget: bytes, "8GiB", a fraction of the device or "auto".
        module: the name of a submodule, or several, as in `named_modules()`. None: the
            LightningModule itself, whose steps have to call `self(batch)`.
        options: what else `wrap` takes. `process_group` is that of all ranks, where there are any.

    Raises from `setup`, before anything ran: InvalidArgument for a submodule that is not there.
    Warns of `accumulate_grad_batches` (AccumulationNotice, IB109), and of steps that compute past
    what is wrapped (UnwrappedMethodNotice, IB105).
    """

    def __init__(
        self,
        memory_budget: int | float | str | None = None,
        *,
        module: str | Sequence[str] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        names = (module,) if isinstance(module, str) else module
        if names is not None:
            several = isinstance(names, (tuple, list)) and len(names) > 0
            if not several or not all(isinstance(name, str) and name for name in names):
                raise InvalidType(
                    f'module must be the name of a submodule, "encoder", or several, not {module!r}'
                )
        self.names = names
        self.options = {"memory_budget": memory_budget, **options}
        wrap(nn.Identity(), **self.options)  # says now what is wrong with them
        self.by_variable = False  # made by the entry point: it gives way to one that the loop has
        self._begin()

    def _begin(self) -> None:
        self._wrapped: dict[str, Wrapped] = {}  # by name; that of the LightningModule is ""
        self._undo: list[Callable[[], None]] = []
        self._looked_at_batch = self._told_of_accumulation = False

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        self._restore()
        if self.by_variable and any(
            isinstance(other, InfinityBatch) and other is not self for other in trainer.callbacks
        ):
            return
        options = dict(self.options)
        if distributed.is_available() and distributed.is_initialized():
            options.setdefault("process_group", distributed.group.WORLD)
        for name in self.names or ():
            self._wrap_submodule(pl_module, name, options)
        if self.names is None and not isinstance(pl_module, Wrapped):
            self._wrap_forward(pl_module, options)

    def _wrap_submodule(self, root: nn.Module, name: str, options: dict[str, Any]) -> None:
        try:
            inner = root.get_submodule(name)
        except AttributeError:
            raise InvalidArgument(
                f"module={name!r} is no submodule of {type(root).__name__}, which has {_children(root)}"
            ) from None
        if not isinstance(inner, Wrapped):
            module = self._wrapped[name] = wrap(inner, **options)
            _replace(root, inner, module)
            self._undo.append(lambda: _replace(root, module, inner))

    def _wrap_forward(self, root: nn.Module, options: dict[str, Any]) -> None:
        own = vars(root).get("forward")
        module = self._wrapped[""] = wrap(_Forward(root), **options)
        root.forward = _Calls(module, root.forward)
        self._undo.append(
            lambda: setattr(root, "forward", own) if own else delattr(root, "forward")
        )

    def on_train_batch_start(self, trainer: Any, *_: Any, **__: Any) -> None:
        batches = trainer.accumulate_grad_batches
        if batches > 1 and not self._told_of_accumulation:
            self._told_of_accumulation = True
            warnings.warn(
                f"IB109: accumulate_grad_batches={batches} {DIFFERS} Load the {batches} batches as "
                f"one and leave accumulate_grad_batches at 1: memory_budget holds their peak",
                AccumulationNotice,
                stacklevel=2,
            )

    def on_train_batch_end(self, trainer: Any, pl_module: nn.Module, *_: Any, **__: Any) -> None:
        if self._looked_at_batch:
            return
        self._looked_at_batch = True
        for name in [n for n, module in self._wrapped.items() if module.last_report is None]:
            warnings.warn(
                f"IB105: {type(pl_module).__name__}.training_step did not call "
                f"{'self.' + name if name else 'self(batch)'}: the gradient is exact, but micro-batches "
                f"and memory_budget do not apply. Name what it calls, one of {_children(pl_module)}: "
                f"InfinityBatch(module=...)",
                UnwrappedMethodNotice,
                stacklevel=2,
            )

    def teardown(self, *_: Any, **__: Any) -> None:
        self._restore()

    def on_exception(self, *_: Any, **__: Any) -> None:
        self._restore()  # Lightning calls no teardown then

    def _restore(self) -> None:
        for undo in reversed(self._undo):
            undo()
        self._begin()


class _Forward(nn.Module):
    """The forward of a LightningModule without its steps, which compute whole batches."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.call = module.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.call(*args, **kwargs)


class _Calls:
    """In place of a module's forward. An object, so that a copy of the module calls its own copy."""

    def __init__(self, module: Wrapped, like: Callable[..., Any]) -> None:
        self.module = module
        self.__signature__ = inspect.signature(like)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


def _replace(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """At each place below `root` where `old` is."""
    paths = [path for path, m in root.named_modules(remove_duplicate=False) if m is old]
    for path in paths:
        parent, _, name = path.rpartition(".")
        setattr(root.get_submodule(parent), name, new)


def _children(module: nn.Module) -> str:
    return ", ".join(repr(name) for name, _ in module.named_children())


#: The variable that the entry point reads (infinitybatch_lightning.py).
_VARIABLE = "INFINITYBATCH_LIGHTNING"
_KEYS = ("memory_budget", "micro_batch_size", "module")


def from_text(text: str) -> InfinityBatch:
    """The callback that `memory_budget=8GiB,module=encoder` describes."""
    given: dict[str, Any] = {}
    for item in filter(None, (part.strip() for part in text.split(","))):
        key, equals, value = (part.strip() for part in item.partition("="))
        if key not in _KEYS or not equals or not value:
            raise InvalidArgument(
                f"{_VARIABLE}={text!r}: {item!r} is not one of {', '.join(_KEYS)} with a value. "
                f"Write {_VARIABLE}=memory_budget=8GiB,module=encoder"
            )
        if key == "module":
            given[key] = [*given.get(key, []), value]
        else:
            given[key] = _number(value)
    callback = InfinityBatch(**given)
    callback.by_variable = True
    return callback


def _number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


__all__ = ["InfinityBatch"]
