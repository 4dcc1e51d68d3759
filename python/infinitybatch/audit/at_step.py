"""A look at gradients as `step` reads them."""

from collections.abc import Callable
from typing import Any

from torch.optim import Optimizer


class AtStep:
    """Hooks that run behind all others of an optimizer, which may change gradients too, and behind
    its closure where it has one."""

    def __init__(self, look: Callable[[Optimizer, bool], None]) -> None:
        """
        Args:
            look: called with the optimizer, and whether this is the first time in this step: LBFGS
                asks for its closure again, at other parameters.
        """
        self._look = look
        self._handles: dict[Optimizer, Any] = {}

    def __contains__(self, optimizer: Optimizer) -> bool:
        return optimizer in self._handles

    def place(self, optimizer: Optimizer) -> None:
        """To be called as a step begins, behind whatever hooks were registered since the last one."""
        self.remove(optimizer)
        self._handles[optimizer] = optimizer.register_step_pre_hook(self._hook)

    def remove(self, optimizer: Optimizer) -> None:
        handle = self._handles.pop(optimizer, None)
        if handle is not None:
            handle.remove()

    def remove_all(self) -> None:
        for optimizer in list(self._handles):
            self.remove(optimizer)

    def _hook(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        closure = kwargs.get("closure", args[1] if len(args) > 1 else None)
        if not callable(closure):
            self._look(optimizer, True)
            return None
        times = 0

        def looking(*given: Any, **named: Any) -> Any:
            nonlocal times
            value = closure(*given, **named)
            times += 1
            self._look(optimizer, times == 1)
            return value

        if "closure" in kwargs:
            return args, {**kwargs, "closure": looking}
        return (args[0], looking, *args[2:]), kwargs
