from collections import deque
from typing import Any

import torch
from support import Calls
from torch import nn
from torch.nn import functional as F

from .loop import N, Training, by_head, classify, features, linear, loop, minimise_rows, regress


def with_attributes(model: nn.Module, **attributes: Any) -> nn.Module:
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


@loop
def codebook_by_moving_average() -> Training:
    """Vector quantisation whose codes follow the samples that chose them."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        choice = torch.cdist(z.detach(), self.codes).argmin(1)
        chosen = self.codes[choice]
        one_hot = F.one_hot(choice, 5).to(z.dtype)
        self.counts.mul_(0.9).add_(one_hot.sum(0), alpha=0.1)
        self.sums.mul_(0.9).add_(one_hot.t() @ z.detach(), alpha=0.1)
        self.codes.copy_(self.sums / self.counts.clamp(min=1e-3)[:, None])
        return self.decoder(z + (chosen - z).detach())

    codes = torch.randn(5, 4)
    buffers = {"codes": codes, "counts": torch.ones(5), "sums": codes.clone()}
    return classify(by_head(forward, decoder=linear(4), **buffers))


@loop
def centre_moved_after_it_is_read() -> Training:
    """DINO: the teacher's outputs are centred by a moving average."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        target = (z.detach() - self.centre).softmax(-1)
        self.centre.mul_(0.9).add_(z.detach().mean(0), alpha=0.1)
        return -(z.log_softmax(-1) * target).sum(1)

    return minimise_rows(by_head(forward, centre=torch.zeros(4)))


@loop
def centre_moved_before_it_is_read() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        self.centre.mul_(0.9).add_(z.detach().mean(0), alpha=0.1)
        target = (z.detach() - self.centre).softmax(-1)
        return -(z.log_softmax(-1) * target).sum(1)

    return minimise_rows(by_head(forward, centre=torch.zeros(4)))


@loop
def running_mean_as_a_number() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        self.running = 0.9 * self.running + 0.1 * z.detach().mean().item()
        return z - self.running

    return regress(with_attributes(by_head(forward), running=0.0))


@loop
def running_mean_as_a_tensor_attribute() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        result = z * (1 + self.running)
        self.running = 0.9 * self.running + 0.1 * z.detach().mean(0)
        return result

    return regress(with_attributes(by_head(forward), running=torch.zeros(4)))


@loop
def largest_value_so_far() -> Training:
    """The range of a quantiser: a maximum that only grows."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        self.largest = torch.maximum(self.largest, z.detach().abs().max())
        return z / self.largest

    return regress(by_head(forward, largest=torch.tensor(0.5)))


@loop
def bank_of_the_last_batches() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.head(x)
        self.bank.append(z.detach())
        self.bank = self.bank[-2:]
        means = torch.stack([batch.mean(0) for batch in self.bank])
        return z, means.mean(0).expand_as(z)

    model = with_attributes(by_head(forward), bank=[])
    return Training(model, lambda outputs, _: F.mse_loss(*outputs), (features(),), (features(),))


@loop
def queue_of_negatives() -> Training:
    """MoCo: the queue's oldest rows are replaced by the batch's."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = F.normalize(self.head(x), dim=1)
        result = z @ self.queue.clone().t()
        begin = int(self.begin)
        self.queue[(torch.arange(len(z)) + begin) % 18] = z.detach()
        self.begin.fill_((begin + len(z)) % 18)
        return result

    queue = {"queue": torch.randn(18, 4), "begin": torch.zeros((), dtype=torch.long)}
    return classify(by_head(forward, **queue))


@loop
def memory_by_the_index_of_a_sample() -> Training:
    """Instance discrimination: each sample moves its own row of a bank."""

    def forward(self: Calls, x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        before = self.bank[index]
        self.bank[index] = 0.5 * before + 0.5 * z.detach()
        return z - before

    model = by_head(forward, bank=torch.randn(20, 4))
    return regress(model, features(), torch.randperm(20)[:N])


@loop
def means_of_classes() -> Training:
    """Centre loss: prototypes move to the mean of their class in the batch."""

    def forward(self: Calls, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        rows = (z - self.prototypes[y]).pow(2).sum(1)
        sums = torch.zeros(3, 4).index_add(0, y, z.detach())
        counts = torch.bincount(y, minlength=3).clamp(min=1)
        self.prototypes.lerp_(sums / counts[:, None], 0.1)
        return rows

    y = torch.arange(N) % 3
    return minimise_rows(by_head(forward, prototypes=torch.randn(3, 4)), features(), y)


@loop
def hidden_state_across_batches() -> Training:
    """Truncated backpropagation: each place of the batch goes on with its own hidden state."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        result, hidden = self.gru(x, self.hidden)
        self.hidden = hidden.detach()
        return self.head(result).mean(1)

    model = by_head(forward, gru=nn.GRU(6, 6, batch_first=True))
    return regress(with_attributes(model, hidden=None), features(5, 6))


@loop
def counter_before_it_is_read() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(x) * (1 + self.calls)

    return regress(by_head(forward, calls=torch.zeros(())))


@loop
def counter_bound_anew() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        self.calls = self.calls + 1
        return self.head(x) * (1 + self.calls)

    return regress(by_head(forward, calls=torch.zeros(())))


@loop
def counter_after_it_is_read() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        result = self.head(x) * (1 + self.calls)
        self.calls.add_(1)
        return result

    return regress(by_head(forward, calls=torch.zeros(())))


@loop
def heads_take_turns() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.head(x) if self.calls % 2 else self.other(x)

    return regress(with_attributes(by_head(forward, other=linear()), calls=0))


@loop
def schedule_from_an_iterator() -> Training:
    """A temperature for each call, from a generator that is kept on the module."""
    model = by_head(lambda self, x: self.head(x) / next(self.schedule))
    return regress(with_attributes(model, schedule=(1 + 0.1 * step for step in range(1000))))


@loop
def last_norms_in_a_deque() -> Training:
    """Activations are scaled by the mean norm of the last calls."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        self.norms.append(float(z.detach().norm()))
        return z / (sum(self.norms) / len(self.norms))

    return regress(with_attributes(by_head(forward), norms=deque(maxlen=4)))


@loop
def masks_cached_by_length() -> Training:
    """A causal mask for each length of sequences, made once."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        time = x.shape[1]
        if time not in self.masks:
            self.masks[time] = torch.ones(time, time).tril().bool()
        scores = (x @ x.transpose(1, 2)).masked_fill(~self.masks[time], -torch.inf)
        return self.head(scores.softmax(-1) @ x).mean(1)

    return regress(with_attributes(by_head(forward), masks={}), features(5, 6))


@loop
def number_kept_for_the_log() -> Training:
    """Nothing reads it but people; natively it is of the whole batch."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        self.last_norm = z.detach().norm().item()
        return z

    return regress(with_attributes(by_head(forward), last_norm=0.0))
