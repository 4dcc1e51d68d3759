"""What the C++ step asks of a torch.nn.Module: how to run it and what it owns."""

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ._coupled import first_frame_outside
from .errors import CouplingError, InvalidType, StateError, UncompiledNotice, Unsupported

#: A buffer: its name, and the dict (or the module, in TorchScript) that holds it under a key.
Slot = tuple[str, dict[str, torch.Tensor | None] | nn.Module, str]


#: What the library says of code whose ops nobody sees (src/tape/program.cpp).
_NO_RECORDING = "forward calls compiled code"


class CallableModel:
    """A model that is any callable with its parameters. Made by `make_model`."""

    training = True

    def __init__(self, forward: Callable[..., Any], parameters: Iterable[torch.Tensor]) -> None:
        if not callable(forward):
            raise InvalidType(f"forward must be callable, not {type(forward).__name__}")
        self._forward = forward
        if not hasattr(parameters, "__iter__"):
            raise InvalidType(
                f"parameters must be a list of tensors, not {type(parameters).__name__}"
            )
        self._parameters = list(parameters)
        for i, parameter in enumerate(self._parameters):
            if not isinstance(parameter, torch.Tensor):
                raise InvalidType(
                    f"parameter {i} must be a tensor, not {type(parameter).__name__}; pass "
                    f"parameters as a list of the tensors whose gradients are wanted"
                )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    @property
    def module(self) -> nn.Module | None:
        """The one that is called, itself or by a method; None behind any other function."""
        is_module = isinstance(self._forward, nn.Module)
        called = self._forward if is_module else getattr(self._forward, "__self__", None)
        return called if isinstance(called, nn.Module) else None

    def modules(self) -> Iterator[nn.Module]:
        return iter(()) if self.module is None else self.module.modules()

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((f"parameter {i}", tensor) for i, tensor in enumerate(self._parameters))


def make_model(forward: Callable[..., Any], parameters: Iterable[torch.Tensor]) -> CallableModel:
    """A model of any callable, for `VirtualBatch`.

    Args:
        forward: runs one micro-batch; called as a module would be.
        parameters: the leaf tensors whose gradients are wanted.
    """
    return CallableModel(forward, parameters)


