"""The simulated device catches what it is there to catch."""

import signal
import subprocess
import sys
import textwrap

import pytest
import simulated_device as sim
import torch
from measure import assert_within, gradients
from torch import nn


def in_a_process(code: str) -> subprocess.CompletedProcess:
    prelude = f"import sys; sys.path[:0] = {sys.path!r}\nimport ctypes, torch, simulated_device\n"
    return subprocess.run(
        [sys.executable, "-c", prelude + textwrap.dedent(code)],
        capture_output=True,
        text=True,
        timeout=120,
    )


def streams():
    here = torch.accelerator.current_stream()
    return here, torch.Stream(device="sim")


def test_a_host_read_of_device_memory_kills():
    done = in_a_process(
        """
        tensor = torch.ones(4, device="sim")
        print(tensor.sum().item(), flush=True)
        ctypes.string_at(tensor.data_ptr(), 4)
        """
    )
    assert done.stdout == "4.0\n"
    assert done.returncode == -signal.SIGSEGV


def test_a_missing_wait_before_a_read():
    _, other = streams()
    tensor = torch.ones(4)
    with other:
        tensor + 1
    assert any("without waiting for a write" in race for race in sim.races())
    sim.reset()


def test_a_wait_is_enough():
    here, other = streams()
    tensor = torch.ones(4)
    other.wait_stream(here)
    with other:
        result = tensor + 1
    here.wait_stream(other)
    result + 1
    assert sim.races() == []


def test_a_missing_wait_before_memory_is_reused():
    here, other = streams()
    tensor = torch.ones(1000)
    other.wait_stream(here)
    with other:
        tensor + 1  # the other stream may read it still
    del tensor
    torch.ones(1000)  # the same memory, written on this stream
    assert any("without waiting for a use" in race for race in sim.races())
    sim.reset()


def test_record_stream_is_enough():
    here, other = streams()
    tensor = torch.ones(1000)
    other.wait_stream(here)
    with other:
        tensor + 1
    tensor.record_stream(other)
    del tensor
    torch.ones(1000)
    assert sim.races() == []


def test_pinned_memory_overwritten_too_early():
    pinned = torch.ones(4, device="cpu").pin_memory()
    pinned.to("sim", non_blocking=True)
    pinned.fill_(2)
    assert any("overwrote pinned memory" in race for race in sim.races())
    torch.accelerator.synchronize()
    sim.reset()
    pinned.to("sim", non_blocking=True)
    torch.accelerator.synchronize()
    pinned.fill_(3)
    assert sim.races() == []


def test_a_host_that_does_not_wait_reads_no_numbers():
    pinned = torch.zeros(4, device="cpu").pin_memory()
    pinned.copy_(torch.ones(4), non_blocking=True)
    assert pinned.isnan().all()
    torch.accelerator.synchronize()
    assert pinned.equal(torch.ones(4, device="cpu"))


def test_a_tensor_on_the_wrong_device():
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(4) + torch.ones(4, device="cpu")
    with pytest.raises(RuntimeError, match="same device"):
        torch.ones(4, device="sim:0") + torch.ones(4, device="sim:1")


@pytest.mark.parametrize(
    ("kind", "wait"),
    [
        ("item", lambda x: x.sum().item()),
        ("aten::equal", lambda x: torch.equal(x, x)),
        ("aten::nonzero", lambda x: x.nonzero()),
        ("copy", lambda x: x.cpu()),
        ("device", lambda x: torch.accelerator.synchronize()),
    ],
)
def test_a_needless_synchronisation(kind, wait):
    tensor = torch.ones(4)
    tensor.mul(2).add_(1)
    assert sim.waits() == 0
    wait(tensor)
    assert sim.syncs() == {kind: 1}


def test_new_and_freed_memory_is_poison():
    tensor = torch.empty(1000)
    assert tensor.isnan().all()
    view = torch.ones(1000)
    address, size = view.data_ptr(), view.numel()
    del view
    again = torch.empty(size)
    assert again.data_ptr() == address and again.isnan().all()


def test_out_of_memory():
    with sim.settings(capacity=1 << 22), pytest.raises(torch.OutOfMemoryError):
        torch.empty(1 << 30, dtype=torch.uint8)  # no block that is cached is as large
    with sim.settings(fail_after=1):
        torch.empty(1)
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(1)
    torch.empty(1)


def test_blocks_are_rounded():
    torch.accelerator.reset_peak_memory_stats()
    before = torch.accelerator.memory_allocated()
    tensor = torch.empty(1)
    assert torch.accelerator.memory_allocated() - before == 512
    del tensor
    with sim.settings(rounding=0):
        again = torch.empty(1)
        assert torch.accelerator.memory_allocated() - before == again.nbytes


def test_numbers_are_the_devices():
    torch.manual_seed(0)
    host = torch.get_rng_state()
    a = nn.functional.dropout(torch.ones(100), 0.5)
    assert torch.get_rng_state().equal(host)
    torch.manual_seed(0)
    assert nn.functional.dropout(torch.ones(100), 0.5).equal(a)
    assert not nn.functional.dropout(torch.ones(100), 0.5).equal(a)


def test_computes_as_the_cpu_does():
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten())
    model.append(nn.Linear(48, 5)).double()
    inputs = torch.randn(4, 2, 6, 6, dtype=torch.float64, device="cpu")
    wanted = nn.Sequential(nn.Conv2d(2, 3, 3, device="cpu"), nn.BatchNorm2d(3, device="cpu"))
    wanted.extend([nn.ReLU(), nn.Flatten(), nn.Linear(48, 5, device="cpu")]).double()
    wanted.load_state_dict(model.state_dict())
    for module, x in ((model, inputs.to("sim")), (wanted, inputs)):
        module(x).pow(2).sum().backward()
    found = {name: gradient.cpu() for name, gradient in gradients(model).items()}
    assert_within(found, gradients(wanted))


def test_atomics_differ_from_run_to_run():
    target, source = torch.zeros(10), torch.rand(100)
    index = torch.arange(100) % 10
    add = lambda: target.index_add(0, index, source)  # noqa: E731
    assert add().equal(add())
    with sim.settings(atomics=1):
        assert any(not add().equal(add()) for _ in range(20))
