"""examples/gan.py, siamese.py and momentum_teacher.py beside native loops over whole batches."""

import math
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import infinitybatch as ib
import pytest
import several_models
import torch
from fault_support import in_long_tests
from several_models import (
    ROOT,
    copy_of,
    deviation,
    example,
    moved,
    native_gan,
    native_siamese,
    native_teacher,
)
from torch import nn

#: Weights are those of the whole batch but for rounding, after all steps.
EXACT = 1e-12


@pytest.fixture(autouse=True)
def double() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def with_batch_norm() -> nn.Module:
    """BatchNorm in the middle, where no parameter's gradient is zero but for rounding."""
    before, after = nn.Linear(2, 16), nn.Linear(16, 1)
    return nn.Sequential(
        *(before, nn.Tanh(), nn.Linear(16, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), after)
    )


@pytest.mark.parametrize("batch_norm", [False, True])
@pytest.mark.parametrize("size", [7, 16, 50])
def test_gan_is_that_of_whole_batches(size: int, batch_norm: bool) -> None:
    gan = example("gan")
    nets = nn.ModuleList(gan.make_nets())
    if batch_norm:
        nets[1] = with_batch_norm()
    native, before = copy_of(nets), copy_of(nets)
    trainers = gan.make_trainers(*nets, samples=50, micro_batch_size=size)
    torch.manual_seed(1)
    rates = []
    for _ in range(4):
        gan.turn(*trainers, nets[1])
        rates.append(tuple(t.schedule.get_last_lr()[0] for t in trainers))
    state = torch.get_rng_state()
    torch.manual_seed(1)
    assert native_gan(gan, *native, turns=4) == rates
    assert deviation(nets, native) < EXACT
    assert moved(before, native) and torch.equal(torch.get_rng_state(), state)
    assert [t.steps_done for t in trainers] == [8, 4]
    if batch_norm:  # of real and made samples, and of those that the generator's step makes
        assert int(nets[1][3].num_batches_tracked) == 4 * (2 * 2 + 1)
    assert all(p.requires_grad for p in nets.parameters())


def test_both_trainers_of_a_gan_stay_inside_their_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(several_models, "SAMPLES", 2000)
    gan = example("gan")
    nets = nn.ModuleList(gan.make_nets())
    native, before = copy_of(nets), copy_of(nets)
    reports: list[Any] = []

    class Reports(ib.Callback):
        def on_batch_end(self, event: Any) -> None:
            reports.append(event.report)

    trainers = gan.make_trainers(*nets, samples=2000, memory_budget="4MiB", callbacks=Reports())
    torch.manual_seed(1)
    for _ in range(2):
        gan.turn(*trainers, nets[1])
    torch.manual_seed(1)
    native_gan(gan, *native, turns=2)
    assert deviation(nets, native) < EXACT and moved(before, native)
    assert len(reports) == 6
    assert all(len(r.micro_batch_sizes) > 1 and r.peak_bytes <= 4 * 2**20 for r in reports)


@pytest.mark.parametrize("size", [7, 16, 50])
def test_siamese_is_that_of_whole_batches(size: int) -> None:
    siamese = example("siamese")
    pair = siamese.Pair()
    native, before = copy_of(pair), copy_of(pair)
    training = siamese.Training(pair, micro_batch_size=size, match_native_rng=True)
    torch.manual_seed(1)
    rates = []
    for _ in range(5):  # the last one leaves a gradient that waits for the next
        training.step(*siamese.views(50))
        schedules = training.image_schedule, training.text_schedule
        rates.append(tuple(s.get_last_lr()[0] for s in schedules))
    torch.manual_seed(1)
    assert native_siamese(siamese, native, steps=5) == rates
    assert deviation(pair, native) < EXACT and moved(before, native)
    for mine, its in zip(pair.text.parameters(), native.text.parameters(), strict=True):
        assert (mine.grad - its.grad).abs().max() < EXACT


@pytest.mark.parametrize("size", [7, 16, 50])
def test_teacher_moves_once_a_logical_batch(size: int) -> None:
    example_ = example("momentum_teacher")
    model = example_.make_nets()
    native, before = copy_of(model), copy_of(model)
    batches = list(example_.views(50, batches=6))
    trainer = example_.make_trainer(model, batches, steps=6, micro_batch_size=size)
    trainer.epoch()
    momenta = [1 - 0.05 * (1 + math.cos(math.pi * step / 6)) / 2 for step in range(6)]
    rates = native_teacher(native, batches, momenta, every=2)
    assert trainer.schedule.get_last_lr()[0] == rates[-1]
    assert deviation(model, native) < EXACT and moved(before, native)
    assert all(p.grad is None for p in model.teacher.parameters())


@pytest.mark.parametrize(
    ("name", "line"),
    [
        pytest.param(
            "gan",
            r"turn 100: discriminator \d\.\d+, generator \d\.\d+, radius (\S+) ± \S+",
            marks=in_long_tests,
        ),
        ("siamese", r"step 60: loss \d\.\d+, (\d+)% find their text among 512"),
        ("momentum_teacher", r"epoch 4: distance (\d\.\d+), teacher \d\.\d+ behind"),
    ],
)
def test_the_example_runs(name: str, line: str) -> None:
    done = subprocess.run(
        [sys.executable, ROOT / f"examples/{name}.py"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and done.stderr == "", done.stderr
    (value,) = re.findall(line, done.stdout)
    good: Any = {
        "gan": lambda v: 0.5 < v < 1.5,
        "siamese": lambda v: v > 80,
        "momentum_teacher": lambda v: v < 0.6,
    }[name]
    assert good(float(value)), done.stdout


@pytest.mark.parametrize("name", ["gan", "momentum_teacher"])
def test_training_goes_on_elsewhere_with_the_same_bits(name: str, tmp_path: Any) -> None:
    module = example(name)

    def make() -> tuple[nn.Module, list[Any], Any]:
        torch.manual_seed(3)
        if name == "gan":
            nets = nn.ModuleList(module.make_nets())
            trainers = module.make_trainers(*nets, samples=50, micro_batch_size=16)
            return nets, trainers, lambda: module.turn(*trainers, nets[1])
        model = module.make_nets()
        loader = lambda: module.views(50, batches=3)  # noqa: E731
        trainer = module.make_trainer(model, loader, steps=12, micro_batch_size=16)
        return model, [trainer], trainer.epoch

    model, trainers, turn = make()
    for _ in range(2):
        turn()
    for number, trainer in enumerate(trainers):
        trainer.save(tmp_path / f"{number}.pt")
    for _ in range(2):
        turn()
    other, trainers, turn = make()
    torch.manual_seed(9)
    for number, trainer in enumerate(trainers):
        trainer.load(tmp_path / f"{number}.pt")
    for _ in range(2):
        turn()
    assert deviation(other, model) == 0
