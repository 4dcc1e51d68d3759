"""Samples that are combined behind a factor of zero: outputs do not show it where the parameters
stand, the gradient of the factor does. Rows are compared at other values of the parameters."""

import copy
import threading
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from support import Calls, Log, classification, looks, native, result_of, worst_error
from torch import nn

N = 12
torch.manual_seed(0)
X, Y = classification(N)
WAYS = ("streaming", "coupled", "wrap")


def spread(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(outputs, targets) + outputs.std(0).sum()


def loss_of(way: str) -> Callable[..., torch.Tensor]:
    return nn.CrossEntropyLoss() if way == "streaming" else spread


def step(way: str, model: nn.Module, x: torch.Tensor = X, **options: Any) -> None:
    if way == "wrap":
        spread(ib.wrap(model, **options)(x), Y).backward()
        return
    loss = loss_of(way) if way == "streaming" else ib.losses.coupled(spread)
    ib.VirtualBatch(model, loss, **options).backward(x, Y)


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return gradient * weight, (gradient * x).sum(0)


def zeros(*sizes: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(*sizes))


def zero_linear() -> nn.Linear:
    layer = nn.Linear(8, 8)
    nn.init.zeros_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer


def zero_gru() -> nn.GRU:
    layer = nn.GRU(8, 8)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


Gate = tuple[Callable[[], dict[str, Any]], Callable[[Any, torch.Tensor], torch.Tensor]]
GATES: dict[str, Gate] = {
    "a gate": (lambda: {"gate": zeros(1)}, lambda m, c: m.gate * c),
    "a number": (lambda: {"gate": nn.Parameter(torch.tensor(0.0))}, lambda m, c: m.gate * c),
    "gates": (lambda: {"gate": zeros(8)}, lambda m, c: m.gate * c),
    "a projection": (lambda: {"out": zero_linear()}, lambda m, c: m.out(c)),
    "a view": (lambda: {"weight": zeros(8, 8)}, lambda m, c: c @ m.weight.t()[:8]),
    "a recurrent layer": (lambda: {"gru": zero_gru()}, lambda m, c: m.gru(c[None])[0][0]),
    "a function": (lambda: {"gate": zeros(8)}, lambda m, c: Scaled.apply(c, m.gate)),
    "one less itself": (
        lambda: {"gate": nn.Parameter(torch.ones(8))},
        lambda m, c: (1 - m.gate) * c,
    ),
    "two that are equal": (
        lambda: {"a": nn.Parameter(torch.ones(8)), "b": nn.Parameter(torch.ones(8))},
        lambda m, c: (m.a - m.b) * c,
    ),
    "hardly anything": (
        lambda: {"gate": nn.Parameter(torch.full((8,), 1e-9))},
        lambda m, c: m.gate * c,
    ),
    "nothing but one": (
        lambda: {"gate": nn.Parameter(torch.eye(8)[0])},
        lambda m, c: m.gate.roll(3) * (c - c[:, :1]),
    ),
}


class Gated(nn.Module):
    """Adds what a gate lets through of the batch's mean, or of each sample's own."""

    def __init__(self, name: str, mixes: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 5)
        make, self.open = GATES[name]
        self.mixes = mixes
        for key, value in make().items():
            setattr(self, key, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.body(x))
        context = h.mean(0, keepdim=True).expand_as(h) if self.mixes else h.square()
        return self.head(h + self.open(self, context))


def bits(model: nn.Module) -> list[tuple[torch.Tensor, int]]:
    state = [*model.parameters(), *model.buffers()]
    memory = [t.detach().clone().reshape(-1) for t in state]
    return [(m.view(torch.uint8), t._version) for m, t in zip(memory, state, strict=True)]


def same_bits(model: nn.Module, before: list[tuple[torch.Tensor, int]]) -> bool:
    return all(
        torch.equal(now, then) and version == before_version
        for (now, version), (then, before_version) in zip(bits(model), before, strict=True)
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", GATES)
def test_what_is_combined_behind_a_gate_of_zero_is_refused(
    name: str, way: str, size: int, dtype: torch.dtype
) -> None:
    model = Gated(name, mixes=True).to(dtype)
    before = bits(model)
    with pytest.raises(ib.CouplingError):
        step(way, model, X.to(dtype), micro_batch_size=size)
    assert same_bits(model, before)
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", GATES)
def test_what_is_each_samples_own_behind_it_is_exact(name: str, way: str, size: int) -> None:
    model = Gated(name, mixes=False).double()
    wanted = native(model, loss_of(way), X, Y)
    before = bits(model)
    step(way, model, micro_batch_size=size)
    assert same_bits(model, before)
    assert worst_error(result_of(model, wanted.loss), wanted) <= 1e-12


@pytest.mark.parametrize("way", WAYS)
def test_parameters_of_every_kind_come_back_bit_by_bit(way: str) -> None:
    odd = [0.0, -0.0, 5e-324, 1e-310, -1e-30, float("inf"), float("nan"), 1.0, -1e300]
    model = Gated("gates", mixes=False).double()
    model.gate.requires_grad_(False)
    model.odd = nn.Parameter(torch.tensor(odd).double())
    model.tiny = nn.Parameter(torch.tensor([0.0, -0.0, 5e-324, 1e-310, 1e-12, -3e-13]).double())
    model.small = nn.Parameter(torch.tensor([0.0, 1e-45, 1e-39, 1e-20, -1e-9]).float())
    model.halves = nn.Parameter(torch.tensor([0.0, 6e-8, 1e-5, -1.0, 65504.0]).half())
    model.complexes = nn.Parameter(torch.tensor([0j, 1 + 0j, 1e-9j]))
    model.empty = nn.Parameter(torch.empty(0))
    model.wide = nn.Parameter(torch.zeros(1).double().expand(4))
    model.columns = nn.Parameter(torch.randn(4, 6).double().t())
    model.tied = model.columns
    model.gate_again = nn.Parameter(model.head.weight.detach()[1])
    before = bits(model)
    step(way, model, micro_batch_size=4)
    assert same_bits(model, before)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_trained_stays_as_it_is(way: str) -> None:
    model = Gated("gates", mixes=True).double()
    model.gate.requires_grad_(False)
    wanted = native(model, loss_of(way), X, Y)
    step(way, model, micro_batch_size=4)
    assert worst_error(result_of(model, wanted.loss), wanted) <= 1e-12


@pytest.mark.parametrize("way", WAYS)
def test_a_share_that_forward_counts_up_is_noticed_and_one_that_stands_is_none(way: str) -> None:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.net(x)
        share = self.share.clone()
        if self.grows:
            self.share += 0.1
        return z - share * z.mean(0)

    for grows in (False, True):
        model = Calls(forward, net=nn.Linear(6, 5), share=torch.zeros(())).double()
        model.grows = grows
        wanted = native(copy.deepcopy(model), loss_of(way), X, Y)
        if grows:
            with pytest.raises(ib.CouplingError):
                step(way, model, micro_batch_size=4)
            assert model.share == 0
            continue
        step(way, model, micro_batch_size=4)
        assert worst_error(result_of(model, wanted.loss), wanted) <= 1e-12


def raises(h: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    if not bool(gate.eq(0).all()):
        raise ValueError("the gate is shut")
    return h


def overflows(h: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
    return h * (gate * 1e200).exp()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("only_at_zero", [raises, overflows])
@pytest.mark.parametrize("mixes", [False, True])
def test_where_forward_cannot_run_at_other_values_it_is_looked_at_where_it_stands(
    way: str, only_at_zero: Callable[..., torch.Tensor], mixes: bool
) -> None:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        h = only_at_zero(self.net(x), self.gate)
        return h / (1 + float(h.norm())) if mixes else h

    model = Calls(forward, net=nn.Linear(6, 5)).double()
    model.gate = nn.Parameter(torch.zeros(1).double())
    wanted = native(copy.deepcopy(model), loss_of(way), X, Y)
    before = bits(model)
    if mixes:
        with pytest.raises(ib.CouplingError):
            step(way, model, micro_batch_size=4)
    else:
        step(way, model, micro_batch_size=4)
        assert worst_error(result_of(model, wanted.loss), wanted) <= 1e-12
    assert same_bits(model, before)


def test_a_forward_that_writes_its_parameters() -> None:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.net.weight.data.clamp_(-0.1, 0.1)
            if len(x) > 4:  # in the look for the first time
                self.other.data.add_(1)
        return self.net(x) + self.other - self.other.detach()

    model = Calls(forward, net=nn.Linear(6, 5)).double()
    model.other = nn.Parameter(torch.randn(5).double())
    other, bias = model.other.detach().clone(), model.net.bias.detach().clone()
    for _ in range(2):
        step("streaming", model, micro_batch_size=4)
        assert torch.equal(model.other, other) and torch.equal(model.net.bias, bias)
        assert model.net.weight.abs().max() == 0.1


@pytest.mark.parametrize("way", WAYS)
def test_an_error_in_the_middle_leaves_the_parameters(way: str) -> None:
    class Stop(Exception):
        pass

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        if len(x) == N:
            CALLS.append(1)
            if len(CALLS) == 1:
                raise Stop
        return self.net(x)

    CALLS.clear()
    model = Calls(forward, net=nn.Linear(6, 5)).double()
    before = bits(model)
    with pytest.raises(Stop):
        step(way, model, micro_batch_size=4)
    assert CALLS and same_bits(model, before)


CALLS: list[int] = []


def test_autocast_keeps_no_cast_of_other_values() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5))
    model[2].weight.data.zero_()
    x = X.float()
    with torch.autocast("cpu", torch.bfloat16):
        wanted = copy.deepcopy(model)(x)
        outputs = ib.wrap(model, micro_batch_size=4)(x)
        assert torch.equal(outputs, wanted)
        assert torch.equal(model(x), wanted)


def test_later_looks_leave_parameters_where_they_are() -> None:
    """Somebody may read them: an evaluation in another thread, a signal handler."""
    torch.manual_seed(0)
    seen = Log()
    model = Calls(lambda self, x: (seen.append(float(self.net.weight.sum())), self.net(x))[1])
    model.net = nn.Linear(6, 5)
    model.double()
    own = float(model.net.weight.sum())
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4)
    for number in range(1, 9):
        seen.clear()
        batch.backward(X, Y)
        assert (set(seen) == {own}) == (number > 1), number
        assert len(seen) == N // 4 + looks(number - 1)


def test_threads_that_only_read_do_not_meet_moved_parameters() -> None:
    """Calls without gradients exclude nobody; two that moved the same memory would not undo each
    other."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 5)).double()
    before = copy.deepcopy(model)
    wanted = before(X).detach()
    wrapped = ib.wrap(model, micro_batch_size=4)
    wrong: list[float] = []

    def read() -> None:
        with torch.no_grad():
            for _ in range(40):
                wrong.append((wrapped(X) - wanted).abs().max().item())

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 120 and max(wrong) < 1e-12
    assert all(map(torch.equal, model.parameters(), before.parameters()))
