"""`match_native_rng=True`: the whole batch's random numbers, op by op, in micro-batches."""

import random

import infinitybatch as ib
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from native_rng_support import LOSSES, assert_native, seed
from random_models import MODELS, make, three_dropouts
from support import Calls, Log, classification, native, ours, worst_error
from torch import nn


@pytest.mark.parametrize("which", LOSSES)
@pytest.mark.parametrize("n, size", [(11, 4), (5, 1), (2, 1), (6, 6)])
@pytest.mark.parametrize("name", MODELS)
def test_numbers_are_those_of_the_whole_batch(name, n, size, which):
    inputs, targets = classification(n)
    report = assert_native(make(name), inputs, targets, which, micro_batch_size=size)
    if size < n:
        assert report.strategy == "cut"


@pytest.mark.parametrize("which", LOSSES)
@pytest.mark.parametrize("name", MODELS)
def test_under_a_budget(name, which):
    inputs, targets = classification(24)
    report = assert_native(make(name), inputs, targets, which, memory_budget="32MiB")
    assert report.peak_bytes <= report.memory_budget


@pytest.mark.parametrize("retained", [1, 3])
@pytest.mark.parametrize(
    "name", ["three dropouts", "sequence first", "BatchNorm", "in place", "autoencoder"]
)
def test_retained_graphs(name, retained):
    inputs, targets = classification(11)
    for which in LOSSES:
        assert_native(
            make(name), inputs, targets, which, micro_batch_size=4, retained_micro_batches=retained
        )


@pytest.mark.parametrize(
    "name", ["three dropouts", "sequence first", "BatchNorm", "batch · time", "shared noise"]
)
def test_a_static_graph_over_several_steps(name):
    inputs, targets = classification(11)
    model, twin = make(name), make(name)
    twin.load_state_dict(model.state_dict())
    batch = ib.VirtualBatch(
        model, nn.CrossEntropyLoss(), micro_batch_size=3, static_graph=True, match_native_rng=True
    )
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, twin)]
    seed()
    state = torch.get_rng_state()
    for _ in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        torch.set_rng_state(state)
        batch.backward(inputs, targets)
        after = torch.get_rng_state()
        torch.set_rng_state(state)
        F.cross_entropy(twin(inputs), targets).backward()
        assert torch.equal(torch.get_rng_state(), after)
        state = after
        for optimizer in optimizers:
            optimizer.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


def test_batches_of_other_sizes_and_lengths_in_one_loop():
    model = make("batch · time")
    model.function = lambda self, x: self.head(
        F.dropout(self.embed(x.unsqueeze(2)).flatten(0, 1), 0.3).unflatten(0, x.shape).mean(1)
    )
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4, match_native_rng=True)
    for n, length in [(11, 6), (4, 6), (9, 1), (8, 9), (2, 6), (13, 9)]:
        inputs, targets = torch.randn(n, length, dtype=torch.float64), torch.randint(5, (n,))
        seed()
        wanted = native(model, nn.CrossEntropyLoss(), inputs, targets)
        after = torch.get_rng_state()
        model.zero_grad()
        seed()
        batch.backward(inputs, targets)
        assert torch.equal(torch.get_rng_state(), after)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                parameter.grad, wanted.gradients[name], rtol=1e-11, atol=1e-14
            )
        model.zero_grad()


def test_user_code_draws_nothing_that_counts_and_runs_once_more():
    rows = Log()

    def forward(self, x):
        rows.append(len(x))
        return self.net(x)

    model = Calls(forward, net=three_dropouts()).double()
    inputs, targets = classification(12)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4, match_native_rng=True)
    batch.backward(inputs, targets)
    assert rows == [4, 4, 3, 4, 4, 4, 12, 4, 4, 4], (
        "to notice that it draws; recorded, with 3, checked; others; looks"
    )
    rows.clear()
    batch.backward(inputs, targets)
    assert rows == [4, 4, 4, 12, 4, 4, 4], "looks again"
    rows.clear()
    batch.backward(inputs, targets)
    assert rows == [4, 4, 4]


def test_without_draws_it_streams():
    inputs, targets = classification(12)
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.5)).double().eval()
    assert assert_native(model, inputs, targets, micro_batch_size=4).strategy == "stream"
    model = nn.Sequential(nn.Linear(6, 5), nn.Dropout(0.0)).double()
    assert assert_native(model, inputs, targets, micro_batch_size=4).strategy == "stream"


def test_the_default_draws_for_each_micro_batch():
    model = make("three dropouts")
    inputs, targets = classification(12)
    seed()
    wanted = native(model, nn.CrossEntropyLoss(), inputs, targets)
    seed()
    found = ours(model, nn.CrossEntropyLoss(), inputs, targets, micro_batch_size=4)
    assert worst_error(found, wanted) > 1e-3


def test_hooks_draw_behind_forward():
    model = make("three dropouts")
    drawn = []
    inputs, targets = classification(12)
    model[0].weight.register_hook(lambda g: drawn.append(torch.rand(2)))
    seed()
    F.cross_entropy(model(inputs), targets).backward()
    after = torch.get_rng_state()
    seed()
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4, match_native_rng=True)
    batch.backward(inputs, targets)
    assert torch.equal(*drawn)
    assert torch.equal(torch.get_rng_state(), after)


