"""Forward calls of a model and calls of criteria, noted as a loop makes them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from .. import _random_state, _tree
from .batches import keep, rows_of
from .clipping import Clipping
from .origins import Origin, Origins
from .rows import Column, columns_of

#: Criteria that are means over their first dimension, called as criterion(input, target, ...).
_NAMES = (
    "binary_cross_entropy binary_cross_entropy_with_logits cross_entropy huber_loss kl_div l1_loss "
    "mse_loss multilabel_soft_margin_loss nll_loss poisson_nll_loss smooth_l1_loss soft_margin_loss"
)
CRITERIA: dict[Any, str] = {getattr(F, name): name for name in _NAMES.split()}

Buffers = dict[int, tuple[Tensor, int, Tensor]]


@dataclass
class Conditions:
    """What a forward found: generators, buffers, autocast."""

    random: dict[str, Any]
    buffers: Buffers
    autocast: tuple[tuple[str, torch.dtype], ...]
    #: Whether each of the model's modules was in training mode.
    modes: tuple[bool, ...] = ()


@dataclass
class Criterion:
    """A call of a criterion on a model's outputs."""

    function: Any
    #: From the outputs' leaf to the criterion's input: (function, arguments after the tensor).
    leaf: int
    chain: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...]
    target: Tensor
    rest: tuple[Any, ...]
    keywords: dict[str, Any]
    origin: Origin | None = None


@dataclass
class Call:
    """One outermost forward call."""

    #: Backward passes before it, in the whole run.
    group: int
    #: How many times the loader had come to its end.
    epoch: int
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    rows: int | None
    conditions: Conditions
    #: Whether an argument hangs on a parameter: the loop computes something before it.
    is_inner: bool = False
    #: A scalar that the model computed as its own loss.
    has_loss: bool = False
    criteria: list[Criterion] = field(default_factory=list)
    #: Why a criterion's input could not be followed back to the outputs.
    lost: str = ""
    #: What took a part of the outputs' rows before the criterion.
    taken: str = ""
    #: What else than the criterion, or the model's own loss, backward() was called on.
    other: str = ""
    #: Where the tensors among its arguments come from.
    origins: list[Origin | None] = field(default_factory=list)

    def columns(self) -> list[Column]:
        """What it was called with, one row for each sample."""
        targets = [c.target for c in self.criteria]
        origins = [c.origin for c in self.criteria]
        if self.taken and targets:
            return columns_of(targets, "target", len_of(targets[0]), origins)
        leaves = _tree.flatten((self.args, self.kwargs))[0]
        found = columns_of(leaves, "input", self.rows, self.origins)
        return found + columns_of(targets, "target", self.rows, origins)


@dataclass
class Awaited:
    """Samples that a step has not seen."""

    rows: Tensor | None
    #: Whether some call after that step sees them, or any call where rows are not followed.
    seen: bool = False

    def look(self, origins: list[Origin | None]) -> None:
        rows = [o.rows.reshape(-1) for o in origins if o is not None and o.rows is not None]
        if self.rows is None or not rows:
            self.seen = True
        else:
            self.seen = self.seen or any(bool(torch.isin(r, self.rows).any()) for r in rows)


def len_of(tensor: Tensor) -> int | None:
    return len(tensor) if tensor.ndim else None


def own_loss(outputs: Any) -> Tensor | None:
    """The loss that a model computes itself: `outputs.loss`, `outputs["loss"]`, or a scalar."""
    found = getattr(outputs, "loss", None)
    if found is None and isinstance(outputs, dict):
        found = outputs.get("loss")
    if found is None and isinstance(outputs, tuple) and outputs:
        found = outputs[0]
    if found is None:
        found = outputs
    is_loss = isinstance(found, Tensor) and found.ndim == 0 and found.requires_grad
    return found if is_loss else None


#: What may be done to a loss without its gradient becoming more than a multiple.
_LINEAR = {
    *("mul", "mul_", "multiply", "div", "div_", "divide", "true_divide", "neg", "negative"),
    *("add", "add_", "sub", "sub_", "subtract", "mean", "sum", "to", "float", "double", "half"),
    *("__mul__", "__rmul__", "__imul__", "__truediv__", "__itruediv__", "__neg__", "__pos__"),
    *("__add__", "__radd__", "__iadd__", "__sub__", "__rsub__", "__isub__", "bfloat16", "type"),
    *("clone", "view", "reshape", "squeeze", "unsqueeze", "flatten", "contiguous", "positive"),
    *("__getitem__", "rsub", "cpu", "cuda"),
}


