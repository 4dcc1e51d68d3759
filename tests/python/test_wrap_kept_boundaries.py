"""Behind `wrap`, too, boundary activations that do not fit are kept in part and the others computed
again on the way back, whenever and however often that begins: everything stays what it is where all
are kept."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from batch_norm_models import Dense, Residual, images
from support import Calls, until_quiet
from test_kept_boundaries import KEPT, OTHERS, dropping
from torch import nn
from wrap_support import close, contrastive, grads
from wrap_whole_batch_support import buffers, live

ROWS, SIZE = 32, 2


def made(make: Callable[[], nn.Module], rows: int = ROWS) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return make().double().train(), images(rows)[0]


def step(module: nn.Module, x: torch.Tensor, times: int = 1, calls: int = 1) -> dict[str, Any]:
    """What `calls` of the module, one backward pass through each output and `times` through all
    leave, beginning from the same random state."""
    module.zero_grad(set_to_none=True)
    leaves = [(x * (1 + i)).requires_grad_() for i in range(calls)]
    torch.manual_seed(1)
    outputs = [module(leaf) for leaf in leaves]
    loss = contrastive(torch.cat(outputs)) + sum(each.sin().mean() for each in outputs)
    for i in range(times):
        loss.backward(retain_graph=i + 1 < times)
    return {
        "outputs": [each.detach() for each in outputs],
        "gradients": grads(module),
        "of the inputs": [leaf.grad for leaf in leaves],
        "buffers": {name: each.clone() for name, each in buffers(module).items()},
        "random": torch.get_rng_state(),
    }


def peak_of(inner: nn.Module, run: Callable[[nn.Module], Any]) -> int:
    """What `run` takes natively, above what is live."""
    model = copy.deepcopy(inner)
    before = live()
    with ib.memory.peak() as scope:
        run(model)
    return scope.peak - before


#: Of native's peak. The first keeps all in the networks with nine layers and more.
SHARES = (66, 56, 50, 44, 38, 33)
FEW = (52, 42)
WIDE = (80, 74, 60, 54, 50)


def chosen(
    inner: nn.Module,
    run: Callable[[nn.Module], Any],
    shares: tuple[int, ...] = SHARES,
    **options: Any,
) -> Iterator[tuple[float, Any, ib.WrapReport]]:
    """`run` with a given size under ever smaller budgets, each of which keeps other boundaries: its
    peak as a share of native's, what it left, and its report."""
    native = peak_of(inner, run)
    seen = set()
    for share in shares:
        model = copy.deepcopy(inner)
        before = live()
        budget = before + native * share // 100
        given = {"micro_batch_size": SIZE, "memory_budget": budget, "offload": "never", **options}
        wrapped = ib.wrap(model, **given)
        found = None
        for _ in range(2):  # what the loss itself takes nobody knows before the first call
            try:
                found = run(wrapped)
                break
            except ib.BudgetExceeded:
                pass
            model.load_state_dict(inner.state_dict())
            model.zero_grad(set_to_none=True)
        if found is None:
            return
        report = wrapped.last_report
        assert report.strategy == "cut" and report.peak_bytes <= budget
        if report.strategy_reason in seen:
            continue
        seen.add(report.strategy_reason)
        yield (report.peak_bytes - before) / native, found, report


def same_bits(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)


#: Network, how many ways to keep boundaries the budgets bring about at least, and the least peak.
NETWORKS = {
    "residual, 9 layers": (lambda: Residual(8), 4, 0.4),
    "residual, 17 layers": (lambda: Residual(16), 4, 0.36),
    "DenseNet": (lambda: Dense(8), 2, 0.4),
}


@pytest.mark.parametrize("network", NETWORKS)
def test_every_choice_is_exact(network: str) -> None:
    make, ways, least = NETWORKS[network]
    inner, x = made(make)
    wanted = step(copy.deepcopy(inner), x)
    all_kept = step(ib.wrap(copy.deepcopy(inner), micro_batch_size=SIZE), x)
    peaks = []
    for peak, found, _ in chosen(inner, lambda module: step(module, x)):
        same_bits(found, all_kept)
        close(found, wanted)
        peaks.append(peak)
    assert len(peaks) >= ways
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[-1] <= least, peaks


