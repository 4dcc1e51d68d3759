"""Gradients computed beside a training that does not notice."""

import contextlib
import copy
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from .. import _random_state
from ..errors import Unsupported
from ..wrap import Wrapped, unwrap, wrap
from .batches import to_device
from .calls import Buffers, Conditions
from .gradients import Gradients
from .losses import Loss, scalar

_PLAIN = (list, dict, set, deque)
#: Gradients of float16 would underflow; powers of two round nothing.
_SCALE = 2.0**14


@dataclass
class Micro:
    """A batch, and what the loop's forward found when it computed it."""

    batch: Any
    conditions: Conditions


@contextlib.contextmanager
def untouched(model: nn.Module) -> Iterator[None]:
    """Random state, modes, buffers and plain attributes of modules are as before afterwards."""
    random = _random_state.capture()
    modules = [m for m in model.modules() if not isinstance(m, torch.jit.ScriptModule)]
    modes = [(m, m.training) for m in model.modules()]
    frozen = [p for p in model.parameters() if not p.requires_grad]
    attributes = [(m, dict(m.__dict__)) for m in modules]
    registered = [(m, dict(m._buffers)) for m in modules]
    plain = [v for _, own in attributes for v in own.values()]
    tensors = [b for b in model.buffers()] + [
        v for v in plain if isinstance(v, Tensor) and not isinstance(v, nn.Parameter)
    ]
    values = [(t, t._version, t.detach().clone()) for t in tensors if not t.is_inference()]
    containers = [(v, copy.copy(v)) for own in attributes for v in _containers(own[1])]
    try:
        with torch.enable_grad():
            yield
    finally:
        for module, own in attributes:
            module.__dict__.clear()
            module.__dict__.update(own)
        for module, buffers in registered:
            module._buffers.clear()
            module._buffers.update(buffers)
        for container, content in containers:
            if isinstance(container, (list, deque)):
                container.clear()
                container.extend(content)
            else:
                container.clear()
                container.update(content)
        with torch.no_grad():
            for tensor, version, value in values:
                if tensor._version != version:
                    tensor.copy_(value)
        for module, mode in modes:
            module.training = mode
        for parameter in frozen:
            parameter.requires_grad_(False)
        _random_state.restore(random)


def _containers(own: dict[str, Any]) -> list[Any]:
    return [v for k, v in own.items() if not k.startswith("_") and type(v) in _PLAIN]


