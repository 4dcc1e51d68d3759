"""What waits at the cuts leaves the device: the peak stays flat, and gradients are what they were."""

from __future__ import annotations

import inspect
import resource
import signal
import textwrap
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
from fault_support import assert_a_kill_leaves_nothing, in_long_tests
from support import gradient_error, live_bytes, native_gradients, until_quiet
from torch import nn

TOLERANCE = 1e-11  # of a network of several BatchNorm layers; see test_batch_norm.py
SIMULATED_HOST = {"host_budget": "1GiB", "disk": False}


def network(channels: int = 8, layers: int = 4, kernel: int = 3) -> nn.Sequential:
    torch.manual_seed(0)
    stack: list[nn.Module] = [nn.Conv2d(3, channels, kernel, padding=kernel // 2)]
    for _ in range(layers):
        stack += [
            nn.BatchNorm2d(channels),
            nn.ReLU(inplace=True),
            nn.Conv2d(channels, channels, kernel, padding=kernel // 2),
        ]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 10)]
    return nn.Sequential(*stack, *head).double()


def samples(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    return torch.randn(count, 3, 12, 12, dtype=torch.float64), torch.randint(0, 10, (count,))


@pytest.mark.parametrize(
    "where",
    [SIMULATED_HOST, {"host_budget": "100KiB"}, {}],
    ids=["host", "host and disk", "disk"],
)
@pytest.mark.parametrize("coupled", [False, True], ids=["separable", "coupled"])
@pytest.mark.parametrize("retained", [0, 3])
def test_offloaded_steps_are_bit_equal_to_others(where: dict, coupled: bool, retained: int) -> None:
    images, labels = samples(26)
    loss = nn.CrossEntropyLoss()
    if coupled:
        loss = ib.losses.coupled(lambda out, target: nn.functional.cross_entropy(out, target))
    gradients = []
    for offload in ("never", "always"):
        model = network()
        batch = ib.VirtualBatch(
            model,
            loss,
            micro_batch_size=4,
            retained_micro_batches=retained,
            offload=ib.Offload("always", **where) if offload == "always" else offload,
        )
        report = batch.backward(images, labels)
        assert (report.offloaded_bytes > 0) == (offload == "always")
        gradients.append([parameter.grad for parameter in model.parameters()])
        gradients[-1] += list(model.buffers())
    assert all(map(torch.equal, *gradients))
    assert (
        gradient_error(model, native_gradients(network(), nn.CrossEntropyLoss(), images, labels))
        <= TOLERANCE
    )


def test_the_peak_is_flat_in_the_number_of_micro_batches() -> None:
    above = []
    for micro_batches in (16, 64, 256):  # statistics of eight are added up together
        model = network(channels=4, layers=3)
        images, labels = samples(4 * micro_batches)
        batch = ib.VirtualBatch(
            model,
            nn.CrossEntropyLoss(),
            micro_batch_size=4,
            offload=ib.Offload("always", **SIMULATED_HOST),
        )
        peaks = []
        for _ in range(4):  # in some steps rows are looked at, in more room than this takes
            live = live_bytes()
            peaks.append(batch.backward(images, labels).peak_bytes - live)
            model.zero_grad()
        above.append(min(peaks[1:]))
    # A device rounds blocks to 512 bytes; if anything stayed of each micro-batch, it would be more.
    assert max(above) - min(above) <= 512, above


@pytest.mark.parametrize(
    "divisor", [10, *(pytest.param(each, marks=in_long_tests) for each in (3, 40))]
)
def test_a_budget_that_frontiers_do_not_fit_into_is_kept_by_offload(divisor: int) -> None:
    images, labels = samples(256)
    model = network()
    wanted = native_gradients(model, nn.CrossEntropyLoss(), images, labels)
    live = live_bytes()
    whole = 256 * 8 * 144 * 8 * 4  # of the frontiers alone, about
    budget = live + whole // divisor + 2**20
    with pytest.raises(ib.BudgetExceeded):
        ib.VirtualBatch(
            model, nn.CrossEntropyLoss(), memory_budget=budget, offload="never"
        ).backward(images, labels)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), memory_budget=budget)
    for _ in range(20):
        model.zero_grad()
        report = batch.backward(images, labels)
        assert report.peak_bytes <= budget
        if report.predicted_peak_bytes is not None and report.restarts == 0:  # settled
            break
    assert report.restarts == 0
    assert report.offloaded_bytes > whole // 2
    assert report.predicted_peak_bytes == pytest.approx(report.peak_bytes, rel=0.05)
    assert gradient_error(model, wanted) <= TOLERANCE
    assert "offloaded to host or disk" in batch.plan(images, labels).explain()


