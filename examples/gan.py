"""A GAN by two trainers that take turns: each has its own optimizer, schedule and frequency."""

import infinitybatch as ib
import torch
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, StepLR

NOISE = 8


class DiscriminatorGame(nn.Module):
    """Scores of real and made samples; BatchNorm sees the whole batch of either, in this order."""

    def __init__(self, generator, discriminator):
        super().__init__()
        self.generator, self.discriminator = generator, discriminator

    def forward(self, real, noise):
        with torch.no_grad():
            made = self.generator(noise)
        return torch.cat([self.discriminator(real), self.discriminator(made)], 1)


def make_nets():
    generator = nn.Sequential(
        nn.Linear(NOISE, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 2)
    )
    discriminator = nn.Sequential(
        *(nn.Linear(2, 64), nn.LeakyReLU(0.2)),
        *(nn.Linear(64, 64), nn.LeakyReLU(0.2)),
        nn.Linear(64, 1),
    )
    return generator, discriminator


def ring(samples):
    """Points around the unit circle."""
    angles = torch.rand(samples) * 2 * torch.pi
    return torch.stack([angles.cos(), angles.sin()], 1) + 0.05 * torch.randn(samples, 2)


def for_discriminator(samples):
    while True:
        inputs = ring(samples), torch.randn(samples, NOISE)
        yield inputs, torch.tensor([1.0, 0.0]).repeat(samples, 1)


def for_generator(samples):
    while True:
        yield torch.randn(samples, NOISE), torch.ones(samples, 1)


def make_trainers(generator, discriminator, samples, d_steps=2, **options):
    """One trainer for each pair; an epoch is a turn: two steps of the discriminator, one of the
    generator."""
    d_optimizer = torch.optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    g_optimizer = torch.optim.Adam(generator.parameters(), lr=2e-3, betas=(0.5, 0.999))
    options = {"loss": nn.BCEWithLogitsLoss(), **options}
    d_trainer = ib.Trainer(
        DiscriminatorGame(generator, discriminator),
        optimizer=d_optimizer,
        loader=for_discriminator(samples),
        batches_per_epoch=d_steps,
        schedule=CosineAnnealingLR(d_optimizer, T_max=200),
        schedule_by="step",
        **options,
    )
    g_trainer = ib.Trainer(
        nn.Sequential(generator, discriminator),  # the gradient goes through the discriminator
        optimizer=g_optimizer,
        loader=for_generator(samples),
        batches_per_epoch=1,
        schedule=StepLR(g_optimizer, step_size=50, gamma=0.5),
        **options,
    )
    return d_trainer, g_trainer


def turn(d_trainer, g_trainer, discriminator):
    """One turn of each. Frozen, the discriminator costs the generator's step no gradients."""
    d_loss = d_trainer.epoch().loss
    discriminator.requires_grad_(False)
    try:
        g_loss = g_trainer.epoch().loss
    finally:
        discriminator.requires_grad_(True)
    return d_loss, g_loss


if __name__ == "__main__":
    torch.manual_seed(0)
    generator, discriminator = make_nets()
    trainers = make_trainers(generator, discriminator, samples=512, micro_batch_size=128)
    for number in range(100):
        d_loss, g_loss = turn(*trainers, discriminator)
        if number % 25 == 24:
            radius = generator(torch.randn(1000, NOISE)).norm(dim=1).detach()
            print(
                f"turn {number + 1}: discriminator {d_loss:.3f}, generator {g_loss:.3f}, "
                f"radius {radius.mean():.2f} ± {radius.std():.2f}"
            )