def test_across_batch():
    def forward(self, x):
        x = F.dropout(self.first(x), 0.3)
        spread = ib.across_batch(lambda x: x.std(0).mean().expand(len(x), 1), x)
        return self.last(F.dropout(torch.cat([x, spread], 1), 0.2))

    model = Calls(forward, first=nn.Linear(6, 7), last=nn.Linear(8, 5)).double()
    inputs, targets = classification(11)
    for which in LOSSES:
        assert_native(model, inputs, targets, which, micro_batch_size=4)


def test_single_precision():
    """To the bit in the masks: a wrong one would be off by tens of percents."""
    for name in ["three dropouts", "sequence first", "autoencoder", "Dropout2d"]:
        model = make(name).float()
        inputs, targets = classification(11)
        seed()
        wanted = native(model, nn.CrossEntropyLoss(), inputs.float(), targets)
        after = torch.get_rng_state()
        seed()
        found = ours(
            model,
            nn.CrossEntropyLoss(),
            inputs.float(),
            targets,
            micro_batch_size=4,
            match_native_rng=True,
        )
        assert worst_error(found, wanted) <= 1e-5
        assert torch.equal(torch.get_rng_state(), after)


def test_the_peak_is_predicted_and_kept():
    def forward(self, x):
        # Whole numbers: kept for the whole batch.
        x = self.embed(x.unsqueeze(2)).transpose(0, 1).contiguous()
        for layer in self.layers:
            x = x + F.dropout(torch.tanh(layer(x)), 0.2)
        return self.head(x.mean(0))

    model = Calls(
        forward,
        embed=nn.Linear(1, 32),
        layers=nn.ModuleList(nn.Linear(32, 32) for _ in range(3)),
        head=nn.Linear(32, 5),
    ).double()
    inputs, targets = torch.randn(192, 24, dtype=torch.float64), torch.randint(5, (192,))
    # Too little for all samples at once.
    budget = ib.memory.stats("cpu").live + 11_000_000
    batch = ib.VirtualBatch(
        model, nn.CrossEntropyLoss(), memory_budget=budget, match_native_rng=True
    )
    for _ in range(20):
        report = batch.backward(inputs, targets)
        assert report.peak_bytes <= report.memory_budget
        if report.predicted_peak_bytes is not None:  # settled
            break
    assert len(report.micro_batch_sizes) > 1
    assert report.restarts == 0
    assert report.predicted_peak_bytes >= 0.98 * report.peak_bytes
    assert report.predicted_peak_bytes <= 1.05 * report.peak_bytes


def small_network(norm: bool) -> nn.Sequential:
    torch.manual_seed(0)
    middle = nn.BatchNorm1d(16) if norm else nn.Identity()
    return nn.Sequential(
        nn.Linear(8, 16), nn.Dropout(0.3), middle, nn.Tanh(), nn.Dropout(0.2), nn.Linear(16, 3)
    ).double()


@pytest.mark.parametrize(
    ("norm", "size", "options"),
    [
        (True, 5, {"offload": "always"}),
        (True, 5, {"offload": ib.Offload("always", host_budget="64MiB", disk=False)}),
        (False, 24, {"checkpoint_segments": 3}),
    ],
    ids=["offloaded to disk", "offloaded to the host", "one micro-batch in segments"],
)
def test_beside_offload_and_cuts_for_memory(norm: bool, size: int, options: dict) -> None:
    inputs, targets = torch.randn(24, 8, dtype=torch.float64), torch.randint(3, (24,))
    assert_native(small_network(norm), inputs, targets, micro_batch_size=size, **options)


@pytest.mark.parametrize("offload", ["never", "always"])
@pytest.mark.parametrize("which", LOSSES)
def test_several_micro_batches_in_segments(which: str, offload: str) -> None:
    def layers() -> list[nn.Module]:
        return [layer for _ in range(4) for layer in (nn.Linear(16, 16), nn.Tanh())]

    norm = small_network(norm=True)
    model = nn.Sequential(norm[0], *layers(), *norm[1:4], *layers(), *norm[4:]).double()
    inputs, targets = torch.randn(24, 8, dtype=torch.float64), torch.randint(3, (24,))
    options = {"micro_batch_size": 5, "checkpoint_segments": 3, "offload": offload}
    assert assert_native(model, inputs, targets, which, **options).strategy == "checkpoint"


@pytest.mark.parametrize("which", LOSSES)
@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_numbers_of_python_and_numpy_alone_beside_cuts_for_memory(draw, which):
    """No op of torch's tells that forward draws."""
    model = Calls(
        lambda self, x: self.last(self.first(x * float(draw())).tanh()),
        first=nn.Linear(6, 6),
        last=nn.Linear(6, 5),
    ).double()
    inputs, targets = classification(11)
    assert_native(model, inputs, targets, which, micro_batch_size=4, checkpoint_segments=2)