@pytest.mark.parametrize("offload", ["auto", "never"], ids=["offloaded", "computed again"])
def test_one_sample_beyond_the_device_needs_one_segment(offload: str) -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(150) for layer in (nn.Linear(8, 8), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(8, 1)).double()
    inputs = torch.randn(2, 512, 8, dtype=torch.float64)
    targets = torch.randn(2, 512, 1, dtype=torch.float64)
    wanted = native_gradients(model, nn.MSELoss(), inputs, targets)
    gradients = sum(parameter.nbytes for parameter in model.parameters())
    # A layer's output is 32 KiB; the least without offloading is about 2 × √150 of them.
    budget = live_bytes() + gradients + 420 * 2**10
    batch = ib.VirtualBatch(model, nn.MSELoss(), memory_budget=budget, offload=offload)
    for _ in range(2):
        for parameter in model.parameters():
            parameter.grad = None
        report = batch.backward(inputs, targets)
        assert report.peak_bytes <= budget
        assert (report.offloaded_bytes > 0) == (offload == "auto")
        assert gradient_error(model, wanted) <= TOLERANCE


@until_quiet
def test_bandwidth_of_the_simulated_device_costs_time() -> None:
    model = network()
    images, labels = samples(32)
    seconds = {}
    for bandwidth in (0.0, 20e6):
        batch = ib.VirtualBatch(
            model,
            nn.CrossEntropyLoss(),
            micro_batch_size=8,
            offload=ib.Offload("always", host_bandwidth=bandwidth, **SIMULATED_HOST),
        )
        batch.backward(images, labels)
        report = batch.backward(images, labels)
        seconds[bandwidth] = report.seconds
    assert seconds[20e6] > report.offloaded_bytes / 20e6


def hiding(channels: int, count: int, **options: object) -> tuple:
    """A network whose copies take about half of the time of a step, and its batch."""
    model = network(channels=channels)
    images, labels = samples(count)

    def fastest(bandwidth: float) -> ib.StepReport:
        batch = ib.VirtualBatch(
            model,
            nn.CrossEntropyLoss(),
            micro_batch_size=8,
            offload=ib.Offload("always", host_bandwidth=bandwidth, **SIMULATED_HOST),
            **options,
        )
        reports = [batch.backward(images, labels) for _ in range(6)]
        return min(reports, key=lambda report: report.seconds)

    free = fastest(0.0)
    return free, 2 * free.offloaded_bytes / (free.seconds / 2), fastest


@until_quiet
def test_copies_are_hidden_behind_compute() -> None:
    free, bandwidth, fastest = hiding(16, 64)
    copies = free.seconds / 2
    report = fastest(bandwidth)
    assert report.offloaded_bytes == free.offloaded_bytes
    assert report.offload_seconds_hidden > 0.5 * copies
    assert report.seconds < free.seconds + 0.6 * copies  # in turn: all of them, and more
    assert report.offload_seconds_hidden + report.offload_seconds_waited > 0.9 * copies


@until_quiet
def test_without_room_copies_run_in_turn_and_the_budget_is_kept() -> None:
    images, labels = samples(64)
    peaks, gradients = [], []
    for budget in (None, 0):
        # Without what convolutions unfold, so that recording takes less than two more frontiers do.
        model = network(channels=16, kernel=1)
        if budget is not None:
            budget = peaks[0] + sum(each.nbytes for each in gradients[0]) - 8192
        batch = ib.VirtualBatch(
            model,
            nn.CrossEntropyLoss(),
            micro_batch_size=8,
            memory_budget=budget,
            offload=ib.Offload("always", host_bandwidth=100e6, **SIMULATED_HOST),
        )
        report = batch.backward(images, labels)
        peaks.append(report.peak_bytes)
        gradients.append([parameter.grad for parameter in model.parameters()])
        assert report.restarts == (budget is not None)
        for parameter in model.parameters():
            parameter.grad = None
        again = batch.backward(images, labels)
        assert again.restarts == 0
        if budget is not None:
            assert again.offload_seconds_hidden < 1e-3
        else:  # a machine with other work may let compute wait for every copy of one step
            assert batch.backward(images, labels).offload_seconds_hidden >= 1e-3
        plan = batch.plan(images, labels)
        assert plan.offloads
        assert plan.overlaps == (budget is None)
        assert ("in turn" in plan.explain()) == (budget is not None)
        if budget is not None:
            assert max(report.peak_bytes, again.peak_bytes) <= budget
    assert all(map(torch.equal, *gradients))


