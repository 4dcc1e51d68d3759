"""A single sample whose graph does not fit: its tape is cut for memory and played segment by segment."""

from __future__ import annotations

import copy
import functools
import random
from collections.abc import Callable

import infinitybatch as ib
import pytest
import torch
from fault_support import LONG
from measure import gradients, numbered, worst
from support import LOOKS, Calls, Log, gradient_error, looks, native_gradients
from torch import nn

TOLERANCE = 1e-12


class Chain(nn.Module):
    """Equal layers, one after the other, on a sequence."""

    def __init__(self, layers: int, width: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(layers)])
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self.dropout(torch.tanh(layer(x)))
        return self.head(x).mean(1)


class Recurrent(nn.Module):
    """A loop over time steps in Python."""

    def __init__(self, hidden: int = 24) -> None:
        super().__init__()
        self.cell = nn.GRUCell(4, hidden)
        self.out = nn.Linear(hidden, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = x.new_zeros(x.shape[0], self.cell.hidden_size)
        for step in range(x.shape[1]):
            state = self.cell(x[:, step], state)
        return self.out(state)


class Residual(nn.Module):
    """In-place everywhere, and a value from the beginning that the end needs."""

    def __init__(self, blocks: int = 8, channels: int = 6) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, channels, 3, padding=1)
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(
                    nn.Conv2d(channels, channels, 3, padding=1),
                    nn.GroupNorm(2, channels),
                    nn.ReLU(inplace=True),
                    nn.Conv2d(channels, channels, 3, padding=1),
                )
                for _ in range(blocks)
            ]
        )
        self.head = nn.Linear(channels, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = x = self.stem(x)
        for block in self.blocks:
            y = block(x)
            y += x
            x = torch.relu_(y)
        return self.head((x + first).mean((2, 3)))


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.head = nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(x)).mean(1)


class ChangedLater(nn.Module):
    """What waits at the cuts is changed in place behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(5, 8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(10)])
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.stem(x)
        y = first * 2.0
        for layer in self.layers:
            y = torch.tanh(layer(y))
        first.mul_(0.5)
        return self.head(first + y)


class ViewChangedLater(ChangedLater):
    """The same, of which only a view waits."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.stem(x)
        half = first[:, 2:6]
        y = first * 2.0
        for layer in self.layers:
            y = torch.tanh(layer(y))
        half.mul_(0.5)
        return self.head(torch.cat([y[:, :2], half, y[:, 6:]], 1) * y)


class Counting(ChangedLater):
    """A buffer that forward writes, and that what follows the last cut reads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.fill_(2.0)
        return super().forward(x) * self.calls


class Shared(nn.Module):
    """One weight on both sides of every cut."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(12):
            x = x + torch.tanh(self.layer(x))
        return self.head(x)


MODELS = {
    "a view changed later": (ViewChangedLater, (6, 5)),
    "changed later": (ChangedLater, (6, 5)),
    "counting": (Counting, (6, 5)),
    "chain": (lambda: Chain(24, 12), (6, 20, 12)),
    "recurrent": (Recurrent, (6, 30, 4)),
    "residual": (Residual, (6, 2, 8, 8)),
    "transformer": (Transformer, (6, 9, 16)),
}


def make(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    build, shape = MODELS[name]
    return (
        build().double(),
        torch.randn(shape, dtype=torch.float64),
        torch.randn(shape[0], 1, dtype=torch.float64),
    )


@pytest.mark.parametrize("segments", [2, 3, 7, 50])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_the_whole_batch(name: str, size: int, segments: int) -> None:
    model, inputs, targets = make(name)
    wanted = native_gradients(model, nn.MSELoss(), inputs, targets)
    batch = ib.VirtualBatch(
        model, nn.MSELoss(), micro_batch_size=size, checkpoint_segments=segments
    )
    for step in range(3):  # replayed, then kept while user code runs
        model.zero_grad()
        report = batch.backward(inputs, targets)
        assert report.strategy == "checkpoint"
        assert gradient_error(model, wanted) <= TOLERANCE, step


@pytest.mark.parametrize("name", MODELS)
def test_user_code_runs_once_for_each_micro_batch(name: str) -> None:
    model, inputs, targets = make(name)
    calls = Log()
    model.register_forward_hook(lambda *_: calls.append(1))
    batch = ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=2, checkpoint_segments=4)
    for step in range(2):
        calls.clear()
        batch.backward(inputs, targets)
        counts = name == "counting" and step == 0  # buffers that may count samples are asked about
        assert len(calls) == 3 + looks(step) + counts


MAKERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "arange": lambda h: torch.arange(h.shape[1]),
    "zeros": lambda h: torch.zeros(h.shape[1]),
    "full": lambda h: torch.full((h.shape[1],), 0.5),
    "eye": lambda h: torch.eye(h.shape[1])[0],
    "linspace": lambda h: torch.linspace(0, 1, h.shape[1]),
    "tensor": lambda h: torch.tensor([0.5] * h.shape[1]),
    "new": lambda h: h.new_ones(h.shape[1]),
}


@pytest.mark.parametrize("segments", [2, 3, 7])
@pytest.mark.parametrize("maker", MAKERS)
def test_a_cut_in_front_of_an_op_that_makes_a_tensor(maker: str, segments: int) -> None:
    """It runs below autograd, and the graph of the last segment begins in front of it."""

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            x = x + MAKERS[maker](x)
        return x

    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(6))
    model = Calls(forward, layers=layers).double()
    inputs, targets = torch.randn(2, 6, 6, dtype=torch.float64)
    wanted = native_gradients(model, nn.MSELoss(), inputs, targets)
    batch = ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=2, checkpoint_segments=segments)
    for step in range(2):
        model.zero_grad()
        assert batch.backward(inputs, targets).strategy == "checkpoint"
        assert gradient_error(model, wanted) <= TOLERANCE, step


@pytest.mark.parametrize("autocast", [False, True], ids=["as it is", "autocast"])
@pytest.mark.parametrize("name", [*MODELS, "shared"])
def test_a_graph_that_is_kept_gives_the_bits_of_one_that_is_played(
    name: str, autocast: bool
) -> None:
    if name == "shared":
        torch.manual_seed(0)
        model, inputs, targets = Shared(), torch.randn(6, 8), torch.randn(6, 1)
    else:
        model, inputs, targets = make(name)
    model, inputs, targets = model.float(), inputs.float(), targets.float()
    batch = ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=6, checkpoint_segments=3)
    steps = []
    for _ in range(3):  # the first step plays the last segment, the others have kept its graph
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            report = batch.backward(inputs, targets)
        steps.append([report.loss, *(parameter.grad for parameter in model.parameters())])
    for step in steps[1:]:
        assert all(map(torch.equal, steps[0], step))


@functools.cache
def counted_calls() -> list[int]:
    """Defines an operator that notes each of its calls here, by their places."""
    calls: list[int] = []
    library = torch.library.Library("checkpoints_test", "FRAGMENT")
    library.define("counted(Tensor x, int place) -> Tensor")

    def counted(x: torch.Tensor, place: int) -> torch.Tensor:
        calls.append(place)
        return torch.tanh(x)

    library.impl("counted", counted, "CompositeImplicitAutograd")
    KEPT_ALIVE.append(library)
    return calls


KEPT_ALIVE: list[object] = []


class CountedChain(nn.Module):
    """Tells how often each layer is computed."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(layers)])
        self.calls = counted_calls()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for place, layer in enumerate(self.layers):
            x = torch.ops.checkpoints_test.counted(layer(x), place)
        return x.mean(1)

    def take_counts(self) -> list[int]:
        counts = [self.calls.count(place) for place in range(len(self.layers))]
        self.calls.clear()
        return counts


def test_the_last_segment_is_computed_once() -> None:
    model = CountedChain(9)
    inputs, targets = torch.randn(4, 8, 8), torch.randn(4, 8)
    batch = ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=4, checkpoint_segments=3)
    batch.backward(inputs, targets)
    model.take_counts()
    batch.backward(inputs, targets)
    counts = model.take_counts()
    assert counts == sorted(counts, reverse=True)
    assert set(counts) == {1, 2}
    assert counts.count(1) >= 3


@pytest.mark.parametrize("when", ["at once", "behind"])
@pytest.mark.parametrize("how", ["register_hook", "retain_grad"])
def test_a_hook_on_any_value_is_noticed_in_later_steps(when: str, how: str) -> None:
    """Also on what waits at the last cut, set in front of it or behind."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(6)])
            self.place = -1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            between = []
            for layer in self.layers:
                for step in (layer, torch.tanh):
                    x = step(x)
                    between.append(x)
                    if when == "at once" and len(between) == self.place + 1:
                        self.hook(x)
            if when == "behind" and self.place >= 0:
                self.hook(between[self.place])
            return x

        def hook(self, x: torch.Tensor) -> None:
            if how == "register_hook":
                x.register_hook(lambda gradient: 2 * gradient)
            else:
                x.retain_grad()

    model = Model()
    inputs, targets = torch.randn(4, 8), torch.randn(4, 8)
    for place in range(12):
        batch = ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=4, checkpoint_segments=3)
        model.place = -1
        for _ in range(2):
            batch.backward(inputs, targets)
        model.zero_grad()
        model.place = place
        with pytest.raises(ib.Unsupported, match=r"hook was set|retain_grad|graph node was set"):
            batch.backward(inputs, targets)
        assert all(parameter.grad is None for parameter in model.parameters())


