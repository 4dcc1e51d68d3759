"""What went wrong on accelerators and nowhere else."""

import copy

import infinitybatch as ib
import pytest
import simulated_device as sim
import torch
from measure import numbered, worst
from support import Square
from torch import nn

MiB = 1 << 20
KIND = torch.get_default_device().type


def allocated() -> int:
    return torch.accelerator.memory_allocated()


def mlp(width=32):
    return nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 3)).double()


def data(n=24):
    return torch.randn(n, 8, dtype=torch.float64), torch.randn(n, 3, dtype=torch.float64)


def gradients(model):
    return [p.grad.clone() for p in model.parameters()]


def native(model, loss, inputs, targets):
    model = copy.deepcopy(model)
    loss(model(inputs), targets).backward()
    return gradients(model)


def assert_same(found, wanted, tolerance=1e-12):
    error = worst(numbered(found), numbered(wanted))
    assert error <= tolerance, error


class Squared(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp()

    def forward(self, x):
        return Square.apply(self.body(x))


class Reentrant(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8).double()
        self.body = mlp()

    def forward(self, x):
        return torch.utils.checkpoint.checkpoint(self.body, self.first(x), use_reentrant=True)


@pytest.mark.parametrize("make", [Squared, Reentrant])
def test_a_budget_with_an_autograd_function(make):
    model, (inputs, targets) = make(), data()
    wanted = native(model, nn.MSELoss(), inputs, targets)
    batch = ib.VirtualBatch(model, nn.MSELoss(), memory_budget=allocated() + 60_000)
    for _ in range(3):
        model.zero_grad()
        batch.backward(inputs, targets)
        assert_same(gradients(model), wanted)


def pinned(tensor):
    return tensor.cpu().pin_memory()


def test_a_pinned_batch_that_is_refilled():
    model = mlp()
    batch = ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=7)
    first, second = data(), data()
    inputs, targets = pinned(first[0]), pinned(first[1])
    for wanted, others in ((first, second), (second, first), (first, second)):
        model.zero_grad()
        refill = [tensor.cpu() for tensor in others]
        batch.backward(inputs, targets)
        inputs.copy_(refill[0])  # what a loader with one pinned buffer does
        targets.copy_(refill[1])
        assert_same(gradients(model), native(model, nn.MSELoss(), *wanted))
    assert sim.races() == []


def test_a_source_with_one_pinned_buffer():
    model, (inputs, targets) = mlp(), data()
    wanted = native(model, nn.MSELoss(), inputs, targets)
    host, buffer = inputs.cpu(), pinned(inputs[:8])

    def rows(begin, end):
        buffer[: end - begin].copy_(host[begin:end])
        return buffer[: end - begin]

    ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=7).backward(
        ib.BatchSource(len(host), rows), targets
    )
    assert sim.races() == []
    assert_same(gradients(model), wanted)


def steps_of(batch, model, inputs, targets, count=6):
    reports = []
    for _ in range(count):
        model.zero_grad()
        reports.append(batch.backward(inputs, targets))
    return reports


def test_a_workspace_that_appears_late_is_no_factor():
    model, (inputs, targets) = mlp(256), data(2000)
    wanted = native(model, nn.MSELoss(), inputs, targets)
    batch = ib.VirtualBatch(model, nn.MSELoss(), memory_budget=allocated() + 20 * MiB)
    with sim.settings(blas_workspace=1):
        reports = steps_of(batch, model, inputs, targets)
    assert max(reports[-1].micro_batch_sizes) >= 200
    assert_same(gradients(model), wanted)


