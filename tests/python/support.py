"""The oracle: what torch itself computes for the whole batch at once."""

import copy
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import infinitybatch as ib
import pytest
import torch
from measure import excess, gradients, worst
from torch import nn


class Tally:
    """Counts what runs, those runs too that do not count: no snapshot of plain state looks here."""

    __slots__ = ("count", "seen")

    def __init__(self) -> None:
        self.count = 0
        self.seen: list[Any] = []

    def __call__(self, *_: Any) -> None:
        self.count += 1

    def note(self, value: Any) -> None:
        self.count += 1
        self.seen.append(value)


class Log(list[Any]):
    """A list that keeps what runs noted that do not count: no snapshot of plain state undoes it."""


def until_quiet(test: Callable[..., None]) -> Callable[..., None]:
    """For what clocks and threads decide: no other test runs beside it, and as other work on the
    machine spoils an attempt, it is made again, for a minute. What would be wrong on a quiet machine
    fails every one of them."""

    @functools.wraps(test)
    def attempts(*args: Any, **kwargs: Any) -> None:
        end = time.monotonic() + 60
        while True:
            try:
                return test(*args, **kwargs)
            except AssertionError:
                if time.monotonic() > end:
                    raise

    return pytest.mark.alone(attempts)


def live_bytes() -> int:
    """What tensors occupy where those of the tests are made: inputs lie there too."""
    if torch.get_default_device().type == "cpu":
        return ib.memory.stats("cpu").live
    return torch.accelerator.memory_allocated()


def call(model: Any, inputs: Any) -> Any:
    """Calls a model as VirtualBatch does."""
    if isinstance(inputs, dict):
        return model(**inputs)
    if type(inputs) in (tuple, list):
        return model(*inputs)
    return model(inputs)


def criterion_value(criterion: Any, outputs: Any, targets: Any) -> torch.Tensor:
    as_tuple = lambda x: x if isinstance(x, (tuple, list)) else (x,)  # noqa: E731
    return criterion(*as_tuple(outputs), *as_tuple(targets))


# A step that looks runs forward on more rows than a micro-batch has, and on as many as a micro-batch
# has at three places among them.
LOOKS = 4


def looks(step: int) -> int:
    """How many forwards look at rows in this step with a kind of batch that is split (the first one
    is 0): steps 1, 2, 4, 8, ... look."""
    return 0 if step & (step + 1) else LOOKS


@dataclass
class Result:
    loss: torch.Tensor
    gradients: dict[str, torch.Tensor | None]
    buffers: dict[str, torch.Tensor]
    model: nn.Module
    report: ib.StepReport | None = None


def result_of(model: nn.Module, loss: torch.Tensor) -> Result:
    gradients = {name: p.grad for name, p in model.named_parameters()}
    buffers = {name: b.detach().clone() for name, b in model.named_buffers()}
    return Result(loss.detach(), gradients, buffers, model)


def native(model: nn.Module, criterion: Any, inputs: Any, targets: Any) -> Result:
    """One step of a copy of `model`, the whole batch at once."""
    model = copy.deepcopy(model)
    inputs = copy.deepcopy(inputs)  # models may write to them
    loss = criterion_value(criterion, call(model, inputs), targets)
    loss.backward()
    return result_of(model, loss)


def ours(model: nn.Module, loss: Any, inputs: Any, targets: Any, **options: Any) -> Result:
    """The same step of another copy, by VirtualBatch."""
    model = copy.deepcopy(model)
    report = ib.VirtualBatch(model, loss, **options).backward(inputs, targets)
    result = result_of(model, report.loss)
    result.report = report
    return result


def worst_error(found: Result, wanted: Result) -> float:
    """The largest relative error of a gradient, a buffer or the loss."""
    return max(
        worst(found.gradients, wanted.gradients),
        worst(found.buffers, wanted.buffers),
        worst({"loss": found.loss}, {"loss": wanted.loss}),
    )


def excess_in_single(
    found: Result, truth: Result, whole: Sequence[Result], dtype: torch.dtype = torch.float32
) -> dict[str, tuple[float, float]]:
    """Gradients outside of contract 1 in a type coarser than float64.

    Args:
        truth: native in float64.
        whole: native in `dtype`, in one or several orders of the batch: what one order rounds is
            one draw, by luck a tenth of what the next one does.
    """
    roundings = 8 * torch.finfo(dtype).eps
    moved, given = [one.gradients for one in whole], (found.gradients, truth.gradients)
    return excess(*given, moved, least=roundings, times=2, any_type=True)


def assert_same_buffers(found: Result, wanted: Result, tolerance: float) -> None:
    """Each number of each buffer, however much larger its neighbours are."""
    assert found.buffers.keys() == wanted.buffers.keys()
    for name, buffer in wanted.buffers.items():
        torch.testing.assert_close(
            found.buffers[name], buffer, rtol=tolerance, atol=0, msg=lambda m, n=name: f"{n}: {m}"
        )


def assert_exact(
    model: nn.Module,
    criterion: Any,
    inputs: Any,
    targets: Any,
    sizes: tuple[int, ...] = (1, 3, 64),
    tolerance: float = 1e-12,
    wrap: Callable[[Any], Any] = lambda x: x,
    **options: Any,
) -> None:
    """`model` gives the same loss, gradients and buffers at every size, and planned, as at once."""
    wanted = native(model, criterion, inputs, targets)
    ways = [{"micro_batch_size": size} for size in sizes] + [{"memory_budget": "256MiB"}]
    for way in ways:
        found = ours(model, wrap(criterion), inputs, targets, **way, **options)
        worst = worst_error(found, wanted)
        assert worst <= tolerance, f"{way}: relative error {worst}"
        assert_same_buffers(found, wanted, tolerance)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return 2 * ctx.saved_tensors[0] * gradient


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * 2


class Calls(nn.Module):
    """A module made of a function, for models of a few lines."""

    def __init__(self, forward: Callable[..., Any], **children: Any) -> None:
        super().__init__()
        self.function = forward
        for name, child in children.items():
            if isinstance(child, torch.Tensor) and not isinstance(child, nn.Parameter):
                self.register_buffer(name, child)
            else:
                setattr(self, name, child)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


def native_gradients(
    model: nn.Module, criterion: Any, inputs: Any, targets: Any
) -> dict[str, torch.Tensor | None]:
    """Of the parameters of `model` for the whole batch at once."""
    whole = copy.deepcopy(model)
    criterion(whole(inputs), targets).backward()
    return gradients(whole)


def gradient_error(model: nn.Module, wanted: dict[str, torch.Tensor | None]) -> float:
    """The largest relative error of a parameter's gradient."""
    return worst(gradients(model), wanted)


def mlp(width: int = 8, classes: int = 5) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, width), nn.Tanh(), nn.Linear(width, classes)).double()


def classification(n: int = 13, classes: int = 5) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 6, dtype=torch.float64), torch.randint(classes, (n,))