def contrast(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Each sample against all others."""
    sides = torch.cat([outputs, targets, outputs * targets], 1)
    return nn.functional.cross_entropy(sides @ sides.T, torch.arange(len(sides)).flip(0))


def spread(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """No sample's share can be told from the others'."""
    return torch.logsumexp(outputs, 0).sum() * (2 + (outputs * targets).sum())


@pytest.mark.parametrize("offload", ["never", "always"])
@pytest.mark.parametrize("segments", [2, 7])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("loss", [contrast, spread])
@pytest.mark.parametrize("name", MODELS)
def test_coupled_losses(name: str, loss, size: int, segments: int, offload: str) -> None:
    model, inputs, targets = make(name)
    wanted = native_gradients(model, loss, inputs, targets)
    calls = Log()
    model.register_forward_hook(lambda *_: calls.append(1))
    batch = ib.VirtualBatch(
        model,
        ib.losses.coupled(loss),
        micro_batch_size=size,
        checkpoint_segments=segments,
        offload=offload,
    )
    for step in range(2):
        model.zero_grad()
        calls.clear()
        report = batch.backward(inputs, targets)
        assert report.strategy == "checkpoint"
        # Of one sample nothing tells along which dimension samples lie: two are looked at once.
        # And in micro-batches of one each of the six samples is.
        more = (6 + 1 if size == 1 else LOOKS * (size < 6)) * (looks(step) > 0)
        more += name == "counting" and size == 1 and step == 0  # buffers that may count samples
        assert len(calls) == -(-6 // size) + more + (size == 1 and step == 0)
        assert gradient_error(model, wanted) <= TOLERANCE, step


@pytest.mark.parametrize("size", [3, 5, 6])
def test_masks_are_those_that_a_coupled_loss_saw(size: int) -> None:
    torch.manual_seed(0)
    model = Chain(12, 8, dropout=0.4).double()
    inputs = torch.randn(6, 10, 8, dtype=torch.float64)
    targets = torch.randn(6, 1, dtype=torch.float64)
    results = []
    for options in ({}, {"checkpoint_segments": 5}):
        batch = ib.VirtualBatch(
            model, ib.losses.coupled(contrast), micro_batch_size=size, **options
        )
        for step in range(2):
            torch.manual_seed(step)
            model.zero_grad()
            report = batch.backward(inputs, targets)
        results.append([report.loss, torch.get_rng_state(), *(p.grad for p in model.parameters())])
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    assert worst(numbered(results[1][2:]), numbered(results[0][2:])) <= TOLERANCE


@pytest.mark.parametrize(
    ("offload", "above", "times"),
    [("never", 160, 2), ("auto", 60, 2), ("never", 90, 3), ("never", 40, 4)],
    ids=["kept", "offloaded", "made again", "computed again and again"],
)
def test_one_sample_beyond_the_device_with_a_coupled_loss(
    offload: str, above: int, times: int
) -> None:
    torch.manual_seed(0)
    model = CountedChain(60).double()
    inputs = torch.randn(6, 64, 8, dtype=torch.float64)
    targets = torch.randn(6, 1, dtype=torch.float64)
    wanted = native_gradients(model, contrast, inputs, targets)
    sums = sum(parameter.nbytes for parameter in model.parameters())
    budget = ib.memory.stats("cpu").live + sums + above * 1024
    batch = ib.VirtualBatch(
        model, ib.losses.coupled(contrast), memory_budget=budget, offload=offload
    )
    for _ in range(3):
        model.zero_grad()
        model.take_counts()
        report = batch.backward(inputs, targets)
        assert report.strategy == "checkpoint"
        assert report.peak_bytes <= budget
        assert gradient_error(model, wanted) <= TOLERANCE
    assert report.restarts == 0
    assert (report.offloaded_bytes > 0) == (offload == "auto")
    most = max(model.take_counts())
    assert (most >= 6 * times) if times > 3 else (most == 6 * times), most / 6
    model.zero_grad()
    assert "loss of all" in batch.plan(inputs, targets).explain()


@pytest.mark.parametrize("above", [2**16, 2**18], ids=["nor does a sample", "a sample does"])
@pytest.mark.parametrize("offload", ["auto", "never"])
def test_a_coupled_loss_that_does_not_fit_is_told_soon(offload: str, above: int) -> None:
    model, inputs, targets = make("chain")

    def large(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs * torch.ones(1 << 20, dtype=torch.float64)).sum()

    budget = ib.memory.stats("cpu").live + above
    batch = ib.VirtualBatch(model, ib.losses.coupled(large), memory_budget=budget, offload=offload)
    # Beside one sample's segments and the gradients there may be too little for the loss to begin.
    with pytest.raises(ib.BudgetExceeded, match="loss on the outputs of all|smallest segment"):
        batch.backward(inputs, targets)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_masks_of_replayed_segments_are_those_of_the_recording() -> None:
    torch.manual_seed(0)
    model = Chain(12, 8, dropout=0.4).double()
    inputs = torch.randn(4, 10, 8, dtype=torch.float64)
    targets = torch.randn(4, 1, dtype=torch.float64)
    whole = copy.deepcopy(model)
    batch = ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=4, checkpoint_segments=5)
    for step in range(3):
        torch.manual_seed(step)
        whole.zero_grad()
        loss = nn.MSELoss()(whole(inputs), targets)
        loss.backward()
        after = torch.get_rng_state()
        torch.manual_seed(step)
        model.zero_grad()
        report = batch.backward(inputs, targets)
        assert torch.equal(report.loss, loss.detach())
        assert torch.equal(torch.get_rng_state(), after)
        assert gradient_error(model, gradients(whole)) <= TOLERANCE


@pytest.mark.parametrize(
    ("make_model", "shape", "above"),
    [
        pytest.param(
            lambda: Chain(1000, 8),
            (2, 128, 8),
            2.5,
            marks=pytest.mark.skipif(not LONG, reason="in make test-long"),
        ),
        (lambda: Recurrent(32), (2, 1000, 4), 0.5),
    ],
    ids=["1,000 layers", "1,000 time steps"],
)
def test_one_sample_beyond_the_device(make_model, shape, above) -> None:
    torch.manual_seed(0)
    model = make_model().double()
    inputs = torch.randn(shape, dtype=torch.float64)
    targets = torch.randn(shape[0], 1, dtype=torch.float64)
    wanted = native_gradients(model, nn.MSELoss(), inputs, targets)
    for parameter in model.parameters():
        parameter.grad = None
    budget = ib.memory.stats("cpu").live + int(above * 2**20)
    with pytest.raises(ib.BudgetExceeded):  # without cuts
        ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=1, memory_budget=budget).backward(
            inputs, targets
        )
    batch = ib.VirtualBatch(model, nn.MSELoss(), memory_budget=budget)
    for step in range(4):
        for parameter in model.parameters():
            parameter.grad = None
        report = batch.backward(inputs, targets)
        assert report.strategy == "checkpoint"
        assert report.peak_bytes <= budget
        assert step <= 1 or report.restarts == 0
        assert gradient_error(model, wanted) <= TOLERANCE
    assert "segments" in batch.plan(inputs, targets).explain()


def test_a_budget_below_the_smallest_segment_says_so() -> None:
    model, inputs, targets = make("chain")
    before = [parameter.clone() for parameter in model.parameters()]
    budget = ib.memory.stats("cpu").live + sum(p.nbytes for p in model.parameters()) + 2000
    batch = ib.VirtualBatch(model, nn.MSELoss(), memory_budget=budget)
    with pytest.raises(ib.BudgetExceeded, match="segment of a single sample"):
        batch.backward(inputs, targets)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("norm", [False, True], ids=["plain", "with BatchNorm"])
@pytest.mark.parametrize("above", [0, 1000, 20_000])
def test_a_budget_that_nothing_fits_into_is_told_soon(above: int, norm: bool) -> None:
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(64)] if norm else []
    model = nn.Sequential(nn.Linear(64, 64), *middle, nn.Tanh(), nn.Linear(64, 1)).double()
    inputs = torch.randn(64, 64, dtype=torch.float64)
    targets = torch.randn(64, 1, dtype=torch.float64)
    batch = ib.VirtualBatch(
        model, nn.MSELoss(), memory_budget=ib.memory.stats("cpu").live + 6000 + above
    )
    with pytest.raises(ib.BudgetExceeded):
        batch.backward(inputs, targets)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_what_cannot_be_cut_is_refused_by_name() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            context.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(context, gradient):
            return 2 * context.saved_tensors[0] * gradient

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(3, 1)

        def forward(self, x):
            return Square.apply(self.line(x))

    model = Model()
    batch = ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=2, checkpoint_segments=2)
    with pytest.raises(ib.Unsupported, match="Square.*larger memory_budget"):
        batch.backward(torch.randn(4, 3), torch.randn(4, 1))
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"micro_batch_size": 2, "checkpoint_segments": 1}, "2 or more"),
        ({"checkpoint_segments": 3}, "without micro_batch_size"),
        ({"micro_batch_size": 2, "checkpoint_segments": 3, "static_graph": True}, "static_graph"),
        ({"micro_batch_size": 2, "checkpoint_segments": 3.5}, "whole number"),
        (
            {"micro_batch_size": 2, "checkpoint_segments": 3, "retained_micro_batches": 1},
            "retained_micro_batches",
        ),
    ],
)
def test_misuse(options: dict, message: str) -> None:
    with pytest.raises((ib.InvalidArgument, ib.InvalidType), match=message):
        ib.VirtualBatch(nn.Linear(2, 1), nn.MSELoss(), **options)


@pytest.mark.parametrize("loss", ["separable", "coupled"])
@pytest.mark.parametrize("offload", ["never", "always"])
def test_a_failed_allocation_anywhere_leaves_everything_as_it_was(offload: str, loss: str) -> None:
    model, inputs, targets = make("residual")
    batch = ib.VirtualBatch(
        model,
        nn.MSELoss() if loss == "separable" else ib.losses.coupled(contrast),
        micro_batch_size=2,
        checkpoint_segments=4,
        offload=offload,
    )
    for _ in range(2):
        model.zero_grad()
        batch.backward(inputs, targets)
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    with ib.memory.fail_allocation() as counter:
        batch.backward(inputs, targets)
    count = counter.seen - 5
    assert count > 300
    model.zero_grad()
    live = ib.memory.stats("cpu").live
    places = range(1, count + 1)
    if not LONG:
        places = sorted(random.Random(1).sample(places, 60))
    for place in places:
        with ib.memory.fail_allocation(place) as failure:
            with pytest.raises(torch.OutOfMemoryError) as raised:
                batch.backward(inputs, targets)
        raised.value.__traceback__ = None
        del raised
        assert failure.failed
        assert all(parameter.grad is None for parameter in model.parameters()), place
        assert ib.memory.stats("cpu").live == live, place
        if place % 7 == 0 or LONG:
            batch.backward(inputs, targets)
            assert all(map(torch.equal, wanted, (p.grad for p in model.parameters()))), place
            model.zero_grad()


def test_a_failing_step_leaves_everything_as_it_was() -> None:
    model, inputs, targets = make("chain")
    wanted = native_gradients(model, nn.MSELoss(), inputs, targets)
    batch = ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=2, checkpoint_segments=4)
    batch.backward(inputs, targets)
    model.zero_grad()
    failing = model.head.register_full_backward_pre_hook(lambda *_: 1 / 0)
    state = torch.get_rng_state()
    live = ib.memory.stats("cpu").live
    with pytest.raises((ZeroDivisionError, ib.Unsupported)):
        batch.backward(inputs, targets)
    failing.remove()
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    assert ib.memory.stats("cpu").live == live
    batch.backward(inputs, targets)
    assert gradient_error(model, wanted) <= TOLERANCE
