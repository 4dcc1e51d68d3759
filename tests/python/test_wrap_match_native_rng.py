"""`wrap(match_native_rng=True)`: the numbers of the whole batch's own forward, in micro-batches."""

import copy

import infinitybatch as ib
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from native_rng_support import coupled_loss, random_state, same_state, seed
from random_models import GENERATOR, MODELS, make, three_dropouts
from support import Calls, Log, classification
from torch import nn
from torch.utils.checkpoint import checkpoint
from wrap_support import close, grads


def buffers(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: buffer.double() for name, buffer in module.named_buffers()}


def check(
    model: nn.Module,
    n: int,
    steps: int = 2,
    strategy: str = "cut",
    tolerance: float = 1e-12,
    **options,
):
    """Outputs, gradients and generators, step by step, under a loss that draws itself."""
    inner, same = copy.deepcopy(model), copy.deepcopy(model)
    wrapped = ib.wrap(inner, match_native_rng=True, **options)
    x, y = classification(n)
    for step in range(steps):
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        seed(step)
        wanted = same(inputs[1])
        after_forward = random_state()
        coupled_loss(wanted, y).backward()
        after = random_state()
        seed(step)
        found = wrapped(inputs[0])
        assert same_state(random_state(), after_forward), "generators stand elsewhere"
        close(found, wanted)
        close(buffers(inner), buffers(same))
        coupled_loss(found, y).backward()
        assert same_state(random_state(), after), "backward has drawn"
        close(grads(inner), grads(same), tolerance)
        close(inputs[0].grad, inputs[1].grad)
        assert wrapped.last_report.strategy == strategy
    return wrapped.last_report


@pytest.mark.parametrize("n, size", [(11, 4), (5, 1), (6, 6)])
@pytest.mark.parametrize("name", MODELS)
def test_numbers_are_those_of_the_whole_batch(name, n, size):
    # In front of that BatchNorm the shares of a bias nearly cancel.
    tolerance = 1e-11 if name == "BatchNorm of tokens" else 1e-12
    strategy = "cut" if size < n else "native"
    check(make(name), n, strategy=strategy, tolerance=tolerance, micro_batch_size=size)


@pytest.mark.parametrize(
    "name", ["three dropouts", "sequence first", "BatchNorm", "in place", "shared noise"]
)
def test_under_a_budget(name):
    torch.manual_seed(0)
    for options in ({}, {"micro_batch_size": 4}, {"offload": "always"}):
        report = check(make(name), 24, steps=3, memory_budget="64MiB", **options)
        assert report.peak_bytes <= report.memory_budget


@pytest.mark.parametrize("name", ["three dropouts", "sequence first", "autoencoder"])
def test_offloaded(name):
    report = check(make(name), 11, micro_batch_size=3, offload="always")
    assert report.offloaded_bytes > 0


@pytest.mark.parametrize("name", ["three dropouts", "sequence first", "in place", "BatchNorm"])
def test_several_calls_before_one_backward(name):
    inner = make(name)
    same = copy.deepcopy(inner)
    wrapped = ib.wrap(inner, micro_batch_size=4, match_native_rng=True)
    a, b = classification(11)[0], classification(9)[0]
    for step in range(2):
        ends = []
        for module in (wrapped, same):
            seed(step)
            u, v = module(a), module(b)
            w = F.dropout(module(a), 0.2)
            ((u.T @ u).sub(v.T @ v).square().mean() + w.exp().mean()).backward()
            ends.append(random_state())
        assert same_state(*ends)
        close(grads(inner), grads(same))


@pytest.mark.parametrize(
    "name", ["three dropouts", "sequence first", "scaled_dot_product_attention"]
)
def test_a_graph_that_is_kept(name):
    inner = make(name)
    same = copy.deepcopy(inner)
    wrapped = ib.wrap(inner, micro_batch_size=4, match_native_rng=True)
    x = classification(11)[0]
    for module in (wrapped, same):
        seed()
        z = module(x)
        for power in (2, 3):
            (z.T @ z).pow(power).mean().backward(retain_graph=power == 2)
    close(grads(inner), grads(same))


def test_without_gradients_and_in_eval_mode():
    inner = make("three dropouts")
    same = copy.deepcopy(inner)
    wrapped = ib.wrap(inner, micro_batch_size=4, match_native_rng=True)
    x = classification(11)[0]
    for context in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        for training in (True, False, True):
            found = []
            for module in (wrapped, same):
                module.train(training)
                with context():
                    seed()
                    found.append((module(x).detach(), random_state()))
            close(found[0][0], found[1][0])
            assert same_state(found[0][1], found[1][1])
    for options in ({"memory_budget": "32MiB"}, {"memory_budget": "32MiB", "micro_batch_size": 4}):
        wrapped = ib.wrap(inner, match_native_rng=True, **options)
        for _ in range(2):
            with torch.no_grad():
                seed()
                close(wrapped(x), found[1][0])
                assert same_state(random_state(), found[1][1])


def test_without_draws_nothing_is_cut():
    model = make("three dropouts").eval()
    check(model, 12, micro_batch_size=4, strategy="replay")
    check(model, 12, memory_budget="32MiB", strategy="replay")


def test_the_default_draws_for_each_micro_batch():
    model = make("three dropouts")
    x = classification(11)[0]
    seed()
    wanted = model(x)
    seed()
    assert (ib.wrap(model, micro_batch_size=4)(x) - wanted).abs().max() > 1e-3


