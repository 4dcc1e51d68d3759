"""What happens to `.grad` between two steps of an optimizer, seen by hooks on its parameters."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

#: Relative difference from which on a `.grad` counts as changed.
_CHANGED = 1e-6


@dataclass
class Slot:
    """One parameter's gradient since its optimizer's last step."""

    #: Backward passes that reached it.
    passes: int = 0
    #: What `.grad` held before the first of them; None for nothing or zeros.
    start: Tensor | None = None
    #: `.grad` right after the last of them.
    last: Tensor | None = None
    #: By what the loop multiplied `.grad` between two passes: 1 for nothing, 0 for zero_grad, None
    #: for a change that is no factor.
    factors: list[float | None] = field(default_factory=list)
    _next: float | None = 1.0


class Trace:
    def __init__(self) -> None:
        self.slots: dict[nn.Parameter, Slot] = {}
        #: Passes that a GradScaler threw away, since the last step.
        self.skipped = 0
        self.paused = False
        #: Backward passes in the whole run.
        self.passes = 0
        self._seen: set[nn.Parameter] = set()
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def watch(self, parameters: Iterable[nn.Parameter]) -> None:
        """Hooks all that train and have no hook yet."""
        for parameter in parameters:
            if not parameter.requires_grad or parameter in self.slots:
                continue
            self.slots[parameter] = Slot()
            self._handles += [
                parameter.register_hook(lambda grad, p=parameter: self._incoming(p)),
                parameter.register_post_accumulate_grad_hook(self._accumulated),
            ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _incoming(self, parameter: nn.Parameter) -> None:
        if self.paused:
            return
        slot, before = self.slots[parameter], parameter.grad
        if slot.passes and not bool(torch.isfinite(_dense(slot.last)).all()) and _is_empty(before):
            # A GradScaler skipped this step, as it should.
            self.skipped = max(self.skipped, slot.passes)
            self.slots[parameter] = slot = Slot()
        if slot.passes == 0:
            slot.start = None if _is_empty(before) else before.detach().clone()
        else:
            slot._next = _factor(before, slot.last)

    def _accumulated(self, parameter: nn.Parameter) -> None:
        if self.paused:
            return
        if parameter in self._seen or not self._seen:  # the first of a pass
            self.passes += 1
            self._seen.clear()
        self._seen.add(parameter)
        slot = self.slots[parameter]
        if slot.passes:
            slot.factors.append(slot._next)
        slot.passes += 1
        grad = parameter.grad.detach()
        if slot.last is None or grad.layout != torch.strided or slot.last.layout != torch.strided:
            slot.last = grad.clone()
        else:
            slot.last.copy_(grad)

    def stepped(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter in self.slots:
                self.slots[parameter] = Slot()
        self.skipped = 0


def _dense(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor if tensor.layout == torch.strided else tensor.to_dense()


def _is_empty(grad: Tensor | None) -> bool:
    return grad is None or not bool(_dense(grad).any())


def _factor(now: Tensor | None, before: Tensor | None) -> float | None:
    if now is None or _is_empty(now):
        return 1.0 if _is_empty(before) else 0.0
    one, other = _dense(now.detach()).double(), _dense(before).double()
    square = float((other * other).sum())
    if square == 0:
        return None
    factor = float((one * other).sum()) / square
    if float((one - factor * other).norm()) > 1e-3 * float(one.norm()):
        return None
    return 1.0 if abs(factor - 1) < _CHANGED else factor
