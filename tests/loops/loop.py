"""What a loop is, and the pieces that most are made of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from support import Calls
from torch import nn
from torch.nn import functional as F

#: Samples of a batch: micro-batches of three are of one length, those of four are not.
N = 9


@dataclass
class Turn:
    """One turn of a loop, for those that are more than one backward and one step."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    #: Forward, loss and backward over the turn's batch, natively or by ours; returns the loss.
    backward: Callable[[], torch.Tensor]


def one_backward(turn: Turn) -> None:
    turn.optimizer.zero_grad()
    turn.backward()
    turn.optimizer.step()


@dataclass
class Training:
    """A model, its loss and its data; made anew for each way, so that hooks and closures are too."""

    model: nn.Module
    #: Called as VirtualBatch calls it: loss(outputs, targets), or loss(outputs) without targets.
    loss: Callable[..., torch.Tensor]
    #: Tensors, which each turn moves a little, or functions that give those of a turn.
    inputs: tuple[Any, ...]
    targets: tuple[Any, ...] = ()
    #: The model is called two times, and the loss gets the pair.
    twice: bool = False
    turn: Callable[[Turn], None] = one_backward


@dataclass(frozen=True)
class Loop:
    name: str
    theme: str
    make: Callable[[], Training]
    #: It draws random numbers: ours are asked for native's.
    draws: bool = False


#: All loops by name, in the order of their themes.
LOOPS: dict[str, Loop] = {}


def loop(make: Callable[[], Training], draws: bool = False) -> Callable[[], Training]:
    assert make.__name__ not in LOOPS, make.__name__
    theme = make.__module__.rpartition(".")[2]
    LOOPS[make.__name__] = Loop(make.__name__, theme, make, draws)
    return make


def loop_that_draws(make: Callable[[], Training]) -> Callable[[], Training]:
    return loop(make, draws=True)


def features(*shape: int) -> torch.Tensor:
    return torch.randn(N, *(shape or (6,)))


def labels(classes: int = 4) -> torch.Tensor:
    return torch.arange(N) % classes


def lengths(longest: int = 5) -> torch.Tensor:
    return torch.arange(N) % longest + 1


def linear(inputs: int = 6, outputs: int = 4) -> nn.Linear:
    return nn.Linear(inputs, outputs)


def classify(model: nn.Module, *inputs: Any) -> Training:
    return Training(model, F.cross_entropy, inputs or (features(),), (labels(),))


def regress(model: nn.Module, *inputs: Any, width: int = 4) -> Training:
    return Training(model, F.mse_loss, inputs or (features(),), (features(width),))


def minimise_rows(model: nn.Module, *inputs: Any) -> Training:
    """The model computes a loss of each sample."""
    return Training(model, torch.mean, inputs or (features(),))


def by_head(forward: Callable[..., Any], **children: Any) -> Calls:
    """A module of a function with a linear `head`."""
    return Calls(forward, head=linear(), **children)