@pytest.mark.parametrize("times", [3])
def test_several_backward_passes(times: int) -> None:
    """What is computed again goes again, and what is kept stays, until the last of them."""
    inner, x = made(lambda: Residual(8))
    wanted = step(copy.deepcopy(inner), x, times)
    all_kept = step(ib.wrap(copy.deepcopy(inner), micro_batch_size=SIZE), x, times)
    recomputed = 0
    for _, found, report in chosen(inner, lambda module: step(module, x, times), FEW):
        recomputed += report.strategy_reason.startswith(KEPT)
        same_bits(found, all_kept)
        close(found, wanted)
    assert recomputed > 0


@pytest.mark.parametrize("times", [1, 2])
def test_calls_that_wait_beside_each_other(times: int) -> None:
    inner, x = made(lambda: Residual(8))
    wanted = step(copy.deepcopy(inner), x, times, calls=2)
    all_kept = step(ib.wrap(copy.deepcopy(inner), micro_batch_size=SIZE), x, times, calls=2)
    recomputed = 0
    for _, found, report in chosen(inner, lambda module: step(module, x, times, calls=2), WIDE):
        recomputed += report.strategy_reason.startswith(KEPT)
        same_bits(found, all_kept)
        close(found, wanted)
    assert recomputed > 0


#: Natively, masks and what is dropped lie beside each other: all boundaries take a quarter of that.
@pytest.mark.parametrize(
    ("options", "shares"),
    [({}, (26, 23, 20, 17)), ({"match_native_rng": True}, WIDE)],
    ids=["own", "native's"],
)
def test_random_numbers_are_drawn_again_as_they_were(
    options: dict[str, Any], shares: tuple[int, ...]
) -> None:
    inner, x = made(dropping)
    wanted = step(ib.wrap(copy.deepcopy(inner), micro_batch_size=SIZE, **options), x, 2)
    native = step(copy.deepcopy(inner), x, 2)
    recomputed = 0
    for _, found, report in chosen(inner, lambda module: step(module, x, 2), shares, **options):
        recomputed += report.strategy_reason.startswith(KEPT)
        same_bits(found, wanted)
        if options:
            close({**found, "random": None}, {**native, "random": None})
    assert recomputed > 0


@pytest.mark.parametrize("name", OTHERS)
def test_other_networks(name: str) -> None:
    inner, x = made(OTHERS[name], rows=24)
    wanted = step(copy.deepcopy(inner), x, 2)
    all_kept = step(ib.wrap(copy.deepcopy(inner), micro_batch_size=SIZE), x, 2)
    for _, found, _ in chosen(inner, lambda module: step(module, x, 2), FEW):
        same_bits(found, all_kept)
        close({**found, "random": None}, {**wanted, "random": None})


def test_static_graph() -> None:
    inner, x = made(lambda: Residual(8))
    wanted = step(copy.deepcopy(inner), x)
    recomputed = 0
    for _, found, report in chosen(inner, lambda module: step(module, x), FEW, static_graph=True):
        recomputed += report.strategy_reason.startswith(KEPT)
        close(found, wanted)
    assert recomputed > 0


def beside_each_other(module: nn.Module, x: torch.Tensor) -> list[Any]:
    """What a loop does beside training: looks without gradients, evaluates, drops a call."""
    found: list[Any] = []
    for _ in range(3):
        found.append(step(module, x))
        with torch.no_grad():
            found.append(module(x))
        module(x)  # nobody goes back
        module.eval()
        found.append(step(module, x))
        with torch.no_grad():
            found.append(module(x[:7]))
        module.train()
        found.append(copy.deepcopy(buffers(module)))
    return found


