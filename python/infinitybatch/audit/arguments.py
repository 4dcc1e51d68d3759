"""Checks of a model and an optimizer."""

from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer

from ..errors import InvalidArgument, InvalidType, Unsupported


def checked_model(model: Any) -> nn.Module:
    if isinstance(model, type) and issubclass(model, nn.Module):
        raise InvalidType(
            f"model is the class {model.__name__} itself; give an instance: {model.__name__}(...)"
        )
    if not isinstance(model, nn.Module):
        raise InvalidType(f"model must be a torch.nn.Module, not {type(model).__name__}")
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        if distributed.get_world_size() > 1:
            raise Unsupported(
                f"an audit looks at one process, and there are {distributed.get_world_size()}: run "
                f"the loop on one device with the same micro-batches"
            )
    parallel = (nn.parallel.DistributedDataParallel, nn.DataParallel)
    inner = model.module if isinstance(model, parallel) else model
    if not any(p.requires_grad for p in inner.parameters()):
        raise InvalidArgument(
            f"{type(inner).__name__} has no parameter that requires a gradient: "
            f"model.requires_grad_(True)"
        )
    return inner


def inner_optimizer(optimizer: Any, model: nn.Module) -> Optimizer | None:
    if optimizer is None:
        return None
    inner = optimizer
    while not hasattr(inner, "_optimizer_step_pre_hooks") and hasattr(inner, "optimizer"):
        inner = inner.optimizer  # accelerate's
    if isinstance(inner, type) or not isinstance(inner, Optimizer):
        what = inner.__name__ if isinstance(inner, type) else type(inner).__name__
        raise InvalidType(
            f"optimizer must be a torch.optim.Optimizer, not {what}: watch(model, optimizer, loader)"
        )
    own = set(model.parameters())
    if not any(p in own for p in parameters_of(inner)):
        raise InvalidArgument(
            f"the {type(inner).__name__} holds no parameter of this {type(model).__name__}: give the "
            f"model that it trains"
        )
    return inner


def parameters_of(optimizer: Optimizer) -> list[nn.Parameter]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def hook_bases(optimizer: Optimizer) -> None:
    """Lets torch put its hooks around step() of the classes that this one's step() calls.

    torch does that as the first optimizer of each class is made.
    """
    if type(optimizer).__module__.startswith("torch.optim"):
        return
    for base in type(optimizer).__mro__[1:]:
        is_torchs = base.__module__.startswith("torch.optim.") and base is not Optimizer
        if is_torchs and "step" in vars(base) and not getattr(base.step, "hooked", False):
            base([nn.Parameter(torch.zeros(1))])