def test_other_modules_numbers():
    """Python's and NumPy's are drawn once for all samples, as natively."""

    def forward(self, x):
        return self.last(self.first(x) * float(np.random.rand()))

    model = Calls(forward, first=nn.Linear(6, 6), last=nn.Linear(6, 5)).double()
    check(model, 11, micro_batch_size=4)
    check(model, 11, memory_budget="32MiB")


def test_batches_of_other_sizes_and_lengths_in_one_loop():
    inner = make("batch · time")
    inner.function = lambda self, x: self.head(
        F.dropout(self.embed(x.unsqueeze(2)).flatten(0, 1), 0.3).unflatten(0, x.shape).mean(1)
    )
    same = copy.deepcopy(inner)
    wrapped = ib.wrap(inner, micro_batch_size=4, match_native_rng=True)
    for n, length in [(11, 6), (4, 6), (9, 1), (8, 9), (2, 6), (13, 9)]:
        x = torch.randn(n, length, dtype=torch.float64)
        ends = []
        for module in (wrapped, same):
            seed()
            module(x).exp().mean().backward()
            ends.append(random_state())
        assert same_state(*ends)
        close(grads(inner), grads(same))


def on_the_host(self, x):
    x = F.dropout(self.first(x), 0.5)
    return self.last(x * 2 if float(x.sum()) > 0 else x)


def seeds(self, x):
    torch.manual_seed(7)
    return self.last(F.dropout(self.first(x), 0.3))


def seeds_its_own(self, x):
    noise = torch.rand(6, generator=GENERATOR, dtype=x.dtype)
    GENERATOR.manual_seed(7)
    return self.last(self.first(x) * noise + torch.rand(6, generator=GENERATOR))


def by_numpy(self, x):
    return self.last(self.first(x) + torch.from_numpy(np.random.rand(len(x), 6)))


def in_rows(self, x):
    x = self.first(x)
    return self.last(x * torch.rand(x.numel(), dtype=x.dtype).view_as(x))


def recomputed(self, x):
    return self.last(checkpoint(lambda x: F.dropout(self.first(x), 0.3), x, use_reentrant=False))


def natively(model, x):
    seed()
    return model(x)


REFUSED = {
    "lstm": (
        lambda self, x: self.last(self.lstm(self.first(x).unsqueeze(1))[0][:, -1]),
        "aten::lstm .*inside of a larger op",
    ),
    "mixup": (
        lambda self, x: self.last(self.first(x)[torch.randperm(len(x))]),
        "aten::randperm .*permutes",
    ),
    "host": (on_the_host, "aten::(item|_local_scalar_dense) reads values"),
    "seeds": (seeds, "seeds a random generator"),
    "seeds its own": (seeds_its_own, "seeds a random generator"),
    "numpy": (by_numpy, "draws from the module numpy.random"),
    "shape": (in_rows, "aten::rand .*cannot be seen"),
    "opaque": (recomputed, "cannot be cut"),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_is_named_and_leaves_everything_as_it_was(name, grad) -> None:
    forward, why = REFUSED[name]
    lstm = nn.LSTM(6, 6, num_layers=2, dropout=0.3, batch_first=True)
    model = Calls(forward, first=nn.Linear(6, 6), last=nn.Linear(6, 5), lstm=lstm).double()
    x = classification(12)[0]
    seed()
    before = random_state()
    wrapped = ib.wrap(model, micro_batch_size=4, match_native_rng=True)
    with torch.set_grad_enabled(grad):
        if name == "opaque" and not grad:  # nothing is checkpointed then
            return close(wrapped(x), natively(model, x))
        with pytest.raises(ib.CouplingError, match=why):
            wrapped(x)
        assert same_state(random_state(), before)
        if name == "opaque":  # as one micro-batch it needs not be cut
            found = ib.wrap(model, memory_budget="32MiB", match_native_rng=True)(x)
            close(found, natively(model, x))


def test_failures_leave_generators_alone():
    calls = Log()

    def forward(self, x):
        calls.append(len(x))
        noise = torch.rand(len(x), 7, generator=GENERATOR, dtype=x.dtype)
        x = F.dropout(self.first(x) * noise, float(np.random.rand()) * 0 + 0.3)
        if len(calls) == self.fails_at:
            raise KeyError("here")
        return self.last(x)

    model = Calls(forward, first=nn.Linear(6, 7), last=nn.Linear(7, 5)).double()
    x = classification(12)[0]
    for options in ({"micro_batch_size": 4}, {"memory_budget": "32MiB"}):
        wrapped = ib.wrap(model, match_native_rng=True, **options)
        seed()
        before = random_state()
        for place in range(1, 7):
            calls.clear()
            model.fails_at = place
            with pytest.raises(KeyError, match="here"):
                wrapped(x)
            assert same_state(random_state(), before), place
            wrapped = ib.wrap(model, match_native_rng=True, **options)
        model.fails_at = 0
        found = wrapped(x)
        after = random_state()
        seed()
        close(found, model(x))
        assert same_state(random_state(), after)


def test_misuse():
    with pytest.raises(ib.InvalidArgument, match='batch_coupling="exact"'):
        ib.wrap(three_dropouts(), match_native_rng=True, batch_coupling="per_micro_batch")
