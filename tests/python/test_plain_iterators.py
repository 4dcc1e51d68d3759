"""Schedules in iterators: each micro-batch sees what the whole batch's forward would have seen, and
they advance once for each logical batch. What Python cannot copy is refused once forward moves it."""

import copy
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from support import Calls, classification
from torch import nn
from torch.utils.data import DataLoader
from wrap_support import close, grads

N, SIZE, STEPS = 13, 4, 5
VALUES = [1.0, 1.5, 2.0, 2.0, 3.0, 0.5, 4.0, 1.0] * 10


def generated() -> Iterator[float]:
    yield from VALUES


def looped() -> Iterator[float]:
    for value in [1.0, 1.0, 2.0, 3.0, 5.0, 8.0] * 10:
        yield value * 2


COPIED: dict[str, Callable[[], Any]] = {
    "list": lambda: iter(VALUES),
    "tuple": lambda: iter(tuple(VALUES)),
    "range": lambda: iter(range(1, 100)),
    "reversed": lambda: reversed(VALUES),
    "count": lambda: itertools.count(1.0, 0.5),
    "cycle": lambda: itertools.cycle([1.0, 2.0, 4.0]),
    "cycle of a cycle": lambda: itertools.cycle(itertools.islice(itertools.cycle([1.0, 2.0]), 3)),
    "chain": lambda: itertools.chain([1.0, 2.0], iter(VALUES)),
    "in turn": lambda: itertools.islice(itertools.chain(*[iter(VALUES)] * 2), 0, None, 2),
    "accumulated": lambda: itertools.accumulate(VALUES),
}  # fmt: skip
FIXED: dict[str, Callable[[], Any]] = {
    "generator": generated,
    "loop": looped,
    "expression": lambda: (1 + 0.1 * step for step in range(1000)),
    "map": lambda: map(float, VALUES),
    "of a generator": lambda: itertools.islice(generated(), 50),
    "list of iterators": lambda: itertools.chain.from_iterable([[1.0, 2.0], iter(VALUES)]),
    "dict": lambda: iter(dict.fromkeys(range(1, 50))),
}
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "stream": ("stream", {"micro_batch_size": SIZE}),
    "ones": ("stream", {"micro_batch_size": 1}),
    "stream, budget": ("stream", {"memory_budget": "64MiB"}),
    "stream, static": ("stream", {"micro_batch_size": SIZE, "static_graph": True}),
    "coupled": ("coupled", {"micro_batch_size": SIZE}),
    "coupled, ones": ("coupled", {"micro_batch_size": 1}),
    "coupled, budget": ("coupled", {"memory_budget": "64MiB"}),
    "wrap": ("wrap", {"micro_batch_size": SIZE}),
    "wrap, ones": ("wrap", {"micro_batch_size": 1}),
    "wrap, budget": ("wrap", {"memory_budget": "64MiB"}),
    "segments": ("stream", {"micro_batch_size": SIZE, "checkpoint_segments": 2}),
}


def scaled(**attributes: Any) -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) / next(self.schedule)

    torch.manual_seed(0)
    model = Calls(forward, head=nn.Linear(6, 5)).double()
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


def step_of(model: nn.Module, way: str) -> Callable[[torch.Tensor, torch.Tensor], None]:
    by, options = WAYS[way]
    if by == "wrap":
        wrapped = ib.wrap(model, **options)
        return lambda x, y: F.cross_entropy(wrapped(x), y).backward()
    loss = ib.losses.coupled(F.cross_entropy) if by == "coupled" else nn.CrossEntropyLoss()
    batch = ib.VirtualBatch(model, loss, **options)
    return lambda x, y: batch.backward(x, y) and None


def check(theirs: nn.Module, model: nn.Module, way: str) -> None:
    step = step_of(model, way)
    x, y = classification(N)
    for _ in range(STEPS):
        theirs.zero_grad()
        model.zero_grad()
        F.cross_entropy(theirs(x), y).backward()
        step(x, y)
        close(grads(model), grads(theirs), 1e-12)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", COPIED)
def test_an_iterator_advances_once_for_each_batch(kind: str, way: str) -> None:
    theirs, model = (scaled(schedule=COPIED[kind]()) for _ in range(2))
    check(theirs, model, way)
    for _ in range(7):
        assert next(model.schedule) == next(theirs.schedule)


@pytest.mark.parametrize("way", ["stream", "coupled", "wrap, budget"])
@pytest.mark.parametrize("where", ["list", "dict", "closure", "two", "lazy", "restarted"])
def test_where_iterators_lie(where: str, way: str) -> None:
    def made() -> nn.Module:
        model = scaled()
        held = iter(VALUES)

        def value(self: Any) -> float:
            if where == "list":
                return next(self.kept[1])
            if where == "dict":
                return next(self.kept["at"][0])
            if where == "closure":
                return next(held)
            if where == "two":  # one iterator in two places
                return next(self.a) + 3 * next(self.b)
            if where == "lazy" and self.kept is None:
                self.kept = iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
            if where == "restarted":
                found = next(self.kept, None)
                if found is None:
                    self.kept = iter([1.0, 3.0])
                    found = next(self.kept)
                return found
            return next(self.kept)

        def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
            return self.head(x) / value(self)

        model = Calls(forward, head=model.head)
        if where == "two":
            model.a = model.b = held
        else:
            model.kept = {"list": [0, held], "dict": {"at": [held]}, "restarted": iter([2.0])}.get(
                where
            )
        return model

    check(made(), made(), way)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", FIXED)
