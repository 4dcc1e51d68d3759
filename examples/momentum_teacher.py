"""A student that learns from its own moving average: the teacher moves once a logical batch."""

import math

import infinitybatch as ib
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR


class Distillation(nn.Module):
    """What the student predicts of the teacher's view of the other half of each pair."""

    def __init__(self, student, predictor, teacher):
        super().__init__()
        self.student, self.predictor, self.teacher = student, predictor, teacher
        teacher.requires_grad_(False)

    def forward(self, one, other):
        with torch.no_grad():
            wanted = self.teacher(other), self.teacher(one)
        said = self.predictor(self.student(one)), self.predictor(self.student(other))
        return sum(2 - 2 * F.cosine_similarity(s, w) for s, w in zip(said, wanted, strict=True))


class MomentumTeacher(ib.Callback):
    """After each `every`-th step teacher = m * teacher + (1 - m) * student; m goes from `base` to 1.

    A callback, for on_batch_end comes once for each logical batch. A hook on forward would come
    once for each micro-batch.
    """

    def __init__(self, student, teacher, base=0.95, steps=100, every=1):
        self.student, self.teacher = student, teacher
        self.base, self.steps, self.every = base, steps, every

    def momentum(self, step):
        return 1 - (1 - self.base) * (1 + math.cos(math.pi * min(step / self.steps, 1))) / 2

    @torch.no_grad()
    def on_batch_end(self, event):
        if (event.step + 1) % self.every == 0:
            m = self.momentum(event.step)
            pairs = zip(self.teacher.parameters(), self.student.parameters(), strict=True)
            for mine, its in pairs:
                mine.lerp_(its, 1 - m)


def make_nets():
    def net(inputs):
        return nn.Sequential(
            nn.Linear(inputs, 64, bias=False), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16)
        )

    student, predictor, teacher = net(32), net(16), net(32)
    teacher.load_state_dict(student.state_dict())
    return Distillation(student, predictor, teacher)


def make_trainer(model, loader, steps, every=2, **options):
    optimizer = torch.optim.SGD(
        [*model.student.parameters(), *model.predictor.parameters()], lr=0.1, momentum=0.9
    )
    return ib.Trainer(
        model,
        ib.losses.separable(lambda distances, _: distances.sum(), lambda _, samples: samples),
        optimizer,
        loader,
        schedule=CosineAnnealingLR(optimizer, T_max=steps),
        schedule_by="step",
        callbacks=MomentumTeacher(model.student, model.teacher, steps=steps, every=every),
        **options,
    )


def views(samples, batches):
    """Pairs of noisy copies of points around four centres."""
    centres = 2 * torch.randn(4, 32, generator=torch.Generator().manual_seed(0))
    for _ in range(batches):
        points = centres[torch.randint(4, (samples,))] + torch.randn(samples, 32)
        yield {name: points + 0.5 * torch.randn_like(points) for name in ("one", "other")}


if __name__ == "__main__":
    torch.manual_seed(0)
    model = make_nets()
    trainer = make_trainer(model, lambda: views(512, batches=10), steps=50, micro_batch_size=128)
    for epoch in range(5):
        done = trainer.epoch()
        apart = model.student[0].weight - model.teacher[0].weight
        print(f"epoch {epoch}: distance {done.loss:.3f}, teacher {apart.norm():.3f} behind")
