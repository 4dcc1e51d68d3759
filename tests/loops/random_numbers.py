import math
import random

import torch
from support import Calls
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from .loop import (
    Training,
    by_head,
    classify,
    features,
    linear,
    loop_that_draws,
    minimise_rows,
    regress,
)


@loop_that_draws
def mixed_with_the_permuted_batch() -> Training:
    """Mixup inside of the model."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        return self.head(0.7 * x + 0.3 * x[torch.randperm(len(x))])

    return classify(by_head(forward))


@loop_that_draws
def mixed_targets_are_returned() -> Training:
    """Manifold mixup: forward permutes hidden values and labels alike, and gives both."""

    def forward(self: Calls, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        order = torch.randperm(len(x))
        logits = self.head(0.6 * x + 0.4 * x[order])
        of = lambda labels: F.cross_entropy(logits, labels, reduction="none")  # noqa: E731
        return 0.6 * of(y) + 0.4 * of(y[order])

    return minimise_rows(by_head(forward), features(), torch.arange(9) % 4)


@loop_that_draws
def coin_of_python_for_the_batch() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        return self.head(x * (2.0 if random.random() < 0.5 else 0.5))

    return classify(by_head(forward))


@loop_that_draws
def one_number_for_the_batch() -> Training:
    return classify(by_head(lambda self, x: self.head(x * torch.rand(1))))


@loop_that_draws
def noise_on_weights() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        weight = self.head.weight + 0.5 * torch.randn_like(self.head.weight)
        return F.linear(x, weight, self.head.bias)

    return classify(by_head(forward))


@loop_that_draws
def dropped_connections() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, F.dropout(self.head.weight, 0.5, True), self.head.bias)

    return classify(by_head(forward))


@loop_that_draws
def paths_dropped_by_sample() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        keep = x.new_empty((x.shape[0], 1)).bernoulli_(0.5)
        return self.head(x) + self.other(x) * keep

    return classify(by_head(forward, other=linear()))


@loop_that_draws
def path_dropped_for_the_batch() -> Training:
    """Stochastic depth of a batch: the host reads one number of torch's generator."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        return z + self.other(x) if torch.rand(()).item() < 0.5 else z

    return classify(by_head(forward, other=linear()))


@loop_that_draws
def layers_dropped() -> Training:
    """LayerDrop, by numbers of torch."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        for layer, number in zip(self.layers, torch.rand(len(self.layers)), strict=True):
            x = x + torch.tanh(layer(x)) * (number > 0.3)
        return self.head(x)

    return classify(by_head(forward, layers=nn.ModuleList(linear(6, 6) for _ in range(4))))


@loop_that_draws
def one_mask_for_all_samples() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        return self.head(x * torch.empty(1, x.shape[1]).bernoulli_(0.5))

    return classify(by_head(forward))


@loop_that_draws
def one_crop_for_all_samples() -> Training:
    """Where it begins is drawn by Python for the batch."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        begin = random.randint(0, 4)
        return self.head(x[:, begin : begin + 6])

    return classify(by_head(forward), features(10))


@loop_that_draws
def one_crop_drawn_by_torch() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        begin = int(torch.randint(0, 5, ()))
        return self.head(x[:, begin : begin + 6])

    return classify(by_head(forward), features(10))


@loop_that_draws
def gumbel_softmax() -> Training:
    return regress(by_head(lambda self, x: F.gumbel_softmax(self.head(x), hard=True)))


@loop_that_draws
def annealed_gumbel_softmax() -> Training:
    """The temperature falls with each call."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return F.gumbel_softmax(self.head(x), tau=max(0.5, math.exp(-0.3 * self.calls)))

    model = by_head(forward)
    model.calls = 0
    return regress(model)


@loop_that_draws
def buffer_of_random_numbers() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        self.noise.copy_(torch.rand(4))
        return self.head(x) + self.noise

    return regress(by_head(forward, noise=torch.zeros(4)))


@loop_that_draws
def variational_autoencoder() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        mean, log_variance = self.encoder(x).chunk(2, dim=1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        divergence = (mean.pow(2) + log_variance.exp() - log_variance - 1).sum(1)
        return (self.decoder(z) - x).pow(2).sum(1) + 0.1 * divergence

    return minimise_rows(Calls(forward, encoder=linear(6, 8), decoder=linear(4, 6)))


@loop_that_draws
def dropout_in_a_checkpoint() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))

    body = nn.Sequential(linear(6, 6), nn.Dropout(0.3), nn.Tanh())
    return regress(by_head(forward, body=body))


@loop_that_draws
def penalty_on_interpolated_samples() -> Training:
    """WGAN-GP in one module: the gradient at points between real and generated samples."""

    def forward(self: Calls, real: torch.Tensor, fake: torch.Tensor) -> torch.Tensor:
        share = torch.rand(len(real), 1)
        between = (share * real + (1 - share) * fake).detach().requires_grad_()
        with torch.enable_grad():
            scores = self.critic(between).sum()
            (slope,) = torch.autograd.grad(scores, between, create_graph=True)
        difference = (self.critic(fake) - self.critic(real)).squeeze(1)
        return difference + 10 * (slope.norm(dim=1) - 1).pow(2)

    critic = nn.Sequential(linear(6, 5), nn.Tanh(), linear(5, 1))
    return minimise_rows(Calls(forward, critic=critic), features(), features())


@loop_that_draws
def two_passes_with_other_dropout() -> Training:
    """R-Drop: the model is called two times, and the passes are to agree."""

    def loss(passes: tuple[torch.Tensor, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
        one, other = (logits.log_softmax(-1) for logits in passes)
        agreement = F.kl_div(one, other, log_target=True, reduction="batchmean")
        return F.nll_loss(one, y) + F.nll_loss(other, y) + agreement

    training = classify(nn.Sequential(linear(6, 8), nn.Dropout(0.3), linear(8)))
    training.loss, training.twice = loss, True
    return training
