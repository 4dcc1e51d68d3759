"""Ops that are given a number made of how many samples there are: `x / len(x)` in forward."""

import copy
import math
import random
from collections.abc import Callable

import infinitybatch as ib
import pytest
import torch
from support import LOOKS, Calls, Tally, classification, mlp
from torch import nn
from wrap_support import close, contrastive, grads

N = 12
X, Y = classification(N)


class Scaled(nn.Module):
    def __init__(self, scale: Callable[[torch.Tensor], torch.Tensor], norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        middle = nn.BatchNorm1d(8) if norm else nn.Tanh()
        self.net = nn.Sequential(nn.Linear(6, 8), middle, nn.Linear(8, 5)).double()
        self.scale = scale
        self.calls = Tally()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls()
        return self.scale(self.net(x))


COUNTS = {
    "division": (lambda x: x / len(x), "aten::div"),
    "in place": (lambda x: x.clone().div_(x.shape[0]), "aten::div_"),
    "a factor": (lambda x: x * (1.0 / x.size(0)), "aten::mul"),
    "a root": (lambda x: x / math.sqrt(len(x)), "aten::div"),
    "degrees of freedom": (lambda x: x * 3 / (len(x) - 1), "aten::div"),
    "a shift": (lambda x: x + len(x), "aten::add"),
    "a tensor": (lambda x: x * torch.tensor(float(len(x))), "aten::mul"),
    "a full tensor": (lambda x: x / torch.full((), len(x)), "aten::div"),
    "a scale of each": (lambda x: x / torch.full_like(x, len(x)), "aten::full_like"),
    "alpha": (lambda x: torch.add(x, x.sin(), alpha=len(x)), "aten::add"),
    "twice": (lambda x: x / (2 * len(x)), "aten::div"),
    "elements": (lambda x: x / x.numel(), "aten::div"),
    "one more": (lambda x: x / (len(x) + 1), "aten::div"),
    "a row of it": (lambda x: x / torch.full((1, 5), len(x)), "aten::div"),
    "positions": (lambda x: x * torch.arange(len(x))[:, None], "aten::mul"),
}
WAYS = [
    "streaming",
    "coupled",
    "checkpoints",
    "wrap",
    "no gradients",
    "batch norm",
    "batch norm and a coupled loss",
    "batch norm in wrap",
]


def run(model: nn.Module, way: str, size: int, **options: object) -> None:
    if way == "checkpoints":
        options["checkpoint_segments"] = 3
    if way.endswith("wrap"):
        contrastive(ib.wrap(model, micro_batch_size=size, **options)(X)).backward()
    elif way == "no gradients":
        with torch.no_grad():
            ib.wrap(model, micro_batch_size=size, **options)(X)
    elif "coupled" in way:
        loss = ib.losses.coupled(lambda outputs: contrastive(outputs))
        ib.VirtualBatch(model, loss, micro_batch_size=size, **options).backward(X)
    else:
        loss = nn.CrossEntropyLoss()
        ib.VirtualBatch(model, loss, micro_batch_size=size, **options).backward(X, Y)


# 1 tells nothing, and 2 and one half too little.
UNTOLD = {("degrees of freedom", 3), ("a root", 4)}
PLACES = [(count, size) for count in COUNTS for size in (4, 3, 5) if (count, size) not in UNTOLD]


@pytest.mark.parametrize(("count", "size"), PLACES)
@pytest.mark.parametrize("way", WAYS)
def test_a_count_is_named(count: str, way: str, size: int) -> None:
    scale, op = COUNTS[count]
    model = Scaled(scale, norm="batch norm" in way)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ib.CouplingError, match=rf"{op} is given a number that counts the samples"):
        run(model, way, size)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


# Seen where a recording of another length is there anyway: two of the twelve are left over. A
# separable loss needs no recording of them.
MADE_OF_COUNTS = {
    "logarithm": (lambda x: x * math.log(len(x) + 1), "aten::mul"),
    "fourth root": (lambda x: x / len(x) ** 0.25, "aten::div"),
    "more": (lambda x: x + (len(x) + 3), "aten::add"),
    "tenth": (lambda x: x * (0.1 * len(x)), "aten::mul"),
    "exponent": (lambda x: x.abs() ** (1 / len(x)), "aten::pow"),
    "slope": (lambda x: nn.functional.leaky_relu(x, 0.5 / len(x)), "aten::leaky_relu"),
    "bounds": (lambda x: x.clamp(-0.2 / len(x), 0.2 / len(x)), "aten::clamp"),
    "a table of positions": (
        lambda x: x + torch.ones(20, 5).double().cumsum(0)[torch.arange(len(x))],
        "aten::add",
    ),
}


