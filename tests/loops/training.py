"""Trains a loop for a few turns in one way, and judges what came of it by native's."""

import random
import warnings
import zlib
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import infinitybatch as ib
import numpy
import torch
from measure import worst
from torch import nn

from .loop import Loop, Training, Turn
from .ways import NATIVE, WAYS, Way

TURNS = 3
#: In place of a budget: bytes above what is live before the first step.
ROOM = "room"
#: Roundings of three turns; a model in single precision has as many bits less.
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}

#: By what is compared, and there by name: tensors after each turn.
Seen = dict[str, dict[str, torch.Tensor | None]]
KINDS = ("gradients", "parameters", "buffers", "loss", "state", "generators")


class Twice(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, *inputs: Any) -> tuple[Any, Any]:
        return self.model(*inputs), self.model(*inputs)


def numbers(name: str, value: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """What Python objects hold, as tensors."""
    if isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        yield name, value.detach().clone()
    elif isinstance(value, (bool, int, float)):
        yield name, torch.tensor(value)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from numbers(f"{name}[{key}]", item)
    elif isinstance(value, (list, tuple, deque)):
        yield f"len({name})", torch.tensor(len(value))
        for place, item in enumerate(value):
            yield from numbers(f"{name}[{place}]", item)


def plain_state(module: nn.Module) -> dict[str, torch.Tensor]:
    """Attributes that are neither parameters nor buffers."""
    return {
        key: number
        for prefix, child in module.named_modules()
        for attribute, value in vars(child).items()
        if not attribute.startswith("_")
        for key, number in numbers(f"{prefix}.{attribute}", value)
    }


def generators() -> dict[str, torch.Tensor]:
    host = {"random": random.getstate(), "numpy": numpy.random.get_state()}
    states = {name: torch.tensor(zlib.crc32(repr(s).encode())) for name, s in host.items()}
    return {"torch": torch.get_rng_state(), **states}


def uncounted(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory of NumPy's, which takes nothing of a tight budget."""
    tensor = tensor.detach()
    try:
        return torch.from_numpy(tensor.resolve_conj().numpy().copy())
    except TypeError:  # sparse, or of a type that NumPy does not know
        return tensor.clone()


def note(
    seen: Seen, turn: int, module: nn.Module, inputs: tuple[Any, ...], loss: torch.Tensor
) -> None:
    parameters = dict(module.named_parameters())
    leaves = {
        f"input {place}": value
        for place, value in enumerate(inputs)
        if isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf
    }
    now: Seen = {
        "gradients": {name: p.grad for name, p in {**parameters, **leaves}.items()},
        "parameters": dict(parameters),
        "buffers": dict(module.named_buffers()),
        "loss": {"": loss},
        "state": dict(plain_state(module)),
        "generators": dict(generators()),
    }
    for kind, tensors in now.items():
        for name, tensor in tensors.items():
            seen[kind][f"turn {turn}: {name}"] = None if tensor is None else uncounted(tensor)


def of_turn(value: Any, turn: int) -> Any:
    """Other data in each turn, as similar as those of a training are; or what a function says."""
    if callable(value):
        return value(turn)
    if not isinstance(value, torch.Tensor):
        return value
    moved = value.detach() + 0.1 * turn if value.is_floating_point() else value.clone()
    return moved.requires_grad_(value.requires_grad)


def one_or_all(values: tuple[Any, ...]) -> Any:
    return values if len(values) > 1 else values[0] if values else None


def backward_of(training: Training, way: Way, options: dict[str, Any]) -> Any:
    """Forward, loss and backward over inputs, as this way does them."""
    model, targets = training.model, one_or_all(training.targets)
    if ROOM in options:
        budget = ib.memory.stats().live + options[ROOM]
        options = {k: v for k, v in options.items() if k != ROOM} | {"memory_budget": budget}
    if way.kind == "stream":
        loss = ib.losses.coupled(training.loss) if way.coupled else training.loss
        called = Twice(model) if training.twice else model
        batch = ib.VirtualBatch(called, loss, **options)
        return lambda inputs: batch.backward(one_or_all(inputs), targets).loss

    run = ib.wrap(model, **options) if way.kind == "wrap" else model

    def backward(inputs: tuple[Any, ...]) -> torch.Tensor:
        outputs = (run(*inputs), run(*inputs)) if training.twice else run(*inputs)
        loss = training.loss(outputs, *(() if targets is None else (targets,)))
        loss.backward()
        return loss

    return backward


@contextmanager
def double_precision() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_default_dtype(before)


def train(loop: Loop, way: Way) -> Seen:
    with double_precision():
        torch.manual_seed(1)
        training = loop.make()
        torch.manual_seed(5)
        random.seed(5)
        numpy.random.seed(5)
        options = dict(way.options, match_native_rng=True) if loop.draws else way.options
        # The loss may have parameters, buffers and state of its own.
        watched = nn.ModuleDict({"model": training.model})
        if isinstance(training.loss, nn.Module):
            watched["loss"] = training.loss
        optimizer = torch.optim.SGD(watched.parameters(), lr=0.05)
        backward = backward_of(training, way, options)
        seen: Seen = {kind: {} for kind in KINDS}
        for turn in range(TURNS):
            inputs = tuple(of_turn(value, turn) for value in training.inputs)
            losses: list[torch.Tensor] = []

            def once(inputs: Any = inputs, losses: Any = losses) -> torch.Tensor:
                losses.append(backward(inputs))
                return losses[-1]

            training.turn(Turn(training.model, optimizer, once))
            note(seen, turn, watched, inputs, torch.stack([loss.detach() for loss in losses]))
        return seen


def tolerance(wanted: Seen) -> float:
    """By the coarsest type among its parameters."""
    types = {p.dtype for p in wanted["parameters"].values() if p is not None}
    return max(TOLERANCE.get(kind.to_real(), TOLERANCE[torch.float64]) for kind in types)


def room_of_native(loop: Loop) -> int:
    """What native's first step takes beside what is live before it."""
    with double_precision():
        torch.manual_seed(1)
        training = loop.make()
        backward = backward_of(training, NATIVE, {})
        inputs = tuple(of_turn(value, 0) for value in training.inputs)
        before = ib.memory.stats().live
        with ib.memory.peak() as scope:
            backward(inputs)
        return scope.peak - before


def verdict(loop: Loop, way: Way, wanted: Seen) -> str:
    """Of several budgets the worst; where none has room for a step, or it is refused in each,
    "refused", for which error says how much there is."""
    if way.rooms:
        native = room_of_native(loop)
        found = [
            verdict(loop, replace(way, rooms=(), options={ROOM: int(room * native)}), wanted)
            for room in way.rooms
        ]
        silent = [each for each in found if each.startswith("silent")]
        untyped = [each for each in found if each.startswith("untyped")]
        return next(iter([*silent, *untyped, *({"exact"} & set(found))]), "refused")
    try:
        found = train(loop, way)
    except ib.Error as error:
        return type(error).__name__
    except Exception as error:  # whatever comes out, untyped errors above all, is the verdict
        return f"untyped {type(error).__name__}"
    for kind in KINDS:
        error = worst(found[kind], wanted[kind])
        if not error <= tolerance(wanted):
            return f"silent {error:.2g}" + ("" if kind == "gradients" else f" in {kind}")
    return "exact"


def verdicts(loop: Loop) -> dict[str, str]:
    """By the names of ways; an exception of native's own is the loop's mistake."""
    wanted = train(loop, NATIVE)
    return {way.name: verdict(loop, way, wanted) for way in WAYS}