@pytest.mark.parametrize("options", [{"micro_batch_size": SIZE}, {}], ids=["given", "planned"])
def test_calls_without_gradients_in_eval_and_dropped(options: dict[str, Any]) -> None:
    inner, x = made(lambda: Residual(8), rows=64)
    wanted = beside_each_other(copy.deepcopy(inner), x)
    native = peak_of(inner, lambda module: step(module, x))
    for share in (0.6, 0.5):
        model = copy.deepcopy(inner)
        budget = live() + int(share * native)
        wrapped = ib.wrap(model, memory_budget=budget, offload="never", **options)
        close(beside_each_other(wrapped, x), wanted)
        step(wrapped, x)
        assert wrapped.last_report.strategy_reason.startswith(KEPT)
        assert wrapped.last_report.peak_bytes <= budget
        with torch.no_grad():
            wrapped(x)
        assert wrapped.last_report.peak_bytes <= budget


def test_a_call_without_gradients_keeps_nothing() -> None:
    """Nobody goes back: not even what waits in front of one op has to be there for the next."""
    inner, x = made(lambda: Residual(16))
    peaks = []
    for depth in (2, 16):
        model = Residual(depth).double()
        budget = live() + (64 << 20)
        wrapped = ib.wrap(model, memory_budget=budget, micro_batch_size=SIZE)
        before = live()
        with torch.no_grad():
            wrapped(x)
        assert wrapped.last_report.strategy_reason == ""
        peaks.append(wrapped.last_report.peak_bytes - before)
    assert peaks[1] < 1.3 * peaks[0], peaks


@pytest.mark.parametrize("depth", [8])
def test_the_planner_keeps_what_fits_and_says_so(depth: int) -> None:
    inner, x = made(lambda: Residual(depth), rows=64)
    native = peak_of(inner, lambda module: contrastive(module(x)).backward())
    same = copy.deepcopy(inner)
    kept = []
    for share in (0.54, 0.46, 0.4):
        inner.load_state_dict(same.state_dict())
        budget = live() + int(share * native)
        wrapped = ib.wrap(inner, memory_budget=budget, offload="never")
        predicted = 0
        for i in range(7):
            for module in (wrapped, same):
                module.zero_grad(set_to_none=True)
            before = live()
            contrastive(wrapped(x)).backward()
            contrastive(same(x)).backward()
            close(grads(inner), grads(same))
            close(buffers(inner), buffers(same))
            report = wrapped.last_report
            assert report.peak_bytes <= budget and report.offloaded_bytes == 0
            assert i < 2 or report.restarts == 0
            if i >= 2 and report.predicted_peak_bytes is not None:
                predicted += 1
                above = report.predicted_peak_bytes - before
                assert above == pytest.approx(report.peak_bytes - before, rel=0.01)
        assert predicted >= 2
        assert report.strategy == "cut" and report.strategy_reason.startswith(KEPT)
        kept.append(report.strategy_reason)
    assert len(set(kept)) >= 2, kept


