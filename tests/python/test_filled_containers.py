"""Lists, dicts and objects that forward fills: each micro-batch finds what the step found, and after
the step they hold what one forward of the whole batch leaves."""

import collections
import copy
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from support import classification
from torch import nn
from wrap_support import close, grads

N, SIZE, STEPS = 13, 4, 5


@dataclasses.dataclass
class Record:
    n: int = 0
    seen: list[int] = dataclasses.field(default_factory=list)
    last: float | None = None


class Fills(nn.Module):
    """`fill(self)` changes what lies in Python and returns what forward makes of it."""

    def __init__(self, fill: Callable[[Any], float], norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.head = nn.Linear(8, 5)
        self.fill = [fill]  # a list: no method of this object
        self.history: list[Any] = []
        self.d: dict[Any, Any] = {}
        self.ordered: Any = collections.OrderedDict(a=1)
        self.counter: Any = collections.Counter()
        self.default: Any = collections.defaultdict(list)
        self.deque: Any = collections.deque([1, 2], maxlen=3)
        self.set: set[Any] = {0}
        self.none: Any = None
        self.text = "a"
        self.number = 0
        self.record = Record()
        self.config = SimpleNamespace(inner=SimpleNamespace(n=0, seen=[]))
        self.pool = [0.1 * i for i in range(40)]
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = self.fill[0](self)
        return self.head((self.norm(self.first(x)) * factor).tanh())

    def left(self) -> Any:
        names = ("history", "d", "ordered", "counter", "default", "deque", "set", "none", "text")
        more = ("number", "record", "config", "pool")
        return {name: getattr(self, name) for name in names + more} | {
            "child": getattr(self.first, "seen", None)
        }


FILLS: dict[str, Callable[[Any], float]] = {}


def fill(function: Callable[[Any], float]) -> Callable[[Any], float]:
    FILLS[function.__name__] = function
    return function


@fill
def appended_unread(self: Any) -> float:
    self.history.append(1)
    return 1.0


@fill
def appended_read_from_the_third_on(self: Any) -> float:
    self.history.append(0.1 * len(self.history) + 0.3)
    return 1.0 + self.history[2] if len(self.history) > 2 else 1.0


@fill
def appended_read_at_once(self: Any) -> float:
    self.history.append(len(self.history))
    return 0.2 + 0.1 * self.history[-1]


@fill
def extended_read_before(self: Any) -> float:
    factor = 1.0 + 0.1 * sum(self.history[:5])
    self.history.extend([1, 2])
    return factor


@fill
def popped(self: Any) -> float:
    return 0.5 + self.pool.pop()


@fill
def popped_in_front(self: Any) -> float:
    del self.pool[:2]
    return 0.5 + self.pool[0]


@fill
def get_and_set(self: Any) -> float:
    self.d["n"] = self.d.get("n", 0) + 1
    return 1.0


@fill
def get_and_set_read(self: Any) -> float:
    self.d["n"] = self.d.get("n", 0) + 1
    return 1.0 if self.d["n"] < 3 else 0.4


@fill
def setdefault(self: Any) -> float:
    self.d.setdefault("made", []).append(len(self.d))
    return 1.0 / (1 + len(self.d["made"]))


@fill
def keyed_by_step(self: Any) -> float:
    self.d[len(self.d)] = 0.1
    return 1.0 + sum(self.d.values())


@fill
def counter(self: Any) -> float:
    self.counter["calls"] += 1
    self.counter.update(["other", "other"])
    return 1.0 / (1 + self.counter["other"])


@fill
def default_list(self: Any) -> float:
    self.default["seen"].append(3)
    self.default[len(self.default)].append(1)
    return 1.0 / len(self.default)


@fill
def a_deque(self: Any) -> float:
    self.deque.append(self.deque[-1] + 1)
    return 0.1 * self.deque[0]


@fill
def a_set(self: Any) -> float:
    self.set.add(len(self.set))
    return 1.0 / len(self.set)


@fill
def ordered(self: Any) -> float:
    self.ordered["n"] = self.ordered.get("n", 0) + 1
    self.ordered.move_to_end("a")
    return 0.3 * self.ordered["n"]


@fill
def nested(self: Any) -> float:
    self.d.setdefault("a", {}).setdefault("b", []).append(1)
    return 0.3 * len(self.d["a"]["b"])


@fill
def deeply_nested(self: Any) -> float:
    at = self.d
    for key in "abcd":
        at = at.setdefault(key, {})
    at["n"] = at.get("n", 0) + 1
    return 0.3 * at["n"]


@fill
def of_a_child(self: Any) -> float:
    if not hasattr(self.first, "seen"):
        self.first.seen = []
    self.first.seen.append(len(self.first.seen))
    return 0.3 + 0.1 * sum(self.first.seen[3:])


@fill
def of_an_object(self: Any) -> float:
    self.config.inner.n += 1
    self.config.inner.seen.append(self.config.inner.n)
    return 0.3 + 0.1 * self.config.inner.seen[-1]


@fill
def of_a_dataclass(self: Any) -> float:
    self.record.n += 1
    self.record.seen.append(self.record.n)
    self.record.last = 0.5 * self.record.n
    return 0.3 + self.record.last


@fill
def a_dataclass_anew(self: Any) -> float:
    self.record = dataclasses.replace(self.record, n=self.record.n + 1)
    return 0.3 + 0.1 * self.record.n


@fill
def none_then_value(self: Any) -> float:
    self.none = 1.0 if self.none is None else self.none / 2
    return self.none


@fill
def text(self: Any) -> float:
    self.text += "b"
    return 0.1 * len(self.text)


@fill
def tensors_in_a_list(self: Any) -> float:
    self.history.append(torch.full((2,), 0.5 + len(self.history), dtype=torch.float64))
    return self.history[2].sum() / 10 if len(self.history) > 2 else 1.0


@fill
def begins_later(self: Any) -> float:
    self.number += 1
    if self.number > 2:
        self.history.append(self.number)
    return 1.0 + 0.1 * len(self.history)


WAYS: dict[str, dict[str, Any]] = {
    "streamed": {"micro_batch_size": SIZE},
    "coupled": {"micro_batch_size": SIZE},
    "norm": {"micro_batch_size": SIZE},
    "wrap": {"micro_batch_size": SIZE},
    "wrap, norm": {"micro_batch_size": SIZE},
    "budget": {"memory_budget": "64MiB"},
}


def runner(model: nn.Module, way: str) -> Callable[[torch.Tensor, torch.Tensor], None]:
    options = STATIC if way == "static" else WAYS[way]
    if way.startswith("wrap"):
        wrapped = ib.wrap(model, **options)
        return lambda x, y: F.cross_entropy(wrapped(x), y).backward()
    loss = ib.losses.coupled(F.cross_entropy) if way == "coupled" else nn.CrossEntropyLoss()
    batch = ib.VirtualBatch(model, loss, **options)
    return lambda x, y: batch.backward(x, y) and None


STATIC = {"micro_batch_size": SIZE, "static_graph": True}
#: With `static_graph` a forward that reads what it fills is recorded in each step.
READ_AT_ONCE = ["appended_read_at_once", "popped", "setdefault", "counter", "default_list"]
READ_AT_ONCE += ["a_deque", "a_set", "nested", "of_an_object", "of_a_dataclass", "a_dataclass_anew"]
CASES = [(kind, way) for kind in FILLS for way in WAYS] + [
    (kind, "static") for kind in READ_AT_ONCE
]


@pytest.mark.parametrize("kind, way", CASES)
def test_they_hold_what_one_forward_leaves(kind: str, way: str) -> None:
    theirs = Fills(FILLS[kind], norm="norm" in way)
    model = copy.deepcopy(theirs)
    run = runner(model, way)
    x, y = classification(N)
    for step in range(STEPS):
        theirs.zero_grad()
        model.zero_grad()
        F.cross_entropy(theirs(x), y).backward()
        run(x, y)
        close(grads(model), grads(theirs), 1e-11)
        assert repr(model.left()) == repr(theirs.left()), f"step {step}"


DEPENDS: dict[str, Callable[[Any, torch.Tensor], float]] = {}


def depends(function: Callable[[Any, torch.Tensor], float]) -> Callable[..., float]:
    DEPENDS[function.__name__] = function
    return function


@depends
def a_mean_read_next(self: Any, x: torch.Tensor) -> float:
    factor = 1.0 if self.none is None else 1.0 + self.none
    self.none = x.mean().item()
    return factor


@depends
def means_read_from_the_third_on(self: Any, x: torch.Tensor) -> float:
    self.history.append(x.mean().item())
    return 1.0 + self.history[2] if len(self.history) > 2 else 1.0


@depends
def the_first_read_from_the_third_on(self: Any, x: torch.Tensor) -> float:
    self.history.append(x.norm().item())
    return 1.0 + self.history[0] if len(self.history) > 2 else 1.0


@depends
def tensors_read_next(self: Any, x: torch.Tensor) -> float:
    factor = 1.0 + self.history[-1].sum().item() if self.history else 1.0
    self.history.append(x.mean(0))
    return factor


@depends
def tensors_read_by_ops(self: Any, x: torch.Tensor) -> Any:
    factor = 1.0 + self.history[-1].mean() if self.history else 1.0
    self.history.append(x.mean(0))
    return factor


@depends
def labels_counted_and_read(self: Any, x: torch.Tensor) -> float:
    factor = 1.0 / (1 + self.counter["positive"])
    self.counter["positive"] += int((x[:, 0] > 0).sum())
    return factor


@depends
def a_maximum_of_a_dict(self: Any, x: torch.Tensor) -> float:
    factor = 1.0 + self.d.get("max", 0.0)
    self.d["max"] = max(self.d.get("max", 0.0), float(x.max()))
    return factor


@depends
def changed_by_a_later_micro_batch(self: Any, x: torch.Tensor) -> float:
    factor = 1.0 + 0.5 * len(self.history)
    if len(x) < 4 or float(x[0, 0]) == 7.0:
        self.history.append(float(x[0, 1]))
    return factor


class Depends(Fills):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = self.fill[0](self, x)
        return self.head((self.norm(self.first(x)) * factor).tanh())


@pytest.mark.parametrize("way", ["streamed", "coupled", "wrap", "norm", "budget"])
@pytest.mark.parametrize("kind", DEPENDS)
def test_what_depends_on_the_samples_is_exact_or_named(kind: str, way: str) -> None:
    theirs = Depends(DEPENDS[kind], norm=way == "norm")
    model = copy.deepcopy(theirs)
    run = runner(model, way)
    x, y = classification(N)
    for _ in range(STEPS):
        theirs.zero_grad()
        model.zero_grad()
        F.cross_entropy(theirs(x), y).backward()
        try:
            run(x, y)
        except ib.CouplingError:
            return
        close(grads(model), grads(theirs), 1e-11)


@pytest.mark.parametrize("way", ["streamed", "coupled", "wrap", "norm"])
def test_numbers_that_add_up_are_those_of_the_whole_batch(way: str) -> None:
    def fill(self: Any, x: torch.Tensor) -> float:
        self.number += len(x)
        self.none = len(x)
        self.d["rows"] = self.d.get("rows", 0) + len(x)
        for label in (x[:, 0] > 0).tolist():
            self.counter[label] += 1
        self.history.append(len(x))
        self.record.last = x.mean().item()
        return 1.0

    theirs = Depends(fill, norm="norm" in way)
    model = copy.deepcopy(theirs)
    run = runner(model, way)
    x, y = classification(N)
    for _ in range(3):
        theirs(x)
        run(x, y)
        mean = model.record.last
        assert mean == pytest.approx(theirs.record.last, rel=1e-12)
        theirs.record.last = mean
        assert dict(model.counter) == dict(theirs.counter)
        theirs.counter = model.counter
        assert repr(model.left()) == repr(theirs.left())


@pytest.mark.parametrize("way", ["streamed", "coupled", "wrap"])
def test_logs_are_nobodys_concern(way: str) -> None:
    """Of what nothing reads and no rule puts together the last micro-batch's stays."""

    def fill(self: Any, x: torch.Tensor) -> float:
        self.history.append(x.norm().item())
        self.d["last"] = x.std().item()
        self.d[f"step {len(self.d)}"] = x.detach()
        self.set.add(round(float(x[0, 0]), 3))
        self.deque.append(x.mean(0))
        self.text = f"{len(x)} rows"
        return 1.0

    theirs = Depends(fill)
    model = copy.deepcopy(theirs)
    run = runner(model, way)
    x, y = classification(N)
    for step in range(20):
        theirs.zero_grad()
        model.zero_grad()
        F.cross_entropy(theirs(x), y).backward()
        run(x, y)
        close(grads(model), grads(theirs), 1e-11)
        assert len(model.history) == step + 1 and len(model.d) == len(theirs.d)


def test_in_a_training() -> None:
    theirs = Fills(FILLS["appended_read_at_once"])
    model = copy.deepcopy(theirs)
    x, y = classification(N)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        F.cross_entropy(theirs(x), y).backward()
        optimizer.step()
    trainer = ib.Trainer(
        model, nn.CrossEntropyLoss(), torch.optim.SGD(model.parameters(), lr=0.1),
        loader=[(x, y)], micro_batch_size=SIZE,
    )  # fmt: skip
    trainer(4)
    close(list(model.parameters()), list(theirs.parameters()), 1e-11)
    assert model.history == theirs.history
