"""The examples of several models, and their native loops over whole batches."""

import copy
import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, StepLR

ROOT = Path(__file__).resolve().parents[2]
SAMPLES = 50


def example(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", ROOT / f"examples/{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def deviation(mine: nn.Module, native: nn.Module) -> float:
    """Largest error of parameters and buffers; NaN counts as infinite."""
    pairs = zip(mine.state_dict().values(), native.state_dict().values(), strict=True)
    errors = torch.stack([(a.double() - b.double()).abs().max() for a, b in pairs])
    return float(errors.nan_to_num(nan=torch.inf).max())


def moved(before: nn.Module, after: nn.Module) -> bool:
    """Whether every parameter has another value, so that a comparison has something to compare."""
    pairs = zip(before.parameters(), after.parameters(), strict=True)
    return all(not torch.equal(a, b) for a, b in pairs)


def native_gan(
    gan: Any, generator: nn.Module, discriminator: nn.Module, turns: int
) -> list[tuple[float, float]]:
    """The loop as it stands in every tutorial; learning rates after each turn."""
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    d_schedule = CosineAnnealingLR(d_optimizer, T_max=200)
    g_schedule = StepLR(g_optimizer, step_size=50, gamma=0.5)
    rates = []
    for _ in range(turns):
        for _ in range(2):
            real, noise = gan.ring(SAMPLES), torch.randn(SAMPLES, gan.NOISE)
            d_optimizer.zero_grad()
            with torch.no_grad():
                made = generator(noise)
            ones, zeros = torch.ones(SAMPLES, 1), torch.zeros(SAMPLES, 1)
            loss = F.binary_cross_entropy_with_logits(discriminator(real), ones)
            loss = loss + F.binary_cross_entropy_with_logits(discriminator(made), zeros)
            (loss / 2).backward()
            d_optimizer.step()
            d_schedule.step()
        g_optimizer.zero_grad()
        scores = discriminator(generator(torch.randn(SAMPLES, gan.NOISE)))
        F.binary_cross_entropy_with_logits(scores, torch.ones(SAMPLES, 1)).backward()
        g_optimizer.step()
        g_schedule.step()
        rates.append((d_schedule.get_last_lr()[0], g_schedule.get_last_lr()[0]))
    return rates


def native_siamese(siamese: Any, pair: Any, steps: int) -> list[tuple[float, float]]:
    image_optimizer = torch.optim.Adam(pair.image.parameters(), lr=2e-3)
    text_optimizer = torch.optim.SGD(pair.text.parameters(), lr=0.2, momentum=0.9)
    image_schedule = LinearLR(image_optimizer, start_factor=0.1, total_iters=10)
    text_schedule = StepLR(text_optimizer, step_size=10, gamma=0.5)
    rates = []
    sums = [torch.zeros_like(p) for p in pair.text.parameters()]
    for step in range(steps):
        loss = siamese.info_nce(pair(*siamese.views(SAMPLES)))
        pair.zero_grad()
        loss.backward()
        image_optimizer.step()
        image_schedule.step()
        for total, p in zip(sums, pair.text.parameters(), strict=True):
            total += p.grad
        if step % 2 == 1:
            for total, p in zip(sums, pair.text.parameters(), strict=True):
                p.grad.copy_(total)
                total.zero_()
            text_optimizer.step()
            text_schedule.step()
        rates.append((image_schedule.get_last_lr()[0], text_schedule.get_last_lr()[0]))
    return rates


def native_teacher(model: Any, batches: Any, momenta: list[float], every: int) -> list[float]:
    student, predictor, teacher = model.student, model.predictor, model.teacher
    optimizer = torch.optim.SGD(
        [*student.parameters(), *predictor.parameters()], lr=0.1, momentum=0.9
    )
    schedule = CosineAnnealingLR(optimizer, T_max=len(momenta))
    rates = []
    for step, (batch, m) in enumerate(zip(batches, momenta, strict=True)):
        one, other = batch["one"], batch["other"]
        with torch.no_grad():
            wanted_of_other, wanted_of_one = teacher(other), teacher(one)
        said_of_one, said_of_other = predictor(student(one)), predictor(student(other))
        loss = (2 - 2 * F.cosine_similarity(said_of_one, wanted_of_other)).mean()
        loss = loss + (2 - 2 * F.cosine_similarity(said_of_other, wanted_of_one)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if (step + 1) % every == 0:
            with torch.no_grad():
                for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
                    t.copy_(m * t + (1 - m) * s)
        rates.append(schedule.get_last_lr()[0])
    return rates


copy_of = copy.deepcopy