@pytest.mark.parametrize("n", [1, 2, 3, 5, 6, 40])
def test_nothing_passes_the_budget_in_silence(n):
    model = nn.Sequential(nn.Linear(2000, 2000), nn.Tanh(), nn.Linear(2000, 10))
    inputs, targets = torch.randn(n, 2000), torch.randn(n, 10)
    model(inputs[:1]).sum().backward()  # gradients are there
    before = allocated()
    sums = 4 * sum(p.numel() for p in model.parameters())
    for room in (10_000, sums + 10_000, sums + 30_000, sums + 100_000, sums + 1_000_000):
        budget = before + room
        batch = ib.VirtualBatch(model, nn.MSELoss(), memory_budget=budget)
        try:
            report = batch.backward(inputs, targets)
        except ib.BudgetExceeded:
            continue
        # A first plan may pass it, and is then given up and told.
        assert report.peak_bytes <= budget or report.restarts > 0
        for _ in range(2):
            report = batch.backward(inputs, targets)
        assert report.restarts == 0 and report.peak_bytes <= budget


def test_a_fixed_size_beside_a_budget():
    model = nn.Linear(1000, 1000)
    inputs, targets = torch.randn(64, 1000), torch.randn(64, 1000)
    budget = allocated() + 4_100_000 + 100_000
    batch = ib.VirtualBatch(model, nn.MSELoss(), memory_budget=budget, micro_batch_size=64)
    with pytest.raises(ib.BudgetExceeded):
        batch.backward(inputs, targets)


def test_a_coupled_loss_that_does_not_fit():
    model = nn.Linear(16, 16).double()
    inputs = torch.randn(256, 16, dtype=torch.float64)
    loss = ib.losses.coupled(lambda z, _: (z @ z.T).logsumexp(1).sum())
    budget = allocated() + 200_000
    batch = ib.VirtualBatch(model, loss, memory_budget=budget)
    with pytest.raises(ib.BudgetExceeded):
        batch.backward(inputs, inputs)


def test_wrap_sees_its_own_backward():
    model, (inputs, targets) = mlp(512), data(64)
    wrapped = ib.wrap(model, memory_budget=allocated() + 2 * MiB)
    for _ in range(20):
        model.zero_grad()
        torch.accelerator.reset_peak_memory_stats()
        loss = nn.functional.mse_loss(wrapped(inputs), targets)
        before = allocated()
        loss.backward()
    real = torch.accelerator.max_memory_allocated()
    assert real > before
    assert wrapped.last_report.peak_bytes == real


def test_a_wrapped_model_inside_a_virtual_batch():
    model, (inputs, targets) = mlp(), data()
    wanted = native(model, nn.MSELoss(), inputs, targets)
    wrapped = ib.wrap(model, micro_batch_size=3)
    ib.VirtualBatch(wrapped, nn.MSELoss(), micro_batch_size=7).backward(inputs, targets)
    assert_same(gradients(model), wanted)


class OverTwoDevices(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16).double().to(f"{KIND}:0")
        self.second = nn.Linear(16, 3).double().to(f"{KIND}:1")

    def forward(self, x):
        return self.second(self.first(x).tanh().to(f"{KIND}:1"))


@sim.two_devices
@pytest.mark.parametrize(
    ("where", "coupled"), [(f"{KIND}:1", False), (f"{KIND}:1", True), (f"{KIND}:0", True)]
)
def test_a_model_over_two_devices(where, coupled):
    model, (inputs, targets) = OverTwoDevices(), data()
    targets = targets.to(where)

    def criterion(outputs, targets):
        return nn.functional.mse_loss(outputs, targets.to(outputs.device))

    wanted = native(model, criterion, inputs, targets)
    loss = ib.losses.coupled(criterion) if coupled else nn.MSELoss()
    for _ in range(2):
        model.zero_grad()
        report = ib.VirtualBatch(model, loss, micro_batch_size=7).backward(inputs, targets)
        assert_same(gradients(model), wanted)
    assert torch.isfinite(report.loss.cpu())