def test_what_cannot_be_copied_is_refused(kind: str, way: str) -> None:
    schedule = FIXED[kind]()
    next(schedule)  # where it is from now on at the same place of its code
    model = scaled(schedule=schedule)
    step = step_of(model, way)
    for _ in range(2):
        with pytest.raises((ib.Unsupported, ib.CouplingError), match="schedule|taped|static"):
            step(*classification(N))
    assert model.head.weight.grad is None


def shared() -> dict[str, Any]:
    held = iter(VALUES)
    return {"schedule": held, "other": itertools.islice(held, 40)}


def in_a_tuple() -> dict[str, Any]:
    held = iter(VALUES)
    return {"schedule": held, "pair": (held, 0)}


@pytest.mark.parametrize("way", ["stream", "coupled", "wrap"])
@pytest.mark.parametrize("kind", [shared, in_a_tuple])
def test_iterators_that_move_together_are_refused(kind: Any, way: str) -> None:
    model = scaled(**kind())
    with pytest.raises(ib.Unsupported, match="schedule|other|pair"):
        step_of(model, way)(*classification(N))


@pytest.mark.parametrize("by", ["stream", "coupled", "wrap"])
def test_one_number_for_each_sample_is_refused(by: str) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) * x.new_tensor([next(self.schedule) for _ in x])[:, None]

    model = Calls(forward, head=nn.Linear(6, 5)).double()
    model.schedule = iter(VALUES)
    with pytest.raises(ib.CouplingError, match="schedule"):
        step_of(model, by)(*classification(N))
    assert next(model.schedule) == VALUES[0]


@pytest.mark.parametrize("way", [*WAYS])
def test_what_forward_leaves_alone_is_left_alone(way: str) -> None:
    """Among it a loader in the middle of an epoch and a generator that runs."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)

    torch.manual_seed(0)
    model = Calls(forward, head=nn.Linear(6, 5)).double()
    theirs = Calls(forward, head=nn.Linear(6, 5)).double()
    theirs.load_state_dict(model.state_dict())
    held = {kind: make() for kind, make in (COPIED | FIXED).items()}
    model.held, model.count, model.made = dict(held), itertools.count(), generated()
    loader = model.loader = iter(DataLoader(list(range(6)), batch_size=2))
    model.batches = enumerate(loader)
    next(loader)
    count, made = model.count, model.made

    def epoch() -> Iterator[None]:
        check(theirs, model, way)
        yield

    model.epoch = epoch()
    next(model.epoch)
    assert model.loader is loader and model.count is count and model.made is made
    assert all(model.held[kind] is held[kind] for kind in held)
    assert next(count) == 0 and next(made) == VALUES[0]
    for kind, make in (COPIED | FIXED).items():
        assert next(held[kind]) == next(make())
    assert next(loader).tolist() == [2, 3]


@pytest.mark.parametrize("kind", ["count", "generator"])
def test_a_loss_that_fails_behind_its_schedule(kind: str) -> None:
    """A step runs out of memory once the loss has taken a value."""
    torch.manual_seed(0)
    theirs = nn.Linear(6, 5).double()
    model = copy.deepcopy(theirs)
    schedule, wanted = (COPIED | FIXED)[kind](), (COPIED | FIXED)[kind]()
    fails: list[bool] = []

    def loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        value = F.cross_entropy(outputs, targets) * next(schedule)
        if fails:
            fails.clear()
            with ib.memory.limit("1MiB"):
                torch.empty(1 << 20)
        return value

    batch = ib.VirtualBatch(model, ib.losses.coupled(loss), memory_budget="64MiB")
    x, y = classification(N)
    for step in range(3):
        theirs.zero_grad()
        model.zero_grad()
        (F.cross_entropy(theirs(x), y) * next(wanted)).backward()
        if step == 2:
            fails.append(True)
            error = ib.BudgetExceeded if kind == "count" else ib.Unsupported
            with pytest.raises(error, match="loss"):
                batch.backward(x, y)
            assert kind == "generator" or next(schedule) == 2.0
            return
        batch.backward(x, y)
        close(grads(model), grads(theirs), 1e-12)


@pytest.mark.parametrize("way", ["stream", "coupled", "wrap", "wrap, budget"])
def test_a_training_loop_that_is_a_generator_of_the_model(way: str) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(x))

    def loop() -> Iterator[None]:
        step, (x, y) = step_of(model, way), classification(N)
        for index in range(4):
            model.zero_grad()
            for _ in range(index % 2 + 1):
                step(x, y)
            if index == 1:
                yield

    torch.manual_seed(0)
    model = Calls(forward, head=nn.Linear(6, 5), norm=nn.BatchNorm1d(6)).double()
    model.loop = loop()
    assert list(model.loop) == [None]


def test_one_micro_batch_without_a_budget_is_native() -> None:
    theirs, model = (scaled(schedule=generated()) for _ in range(2))
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=N)
    x, y = classification(N)
    for _ in range(STEPS):
        theirs.zero_grad()
        model.zero_grad()
        F.cross_entropy(theirs(x), y).backward()
        batch.backward(x, y)
        close(grads(model), grads(theirs), 1e-12)


def test_an_iterator_in_a_partial() -> None:
    model = scaled()
    draw = partial(next, iter(VALUES))
    model.forward = lambda x: model.head(x) / draw()
    with pytest.raises(ib.Unsupported, match="forward"):
        step_of(model, "stream")(*classification(N))