def test_what_is_too_small_says_what_forward_needs_at_least() -> None:
    """What comes of it in a loss that has not run nobody knows: no budget is said to be enough."""
    inner, x = made(lambda: Residual(8), rows=64)
    native = peak_of(inner, lambda module: contrastive(module(x)).backward())
    before = live()
    with pytest.raises(ib.BudgetExceeded) as raised:
        ib.wrap(inner, memory_budget=before + native // 6, offload="never")(x)
    assert raised.value.smallest_feasible is None
    assert native // 6 < raised.value.needed - before <= 0.4 * native


def across() -> nn.Module:
    """A function of the whole batch between BatchNorms."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for i, (norm, layer) in enumerate(zip(self.norms, self.layers, strict=True)):
            x = x + layer(F.relu(norm(x)))
            if i == 4:
                x = x + ib.across_batch(lambda rows: rows.tanh() - rows.mean(0), x)
        return self.head(x.mean((2, 3)))

    return Calls(
        forward,
        stem=nn.Conv2d(3, 6, 3, padding=1),
        norms=nn.ModuleList(nn.BatchNorm2d(6) for _ in range(8)),
        layers=nn.ModuleList(nn.Conv2d(6, 6, 3, padding=1) for _ in range(8)),
        head=nn.Linear(6, 5),
    )


AGAIN = {
    "BatchNorm": (lambda: Residual(8), {}),
    "masks of the whole batch": (dropping, {"match_native_rng": True}),
    "a function of the whole batch": (across, {}),
}


@pytest.mark.parametrize("times", [1, 2])
@pytest.mark.parametrize("name", AGAIN)
def test_a_backward_without_room_goes_again_with_fewer(name: str, times: int) -> None:
    """With a given size forward knows nothing of what backward takes. What backward has let go of
    is computed again from the inputs."""
    make, options = AGAIN[name]
    inner, x = made(make)
    native = peak_of(inner, lambda module: step(module, x))
    budget = live() + native
    wanted: list[Any] = []
    restarts = 0
    for part in (0, 16, 24, 32, 48):
        given = {"micro_batch_size": SIZE, "memory_budget": budget, "offload": "never", **options}
        wrapped = ib.wrap(inner, **given)
        torch.manual_seed(1)
        leaf = x.clone().requires_grad_()
        loss = contrastive(wrapped(leaf))
        assert wrapped.last_report.strategy_reason == ""
        room = native // part if part else budget - live()
        ballast = [torch.empty(budget - live() - room, dtype=torch.uint8)]
        for i in range(times):
            loss.backward(retain_graph=i + 1 < times)
            ballast.clear()
        report = wrapped.last_report
        assert report.peak_bytes <= budget
        assert (report.restarts > 0) == report.strategy_reason.startswith(KEPT)
        restarts += report.restarts
        gradients = [leaf.grad, *(parameter.grad for parameter in inner.parameters())]
        inner.zero_grad(set_to_none=True)
        same_bits(gradients, wanted or gradients)
        wanted = gradients
        del loss
        if restarts > 0:
            break
    assert restarts > 0


def test_memory_that_runs_out_anywhere_in_backward() -> None:
    inner, x = made(lambda: Residual(8))
    native = peak_of(inner, lambda module: step(module, x))
    budget = live() + native // 2
    wrapped = ib.wrap(inner, memory_budget=budget, offload="never", micro_batch_size=SIZE)
    step(wrapped, x)
    assert wrapped.last_report.strategy_reason.startswith(KEPT)
    inner.zero_grad(set_to_none=True)
    leaf = x.clone().requires_grad_()
    loss = contrastive(wrapped(leaf))

    def found() -> list[torch.Tensor]:
        gradients = [leaf.grad, *(parameter.grad for parameter in inner.parameters())]
        leaf.grad = None
        inner.zero_grad(set_to_none=True)
        return gradients

    with ib.memory.fail_allocation() as counter:
        loss.backward(retain_graph=True)
    wanted = found()
    for place in (counter.seen * i // 8 for i in range(1, 8)):
        try:
            with ib.memory.fail_allocation(place):
                loss.backward(retain_graph=True)
        except (torch.OutOfMemoryError, ib.BudgetExceeded):
            assert leaf.grad is None and all(each.grad is None for each in inner.parameters())
            loss.backward(retain_graph=True)
        same_bits(found(), wanted)


@until_quiet
@pytest.mark.parametrize("bandwidth", [2e7, 0], ids=["slow copies", "fast copies"])
@pytest.mark.real_times
def test_what_is_faster_stays(bandwidth: float) -> None:
    inner, x = made(lambda: Residual(8), rows=64)
    same = copy.deepcopy(inner)
    native = peak_of(inner, lambda module: contrastive(module(x)).backward())
    budget = live() + native * 6 // 10
    offload = ib.Offload("auto", host_budget="64MiB", host_bandwidth=bandwidth)
    wrapped = ib.wrap(inner, memory_budget=budget, offload=offload)
    for _ in range(20):
        for module in (wrapped, same):
            module.zero_grad(set_to_none=True)
            contrastive(module(x)).backward()
        close(grads(inner), grads(same))
        report = wrapped.last_report
        assert report.peak_bytes <= budget
        if "boundary activations are " in report.strategy_reason:
            break
    recomputes = "computed again, not offloaded" in report.strategy_reason
    assert recomputes or "offloaded, not computed again" in report.strategy_reason
    assert recomputes or bandwidth == 0
    assert (report.offloaded_bytes == 0) == recomputes
    assert report.strategy_reason.startswith(KEPT) == recomputes
