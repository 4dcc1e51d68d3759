"""What the C++ step asks of a torch.nn.Module: how to run it and what it owns."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from .errors import CouplingError, InvalidType, StateError, Unsupported


class CallableModel:
    """A model that is any callable with its parameters. Made by `make_model`."""

    training = True

    def __init__(self, forward: Callable[..., Any], parameters: Iterable[torch.Tensor]) -> None:
        if not callable(forward):
            raise InvalidType(f"forward must be callable, not {type(forward).__name__}")
        self._forward = forward
        self._parameters = list(parameters)
        for i, parameter in enumerate(self._parameters):
            if not isinstance(parameter, torch.Tensor):
                raise InvalidType(
                    f"parameter {i} must be a tensor, not {type(parameter).__name__}; pass "
                    f"parameters as a list of the tensors whose gradients are wanted"
                )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        return ((f"parameter {i}", tensor) for i, tensor in enumerate(self._parameters))

    def modules(self) -> Iterator[nn.Module]:
        return iter(())


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
        if not isinstance(model, (nn.Module, CallableModel)):
            raise InvalidType(
                f"model must be a torch.nn.Module, not {type(model).__name__}; make a model of any "
                f"other callable and its parameters with infinitybatch.make_model"
            )
        self.forward = model
        self._exact_coupling = exact_coupling

    def is_training(self) -> bool:
        return self.forward.training

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        for module in self.forward.modules():
            self._check(module)
        parameters = list(self.forward.named_parameters())
        for name, parameter in parameters:
            if isinstance(parameter, nn.parameter.UninitializedTensorMixin):
                raise StateError(
                    f"parameter '{name}' has no shape yet (a lazy module): run the model once on a "
                    f"few samples, model(inputs[:2]), before the first step and before making the "
                    f"optimizer"
                )
        return parameters

    def buffers(self) -> list[tuple[str, Any, str]]:
        """(name, owner, key) of each buffer; the owner is the module's own dict of buffers."""
        slots: list[tuple[str, Any, str]] = []
        seen: set[int] = set()
        for prefix, module in getattr(self.forward, "named_modules", tuple)():
            owner: Any = module._buffers
            scripted = not isinstance(owner, dict)
            for key, buffer in owner.items():
                if buffer is None or id(buffer) in seen:
                    continue
                seen.add(id(buffer))
                name = f"{prefix}.{key}" if prefix else key
                slots.append((name, module if scripted else owner, key))
        return slots

    def _check(self, module: nn.Module) -> None:
        kind = type(module)
        if isinstance(module, nn.parallel.DistributedDataParallel):
            raise Unsupported(
                "the model contains DistributedDataParallel, whose hooks would run once per "
                "micro-batch; for now pass the inner module (ddp.module) and average .grad over "
                "the ranks after backward"
            )
        if any(base.__name__ in _SHARDED and "fsdp" in base.__module__ for base in kind.__mro__):
            raise Unsupported(
                f"the model contains {kind.__name__}, which shards parameters while it runs; pass "
                f"a model whose parameters are whole tensors"
            )
        if self._exact_coupling and _is_compiled(module):
            self._check_compiled(module)

    @staticmethod
    def _check_compiled(module: nn.Module) -> None:
        # Inside a compiled region ops are not dispatched one by one: the watch cannot see them.
        for name, inner in module.named_modules():
            op = _coupled_op(inner)
            if op:
                raise CouplingError(
                    f"the compiled model contains {type(inner).__name__} ('{name}') in training "
                    f"mode: {op} couples the samples of a batch, so micro-batches cannot give the "
                    f"gradient of the whole; put the layer into eval mode, use one that does not "
                    f"couple (GroupNorm), or accept another gradient with "
                    f'batch_coupling="per_micro_batch"',
                    op,
                )


_SHARDED = frozenset({"FullyShardedDataParallel", "FSDPModule"})


def _is_compiled(module: nn.Module) -> bool:
    return (
        getattr(module, "_compiled_call_impl", None) is not None
        or type(module).__name__ == "OptimizedModule"
    )


def _coupled_op(module: nn.Module) -> str:
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        without_statistics = module.running_mean is None and module.running_var is None
        return "aten::batch_norm" if module.training or without_statistics else ""
    if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        if module.max_norm is not None:
            return "aten::embedding_renorm_"
        if module.scale_grad_by_freq:
            return "aten::embedding"
    return ""
