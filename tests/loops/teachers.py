import copy

import torch
from support import Calls
from torch import nn
from torch.nn import functional as F

from .loop import (
    Training,
    Turn,
    by_head,
    features,
    linear,
    loop,
    minimise_rows,
    one_backward,
    regress,
)


def follow(teacher: nn.Module, student: nn.Module, keep: float = 0.9) -> None:
    with torch.no_grad():
        for slow, fast in zip(teacher.parameters(), student.parameters(), strict=True):
            slow.lerp_(fast, 1 - keep)


def two_networks(forward: object) -> Calls:
    """A student and a teacher without gradients that begins as its copy."""
    student = nn.Sequential(linear(6, 6), nn.Tanh(), linear())
    with torch.no_grad():
        student[0].weight.mul_(2)
    teacher = copy.deepcopy(student).requires_grad_(False)
    follow(teacher, linear_like(teacher), 0.5)
    return Calls(forward, student=student, teacher=teacher)


def linear_like(model: nn.Module) -> nn.Module:
    """Other values of the same shapes."""
    other = copy.deepcopy(model)
    for parameter in other.parameters():
        nn.init.normal_(parameter)
    return other


def distances(self: Calls, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        target = self.teacher(x)
    return (self.student(x) - target).pow(2).sum(1)


@loop
def teacher_follows_after_the_step() -> Training:
    """Mean teacher: the loop moves it, forward only reads it."""

    def turn(turn: Turn) -> None:
        one_backward(turn)
        follow(turn.model.teacher, turn.model.student)

    training = minimise_rows(two_networks(distances))
    training.turn = turn
    return training


@loop
def teacher_follows_in_forward() -> Training:
    """BYOL in one module: forward moves the teacher, then asks it."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        follow(self.teacher, self.student)
        return distances(self, x)

    return minimise_rows(two_networks(forward))


@loop
def teacher_follows_at_the_end_of_forward() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        rows = distances(self, x)
        follow(self.teacher, self.student)
        return rows

    return minimise_rows(two_networks(forward))


@loop
def teacher_follows_in_a_hook() -> Training:
    """A forward hook moves it, as libraries of callbacks do."""
    model = two_networks(distances)
    model.register_forward_hook(lambda self, *_: follow(self.teacher, self.student))
    return minimise_rows(model)


@loop
def target_network_copied_every_second_call() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls % 2 == 0:
            follow(self.teacher, self.student, keep=0.0)
        return distances(self, x)

    model = two_networks(forward)
    model.calls = 0
    return minimise_rows(model)


@loop
def teacher_of_buffers() -> Training:
    """Moving averages of weights in buffers, as torch.optim.swa_utils keeps batch statistics."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.slow.lerp_(self.head.weight, 0.1)
        return (self.head(x) - F.linear(x, self.slow)).pow(2).sum(1)

    return minimise_rows(by_head(forward, slow=torch.randn(4, 6)))


@loop
def first_batch_initialises_parameters() -> Training:
    """Glow's ActNorm: the first forward centres and scales by what it sees."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        if not self.initialised:
            with torch.no_grad():
                self.shift.copy_(-z.mean(0))
                self.scale.copy_(1 / z.std(0))
            self.initialised.fill_(True)
        return (z + self.shift) * self.scale

    model = by_head(forward, initialised=torch.tensor(False))
    model.shift = nn.Parameter(torch.zeros(4))
    model.scale = nn.Parameter(torch.ones(4))
    return regress(model)


@loop
def weights_clipped_in_forward() -> Training:
    """WGAN's first form: every call clips the critic's weights."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.head.weight.clamp_(-0.2, 0.2)
        return self.head(x)

    return regress(by_head(forward))


@loop
def weights_decay_in_forward() -> Training:
    """Decay by 1 % for each call: not the same when it is done for each micro-batch."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.head.weight.mul_(0.99)
        return self.head(x)

    return regress(by_head(forward))


@loop
def weights_normalised_through_data() -> Training:
    """Columns of unit norm, written through `.data` in front of each use."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        self.head.weight.data = F.normalize(self.head.weight.data, dim=1)
        return self.head(x)

    return regress(by_head(forward), features())
