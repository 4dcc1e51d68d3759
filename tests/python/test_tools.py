"""`infinitybatch.tools`: snapshots, repeatable runs, comparisons."""

import copy
import os
import random
import re
import subprocess
import sys

import infinitybatch as ib
import numpy
import pytest
import torch
from infinitybatch import tools
from torch import nn

NAN = float("nan")


def test_a_snapshot_of_the_cpu_counts_tensors_and_cannot_be_written():
    before = tools.MemorySnapShot()
    kept = torch.zeros(1000, dtype=torch.float64)
    now = tools.MemorySnapShot("cpu")
    assert now.allocated - before.allocated >= kept.nbytes == 8000
    assert now.reserved - now.allocated == now.free_cache >= 0
    assert now.peak >= now.allocated and now.total > 2**28
    assert now.device == torch.device("cpu") and "allocated=" in repr(now)
    del kept
    assert now.allocated > before.allocated == tools.MemorySnapShot().allocated
    with pytest.raises(AttributeError):
        now.allocated = 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
@pytest.mark.parametrize(
    "take", [tools.CudaMemorySnapShot, lambda: tools.CudaHistory().append("name")]
)
def test_without_cuda_the_way_of_the_cpu_is_named(take):
    with pytest.raises(ib.Unsupported, match=r'tools\.MemorySnapShot\("cpu"\)'):
        take()


def test_a_cuda_snapshot_of_what_is_no_cuda_device_or_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ib.InvalidArgument, match="no CUDA device"):
        tools.CudaMemorySnapShot("cpu")
    with pytest.raises(ib.InvalidArgument, match="device_id is 2; this machine has 2"):
        tools.CudaMemorySnapShot(2)


def test_a_history_prints_itself_as_a_table():
    history = tools.MemoryHistory()
    assert str(history) == "MemoryHistory is empty."
    history.append("before")
    kept = torch.zeros(2**20)
    history.append("with a tensor of four mebibytes", "cpu", synchronize=False)
    assert [name for name, _ in history] == ["before", "with a tensor of four mebibytes"]
    assert history[1][1].allocated - history[0][1].allocated >= kept.nbytes
    title, head, rule, *rows = str(history).splitlines()
    assert title == "MemoryHistory (bytes):" and len(rows) == 2
    assert head.split() == "| Name | Device | Total | Reserved | Allocated |".split()
    assert len({len(line) for line in (head, rule, *rows)}) == 1
    assert f"{history[1][1].allocated:,}" in rows[1]
    with pytest.raises(ib.InvalidType, match="name must be a string"):
        history.append(3)


def drawn():
    return random.random(), numpy.random.rand(), torch.rand(1).item()


@pytest.mark.parametrize("seed", [0, 7, 2**32 + 7, 2**63 - 1])
def test_a_seed_gives_the_same_numbers_everywhere(seed):
    tools.determinize(seed).undo()
    with tools.determinize(seed) as done:
        first = drawn()
        assert done.seed == seed
    with tools.determinize(seed):
        assert drawn() == first
    with tools.determinize(seed + 1 if seed < 2**63 - 1 else 1):
        assert all(a != b for a, b in zip(drawn(), first, strict=True))


def test_numpy_sees_all_bits_of_a_seed():
    with tools.determinize(7):
        first = drawn()
    with tools.determinize(2**32 + 7):
        python, legacy, _ = drawn()  # torch's generator of the CPU reads 32 bits
    assert python != first[0] and legacy != first[1]


def test_without_a_seed_it_is_nought_or_one_that_tells_itself():
    with tools.determinize() as done:
        assert done.seed == 0
    with tools.determinize(None, False) as done, tools.determinize(None, False) as other:
        assert done.seed != other.seed
        numbers = drawn()
    with tools.determinize(other.seed, False):
        assert drawn() == numbers


