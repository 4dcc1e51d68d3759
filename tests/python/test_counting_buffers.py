"""Buffers that count samples: micro-batches of one length leave them equal, the whole batch not."""

import copy
import threading
from collections.abc import Callable

import infinitybatch as ib
import pytest
import torch
from support import LOOKS, Calls, Tally, classification, looks
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm
from wrap_support import close, contrastive, grads


class Writer(nn.Module):
    """Writes its buffer as it is told to."""

    def __init__(self, write: Callable[[nn.Module, torch.Tensor], object]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()
        self.register_buffer("seen", torch.ones((), dtype=torch.float64))
        self.write = write
        self.calls = Tally()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls()
        self.write(self, x)
        return self.net(x)


def add_rows(self: nn.Module, x: torch.Tensor) -> None:
    self.seen += len(x)


def bind_elements(self: nn.Module, x: torch.Tensor) -> None:
    self.seen = self.seen + x.numel()


def decay_by_rows(self: nn.Module, x: torch.Tensor) -> None:
    self.seen.mul_(0.9 ** len(x))


def average_rows(self: nn.Module, x: torch.Tensor) -> None:
    self.seen.lerp_(torch.full_like(self.seen, len(x)), 0.1)


def add_tensor(self: nn.Module, x: torch.Tensor) -> None:
    self.seen += torch.tensor(len(x))


COUNTS = [add_rows, bind_elements, decay_by_rows, average_rows, add_tensor]
WAYS = ["streaming", "coupled", "wrap"]


def runner(
    model: nn.Module, way: str, size: int, n: int = 6, **options: object
) -> Callable[[], object]:
    """A step of one object, to be called as often as wanted."""
    inputs, targets = classification(n)
    if way == "wrap":
        wrapped = ib.wrap(model, micro_batch_size=size, **options)
        return lambda: contrastive(wrapped(inputs)).backward()
    if way == "coupled":
        loss = ib.losses.coupled(lambda outputs: contrastive(outputs))
        batch = ib.VirtualBatch(model, loss, micro_batch_size=size, **options)
        return lambda: batch.backward(inputs)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=size, **options)
    return lambda: batch.backward(inputs, targets)


def run(model: nn.Module, way: str, size: int, n: int = 6, **options: object) -> None:
    runner(model, way, size, n, **options)()


PLACES = [(way, size) for way in WAYS for size in (3, 2, 1)]


@pytest.mark.parametrize(("way", "size"), PLACES)
@pytest.mark.parametrize("count", COUNTS)
def test_a_count_is_named(count: Callable[..., None], way: str, size: int) -> None:
    model = Writer(count)
    with pytest.raises(ib.CouplingError, match=r"seen' depends on the samples, or counts them"):
        run(model, way, size)
    assert model.seen == 1
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize(("way", "size"), PLACES)
def test_it_is_named_again_to_who_goes_on(way: str, size: int) -> None:
    model = Writer(add_rows)
    step = runner(model, way, size)
    for _ in range(3):
        with pytest.raises(ib.CouplingError, match=r"seen' depends on the samples, or counts them"):
            step()
        assert model.seen == 1