class Calls(TorchFunctionMode):
    """Notes outermost forward calls, where the rows in them come from, what clips gradients, and with
    `follow` the criteria that are called on the model's outputs."""

    def __init__(
        self,
        model: nn.Module,
        follow: bool,
        clipping: Clipping,
        passes: Callable[[], int],
        epoch: Callable[[], int],
    ) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self.paused = False
        self._model = model
        self._follow = follow
        self.clipping = clipping
        self.origins = Origins()
        #: Samples that a step has not seen: whether some call sees them after all.
        self.awaited: list[Awaited] = []
        self._passes = passes
        self._epoch = epoch
        self._depth = 0
        self._buffers: Buffers = {}
        #: Tensors made of a call's outputs, by id: (the tensor, its call, leaf, chain).
        self._derived: dict[int, tuple[Tensor, Call, int, tuple[Any, ...]]] = {}
        #: Losses by id: (the tensor, what else than a multiple of the criterion it is).
        self._losses: dict[int, tuple[Tensor, str]] = {}
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def watch(self) -> None:
        # A LightningModule's loop calls training_step, which may go past the module's forward.
        parts = self._model.modules() if hasattr(self._model, "training_step") else [self._model]
        for part in parts:
            if isinstance(part, torch.jit.ScriptModule):
                continue
            self._handles += [
                part.register_forward_pre_hook(self._before, with_kwargs=True),
                part.register_forward_hook(self._after, with_kwargs=True, always_call=True),
            ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._derived.clear()
        self._losses.clear()
        self.origins.clear()

    def forget(self, group: int) -> None:
        """Drops the calls of passes before this one."""
        self.calls = [call for call in self.calls if call.group >= group]
        self._derived.clear()
        self._losses.clear()

    def _before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._depth += 1
        if self.paused or self._depth > 1 or not torch.is_grad_enabled():
            return
        if self.calls and self.calls[-1].group != self._passes():
            self._derived.clear()  # of a graph that is gone
            self._losses.clear()
        leaves = _tree.flatten((args, kwargs))[0]
        origins = [self.origins.of(leaf) for leaf in leaves]
        rows = rows_of((args, kwargs))
        if rows is None and any(o is not None and o.single for o in origins):
            rows = 1
        call = Call(
            group=self._passes(),
            epoch=self._epoch(),
            module=module,
            args=keep(args),
            kwargs=dict(keep(kwargs)),
            rows=rows,
            origins=origins,
            conditions=self._conditions(),
            is_inner=any(isinstance(x, Tensor) and x.grad_fn is not None for x in leaves),
        )
        self.calls.append(call)
        for awaited in self.awaited:
            awaited.look(origins)

    def _after(self, module: nn.Module, args: Any, kwargs: Any, outputs: Any) -> None:
        self._depth -= 1
        if self.paused or self._depth or not torch.is_grad_enabled() or not self.calls:
            return
        call = self.calls[-1]
        call.has_loss = own_loss(outputs) is not None
        if self._follow:
            for place, leaf in enumerate(_tree.flatten(outputs)[0]):
                if isinstance(leaf, Tensor) and leaf.requires_grad:
                    self._derived[id(leaf)] = (leaf, call, place, ())
            own = own_loss(outputs)
            if own is not None:
                self._losses[id(own)] = (own, "")

    def _conditions(self) -> Conditions:
        buffers: Buffers = {}
        for buffer in self._model.buffers():
            known = self._buffers.get(id(buffer))
            if known is None or known[1] != buffer._version or known[0] is not buffer:
                known = (buffer, buffer._version, buffer.detach().clone())
            buffers[id(buffer)] = known
        self._buffers = buffers
        kinds = {"cpu", *(p.device.type for p in self._model.parameters())}
        autocast = tuple(
            (kind, torch.get_autocast_dtype(kind))
            for kind in sorted(kinds)
            if torch.is_autocast_enabled(kind)
        )
        modes = tuple(module.training for module in self._model.modules())
        return Conditions(_random_state.capture(), buffers, autocast, modes)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.paused or self._depth:
            return func(*args, **kwargs)
        self.clipping.before(func)
        if func is Tensor.backward:
            self._backward(args[0])
        result = self.origins.follow(func, args, kwargs, func(*args, **kwargs))
        if self._follow and self._derived:
            self._outputs(func, args, kwargs, result)
        return result

    def _outputs(self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Any) -> None:
        """Follows what the loop does to the model's outputs, until a criterion is called on them."""
        if CRITERIA.get(func):
            self._criterion(func, args, kwargs)
            self._losses[id(result)] = (result, "")
        elif isinstance(result, Tensor) and result.requires_grad and args:
            source = self._derived.get(id(args[0]))
            others = _tree.flatten((args[1:], kwargs))[0]
            if source and not any(isinstance(other, Tensor) for other in others):
                _, call, leaf, chain = source
                self._derived[id(result)] = (
                    result,
                    call,
                    leaf,
                    (*chain, (func, args[1:], kwargs)),
                )
                if not result.numel() == args[0].numel() and len_of(result) != len_of(args[0]):
                    call.taken = getattr(func, "__name__", str(func))
            self._loss(func, args, kwargs, result)

    def _loss(self, func: Any, args: tuple[Any, ...], kwargs: Any, result: Tensor) -> None:
        """Follows what the loop does to a loss, until backward() is called on it."""
        name = getattr(func, "__name__", str(func))
        losses = [a for a in args if isinstance(a, Tensor) and id(a) in self._losses]
        if not losses:
            return
        others = _tree.flatten((args, kwargs))[0]
        other = next((self._losses[id(a)][1] for a in losses if self._losses[id(a)][1]), "")
        if any(
            isinstance(o, Tensor) and o.requires_grad and not any(o is a for a in losses)
            for o in others
        ):
            other = other or f"{name} puts it together with what else needs a gradient"
        elif name not in _LINEAR:
            other = other or f"{name} is applied to it"
        self._losses[id(result)] = (result, other)

    def _backward(self, root: Any) -> None:
        if not self.calls or not self._losses:
            return
        known = self._losses.get(id(root))
        self.calls[-1].other = (
            "backward() is called on something else" if known is None else known[1]
        )

    def _criterion(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keywords = dict(kwargs)
        names = ("input", "target")
        given = dict(zip(names, args, strict=False))
        given.update({n: keywords.pop(n) for n in names if n in keywords})
        inputs, target = given.get("input"), given.get("target")
        source = self._derived.get(id(inputs))
        if source is None or not isinstance(target, Tensor) or target.requires_grad:
            if isinstance(inputs, Tensor) and inputs.requires_grad and self.calls:
                self.calls[-1].lost = CRITERIA[func]
            return
        _, call, leaf, chain = source
        call.criteria.append(
            Criterion(
                func,
                leaf,
                chain,
                target.detach().clone(),
                args[2:],
                keywords,
                self.origins.of(target),
            )
        )
