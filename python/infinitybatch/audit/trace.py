"""What happens to `.grad` between two steps of an optimizer, seen by hooks on its parameters."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

#: Relative difference from which on a `.grad` counts as changed.
_CHANGED = 1e-6

#: Where parameters lay and how often they were written, to tell whether one has moved since.
Places = tuple[tuple[int, int], ...]


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
    #: Calls of a clipping function since the last pass, `.grad` before the first and after the last
    #: of them, and whether something else wrote between two of them.
    clips: int = 0
    unclipped: Tensor | None = None
    clipped: Tensor | None = None
    written_between: bool = False
    #: Whether another optimizer has made a step since the first pass.
    is_late: bool = False
    _next: float | None = 1.0

    def forget_clips(self) -> None:
        self.clips, self.unclipped, self.clipped, self.written_between = 0, None, None, False

    def before_clipping(self, grad: Tensor | None) -> Tensor | None:
        """What `grad` was before it was clipped, if nothing else has written to it since."""
        if self.clips and not self.written_between and _equal(grad, self.clipped):
            return self.unclipped
        return grad

    def is_written_after_clipping(self, grad: Tensor | None) -> bool:
        """Whether clipping had an effect and was not the last that wrote to `grad`."""
        return bool(
            self.clips
            and not _equal(self.unclipped, self.clipped)
            and (self.written_between or not _equal(grad, self.clipped))
        )


class Trace:
    def __init__(self) -> None:
        self.slots: dict[nn.Parameter, Slot] = {}
        #: Passes that a GradScaler threw away, since the last step.
        self.skipped = 0
        self.paused = False
        #: Backward passes in the whole run.
        self.passes = 0
        #: Where the parameters lay at each of the passes that are remembered, the last ones.
        self.places: list[Places] = []
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

    def have_moved(self, passes: int) -> bool:
        """Whether a parameter was written to since the first of the last `passes` passes."""
        now = self._places()
        return any(then != now[: len(then)] for then in self.places[-passes:])

    def forget(self, passes: int) -> None:
        """Drops what is known of all passes but the last ones."""
        del self.places[: max(0, len(self.places) - passes)]

    def clipping_begins(self) -> None:
        for parameter, slot in self.slots.items():
            if slot.passes and not slot.clips:
                slot.unclipped = _copy(parameter.grad)
            elif slot.passes and not _equal(parameter.grad, slot.clipped):
                slot.written_between = True

    def clipping_ends(self) -> None:
        for parameter, slot in self.slots.items():
            if slot.passes:
                slot.clips += 1
                slot.clipped = _copy(parameter.grad)

    def _places(self) -> Places:
        return tuple((p._version, p.data_ptr()) for p in self.slots)

    def _incoming(self, parameter: nn.Parameter) -> None:
        if self.paused:
            return
        slot, before = self.slots[parameter], parameter.grad
        if slot.passes and not bool(torch.isfinite(_dense(slot.last)).all()) and _is_empty(before):
            # A GradScaler skipped this step, as it should.
            self.skipped = max(self.skipped, slot.passes)
            self.slots[parameter] = slot = Slot()
        slot.forget_clips()
        if slot.passes == 0:
            slot.start = None if _is_empty(before) else before.detach().clone()
        else:
            slot._next = _factor(before, slot.last)

    def _accumulated(self, parameter: nn.Parameter) -> None:
        if self.paused:
            return
        if parameter in self._seen or not self._seen:  # the first of a pass
            self.passes += 1
            self.places.append(self._places())
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
        for slot in self.slots.values():
            slot.is_late = slot.passes > 0
        self.skipped = 0


def _copy(grad: Tensor | None) -> Tensor | None:
    return None if grad is None else grad.detach().clone()


def _equal(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(_dense(one.detach()), _dense(other))


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