@pytest.mark.parametrize("room", [1.0, 8.0], ids=["in turn", "overlapped"])
@until_quiet
def test_a_budget_decides_whether_copies_overlap_and_the_peak_is_predicted(room: float) -> None:
    """To within 1 %, on nets whose statistics and bookkeeping weigh more than that."""
    for channels, layers, count in ((8, 4, 256), (16, 2, 150), (6, 8, 200)):
        model = network(channels, layers)
        images, labels = samples(count)
        budget = live_bytes() + int(room * 2**20 / 2) + 2**20
        batch = ib.VirtualBatch(
            model,
            nn.CrossEntropyLoss(),
            memory_budget=budget,
            offload=ib.Offload("always", **SIMULATED_HOST),
        )
        reports = []
        for _ in range(3):  # the first one rehearses, and the first two look at rows
            for parameter in model.parameters():
                parameter.grad = None
            reports.append(batch.backward(images, labels))
        report = reports[-1]
        assert report.peak_bytes <= budget
        assert report.predicted_peak_bytes == pytest.approx(report.peak_bytes, rel=0.01)


@until_quiet
def test_the_plan_foretells_what_copies_will_cost() -> None:
    """Of the step to come, from what instructions took and how fast copies were."""
    _, bandwidth, _ = hiding(16, 64)
    model = network(channels=16)
    images, labels = samples(64)
    for share in (1.0, 0.25):  # at a quarter of the bandwidth most is waited for
        batch = ib.VirtualBatch(
            model,
            nn.CrossEntropyLoss(),
            micro_batch_size=8,
            offload=ib.Offload("always", host_bandwidth=share * bandwidth, **SIMULATED_HOST),
        )
        misses = []
        for _ in range(12):
            plan = batch.plan(images, labels)
            report = batch.backward(images, labels)
            copies = 2 * report.offloaded_bytes / (share * bandwidth)
            predicted = plan.predicted_offload_seconds_hidden, plan.predicted_offload_seconds_waited
            found = report.offload_seconds_hidden, report.offload_seconds_waited
            misses.append(max(abs(a - b) for a, b in zip(predicted, found, strict=True)) / copies)
            assert sum(found) > 0.9 * copies
            assert plan.offloaded_bytes == report.offloaded_bytes
            if misses[-1] < 0.25:  # of all copies; a machine with other work wakes threads late
                break
        assert misses[-1] < 0.25, misses
        assert "hidden behind compute" in plan.explain()
        assert "predicted for the next" in plan.explain()


@until_quiet
def test_one_samples_frontiers_come_back_while_segments_compute() -> None:
    torch.manual_seed(0)
    layers = [layer for _ in range(40) for layer in (nn.Linear(64, 64), nn.Tanh())]
    model = nn.Sequential(*layers, nn.Linear(64, 1)).double()
    inputs = torch.randn(1, 512, 64, dtype=torch.float64)
    targets = torch.randn(1, 512, 1, dtype=torch.float64)
    wanted = native_gradients(model, nn.MSELoss(), inputs, targets)
    batch = ib.VirtualBatch(
        model,
        nn.MSELoss(),
        micro_batch_size=1,
        checkpoint_segments=8,
        offload=ib.Offload("always", host_bandwidth=200e6, **SIMULATED_HOST),
    )
    for _ in range(3):
        model.zero_grad()
        report = batch.backward(inputs, targets)
        assert gradient_error(model, wanted) <= 1e-12
    plan = batch.plan(inputs, targets)
    assert plan.overlaps
    assert report.offload_seconds_hidden > 0
    # Gradients of frontiers go straight to the next segment: what leaves is frontiers, once each.
    segments = sum(step.operation == "resume" for step in plan.instructions)
    assert 0 < report.offloaded_bytes <= (segments - 1) * inputs.nbytes