@pytest.mark.parametrize("way", ["virtual", "wrap"])
def test_the_whole_batch_as_one_micro_batch(way):
    """A program that mixes samples runs at once where the budget holds all of it."""

    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = mlp()

        def forward(self, x):
            y = self.body(x)
            return y - y.mean(0)

    model, (inputs, targets) = Mixing(), data()
    wanted = native(model, nn.MSELoss(), inputs, targets)
    budget = allocated() + 10 * MiB
    for _ in range(2):
        model.zero_grad()
        if way == "virtual":
            ib.VirtualBatch(model, nn.MSELoss(), memory_budget=budget).backward(inputs, targets)
        else:
            nn.functional.mse_loss(ib.wrap(model, memory_budget=budget)(inputs), targets).backward()
        assert_same(gradients(model), wanted)


class Scattered(nn.Module):
    """As a graph network adds messages: `index_add` uses atomics."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16).double()
        self.last = nn.Linear(4, 3).double()
        self.register_buffer("index", torch.arange(16) % 4)

    def forward(self, x):
        x = self.first(x).tanh()
        return self.last(x.new_zeros(len(x), 4).index_add(1, self.index, x))


@pytest.mark.parametrize("way", ["coupled", "wrap", "checkpoint", "batch_norm"])
def test_kernels_that_differ_from_run_to_run(way):
    model, (inputs, targets) = Scattered(), data()
    if way == "batch_norm":
        model.last = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    criterion = nn.functional.mse_loss
    wanted = native(model, criterion, inputs, targets)
    with sim.settings(atomics=1):
        for _ in range(3):
            model.zero_grad()
            if way == "wrap":
                criterion(ib.wrap(model, micro_batch_size=7)(inputs), targets).backward()
            else:
                loss = ib.losses.coupled(criterion) if way == "coupled" else nn.MSELoss()
                options = {"checkpoint_segments": 2} if way == "checkpoint" else {}
                batch = ib.VirtualBatch(model, loss, micro_batch_size=7, **options)
                batch.backward(inputs, targets)
            assert_same(gradients(model), wanted, 1e-10)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_cross_entropy_under_autocast(dtype):
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 5))
    inputs, targets = torch.randn(24, 8), torch.randint(5, (24,))
    with torch.autocast(KIND, dtype=dtype):
        wanted = native(model, nn.CrossEntropyLoss(), inputs, targets)
        batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=24)
        batch.backward(inputs, targets)
    assert_same(gradients(model), wanted, 1e-6)


@pytest.mark.parametrize("way", ["virtual", "wrap"])
def test_what_the_device_refuses_is_not_told_as_a_byte_too_many(way):
    """A budget larger than the device: nobody knows how much more is needed."""
    model = nn.Sequential(nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, 3))
    inputs, targets = torch.randn(1, 20_000, 400), torch.randn(1, 20_000, 3)
    budget = 900 * MiB
    torch.accelerator.empty_cache()  # else blocks of earlier tests serve beyond the capacity
    with (
        sim.settings(capacity=allocated() + 16 * MiB),
        pytest.raises(ib.BudgetExceeded) as raised,
    ):
        if way == "wrap":
            wrapped = ib.wrap(model, memory_budget=budget)
            nn.functional.mse_loss(wrapped(inputs), targets).backward()
        else:
            ib.VirtualBatch(model, nn.MSELoss(), memory_budget=budget).backward(inputs, targets)
    assert str(budget) not in str(raised.value) and str(budget + 1) not in str(raised.value)
    assert "needs more than the memory_budget of 900 MiB" in str(raised.value)


def test_the_devices_own_peak_is_that_of_the_step():
    """A row of docs/limits.md: a device keeps one peak, and nothing can put it back."""
    model, (inputs, targets) = mlp(), data()
    torch.accelerator.reset_peak_memory_stats()
    del [torch.empty(10 * MiB)][:]
    users = torch.accelerator.max_memory_allocated()
    ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=7).backward(inputs, targets)
    step = torch.accelerator.max_memory_allocated()
    assert 0 < step < users - 30 * MiB
