import math

import torch
from support import Calls
from torch import nn

from .loop import N, Training, by_head, classify, features, linear, loop, regress


@loop
def divided_by_the_number_of_samples() -> Training:
    return classify(by_head(lambda self, x: self.head(x) / len(x)))


@loop
def place_in_the_batch_is_added() -> Training:
    return regress(by_head(lambda self, x: self.head(x) + 0.1 * torch.arange(len(x))[:, None]))


@loop
def parameter_for_each_place() -> Training:
    model = by_head(lambda self, x: self.head(x) + self.places[: len(x)])
    model.places = nn.Parameter(torch.randn(N, 4))
    return regress(model)


@loop
def ghost_batch_norm() -> Training:
    """Chunks of three samples: the first rows of another chunk begin elsewhere in a micro-batch."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        chunks = [(c - c.mean(0)) / (c.std(0) + 1) for c in x.split(3)]
        return self.head(torch.cat(chunks))

    return classify(by_head(forward))


@loop
def deviation_of_groups_as_a_feature() -> Training:
    """StyleGAN's minibatch deviation, in groups of three that lie apart."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        group = min(3, len(x))
        deviation = x.reshape(group, -1, 6).var(0, unbiased=False).add(1e-8).sqrt().mean(1)
        return self.wide(torch.cat([x, deviation.repeat(group)[:, None]], 1))

    return classify(Calls(forward, wide=linear(7)))


@loop
def samples_seen_are_counted() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return self.head(x)

    return regress(by_head(forward, seen=torch.zeros(())))


@loop
def samples_seen_decide_the_temperature() -> Training:
    """Annealing by the number of samples so far, as a Python number."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        return self.head(x) / max(0.5, math.exp(-0.01 * self.seen))

    model = by_head(forward)
    model.seen = 0
    return classify(model)


@loop
def unbiased_by_the_number_of_samples() -> Training:
    return regress(by_head(lambda self, x: self.head(x) * (len(x) / (len(x) - 0.5))))


@loop
def rows_of_a_grid() -> Training:
    """The batch is folded into a square of three by three before a convolution."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        side = max(1, int(math.sqrt(len(x))))
        grid = x.t().reshape(1, 6, side, -1)
        return self.conv(grid).flatten(2)[0].t()

    return regress(Calls(forward, conv=nn.Conv2d(6, 4, 3, padding=1)))


@loop
def evenly_spaced_over_the_batch() -> Training:
    """A linear schedule over the batch: `torch.linspace` of as many steps as there are samples."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) * torch.linspace(0.5, 1.5, len(x))[:, None]

    return regress(by_head(forward))


@loop
def odd_batches_are_padded() -> Training:
    """A sample of zeros makes the batch even, and is dropped again: of no consequence."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        even = torch.cat([x, x.new_zeros(len(x) % 2, 6)])
        return self.head(even.view(-1, 2, 6)).flatten(0, 1)[: len(x)]

    return classify(by_head(forward))


@loop
def identities_are_of_the_batch() -> Training:
    """One-hot places as an input beside the features, as for per-batch contrastive labels."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        place = torch.eye(len(x), N)
        return self.wide(torch.cat([x, place], 1))

    return regress(Calls(forward, wide=linear(6 + N)), features())