def everything(model: nn.Module) -> list[torch.Tensor]:
    kept = [tensor.clone() for tensor in model.state_dict().values()]
    kept += [torch.zeros(0) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [*kept, torch.get_rng_state()]


def test_a_full_disk_is_a_typed_error_and_leaves_everything_as_it_was() -> None:
    model = network()
    images, labels = samples(64)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4, offload="always")
    batch.backward(images, labels)
    before = everything(model)
    live = live_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, limits[1]))
        fresh = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4, offload="always")
        with pytest.raises(ib.OffloadError, match=r"needs|room|disk"):
            fresh.backward(images, labels)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    del fresh
    assert live_bytes() == live
    assert all(map(torch.equal, before, everything(model)))
    wanted = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    for module in model:
        if isinstance(module, nn.BatchNorm2d):
            module.reset_running_stats()
    batch.backward(images, labels)
    assert all(map(torch.equal, wanted, (p.grad for p in model.parameters())))


def test_without_disk_a_host_that_is_full_is_a_typed_error() -> None:
    model = network()
    images, labels = samples(64)
    batch = ib.VirtualBatch(
        model,
        nn.CrossEntropyLoss(),
        micro_batch_size=4,
        offload=ib.Offload("always", host_budget="200KiB", disk=False),
    )
    with pytest.raises(ib.OffloadError):
        batch.backward(images, labels)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(int(m.num_batches_tracked) == 0 for m in model if isinstance(m, nn.BatchNorm2d))


def test_nothing_is_left_behind_after_a_kill(tmp_path) -> None:
    script = textwrap.dedent("""
        import os, signal, sys
        import torch
        from torch import nn
        import infinitybatch as ib
        model = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8),
            nn.Flatten(), nn.LazyLinear(10))
        images, labels = torch.randn(64, 3, 12, 12), torch.randint(0, 10, (64,))
        model(images)
        # While the last segment is at work the frontiers of all are away.
        batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4, offload=ib.Offload("always", directory=sys.argv[1]),
                                on_micro_batch=lambda _: os.kill(os.getpid(), signal.SIGKILL))
        batch.backward(images, labels)
        """)
    assert_a_kill_leaves_nothing(script, tmp_path)


@pytest.mark.parametrize(
    ("offload", "message"),
    [
        (lambda: "sometimes", "auto"),
        (
            lambda: ib.Offload(host_budget="lots"),
            '^host_budget is "lots", which is not a valid memory budget',
        ),
        (lambda: ib.Offload(host_budget=0), "^host_budget is 0"),
        (lambda: ib.Offload("always", directory="/nowhere/at/all"), "nowhere"),
        (lambda: ib.Offload("always", host_bandwidth=-1), "bandwidth"),
    ],
)
def test_misuse(offload: Callable[[], object], message: str) -> None:
    images, labels = samples(8)
    with pytest.raises(ib.Error, match=message):
        ib.VirtualBatch(
            network(), nn.CrossEntropyLoss(), micro_batch_size=4, offload=offload()
        ).backward(images, labels)


@pytest.mark.parametrize(
    "old",
    [
        {"park": "always"},
        {"host_budget": "1GiB"},
        {"park_on_disk": False},
        {"park_directory": "/tmp"},
        {"host_bandwidth": 1e9},
    ],
    ids=lambda old: next(iter(old)),
)
@pytest.mark.parametrize("way", ["VirtualBatch", "wrap"])
def test_arguments_of_before_say_what_takes_their_place(way: str, old: dict[str, Any]) -> None:
    name = next(iter(old))
    with pytest.raises(
        ib.InvalidArgument, match=rf"^{name} is not an argument any more: .*offload="
    ):
        if way == "wrap":
            ib.wrap(network(), micro_batch_size=4, **old)
        else:
            ib.VirtualBatch(network(), nn.CrossEntropyLoss(), micro_batch_size=4, **old)


def test_editors_see_the_arguments_of_today() -> None:
    for function in (ib.wrap, ib.VirtualBatch):
        names = inspect.signature(function).parameters
        assert "offload" in names and not names.keys() & {"park", "kwargs", "args"}