class Experiment:
    """Computes gradients of `loss` for `parameters`, inside `untouched(model)`."""

    def __init__(
        self,
        model: nn.Module,
        parameters: list[nn.Parameter],
        loss: Loss,
        memory_budget: Any = None,
    ) -> None:
        self.model = model
        self.parameters = parameters
        for parameter in parameters:
            # One that the loop froze after some micro-batch; `untouched` freezes it again.
            parameter.requires_grad_(True)
        self.loss = loss
        self.memory_budget = memory_budget
        #: Names of those parameters that the loop's backward passes reached.
        self.reached: dict[nn.Parameter, str] = {}
        #: Whether the last gradient drew random numbers.
        self.drew = False
        #: The coarsest type of a tensor that some backward has used.
        self.coarsest = torch.float64
        #: How the last whole gradient was computed.
        self.way = "natively, in one piece"

    @property
    def native(self) -> nn.Module:
        """The model itself, outside of wrappers that compute it in micro-batches."""
        inner = self.model
        return unwrap(inner) if isinstance(inner, Wrapped) else inner

    def whole(self, micro: Micro, **how: Any) -> Gradients:
        """Of the whole batch, in one piece, or under the budget."""
        if self.memory_budget is None:
            try:
                found = self.gradient(micro, self.native, **how)
                self._check_reach()
                return found
            except torch.OutOfMemoryError:
                self.memory_budget = "auto"
        self.way = f"by infinitybatch.wrap(model, memory_budget={self.memory_budget!r})"
        wrapped = wrap(self.native, memory_budget=self.memory_budget)
        return self.gradient(micro, wrapped, **how)

    def gradient(
        self,
        micro: Micro,
        model: nn.Module | None = None,
        *,
        weight: float = 1.0,
        quiet: bool = False,
        evaluated: type | tuple[type, ...] = (),
    ) -> Gradients:
        """Of one batch under its conditions.

        Args:
            weight: of the loss; half precision rounds a product otherwise than its factors.
            quiet: without autocast and dropout.
            evaluated: modules of these classes are in evaluation mode.
        """
        conditions = micro.conditions
        if quiet:
            conditions = replace(conditions, autocast=())
        model = self.model if model is None else model
        half = any(dtype == torch.float16 for _, dtype in conditions.autocast)
        scale = _SCALE if half else 1.0
        _random_state.restore(conditions.random)
        _put_back(conditions.buffers)
        before = _random_state.capture()
        classes = (*_as_tuple(evaluated), *((_DropoutNd,) if quiet else ()))
        # Activation checkpointing runs forward again in backward: in the same mode.
        with _in_modes(self.model, conditions.modes), _in_evaluation(self.model, classes):
            value = self._value(micro, model, dict(conditions.autocast))
            found = torch.autograd.grad(
                value * (scale * weight), self.parameters, allow_unused=True
            )
        self.drew = not _same(before, _random_state.capture())
        self._unreached = [p for p, g in zip(self.parameters, found, strict=True) if g is None]
        return [
            torch.zeros_like(p) if g is None else _dense(g) / scale if half else _dense(g)
            for p, g in zip(self.parameters, found, strict=True)
        ]

    def _value(self, micro: Micro, model: nn.Module, autocast: dict[str, torch.dtype]) -> Tensor:
        with contextlib.ExitStack() as stack:
            # Neither the loop's autocast of this moment counts nor its cache of cast weights.
            for kind in {"cpu", *(p.device.type for p in self.parameters)}:
                dtype = autocast.get(kind)
                stack.enter_context(
                    torch.autocast(kind, dtype, enabled=dtype is not None, cache_enabled=False)
                )
            stack.enter_context(saved_tensors_hooks(self._note, lambda tensor: tensor))
            batch = to_device(micro.batch, self.parameters[0].device)
            return scalar(self.loss(model, batch))

    def _check_reach(self) -> None:
        lost = [self.reached[p] for p in self._unreached if p in self.reached]
        if lost:
            raise Unsupported(
                f"the loss of a batch, computed again, does not reach {lost[0]}, which your loop's "
                f"backward() reached: give the loop's own loss=, and use_reentrant=False to "
                f"torch.utils.checkpoint"
            )

    def values(self, micro: Micro, quiet: bool) -> None:
        """Runs the loss of a batch, for hooks."""
        _random_state.restore(micro.conditions.random)
        _put_back(micro.conditions.buffers)
        quietly = _in_evaluation(self.model, (_DropoutNd,) if quiet else ())
        # With a graph: the loss may ask for gradients itself.
        with _in_modes(self.model, micro.conditions.modes), quietly:
            self.loss(self.native, to_device(micro.batch, self.parameters[0].device))

    def has_batch_norm(self) -> bool:
        return any(isinstance(m, _BatchNorm) and m.training for m in self.model.modules())

    def _note(self, tensor: Tensor) -> Tensor:
        if tensor.is_floating_point():
            if torch.finfo(tensor.dtype).eps > torch.finfo(self.coarsest).eps:
                self.coarsest = tensor.dtype
        return tensor


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _dense(grad: Tensor) -> Tensor:
    return grad if grad.layout == torch.strided else grad.to_dense()


@torch.no_grad()
def _put_back(buffers: Buffers) -> None:
    for buffer, _, value in buffers.values():
        if not torch.equal(buffer, value):
            buffer.copy_(value)


@contextlib.contextmanager
def _in_modes(model: nn.Module, modes: tuple[bool, ...]) -> Iterator[None]:
    """The modules in the modes that they had in the loop's forward."""
    modules = list(model.modules())
    now = [m.training for m in modules]
    if len(modes) == len(modules):
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode
    try:
        yield
    finally:
        for module, mode in zip(modules, now, strict=True):
            module.training = mode


@contextlib.contextmanager
def _in_evaluation(model: nn.Module, classes: tuple[type, ...]) -> Iterator[None]:
    found = [m for m in model.modules() if classes and isinstance(m, classes) and m.training]
    for module in found:
        module.training = False
    try:
        yield
    finally:
        for module in found:
            module.training = True


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return all(_same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)