def test_undo_puts_switches_and_random_states_back(monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    cudnn = torch.backends.cudnn
    states = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    switches = torch.get_deterministic_debug_mode(), cudnn.deterministic, cudnn.benchmark
    done = tools.determinize(5, strict=True)
    assert torch.get_deterministic_debug_mode() == 2
    assert (cudnn.deterministic, cudnn.benchmark) == (True, False)
    drawn()
    done.undo()
    after = random.getstate(), numpy.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert after == states
    assert (torch.get_deterministic_debug_mode(), cudnn.deterministic, cudnn.benchmark) == switches
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    torch.manual_seed(11)
    wanted = torch.rand(1)
    torch.manual_seed(11)
    done.undo()  # a second time does nothing
    assert torch.rand(1) == wanted


def test_what_it_cannot_do_is_said():
    with tools.determinize(1) as done:
        assert any("torch.Generator" in text for text in done.cannot)
        assert any("strict=True" in text for text in done.cannot)
    with tools.determinize(1, strict=True) as done:
        assert not any("strict=True" in text for text in done.cannot)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((-1,), ib.InvalidArgument, "seed is -1"),
        ((2**63,), ib.InvalidArgument, "seed is"),
        ((1.5,), ib.InvalidType, "seed must be a whole number"),
        ((1, "yes"), ib.InvalidType, "be_deterministic is 'yes'"),
    ],
)
def test_wrong_seeds_change_nothing(arguments, error, text):
    state = torch.get_rng_state().tolist()
    with pytest.raises(error, match=text):
        tools.determinize(*arguments)
    assert torch.get_rng_state().tolist() == state


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
        self.register_buffer("hidden", torch.zeros(2), persistent=False)
        self.extra = {"steps": 1, "kept": torch.ones(2)}

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def changed(change):
    torch.manual_seed(0)
    model = Counting()
    other = copy.deepcopy(model)
    with torch.no_grad():
        change(other)
    return model, other


def set_value(name, value, index=0):
    def change(model):
        tensor = dict(model.named_parameters()) | dict(model.named_buffers())
        tensor[name].view(-1)[index] = value

    return change


DIFFERENCES = {
    "a weight": (set_value("body.0.weight", 9.0, 5), "body.0.weight", r"first at \[1, 2\]"),
    "NaN": (set_value("body.0.bias", NAN), "body.0.bias", "nan"),
    "an integer buffer": (set_value("body.1.num_batches_tracked", 1), "body.1.num_batches", "0 and 1"),
    "a buffer without persistence": (set_value("hidden", 3.0), "hidden", "0.0 and 3.0"),
    "another type": (
        lambda m: setattr(m.body[0], "bias", nn.Parameter(m.body[0].bias.double())),
        "body.0.bias",
        "float32 and torch.float64",
    ),
    "another shape": (
        lambda m: setattr(m.body[0], "bias", nn.Parameter(torch.zeros(5))),
        "body.0.bias",
        r"shapes \[4\] and \[5\]",
    ),
    "a missing name": (
        lambda m: m.body[0].register_parameter("bias", None),
        "body.0.bias",
        "only the first",
    ),
    "one name more": (
        lambda m: m.register_buffer("more", torch.zeros(1)),
        "more",
        "only the second",
    ),
    "extra state": (lambda m: m.extra.update(steps=2), "_extra_state", "extra state"),
    "a tensor in extra state": (lambda m: m.extra.update(kept=torch.zeros(2)), "_extra", "extra"),
}  # fmt: skip


@pytest.mark.parametrize("what", DIFFERENCES)
def test_networks_that_differ(what):
    change, first, reason = DIFFERENCES[what]
    one, another = changed(change)
    assert tools.is_equal_network(one, copy.deepcopy(one))
    assert not tools.is_equal_network(one, another)
    for pair in ((one, another), (another, one)):
        found = tools.compare_networks(*pair, tolerance=0.5)
        assert not found and found.first.startswith(first)
        assert not found.largest_error <= 0.5
    assert str(tools.compare_networks(one, another)).startswith(f"{first}")
    assert re.search(reason, str(tools.compare_networks(one, another)))


def test_the_largest_error_and_where_it_is():
    one, another = changed(
        lambda m: (m.body[0].weight.add_(0.125), m.body[1].bias.sub_(0.5))
    )  # fmt: skip
    found = tools.compare_networks(one, another)
    assert (found.first, found.worst) == ("body.0.weight", "body.1.bias")
    assert found.largest_error == 0.5
    within = tools.compare_networks(one, another, tolerance=0.5)
    assert within and within.first is None and within.worst == "body.1.bias"
    assert str(within) == "equal (largest error 0.5 in body.1.bias)"


def test_nan_is_the_largest_error_wherever_it_stands():
    one, another = changed(lambda m: (m.body[0].weight.fill_(NAN), m.body[1].bias.sub_(0.5)))
    assert numpy.isnan(tools.compare_networks(one, another).largest_error)
    assert not tools.compare_networks(another, another)  # NaN equals nothing, itself neither


