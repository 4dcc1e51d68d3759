from typing import Any

import torch
from support import Calls
from torch import nn
from torch.utils.checkpoint import checkpoint

from .loop import (
    Training,
    by_head,
    classify,
    features,
    linear,
    loop,
    minimise_rows,
    regress,
)


class Reversed(torch.autograd.Function):
    """Gradient reversal that divides by the gradient's norm."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient / (1 + gradient.norm())


class Standardise(torch.autograd.Function):
    """A batch normalisation with a backward of its own."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        mean, scale = x.mean(0), 1 / (x.var(0, unbiased=False) + 1e-3).sqrt()
        result = (x - mean) * scale
        context.save_for_backward(result, scale)
        return result

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        result, scale = context.saved_tensors
        projected = (gradient * result).mean(0)
        return scale * (gradient - gradient.mean(0) - result * projected)


class Rounded(torch.autograd.Function):
    """A straight-through estimator: each sample by itself."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient.clamp(-1, 1)


@loop
def function_that_reverses_and_normalises_gradients() -> Training:
    return regress(by_head(lambda self, x: self.head(Reversed.apply(self.first(x))), first=six()))


def six() -> nn.Linear:
    return linear(6, 6)


@loop
def function_with_statistics_of_the_batch() -> Training:
    forward = lambda self, x: self.head(Standardise.apply(self.first(x)))  # noqa: E731
    return regress(by_head(forward, first=six()))


@loop
def function_that_rounds_straight_through() -> Training:
    return regress(by_head(lambda self, x: self.head(Rounded.apply(self.first(x))), first=six()))


@loop
def straight_through_by_detaching() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.first(x)
        return self.head(z + (z.sign() - z).detach())

    return regress(by_head(forward, first=six()))


@loop
def gradient_scaled_by_detaching() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.first(x)
        return self.head(0.1 * z + 0.9 * z.detach())

    return regress(by_head(forward, first=six()))


@loop
def batch_mean_in_the_gradient_only() -> Training:
    """Outputs are each sample's own: `z - z.mean(0)` is added and taken away again, detached."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        centred = z - z.mean(0)
        return z + centred - centred.detach()

    return regress(by_head(forward))


@loop
def hook_that_normalises_hidden_gradients() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient / (gradient.norm() + 1e-3))
        return self.head(hidden)

    return regress(by_head(forward, first=six()))


@loop
def hook_that_clamps_hidden_gradients() -> Training:
    """By value, for each sample; but the loss's mean is over other rows in a micro-batch's."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return self.head(hidden)

    return regress(by_head(forward, first=six()))


@loop
def hook_that_clips_a_parameters_gradient() -> Training:
    model = linear()
    model.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
    return regress(model)


@loop
def hook_that_clips_by_the_norm_of_a_parameter() -> Training:
    model = nn.Sequential(six(), nn.Tanh(), linear())
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient / max(1.0, float(gradient.norm()) * 10))
    return regress(model)


@loop
def hooks_of_modules_in_backward() -> Training:
    model = nn.Sequential(six(), nn.Tanh(), linear())
    model[0].register_full_backward_hook(lambda *_: None)
    model[2].register_full_backward_pre_hook(lambda _, given: (given[0] / (1 + given[0].norm()),))
    return regress(model)


@loop
def hook_of_a_module_that_scales() -> Training:
    model = nn.Sequential(six(), nn.Tanh(), linear())
    model[0].register_forward_hook(lambda _, inputs, z: z / (1 + z.detach().std()))
    return regress(model)


@loop
def energy_and_its_forces() -> Training:
    """The gradient by the inputs is what the next layer reads."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            (forces,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        return self.head(forces)

    return regress(by_head(forward, energy=nn.Sequential(linear(6, 5), nn.Tanh(), linear(5, 1))))


@loop
def inner_step_on_the_batch() -> Training:
    """MAML: one step of gradient descent on the mean over the batch, then the loss of each."""

    def forward(self: Calls, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weight = self.head.weight
        with torch.enable_grad():
            support = (torch.nn.functional.linear(x, weight) - y).pow(2).mean()
            (slope,) = torch.autograd.grad(support, weight, create_graph=True)
        return (torch.nn.functional.linear(x, weight - 0.5 * slope) - y).pow(2).sum(1)

    return minimise_rows(by_head(forward), features(), features(4))


@loop
def gradient_of_each_sample_by_vmap() -> Training:
    """Norms of samples' own gradients as a weight, by torch.func."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        weight = self.head.weight
        of_one = lambda row: torch.func.grad(lambda r: (weight @ r).tanh().sum())(row)  # noqa: E731
        return self.head(x) * torch.func.vmap(of_one)(x).norm(dim=1, keepdim=True)

    return regress(by_head(forward))


@loop
def ensemble_by_functional_call() -> Training:
    """Three members in one vmap over their stacked parameters."""
    member = linear()

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        def call(weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            return torch.func.functional_call(member, {"weight": weight, "bias": bias}, (x,))

        return torch.func.vmap(call)(self.weights, self.biases).mean(0)

    model = Calls(forward)
    model.weights = nn.Parameter(torch.randn(3, 4, 6))
    model.biases = nn.Parameter(torch.randn(3, 4))
    return classify(model)


@loop
def reentrant_checkpoint() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=True))

    body = nn.Sequential(six(), nn.Dropout(0.0), nn.Tanh())
    return regress(by_head(forward, body=body), features().requires_grad_())


@loop
def checkpoint_around_batch_norm() -> Training:
    """Natively it is recomputed in backward, and its statistics move two times."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False))

    return regress(by_head(forward, body=nn.Sequential(six(), nn.BatchNorm1d(6), nn.Tanh())))
