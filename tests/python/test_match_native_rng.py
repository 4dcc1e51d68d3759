"""`match_native_rng=True`: the whole batch's random numbers, op by op, in micro-batches."""

import random

import infinitybatch as ib
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from random_models import GENERATOR, MODELS, make, three_dropouts
from support import Calls, Log, Tally, call, classification, native, ours, worst_error
from torch import nn
from torch.utils.checkpoint import checkpoint


def coupled_loss(outputs, targets):
    """Draws itself, on all outputs at once."""
    outputs = F.dropout(outputs, 0.1)
    return (outputs @ outputs.T / 9).logsumexp(1).mean() + F.cross_entropy(outputs, targets)


LOSSES = {
    "separable": (nn.CrossEntropyLoss(), nn.CrossEntropyLoss()),
    "coupled": (coupled_loss, ib.losses.coupled(coupled_loss)),
}


def seed(number=3):
    torch.manual_seed(number)
    GENERATOR.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def random_state():
    return (
        torch.get_rng_state(),
        GENERATOR.get_state(),
        random.getstate(),
        np.random.get_state()[1].tolist(),
        np.random.get_state()[2:],
    )


def same_state(a, b):
    return all(
        torch.equal(x, y) if isinstance(x, torch.Tensor) else x == y
        for x, y in zip(a, b, strict=True)
    )


def assert_native(model, inputs, targets, which="separable", tolerance=1e-12, **options):
    theirs, loss = LOSSES[which]
    seed()
    wanted = native(model, theirs, inputs, targets)
    after = random_state()
    seed()
    found = ours(model, loss, inputs, targets, match_native_rng=True, **options)
    assert worst_error(found, wanted) <= tolerance
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-12, atol=0)
    for name, buffer in wanted.buffers.items():
        torch.testing.assert_close(found.buffers[name], buffer, rtol=1e-12, atol=1e-14)
    assert same_state(random_state(), after), "generators stand elsewhere"
    return found.report


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


def refused(forward, match, op=None, loss=None, n=12, error=ib.CouplingError, **parts):
    model = Calls(forward, first=nn.Linear(6, 6), last=nn.Linear(6, 5), **parts).double()
    inputs, targets = classification(n)
    seed()
    before = random_state()
    batch = ib.VirtualBatch(
        model, loss or nn.CrossEntropyLoss(), micro_batch_size=4, match_native_rng=True
    )
    with pytest.raises(error, match=match) as caught:
        batch.backward(inputs, targets)
    if op:
        assert caught.value.op == op
    assert same_state(random_state(), before)
    assert all(p.grad is None for p in model.parameters())


def test_dropout_inside_of_a_recurrent_layer():
    refused(
        lambda self, x: self.last(self.lstm(self.first(x).unsqueeze(1))[0][:, -1]),
        "aten::lstm .*inside of a larger op",
        "aten::lstm",
        lstm=nn.LSTM(6, 6, num_layers=2, dropout=0.3, batch_first=True),
    )
    # Without dropout it draws nothing.
    model = Calls(
        lambda self, x: self.last(F.dropout(self.lstm(x.unsqueeze(1))[0][:, -1], 0.2)),
        last=nn.Linear(6, 5),
        lstm=nn.LSTM(6, 6, batch_first=True),
    ).double()
    assert_native(model, *classification(11), micro_batch_size=4)


def test_permutations_of_the_batch():
    def mixup(self, x):
        x = self.first(x)
        return self.last(0.7 * x + 0.3 * x[torch.randperm(len(x))])

    refused(mixup, "aten::randperm .*permutes", "aten::randperm")
    # Of a single sample nothing is drawn.
    model = Calls(mixup, first=nn.Linear(6, 6), last=nn.Linear(6, 5)).double()
    inputs, targets = classification(7)
    with pytest.raises(ib.CouplingError, match="aten::randperm .*permutes"):
        ours(
            model, nn.CrossEntropyLoss(), inputs, targets, micro_batch_size=1, match_native_rng=True
        )
    wrapped = ib.wrap(model, micro_batch_size=1, match_native_rng=True)
    with pytest.raises(ib.CouplingError, match="aten::randperm .*permutes"):
        wrapped(inputs)
    refused(
        lambda self, x: self.last(self.first(x)[torch.randint(len(x), (len(x),))]),
        "aten::randint .*depends on how many samples",
        "aten::randint",
    )
    refused(
        lambda self, x: self.last(self.first(x)[torch.multinomial(x.abs().sum(1), len(x))]),
        "aten::multinomial",
    )


def test_values_on_the_host():
    def on_the_host(self, x):
        x = F.dropout(self.first(x), 0.5)
        return self.last(x * 2 if float(x.sum()) > 0 else x)

    refused(on_the_host, "aten::(item|_local_scalar_dense) reads values")

    def select(self, x):
        x = self.first(x)
        return self.last(x) + self.last(x[torch.rand(len(x)) < 0.5]).sum()

    refused(select, "aten::index reads values")

    def skips(self, x):
        x = self.first(x)
        return self.last(x.tanh() if torch.rand(()) < 0.5 else x)

    refused(skips, "reads values")


