"""Programs that are made of running code. That of a wrapped module would be one micro-batch's."""

from typing import Any

import torch

from .errors import Unsupported


def outside_of_program(call: Any, module: Any, args: Any, kwargs: Any) -> Any:
    """What `call` returns, where the program can go on behind it; Unsupported elsewhere."""
    if type(args) is not tuple:  # a proxy
        raise no_program("torch.fx.symbolic_trace")
    if torch.jit.is_tracing():
        raise no_program("torch.jit.trace")
    if is_exporting():
        raise no_program("torch.export")
    return torch.compiler.disable(call)(module, *args, **kwargs)


def is_exporting() -> bool:
    """`torch.compiler.is_exporting()`, which Dynamo of torch 2.11 takes for true in whatever it
    compiles."""
    return torch.compiler._is_exporting_flag


def no_program(of: str) -> Unsupported:
    return Unsupported(
        f"{of} would make a program of one micro-batch of this wrapped module: give it the inner "
        f"module, ib.unwrap(model)"
    )


__all__ = ["is_exporting", "no_program", "outside_of_program"]
