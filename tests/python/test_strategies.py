"""Every way to compute a step, on every kind of model, held to one contract: gradients, buffers and
loss of the whole batch. With one thread and with two."""

import copy
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
from batch_norm_models import Residual
from exactness_models import FLAT, SEQUENCE, convnet, double_sequence
from fault_support import LONG
from measure import excess, gradients
from support import Calls, classification, mlp
from torch import nn
from torch.nn import functional as F

N, SIZES = 11, (1, 3, 64)
Step = Callable[[nn.Module, Any, Any, int], torch.Tensor]


def normed() -> nn.Module:
    return Residual(2).double()


def dropped() -> nn.Module:
    layers = nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 5)
    return nn.Sequential(*layers).double()


def normed_and_dropped() -> nn.Module:
    return Calls(
        lambda self, x: self.drop(self.net(x)), net=Residual(2).double(), drop=nn.Dropout(0.2)
    )


def images(channels: int, side: int) -> torch.Tensor:
    return torch.randn(N, channels, side, side, dtype=torch.float64)


# ---- models, with their inputs ----------------------------------------------------------------------

MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]] = {
    **{name: (make, lambda: classification(N)[0]) for name, make in FLAT.items()},
    **{name: (make, lambda: double_sequence(N)) for name, make in SEQUENCE.items()},
    "convnet": (convnet, lambda: images(1, 8)),
    "spectral_norm": (
        lambda: nn.utils.parametrizations.spectral_norm(mlp()[0]), lambda: classification(N)[0],
    ),
    "batch_norm": (normed, lambda: images(3, 5)),
    "dropout": (dropped, lambda: classification(N)[0]),
    "batch_norm_and_dropout": (normed_and_dropped, lambda: images(3, 5)),
}  # fmt: skip
#: Only with native's numbers is there something to compare with.
RANDOM = ("dropout", "batch_norm_and_dropout")
#: Which only a program that depends on values, or that no tape holds, refuses.
OPAQUE = ("checkpoint", "checkpoint_reentrant", "custom_function", "sets_requires_grad")


# ---- strategies -------------------------------------------------------------------------------------


def criterion(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets)


def streamed(steps: int = 1, **options: Any) -> Step:
    def run(model: nn.Module, inputs: Any, targets: Any, size: int) -> torch.Tensor:
        return by_virtual_batch(model, nn.CrossEntropyLoss(), inputs, targets, size, steps, options)

    return run


def coupled(steps: int = 1, **options: Any) -> Step:
    """The same loss, of which nobody knows that it is a sum over samples."""

    def run(model: nn.Module, inputs: Any, targets: Any, size: int) -> torch.Tensor:
        loss = ib.losses.coupled(criterion)
        return by_virtual_batch(model, loss, inputs, targets, size, steps, options)

    return run


def by_virtual_batch(
    model: nn.Module, loss: Any, inputs: Any, targets: Any, size: int, steps: int, options: Any
) -> torch.Tensor:
    if "memory_budget" not in options:
        options = {"micro_batch_size": size, **options}
    batch = ib.VirtualBatch(model, loss, **options)
    start = copy.deepcopy(model.state_dict())
    for _ in range(steps):  # the last one counts
        model.load_state_dict(start)
        model.zero_grad(set_to_none=True)
        torch.manual_seed(5)
        report = batch.backward(inputs, targets)
    return report.loss


def wrapped(steps: int = 1, **options: Any) -> Step:
    def run(model: nn.Module, inputs: Any, targets: Any, size: int) -> torch.Tensor:
        sized = {} if "memory_budget" in options else {"micro_batch_size": size}
        wrapper = ib.wrap(model, **sized, **options)
        start = copy.deepcopy(model.state_dict())
        for _ in range(steps):
            model.load_state_dict(start)
            model.zero_grad(set_to_none=True)
            torch.manual_seed(5)
            loss = criterion(wrapper(inputs), targets)
            loss.backward()
        return loss.detach()

    return run


STRATEGIES: dict[str, Step] = {
    "stream": streamed(),
    "budget": streamed(memory_budget="64MiB"),
    "replay": coupled(),
    "replay, all kept": coupled(retained_micro_batches=99),
    "rerun": coupled(use_tapes=False),
    "static graph": streamed(steps=2, static_graph=True),
    "static graph, coupled": coupled(steps=2, static_graph=True),
    "checkpoint": streamed(checkpoint_segments=3),
    "checkpoint, coupled": coupled(checkpoint_segments=3),
    "offload": streamed(offload="always"),
    "offload, coupled": coupled(offload=ib.Offload("always", host_budget="64MiB")),
    "offloaded checkpoint": coupled(checkpoint_segments=3, offload="always"),
    "native numbers": streamed(match_native_rng=True),
    "native numbers, coupled": coupled(match_native_rng=True),
    "wrap": wrapped(),
    "wrap, static graph": wrapped(steps=2, static_graph=True),
    "wrap, native numbers": wrapped(match_native_rng=True),
    "wrap, budget": wrapped(steps=2, memory_budget="64MiB"),
    "wrap, all kept": wrapped(steps=2, retained_micro_batches=99),
    "wrap, offload": wrapped(steps=2, offload="always"),
    "wrap, offloaded native numbers": wrapped(match_native_rng=True, offload="always"),
}


def refuses(strategy: str, name: str) -> bool:
    """A typed error, because code that no tape holds cannot be cut, or a program is not static."""
    if strategy.startswith(("static", "wrap, static")):
        return name in OPAQUE
    return "checkpoint" in strategy and name in OPAQUE


def may_refuse(strategy: str, name: str) -> bool:
    """Experts that the sample chooses are another program for some micro-batches."""
    return "static" in strategy and name == "experts"


def measured(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor | None]:
    buffers = {f"buffer {name}": buffer.clone() for name, buffer in model.named_buffers()}
    return {"loss": loss.detach(), **gradients(model), **buffers}


def cases() -> list[Any]:
    """Each model with each strategy that is for it; a third of them in a run that is not long."""
    every = [
        (strategy, name)
        for strategy in STRATEGIES
        for name in MODELS
        if name not in RANDOM or "native numbers" in strategy
    ]
    special = [case for case in every if case[1] in (*RANDOM, "batch_norm") or may_refuse(*case)]
    return every if LONG else special + [c for c in every if c not in special][::3]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(("strategy", "name"), cases())
def test_exact(strategy, name, threads):
    torch.set_num_threads(threads)
    make, draw = MODELS[name]
    model, inputs, targets = make(), draw(), torch.randint(5, (N,))

    def native(order: slice | torch.Tensor) -> dict[str, torch.Tensor | None]:
        whole = copy.deepcopy(model)
        torch.manual_seed(5)
        loss = criterion(whole(inputs[order].clone()), targets[order])
        loss.backward()
        return measured(whole, loss)

    wanted = native(slice(None))
    moved = [] if name in RANDOM else [native(torch.arange(N - 1, -1, -1))]
    for size in SIZES:
        found = copy.deepcopy(model)
        if refuses(strategy, name) and size < N:
            with pytest.raises(ib.Error):
                STRATEGIES[strategy](found, inputs.clone(), targets, size)
            continue
        try:
            loss = STRATEGIES[strategy](found, inputs.clone(), targets, size)
        except ib.Error as error:
            static = isinstance(error, ib.Unsupported) and "static_graph" in str(error)
            assert refuses(strategy, name) or (may_refuse(strategy, name) and static)
            continue
        assert excess(measured(found, loss), wanted, moved) == {}, size