def test_shapes_that_hide_the_samples():
    def in_rows(self, x):
        x = self.first(x)
        return self.last(x * torch.rand(x.numel(), dtype=x.dtype).view_as(x))

    refused(in_rows, "aten::rand .*cannot be seen", "aten::rand")
    refused(
        lambda self, x: self.last(self.first(x)) + torch.rand(len(x), len(x)).mean(),
        "aten::rand .*no single dimension",
    )
    refused(
        lambda self, x: self.last(self.first(x)) + torch.rand(len(x) + 1).mean(),
        "aten::rand .*no single dimension",
    )


def test_numbers_that_are_written_elsewhere():
    def into(self, x):
        noise = torch.empty(len(x), 6, dtype=x.dtype)
        torch.rand(len(x), 6, out=noise, dtype=x.dtype)
        return self.last(self.first(x) * noise)

    refused(into, "aten::rand .*out=")


def test_seeds_inside_of_forward():
    def seeds(self, x):
        torch.manual_seed(7)
        return self.last(F.dropout(self.first(x), 0.3))

    refused(seeds, "seeds a random generator")

    def seeds_its_own(self, x):
        noise = torch.rand(6, generator=GENERATOR, dtype=x.dtype)
        GENERATOR.manual_seed(7)
        return self.last(self.first(x) * noise + torch.rand(6, generator=GENERATOR))

    refused(seeds_its_own, "seeds a random generator")


def test_numbers_of_python_and_numpy_for_each_sample():
    def by_sample(self, x):
        scale = torch.tensor([[random.random()] for _ in range(len(x))], dtype=x.dtype)
        return self.last(self.first(F.dropout(x, 0.1)) * scale)

    refused(by_sample, "draws from the module random, and not equally often", "random")

    def by_numpy(self, x):
        return self.last(self.first(x) + torch.from_numpy(np.random.rand(len(x), 6)))

    refused(by_numpy, "draws from the module numpy.random", "numpy.random")


def test_opaque_code_beside_draws():
    def recomputed(self, x):
        return self.last(
            checkpoint(lambda x: F.dropout(self.first(x), 0.3), x, use_reentrant=False)
        )

    refused(recomputed, "cannot be cut")
    # As one micro-batch it needs not be cut.
    model = Calls(recomputed, first=nn.Linear(6, 6), last=nn.Linear(6, 5)).double()
    inputs, targets = classification(11)
    for which in LOSSES:
        report = assert_native(model, inputs, targets, which, memory_budget="32MiB")
        assert report.micro_batch_sizes == [11]


def test_a_separable_loss_that_draws():
    loss = ib.losses.separable(
        lambda outputs, targets: F.cross_entropy(F.dropout(outputs, 0.2), targets, reduction="sum"),
        lambda targets, samples: samples,
    )
    refused(
        lambda self, x: self.last(self.first(x)), "the loss draws random numbers", "loss", loss=loss
    )
    refused(
        lambda self, x: self.last(F.dropout(self.first(x), 0.2)),
        "the loss draws random numbers",
        "loss",
        loss=loss,
    )


def test_failures_leave_generators_alone():
    calls = Tally()

    def forward(self, x):
        calls()
        noise = torch.rand(len(x), 7, generator=GENERATOR, dtype=x.dtype)
        x = F.dropout(self.first(x) * noise, 0.3)
        if calls.count == self.fails_at:
            raise KeyError("here")
        return self.last(x)

    model = Calls(forward, first=nn.Linear(6, 7), last=nn.Linear(7, 5)).double()
    inputs, targets = classification(12)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4, match_native_rng=True)
    seed()
    before = random_state()
    for place in range(1, 7):
        calls.count = 0
        model.fails_at = place
        with pytest.raises(KeyError, match="here"):
            batch.backward(inputs, targets)
        assert same_state(random_state(), before), place
        assert all(p.grad is None for p in model.parameters())
        batch = ib.VirtualBatch(
            model, nn.CrossEntropyLoss(), micro_batch_size=4, match_native_rng=True
        )
    model.fails_at = 0
    batch.plan(inputs, targets)
    assert same_state(random_state(), before)
    wanted = native(model, nn.CrossEntropyLoss(), inputs, targets)
    after = random_state()
    seed()
    batch.backward(inputs, targets)
    assert same_state(random_state(), after)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted.gradients[name], rtol=1e-11, atol=1e-14)


def test_misuse():
    model, loss = three_dropouts(), nn.CrossEntropyLoss()
    with pytest.raises(ib.InvalidArgument, match="per_micro_batch"):
        ib.VirtualBatch(model, loss, match_native_rng=True, batch_coupling="per_micro_batch")
    with pytest.raises(ib.InvalidArgument, match="use_tapes"):
        ib.VirtualBatch(model, loss, match_native_rng=True, use_tapes=False)
    assert call(model.float(), torch.randn(2, 6)).shape == (2, 5)


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