class ModelView:
    """Asked by C++ once per step, so that modules may change between steps."""

    def __init__(self, model: nn.Module | CallableModel, exact_coupling: bool) -> None:
        if isinstance(model, type) and issubclass(model, nn.Module):
            raise InvalidType(
                f"model is the class {model.__name__} itself; give an instance: "
                f"{model.__name__}(...)"
            )
        if not isinstance(model, (nn.Module, CallableModel)):
            raise InvalidType(
                f"model must be a torch.nn.Module, not {type(model).__name__}; make a model of any "
                f"other callable and its parameters with infinitybatch.make_model"
            )
        self.forward = model
        self._exact_coupling = exact_coupling
        self._normalises = True  # until it is known that no layer does
        self.is_uncompiled = False  # whether compiled code has to run as it was written
        self._has_compiled = self._always_uncompiled = False
        self._warned = False

    def is_training(self) -> bool:
        return self.forward.training

    def one_of_many(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward` for a single sample of a larger batch that BatchNorm layers will see whole."""
        if not self._normalises:
            return forward

        def run(*args: Any, **kwargs: Any) -> Any:
            with _NormalisesOne():
                return forward(*args, **kwargs)

        return run

    def uncompiled(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward`, with whatever is compiled in it run as it was written."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with torch.compiler.set_stance("force_eager"):
                return forward(*args, **kwargs)

        return run

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        if isinstance(self.forward, CallableModel):
            self._slots: list[Slot] = []
            return list(self.forward.named_parameters())
        parameters, self._slots = self._walk(self.forward)
        return parameters

    def buffers(self) -> list[Slot]:
        """Those that were found beside the parameters, for which C++ asks first."""
        return self._slots

    def _walk(self, model: nn.Module) -> tuple[list[tuple[str, torch.Tensor]], list[Slot]]:
        """Parameters and buffers in one pass, where C++ has met something that is not ordinary."""
        parameters: list[tuple[str, torch.Tensor]] = []
        slots: list[Slot] = []
        seen: set[int] = set()
        self._normalises = self.is_uncompiled = False
        for prefix, module in model.named_modules():
            self._check(module)
            self._normalises |= isinstance(module, nn.modules.batchnorm._BatchNorm)
            prefix += "." if prefix else ""
            for key, parameter in module._parameters.items():
                if parameter is None or id(parameter) in seen:
                    continue
                seen.add(id(parameter))
                name = prefix + key
                _check_shape("parameter", name, parameter)
                parameters.append((name, parameter))
            owner: Any = module._buffers
            for key, buffer in owner.items():
                if not isinstance(buffer, nn.Parameter):
                    _check_shape("buffer", prefix + key, buffer)
                    # TorchScript keeps no dict of its own: C++ asks the module for the attribute.
                    slots.append((prefix + key, owner if type(owner) is dict else module, key))
        self._has_compiled = self.is_uncompiled
        beside = self.is_uncompiled and self._compiled_beside_coupled(model)
        self.is_uncompiled = beside or self._always_uncompiled
        return parameters, slots

    def _check(self, module: nn.Module) -> None:
        kind = type(module)
        verdict = _verdict(kind)
        if verdict == "distributed":
            raise Unsupported(
                "the model contains DistributedDataParallel, whose hooks would run once per "
                "micro-batch; put it around: DistributedDataParallel(ib.wrap(model)); or, with VirtualBatch, "
                "pass the inner module (ddp.module) and average .grad over the ranks after backward"
            )
        if verdict == "sharded":
            raise Unsupported(
                f"the model contains {kind.__name__}, which shards parameters while it runs; pass "
                f"a model whose parameters are whole tensors"
            )
        if self._exact_coupling and (
            verdict == "compiled" or getattr(module, "_compiled_call_impl", None) is not None
        ):
            self.is_uncompiled = True

    def _compiled_beside_coupled(self, model: nn.Module) -> bool:
        """Whether a layer of a model that is compiled, in part at least, needs the whole batch.

        Nobody could stand in for it inside of a compiled region, whose ops are not dispatched one by
        one; and a forward is cut before it, which takes a recording of all that is around it.
        """
        for name, inner in model.named_modules():
            op = _coupled_op(inner)
            if not op:
                continue
            self._tell(f"{type(inner).__name__} ('{name}') needs the whole batch ({op})")
            return True
        return False

    def runs_uncompiled_after(self, error: Exception) -> bool:
        """Whether what `error` stopped can be tried again: it needed a recording of compiled code,
        of which there is none, or found a layer in its kernels, where nobody can stand in for it.
        From now on that code runs as it was written."""
        hidden = (
            self._has_compiled and isinstance(error, CouplingError) and "batch_norm" in error.op
        )
        if self._always_uncompiled or not (hidden or _NO_RECORDING in str(error)):
            return False
        self._always_uncompiled = self.is_uncompiled = True
        self._tell(str(error).partition(", and ")[0].partition(": ")[0])
        return True

    def _tell(self, reason: str) -> None:
        if self._warned:
            return
        self._warned = True
        warnings.warn(
            f"IB103: {reason}, so the compiled parts of the model run uncompiled, at eager speed. To "
            f"run them compiled wrap one that needs no more than its samples by itself: model.part = "
            f"ib.wrap(torch.compile(model.part))",
            UncompiledNotice,
            stacklevel=first_frame_outside(),
        )


class _NormalisesOne(TorchFunctionMode):
    """Answers for `F.batch_norm`, which refuses a single value per channel before any op runs."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if function is nn.functional.batch_norm:
            return _batch_norm(*args, **(kwargs or {}))
        return function(*args, **(kwargs or {}))


def _batch_norm(
    input: torch.Tensor,
    running_mean: torch.Tensor | None,
    running_var: torch.Tensor | None,
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> torch.Tensor:
    cudnn = torch.backends.cudnn.enabled
    return torch.batch_norm(
        input, weight, bias, running_mean, running_var, training, momentum, eps, cudnn
    )


def _check_shape(kind: str, name: str, tensor: torch.Tensor | None) -> None:
    if isinstance(tensor, nn.parameter.UninitializedTensorMixin):
        raise StateError(
            f"{kind} '{name}' has no shape yet (a lazy module): run the model once on a few samples, "
            f"model(inputs[:2]), before the first step and before making the optimizer"
        )


@functools.lru_cache(maxsize=1024)
def _verdict(kind: type[nn.Module]) -> str:
    """What is to be known of a class of modules."""
    if issubclass(kind, nn.parallel.DistributedDataParallel):
        return "distributed"
    sharded = ("FullyShardedDataParallel", "FSDPModule")
    if any(base.__name__ in sharded and "fsdp" in base.__module__ for base in kind.__mro__):
        return "sharded"
    return "compiled" if kind.__name__ == "OptimizedModule" else "ordinary"


def is_ordinary(kind: type) -> bool:
    """Whether modules of this class hold nothing that only `ModelView._walk` understands."""
    return (
        issubclass(kind, nn.Module)
        and _verdict(kind) == "ordinary"
        and kind.named_modules is nn.Module.named_modules
    )


def _coupled_op(module: nn.Module) -> str:
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        without_statistics = module.running_mean is None and module.running_var is None
        return "aten::batch_norm" if module.training or without_statistics else ""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        if module.max_norm is not None:
            return "aten::embedding_renorm_"
        if module.scale_grad_by_freq:
            bag = isinstance(module, nn.EmbeddingBag)
            return "aten::embedding_bag" if bag else "aten::embedding"
    return ""