@pytest.mark.parametrize(
    ("one", "another", "equal"),
    [
        (torch.tensor([1.0, float("inf")]), torch.tensor([1.0, float("inf")]), True),
        (torch.tensor([float("inf")]), torch.tensor([-float("inf")]), False),
        (torch.tensor(1.0), torch.tensor(1.0 + 5e-8), True),
        (torch.tensor(1.0, dtype=torch.float64), torch.tensor(1.0 + 2e-7).double(), False),
        (torch.tensor([NAN]), torch.tensor([NAN]), False),
        (torch.tensor([1.0]), torch.tensor(1.0), False),
        (torch.tensor([1.0]), torch.tensor([1.0]).double(), False),
        (torch.tensor([2**60]), torch.tensor([2**60 + 1]), False),
        (torch.tensor([True]), torch.tensor([False]), False),
        (torch.tensor([3], dtype=torch.uint64), torch.tensor([3], dtype=torch.uint64), True),
        (torch.tensor([3], dtype=torch.uint16), torch.tensor([4], dtype=torch.uint16), False),
        (torch.ones(2).to(torch.float8_e4m3fn), torch.ones(2).to(torch.float8_e4m3fn), True),
        (torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16), False),
        (torch.eye(2).to_sparse(), torch.eye(2).to_sparse(), True),
        (torch.eye(2).to_sparse(), torch.ones(2, 2).to_sparse(), False),
        (torch.tensor([1 + 1j]), torch.tensor([1 - 1j]), False),
        (torch.zeros(0), torch.zeros(0), True),
        (torch.zeros(0, 2), torch.zeros(0, 3), False),
        (torch.ones(2, requires_grad=True), torch.ones(2), True),
    ],
)
def test_tensors_with_error(one, another, equal):
    assert tools.is_equal_with_error(one, another) is equal
    assert tools.is_equal_with_error(another, one, False) is equal


def test_integers_are_equal_or_not_whatever_the_tolerance():
    one, another = torch.tensor([2**60]), torch.tensor([2**60 + 1])
    found = tools.compare_tensors(one, another, tolerance=5)
    assert not found and found.largest_error >= 1
    assert f"{2**60} and {2**60 + 1}" in str(found)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: tools.is_equal_with_error(None, None), ib.InvalidType, "one must be a torch.Tensor"),
        (lambda: tools.is_equal_with_error(torch.ones(1), None), ib.InvalidType, "another must"),
        (lambda: tools.is_equal_network(None, None), ib.InvalidType, "one must be a torch.nn.Module"),
        (lambda: tools.is_equal_network(nn.Linear(1, 1), {}), ib.InvalidType, "another must"),
        (
            lambda: tools.compare_tensors(torch.ones(1), torch.ones(1), tolerance=NAN),
            ib.InvalidArgument,
            "tolerance is nan",
        ),
        (
            lambda: tools.compare_networks(*[nn.Linear(1, 1)] * 2, tolerance="1"),
            ib.InvalidType,
            "tolerance must be a number",
        ),
        (
            lambda: tools.is_equal_network(*[nn.Linear(1, 1, device="meta")] * 2),
            ib.Unsupported,
            "no values yet",
        ),
        (lambda: tools.is_equal_network(*[nn.LazyLinear(1)] * 2), ib.Unsupported, "no values yet"),
    ],
)  # fmt: skip
def test_what_cannot_be_compared(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.parametrize("name", ["tools", "histories", "statistics", "progress"])
def test_importing_the_package_imports_none_of_it(name):
    code = f"""
import sys, infinitybatch as ib
assert not {{"infinitybatch.{name}", "tqdm", "tensorboard", "csv"}} & set(sys.modules) - {{*before}}
assert "{name}" in dir(ib) and "{name}" in ib.__all__
assert ib.{name} is sys.modules["infinitybatch.{name}"]
"""
    before = "import sys, torch; before = set(sys.modules)\n"
    subprocess.run([sys.executable, "-c", before + code], check=True)


def test_a_name_that_is_not_there():
    with pytest.raises(AttributeError, match="no attribute 'nothing_of_the_kind'"):
        ib.nothing_of_the_kind  # noqa: B018


def test_switches_that_torch_forbids_are_told(monkeypatch):
    before = torch.backends.cudnn.benchmark
    switches = torch.backends.flags_frozen.__globals__
    monkeypatch.setitem(switches, "__allow_nonbracketed_mutation_flag", False)
    with tools.determinize(7) as done:
        assert any("disable_global_flags" in reason for reason in done.cannot)
        assert torch.backends.cudnn.benchmark == before
