import math

import torch
from support import Calls
from torch import nn
from torch.nn import functional as F

from .loop import Training, by_head, classify, linear, loop, regress


@loop
def upper_half_of_the_batch_only() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        keep = torch.zeros(len(z))
        keep[z.sum(1).topk(len(z) // 2).indices] = 1
        return z * keep[:, None]

    return classify(by_head(forward))


@loop
def clamped_at_a_quantile_of_the_batch() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        return z.clamp(max=z.detach().quantile(0.7).item())

    return classify(by_head(forward))


@loop
def winsorised_at_quantiles_on_the_device() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        low, high = z.detach().quantile(torch.tensor([0.1, 0.9]))
        return torch.minimum(torch.maximum(z, low), high)

    return classify(by_head(forward))


@loop
def branch_on_distinct_classes() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        return z * (2.0 if len(z.argmax(1).unique()) > 1 else 0.5)

    return regress(by_head(forward))


@loop
def branch_on_any_sample() -> Training:
    """No micro-batch takes another branch than the whole batch."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        return z * (2.0 if (z.sum(1) > 1.0).any() else 0.5)

    return regress(by_head(forward))


@loop
def halting_by_sample() -> Training:
    """Adaptive computation time: each sample stops by itself, the loop with the last one."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        halted, result = torch.zeros(len(x)), 0
        while (halted < 1).any():
            running = (halted < 1).double()
            p = self.halt(x).sigmoid().squeeze(1) * running
            halted = halted + p.detach() + 0.3 * running
            result = result + p[:, None] * self.head(x)
            x = torch.tanh(self.again(x))
        return result

    return classify(by_head(forward, halt=linear(6, 1), again=linear(6, 6)))


@loop
def fixed_point_until_the_batch_converges() -> Training:
    """A deep equilibrium: the norm of all samples' change ends the loop."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(30):
                before, z = z, torch.tanh(0.5 * self.again(z) + x)
                if (z - before).norm() < 1e-3:
                    break
        return self.head(torch.tanh(0.5 * self.again(z) + x))

    return regress(by_head(forward, again=linear(6, 6)))


@loop
def steps_of_a_solver_by_the_error_of_the_batch() -> Training:
    """A neural ODE: steps are halved until the largest error of any sample is small."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        steps = 1
        while True:
            z = half = x
            for _ in range(steps):
                z = z + torch.tanh(self.field(z)) / steps
            for _ in range(2 * steps):
                half = half + torch.tanh(self.field(half)) / (2 * steps)
            if steps >= 16 or float((z - half).detach().abs().max()) < 0.05:
                return self.head(half)
            steps *= 2

    return regress(by_head(forward, field=linear(6, 6)))


@loop
def beams_pruned_over_the_batch() -> Training:
    """The best candidates of all samples together are kept, not of each."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        threshold = z.flatten().topk(2 * len(z)).values[-1].detach()
        return z.masked_fill(z < threshold, 0.0)

    return regress(by_head(forward))


@loop
def experts_with_a_capacity() -> Training:
    """Switch layers: an expert takes the first samples that want it, the others pass by."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        gates, choice = self.gate(x).softmax(-1).max(-1)
        capacity = math.ceil(len(x) / 3)
        result = torch.zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().squeeze(1)[:capacity]
            result = result.index_copy(0, rows, gates[rows, None] * expert(x[rows]))
        return result

    experts = nn.ModuleList(linear() for _ in range(3))
    return regress(Calls(forward, gate=linear(6, 3), experts=experts))


@loop
def experts_without_a_capacity() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        gates, choice = self.gate(x).softmax(-1).max(-1)
        result = torch.zeros(len(x), 4)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().squeeze(1)
            result = result.index_copy(0, rows, gates[rows, None] * expert(x[rows]))
        return result

    experts = nn.ModuleList(linear() for _ in range(3))
    return regress(Calls(forward, gate=linear(6, 3), experts=experts))


@loop
def confident_samples_leave_early() -> Training:
    """Only the others go through the second layer."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        unsure = z.softmax(-1).amax(-1) < 0.5
        result = z.clone()
        result[unsure] = z[unsure] + self.second(x[unsure])
        return result

    return classify(by_head(forward, second=linear()))


@loop
def batch_norm_over_positive_samples() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        chosen = x[:, 0] > 0
        rows = x.clone()
        rows[chosen] = F.batch_norm(x[chosen], None, None, training=True)
        return self.head(rows)

    return classify(by_head(forward))


@loop
def jitter_until_it_factorises() -> Training:
    """A kernel of all samples; noise is added until its Cholesky factor exists."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        kernel, jitter = z @ z.t(), 1e-3
        while torch.linalg.cholesky_ex(kernel + jitter * torch.eye(len(x))).info.item():
            jitter *= 10
        factor = torch.linalg.cholesky(kernel + jitter * torch.eye(len(x)))
        return factor @ z

    return regress(by_head(forward))