class Straight(torch.autograd.Function):
    """Hidden from tapes, as everything with a backward of its own."""

    @staticmethod
    def forward(_ctx: object, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(_ctx: object, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


def add_in_a_thread(self: nn.Module, x: torch.Tensor) -> None:
    thread = threading.Thread(target=lambda: self.seen.add_(len(x)))
    thread.start()
    thread.join()


def add_and_write_the_input(self: nn.Module, x: torch.Tensor) -> None:
    self.seen += len(x)
    x.mul_(2)


PROGRAMS: dict[str, tuple[nn.Module, Callable[..., None], dict[str, object]]] = {
    "batch norm": (nn.BatchNorm1d(5), add_rows, {}),
    "static graph": (nn.Identity(), add_rows, {"static_graph": True}),
    "batch norm, static graph": (nn.BatchNorm1d(5), add_rows, {"static_graph": True}),
    "native numbers": (nn.Dropout(0.3), add_rows, {"match_native_rng": True}),
    "checkpoint": (nn.Identity(), add_rows, {"checkpoint_segments": 2}),
    "autograd.Function": (Calls(lambda _, x: Straight.apply(x)), add_rows, {}),
    "thread": (nn.Identity(), add_in_a_thread, {}),
    "input written": (nn.Identity(), add_and_write_the_input, {}),
}


@pytest.mark.parametrize(("way", "size"), [(way, size) for way in WAYS for size in (3, 1)])
@pytest.mark.parametrize("program", PROGRAMS)
def test_whatever_hides_the_count_from_tapes(program: str, way: str, size: int) -> None:
    layer, write, options = PROGRAMS[program]
    if way == "wrap" and program == "checkpoint":
        pytest.skip("wrap takes no checkpoint_segments")
    model = Writer(write)
    model.net.append(layer)
    model.double()
    step = runner(model, way, size, **options)
    refusal = r"seen' depends on the samples, or counts them"
    if program == "input written":  # where the answer would be to run on them again
        refusal += "|changes its inputs in place"
    for _ in range(2):
        with pytest.raises(ib.Error, match=refusal):
            step()
        assert model.seen == 1
        assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("way", WAYS)
def test_each_micro_batch_may_be_a_batch_of_its_own(way: str) -> None:
    model = Writer(add_rows)
    run(model, way, 3, batch_coupling="per_micro_batch")
    assert model.seen == 7


def test_a_budget_answers_with_the_whole_batch() -> None:
    model = Writer(add_rows)
    twin = copy.deepcopy(model)
    inputs, targets = classification(6)
    loss = nn.CrossEntropyLoss()
    ib.VirtualBatch(model, loss, memory_budget="64MiB").backward(inputs, targets)
    loss(twin(inputs), targets).backward()
    assert model.seen == twin.seen == 7
    close(grads(model), grads(twin), 1e-12)


def add_one(self: nn.Module, x: torch.Tensor) -> None:
    self.seen += 1


def halve(self: nn.Module, x: torch.Tensor) -> None:
    self.seen.mul_(0.5)


@pytest.mark.parametrize("size", [3, 1])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("write", [add_one, halve])
def test_what_counts_no_samples_is_written_once(
    write: Callable[..., None], way: str, size: int
) -> None:
    model = Writer(write)
    twin = copy.deepcopy(model)
    write(twin, torch.empty(0))
    run(model, way, size)
    assert model.seen == twin.seen
    model.calls.count, model.seen = 0, torch.ones_like(model.seen)
    torch.manual_seed(3)
    run(model, way, size)
    if (write, size) == (add_one, 3):
        assert model.calls.count == 2 + LOOKS + 1, "other rows were asked once more than needed"


def test_it_is_asked_once_for_each_kind_of_batch() -> None:
    model = Writer(halve)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=3)
    calls = []
    for _ in range(3):
        model.calls.count = 0
        batch.backward(*classification(6))
        calls.append(model.calls.count)
    assert calls == [3 + looks(0), 2 + looks(1), 2 + looks(2)]


@pytest.mark.parametrize("way", WAYS)
def test_spectral_norm_counts_nothing(way: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(spectral_norm(nn.Linear(6, 8)), nn.Tanh(), nn.Linear(8, 5)).double()
    run(model, way, 3)


def test_random_numbers_are_left_as_they_were() -> None:
    def draw(self: nn.Module, x: torch.Tensor) -> None:
        self.seen.mul_(0.5)
        torch.rand(())

    states = []
    for write in (draw, lambda self, x: (self.seen.mul_(1), torch.rand(()))):
        torch.manual_seed(7)
        run(Writer(write), "streaming", 3)
        states.append(torch.rand(()))
    assert states[0] == states[1]


def test_a_forward_that_fails_on_other_numbers_of_rows_is_a_typed_error():
    """Whether its buffer counts samples, nobody can tell."""

    class Fixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Linear(4, 2)
            self.register_buffer("steps", torch.zeros(()))

        def forward(self, x):
            if len(x) != 4:
                raise ValueError("four rows, please")
            self.steps = self.steps + 1
            return self.first(x)

    torch.manual_seed(0)
    model = Fixed().double()
    x, target = torch.randn(8, 4).double(), torch.randn(8, 2).double()
    batch = ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=4)
    with pytest.raises(ib.Unsupported, match="may count samples.*four rows, please"):
        batch.backward(x, target)
    assert model.steps == 0
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(5), spectral_norm(nn.Linear(5, 5))])
@pytest.mark.parametrize("way", WAYS)
def test_a_forward_of_pairs_is_asked_with_fewer_pairs(way: str, layer: nn.Module) -> None:
    """Three rows are no pairs."""

    def forward(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.net(x)).reshape(-1, 2, 5).reshape(-1, 5)

    torch.manual_seed(0)
    net = nn.Linear(6, 5)
    model = Calls(forward, net=net, layer=copy.deepcopy(layer)).double()
    run(model, way, size=4, n=12)
    assert all(parameter.grad is not None for parameter in net.parameters())
