"""The gradient noise scale beside its definition, from per-sample gradients that torch computes."""

import math
from typing import Any

import infinitybatch as ib
import pytest
import torch
from infinitybatch.callbacks import NoiseScale
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint
from trainer_support import BATCHES, X, Y, bits, net, trainer

WHOLE = [(X, Y)]


def per_sample(model: nn.Module) -> torch.Tensor:
    """One row a sample: its gradient, all parameters in one row."""
    parameters = {n: p.detach() for n, p in model.named_parameters()}

    def value(p: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(functional_call(model, p, (x[None],)), y[None])

    gradients = vmap(grad(value), (None, 0, 0))(parameters, X, Y)
    return torch.cat([g.flatten(1) for g in gradients.values()], 1)


def measured(size: int, **options: Any) -> NoiseScale:
    """After one step of all 50 samples; parameters change after it is measured."""
    noise = NoiseScale()
    model = options.pop("model", None) or net(dropout=False)
    trainer(model, loader=WHOLE, micro_batch_size=size, callbacks=noise, **options)(1)
    return noise


def by_definition(rows: torch.Tensor) -> float:
    """Trace of the covariance over the squared norm of the mean, both without bias."""
    variance = rows.var(0).sum()
    return float(variance / (rows.mean(0).square().sum() - variance / len(rows)))


def test_micro_batches_of_one_sample_give_the_definition() -> None:
    noise = measured(1)
    assert noise.noise_scale == pytest.approx(by_definition(per_sample(net(dropout=False))), 1e-10)
    assert noise.largest_useful_batch() == noise.noise_scale
    assert noise.largest_useful_batch(0.2) == pytest.approx(4 * noise.noise_scale)
    assert noise.steps == 1


@pytest.mark.parametrize("size", [7, 25])
def test_micro_batches_of_any_size_are_its_analysis_of_variance(size: int) -> None:
    rows = per_sample(net(dropout=False))
    groups = rows.split(size)
    mean = rows.mean(0)
    between = sum(len(g) * (g.mean(0) - mean).square().sum() for g in groups)
    variance = between / (len(groups) - 1)
    wanted = variance / (mean.square().sum() - variance / len(rows))
    wanted = float(wanted) if wanted > 0 else math.inf
    assert measured(size).noise_scale == pytest.approx(wanted, 1e-9)


def test_a_known_noise_scale_is_found_over_steps() -> None:
    """Of loss = weight * z the gradients are z: covariance 4 in 8 dimensions, a mean of norm 2."""
    torch.manual_seed(0)
    mean = torch.full((8,), 2 / math.sqrt(8))
    batches = [{"input": mean + 2 * torch.randn(256, 8)} for _ in range(60)]
    model = nn.Linear(8, 1, bias=False)
    loss = ib.losses.separable(lambda rows, _: rows.sum(), lambda _, n: n)
    noise = NoiseScale(decay=0.98)
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    ib.Trainer(model, loss, optimizer, batches, micro_batch_size=16, callbacks=noise)(1)
    assert noise.noise_scale == pytest.approx(8 * 4 / 4, rel=0.1)


@pytest.mark.parametrize("size", [7, 50])
def test_training_has_the_same_weights_and_hardly_more_peak(size: int) -> None:
    """Of gradients that are products of matrices one at a time is made, to be measured."""
    found = []
    for callbacks in (None, NoiseScale()):
        model = net()
        torch.manual_seed(4)
        live = ib.memory.stats().live
        peaks: list[int] = []

        class Peaks(ib.Callback):
            def on_batch_end(self, event: Any, peaks: list[int] = peaks) -> None:
                peaks.append(event.report.peak_bytes)

        both = [Peaks()] if callbacks is None else [Peaks(), callbacks]
        trainer(model, callbacks=both, micro_batch_size=size)(2)
        found.append((bits(model), max(peaks) - live))
    (mine, peak), (theirs, its_peak) = found
    for a, b in zip(mine, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)
    largest = max(p.numel() for p in net().parameters()) * 8
    assert its_peak - peak < largest + 512  # and some numbers of 8 bytes


def test_a_scaler_changes_nothing() -> None:
    plain = measured(5).noise_scale
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    assert measured(5, grad_scaler=scaler).noise_scale == pytest.approx(plain, rel=1e-9)


def test_a_penalty_is_no_noise() -> None:
    model = net(dropout=False)
    loss = ib.losses.separable(
        lambda outputs, targets: nn.functional.cross_entropy(outputs, targets, reduction="sum"),
        lambda _, samples: samples,
        penalty=lambda: sum(p.square().sum() for p in model.parameters()),
    )
    noise = NoiseScale()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    ib.Trainer(model, loss, optimizer, WHOLE, micro_batch_size=1, callbacks=noise)(1)
    assert noise.noise_scale == pytest.approx(by_definition(per_sample(net(dropout=False))), 1e-9)


def test_steps_of_one_micro_batch_are_not_counted() -> None:
    noise = NoiseScale()
    run = trainer(net(), micro_batch_size=50, callbacks=noise)
    run(1)
    with pytest.raises(ib.StateError, match="micro_batch_size is at most half of the batch"):
        noise.largest_useful_batch()
    assert noise.steps == 0


def test_gradients_that_come_in_parts_are_not_counted() -> None:
    """torch's re-entrant checkpoint runs backward within backward: here twice for one weight."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.last = nn.Linear(6, 6).double(), nn.Linear(6, 4).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.clone().requires_grad_()
            for _ in range(2):
                x = checkpoint(self.inner, x, use_reentrant=True)
            return self.last(x)

    assert measured(10, model=Twice()).steps == 0


def test_it_goes_on_elsewhere() -> None:
    together, first = NoiseScale(), NoiseScale()
    trainer(callbacks=together)(2)
    run = trainer(callbacks=first)
    run(1)
    state = run.state_dict()
    second = NoiseScale()
    other = trainer(callbacks=second)
    other.load_state_dict(state)
    other(1)
    assert second.steps == together.steps == 2 * len(BATCHES)
    assert second.state_dict() == together.state_dict()


def test_a_failed_step_is_not_counted() -> None:
    class Fails(ib.Callback):
        def on_micro_batch(self, event: Any) -> None:
            if event.step == 1 and event.begin:
                raise ZeroDivisionError

    noise = NoiseScale()
    run = trainer(callbacks=[noise, Fails()])
    with pytest.raises(ZeroDivisionError):
        run(1)
    run.callbacks = [noise]
    run(1)
    together = NoiseScale()
    trainer(callbacks=together)(1)
    assert noise.steps == 3 and noise.state_dict() == together.state_dict()


def contrastive(outputs: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return (outputs @ outputs.T).logsumexp(1).mean()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: ib.Trainer(
                net(), ib.losses.coupled(contrastive), torch.optim.SGD(net().parameters(), 0.1),
                BATCHES, callbacks=NoiseScale()),
            "needs a loss that is a sum over samples",
        ),
        (
            lambda: trainer(batch_coupling="per_micro_batch", callbacks=NoiseScale()),
            "batch_coupling='per_micro_batch' lets samples",
        ),
        (
            lambda: trainer(net(batch_norm=True), callbacks=NoiseScale())(1),
            'this step ran as "cut"',
        ),
        (
            lambda: trainer(callbacks=NoiseScale(), match_native_rng=True)(1),
            'this step ran as "cut"',
        ),
    ],
)  # fmt: skip
def test_refused_where_samples_are_coupled(make: Any, message: str) -> None:
    with pytest.raises(ib.Unsupported, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: NoiseScale("much"), ib.InvalidType, "decay must be a number, not str"),
        (lambda: NoiseScale(1), ib.InvalidArgument, "decay is 1; it must be at least 0"),
        (lambda: measured(5).largest_useful_batch(1), ib.InvalidArgument, "efficiency is 1;"),
        (lambda: measured(5).largest_useful_batch("a"), ib.InvalidType, "efficiency must be"),
        (lambda: NoiseScale().load_state_dict({}), ib.InvalidArgument, "not one of a NoiseScale"),
    ],
)
def test_misuse(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
