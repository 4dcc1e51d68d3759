"""What waits in a wrapped model leaves the device, until its backward and between: gradients are what
they were."""

import copy
import gc
import resource
import signal

import infinitybatch as ib
import pytest
import torch
from batch_norm_models import MODELS, Residual, images, make
from support import until_quiet
from torch import nn
from wrap_support import X, call_meanwhile, close, contrastive, grads
from wrap_whole_batch_support import buffers, live, small

HOST = {"host_budget": "1GiB", "disk": False}
WHERE = {"host": HOST, "host and disk": {"host_budget": "20KiB"}, "disk": {}}


def step(module, x, times: int = 1) -> list[torch.Tensor]:
    """Outputs, gradients (of the input too) and buffers after a step; `times` backward passes."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    outputs = module(x)
    loss = contrastive(outputs)
    for i in range(times):
        loss.backward(retain_graph=i + 1 < times)
    left = [outputs.detach(), x.grad, *grads(module).values(), *buffers(module).values()]
    return [tensor.clone() for tensor in left if tensor is not None]


@pytest.mark.parametrize(
    ("where", "size"), [("host", 4), ("host and disk", 5), ("disk", 4), ("disk", 1)]
)
def test_offloaded_calls_are_bit_equal_to_others(where, size):
    torch.manual_seed(1)
    native = Residual(3).double()
    x = images(14)[0]
    found = []
    for offload in ("never", ib.Offload("always", **WHERE[where])):
        inner = copy.deepcopy(native)
        wrapped = ib.wrap(inner, micro_batch_size=size, offload=offload)
        for times in (1, 1, 2):
            found.append(step(wrapped, x, times))
            report = wrapped.last_report
            assert report.strategy == "cut"
            assert (report.offloaded_bytes > 0) == (offload != "never")
    half = len(found) // 2
    for on_device, offloaded in zip(found[:half], found[half:], strict=True):
        assert all(map(torch.equal, on_device, offloaded))
    for times, offloaded in zip((1, 1, 2), found[half:], strict=True):
        close(offloaded, step(native, x, times))


@pytest.mark.parametrize("name", MODELS)
def test_networks_with_batch_norm(name):
    torch.manual_seed(2)
    inner = make(name)
    native = copy.deepcopy(inner)
    wrapped = ib.wrap(inner, micro_batch_size=5, offload=ib.Offload("always", **HOST))
    for _ in range(2):
        x = images(14)[0]
        close(step(wrapped, x), step(native, x))


def test_several_calls_before_backward_share_the_arena():
    """And give their places back, in whatever order they end."""
    torch.manual_seed(3)
    inner = small()
    native = copy.deepcopy(inner)
    wrapped = ib.wrap(
        inner, micro_batch_size=4, offload=ib.Offload("always", host_budget="12KiB", disk=False)
    )
    for _ in range(4):
        for module in (wrapped, native):
            module.zero_grad()
            a, b, c = module(X), module(X[:9]), module(X[3:])
            contrastive(torch.cat([a, b])).backward()
            contrastive(c).backward()
            module(X)  # without a backward
        close(grads(inner), grads(native))
        close(buffers(inner), buffers(native))
        a = b = c = None
        gc.collect()


def test_between_the_passes_only_outputs_are_on_the_device():
    torch.manual_seed(4)
    above = {}
    for offload in ("never", "always"):
        for micro_batches in (4, 32):
            wrapped = ib.wrap(
                Residual(2).double(), micro_batch_size=4, offload=ib.Offload(offload, **HOST)
            )
            x = images(4 * micro_batches)[0]
            wrapped(x).sum().backward()
            before = live()
            outputs = wrapped(x)
            above[offload, micro_batches] = live() - before - outputs.nbytes
            del outputs
    frontiers = {n: 4 * n * 6 * 64 * 8 for n in (4, 32)}
    assert above["never", 32] > 3 * frontiers[32]
    assert above["always", 32] - above["always", 4] < frontiers[4]


@pytest.mark.parametrize("given", [None, 8], ids=["planned", "size given"])
def test_a_budget_that_what_waits_does_not_fit_into(given):
    torch.manual_seed(5)
    inner = Residual(3, width=8).double()
    native = copy.deepcopy(inner)
    x = images(256)[0]
    budget = live() + (3 << 20)  # a frontier is 1 MiB, and three wait
    with pytest.raises(ib.BudgetExceeded):
        ib.wrap(inner, micro_batch_size=given, memory_budget=budget, offload="never")(x)
    inner.load_state_dict(native.state_dict())
    wrapped = ib.wrap(inner, micro_batch_size=given, memory_budget=budget)
    for _ in range(5):  # the fourth looks at rows, and tells no peak
        inner.zero_grad()
        native.zero_grad()
        outputs = wrapped(x)
        contrastive(outputs).backward()
        del outputs
        contrastive(native(x)).backward()
        close(grads(inner), grads(native))
        close(buffers(inner), buffers(native))
        report = wrapped.last_report
        assert report.peak_bytes <= budget
        assert report.offloaded_bytes > 3 << 20
    assert report.restarts == 0
    if given is None:
        assert report.predicted_peak_bytes == pytest.approx(report.peak_bytes, rel=0.01)


def test_a_backward_without_room_offloads_the_next_time():
    """A given size cannot become smaller."""
    torch.manual_seed(10)
    inner = Residual(3, width=8).double()
    native = copy.deepcopy(inner)
    x = images(128)[0]
    wrapped = ib.wrap(inner, micro_batch_size=8, memory_budget=live() + (4 << 20))
    outputs = wrapped(x)
    assert wrapped.last_report.offloaded_bytes == 0
    ballast = torch.empty(3 << 20, dtype=torch.uint8)
    with pytest.raises(ib.BudgetExceeded):
        contrastive(outputs).backward()
    del outputs, ballast
    native(x)
    outputs = wrapped(x)
    assert wrapped.last_report.offloaded_bytes > 0
    ballast = torch.empty(3 << 20, dtype=torch.uint8)
    contrastive(outputs).backward()
    del ballast
    contrastive(native(x)).backward()
    close(grads(inner), grads(native))
    close(buffers(inner), buffers(native))


@pytest.mark.parametrize("room", [3.0, 12.0], ids=["in turn", "overlapped"])
@until_quiet
def test_the_peak_of_a_offloaded_call_is_predicted(room):
    for depth, width, count in ((2, 8, 200), (5, 6, 150)):
        torch.manual_seed(6)
        wrapped = ib.wrap(
            Residual(depth, width).double(),
            memory_budget=live() + int(room * 2**20) + count * 3 * 64 * 8,
            offload=ib.Offload("always", **HOST),
        )
        x = images(count)[0]
        for _ in range(5):
            wrapped.zero_grad()
            outputs = wrapped(x)
            outputs.square().mean().backward()
            del outputs
        report = wrapped.last_report
        assert report.peak_bytes <= report.memory_budget
        assert report.predicted_peak_bytes == pytest.approx(report.peak_bytes, rel=0.01)


def everything(module: nn.Module) -> list[torch.Tensor]:
    kept = [tensor.clone() for tensor in module.state_dict().values()]
    kept += [torch.zeros(0) if p.grad is None else p.grad.clone() for p in module.parameters()]
    return [*kept, torch.get_rng_state()]


@pytest.mark.parametrize("disk", [True, False], ids=["disk", "host"])
def test_no_room_is_a_typed_error_and_leaves_everything_as_it_was(disk):
    torch.manual_seed(7)
    inner = Residual(3).double()
    native = copy.deepcopy(inner)
    x = images(32)[0]
    where = {} if disk else {"host_budget": "200KiB", "disk": False}
    wrapped = ib.wrap(inner, micro_batch_size=4, offload=ib.Offload("always", **where))
    if not disk:  # enough for forward: gradients find none beside what waits for another backward
        outputs = wrapped(x[:8])
        with pytest.raises(ib.OffloadError, match="host_budget"):
            outputs.sum().backward(retain_graph=True)
        assert all(p.grad is None for p in inner.parameters())
        del outputs
        wrapped(x[:8])  # what the failed one had is free
        native(x[:8])
        native(x[:8])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    before, held = everything(inner), live()
    try:
        if disk:
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**18, limits[1]))
        for _ in range(2):
            with pytest.raises(ib.OffloadError):
                wrapped(x)
            assert live() == held
            assert all(map(torch.equal, before, everything(inner)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    if disk:
        close(step(wrapped, x), step(native, x))
    else:  # what was taken is free again
        close(step(wrapped, x[:6]), step(native, x[:6]))


def test_one_thread_at_a_time():
    torch.manual_seed(8)
    inner = small()
    native = copy.deepcopy(inner)
    wrapped = ib.wrap(inner, micro_batch_size=4, offload=ib.Offload("always", **HOST))
    step(wrapped, X)
    step(native, X)
    with call_meanwhile(inner[2], lambda: wrapped(X)) as errors:
        found = step(wrapped, X)
    # Of what the hook noted the list keeps one forward's.
    assert len(errors) == 1 and "in another thread" in errors[0]
    close(found, step(native, X))
    close(step(wrapped, X), step(native, X))


def test_copies_offload_too_and_without_gradients():
    torch.manual_seed(9)
    wrapped = copy.deepcopy(
        ib.wrap(small(), micro_batch_size=4, offload=ib.Offload("always", **HOST))
    )
    native = copy.deepcopy(ib.unwrap(wrapped))
    with torch.no_grad():
        close(wrapped(X), native(X))
    assert wrapped.last_report.offloaded_bytes > 0
    close(step(wrapped, X), step(native, X))


def test_misuse():
    with pytest.raises(ib.InvalidArgument, match='"auto"'):
        ib.wrap(small(), micro_batch_size=4, offload="sometimes")
    with pytest.raises(ib.Error, match="nowhere"):
        wrapped = ib.wrap(
            small(), micro_batch_size=4, offload=ib.Offload("always", directory="/nowhere/at/all")
        )
        wrapped(X)