@pytest.mark.parametrize("count", MADE_OF_COUNTS)
@pytest.mark.parametrize("way", ["coupled", "checkpoints", "wrap", "no gradients"])
def test_what_two_lengths_tell(count: str, way: str) -> None:
    scale, op = MADE_OF_COUNTS[count]
    with pytest.raises(ib.CouplingError, match=rf"{op} is given a number that counts the samples"):
        run(Scaled(scale), way, 5)


def test_positions_among_the_outputs() -> None:
    model = Calls(lambda self, x: (self.net(x), torch.arange(len(x))), net=mlp())
    loss = ib.losses.coupled(lambda outputs: nn.functional.cross_entropy(outputs[0], outputs[1]))
    with pytest.raises(ib.CouplingError, match="aten::arange is given a number"):
        ib.VirtualBatch(model.double(), loss, micro_batch_size=2).backward(X[:5])


# Cuts for memory are exact or not at all.
@pytest.mark.parametrize("way", [way for way in WAYS if way != "checkpoints"])
def test_each_micro_batch_may_be_a_batch_of_its_own(way: str) -> None:
    run(Scaled(COUNTS["division"][0]), way, 4, batch_coupling="per_micro_batch")


@pytest.mark.parametrize("coupled", [False, True])
def test_a_budget_answers_with_the_whole_batch(coupled: bool) -> None:
    model = Scaled(COUNTS["division"][0])
    twin = copy.deepcopy(model)
    loss = nn.CrossEntropyLoss()
    for _ in range(3):
        given = ib.losses.coupled(lambda z, y: loss(z, y)) if coupled else loss
        batch = ib.VirtualBatch(model, given, memory_budget="64MiB")
        for _ in range(3):
            model.zero_grad()
            report = batch.backward(X, Y)
            assert report.micro_batch_sizes == [N]
    loss(twin(X), Y).backward()
    close(grads(model), grads(twin), 1e-12)


INNOCENT = {
    "a constant that is the size": lambda x: x / 4,
    "half": lambda x: 0.5 * x * (1 + torch.tanh(x)),
    "positions": lambda x: x[torch.arange(len(x))] * 4,
    "sizes": lambda x: x.reshape(len(x), 1, 5).expand(len(x), 4, 5).mean(1) * 2,
    "chance": lambda x: x * random.choice([1.0]) + 3.7,
    "positions in a sequence": lambda x: x + torch.arange(5) * 0.1,
    "zeros": lambda x: x + torch.zeros(len(x), 5).fill_(0.25),
}


@pytest.mark.parametrize("size", [4, 2])
@pytest.mark.parametrize("way", ["streaming", "coupled", "wrap"])
@pytest.mark.parametrize("scale", INNOCENT)
def test_what_counts_no_samples_is_exact(scale: str, way: str, size: int) -> None:
    model = Scaled(INNOCENT[scale])
    twin = copy.deepcopy(model)
    run(model, way, size)
    if way == "streaming":
        nn.functional.cross_entropy(twin(X), Y).backward()
    else:
        contrastive(twin(X)).backward()
    close(grads(model), grads(twin), 1e-12)
    # Beside the looks only a number that could count samples lets forward run once more.
    model.calls.count = 0
    run(model, way, 5)
    assert model.calls.count <= 4 + LOOKS


@pytest.mark.parametrize("size", [4, 2])
@pytest.mark.parametrize("way", ["streaming", "coupled", "wrap"])
def test_forward_runs_once_without_such_a_number(way: str, size: int) -> None:
    """Halves and doubles are too common for a forward."""
    model = Scaled(lambda x: 0.5 * x + 2 * x.sin())
    run(model, way, size)
    assert model.calls.count == N // size + LOOKS


@pytest.mark.parametrize("coupled", [False, True])
def test_a_budget_too_small_for_the_whole_batch_names_the_op(coupled: bool) -> None:
    """Its plan begins with two samples, of which a number says little."""
    torch.manual_seed(1)
    wide = 128
    model = nn.Sequential(*(nn.Sequential(nn.Linear(wide, wide), nn.Tanh()) for _ in range(6)))
    model.register_forward_hook(lambda module, inputs, outputs: outputs / len(outputs))
    x, y = torch.randn(512, wide), torch.randint(wide, (512,))
    loss = nn.CrossEntropyLoss()
    given = ib.losses.coupled(lambda z, y: loss(z, y)) if coupled else loss
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    room = 2**20 + (2 * x.nbytes if coupled else 0)  # of 13 activations of 256 KiB
    budget = ib.memory.stats("cpu").live + gradients + room
    with pytest.raises(ib.CouplingError, match="a number that counts the samples"):
        ib.VirtualBatch(model, given, memory_budget=budget).backward(x, y)


def time_first(self: Scaled, x: torch.Tensor) -> torch.Tensor:
    """The last step of each sample, by its place in a flat tensor."""
    steps = torch.stack([x, 2.1 * x, 3.1 * x])
    place = (x[:, 0] > 0).long() * len(x) + torch.arange(len(x))
    return self.net(steps.reshape(3 * len(x), 6).index_select(0, place))


def table(self: Scaled, x: torch.Tensor) -> torch.Tensor:
    experts = torch.cat([self.net(x), self.net(1.1 * x)])
    return nn.functional.embedding((x[:, 0] > 0).long() * len(x) + torch.arange(len(x)), experts)


def squeezed(self: Scaled, x: torch.Tensor) -> torch.Tensor:
    if len(x) not in (4, 5, N):
        raise ValueError("a group has four or five")
    return (self.net(x) * 0.25 + 0.2).squeeze()


@pytest.mark.parametrize("size", [4, 5])
@pytest.mark.parametrize("way", ["streaming", "coupled", "wrap", "no gradients"])
@pytest.mark.parametrize("forward", [time_first, table, squeezed])
def test_positions_and_forwards_that_refuse_other_rows_are_exact(
    forward: Callable[..., torch.Tensor], way: str, size: int
) -> None:
    if forward is squeezed:
        size = 4
    model = Scaled(lambda x: x)
    model.__class__ = type("Other", (Scaled,), {"forward": forward})
    twin = copy.deepcopy(model)
    run(model, way, size)
    if way == "no gradients":
        return
    loss = nn.functional.cross_entropy(twin(X), Y) if way == "streaming" else contrastive(twin(X))
    loss.backward()
    close(grads(model), grads(twin), 1e-12)


class Busy(Scaled):
    """Marks itself while it works, and fails for three rows."""

    busy = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.busy:
            raise RuntimeError("entered again")
        self.busy = True
        if len(x) == 3:
            raise ValueError("three")
        result = self.net(x) * 0.25
        self.busy = False
        return result


@pytest.mark.parametrize("way", ["streaming", "coupled", "wrap", "no gradients"])
def test_a_forward_that_fails_on_other_rows_leaves_nothing(way: str) -> None:
    model = Busy(lambda x: x)
    run(model, way, 4)
    assert not model.busy
    run(model, way, 4)


def test_a_count_in_a_buffer_is_noticed_beside_ambiguous_outputs() -> None:
    """Five outputs and five rows: another recording tells which is which, and counts nothing."""

    class Counts(Scaled):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += len(x)
            return self.net(x)

    model = Counts(lambda x: x)
    model.register_buffer("seen", torch.zeros(()))
    x = torch.randn(15, 6).double()
    loss = ib.losses.coupled(lambda outputs: contrastive(outputs))
    with pytest.raises(ib.CouplingError, match="seen' depends on the samples, or counts them"):
        ib.VirtualBatch(model, loss, micro_batch_size=5).backward(x)
    assert model.seen == 0


@pytest.mark.parametrize("shape", [(), (1,)])
def test_a_models_own_mean_is_its_denominators(shape: tuple[int, ...]) -> None:
    """A loss that the model divides by the samples that it was given is one number for all."""

    class WithLoss(Scaled):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(super().forward(x), y, reduction="sum").view(
                shape
            ) / len(x)

    model = WithLoss(lambda x: x)
    twin = copy.deepcopy(model)
    loss = ib.losses.from_model(lambda labels, samples: samples)
    ib.VirtualBatch(model, loss, micro_batch_size=4).backward((X, Y), Y)
    twin(X, Y).backward()
    close(grads(model), grads(twin), 1e-12)
