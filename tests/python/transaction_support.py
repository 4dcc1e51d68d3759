"""What tests of failing steps share: a model that fails when told to, and the bits of a step."""

import copy
import random

import infinitybatch as ib
import numpy as np
import torch
from support import classification
from torch import nn


class Fussy(nn.Module):
    """Draws random numbers of three kinds, writes a buffer, and fails when told to."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 5))
        self.register_buffer("steps", torch.zeros(3))
        self.double()
        self.before_forward = lambda: None

    def forward(self, x):
        self.before_forward()
        self.steps += 1
        noise = random.random() + np.random.rand()
        return self.net(x) + 0.1 * noise


OPTIONS = [{"micro_batch_size": 3}, {"memory_budget": "64MiB"}]


def set_up(with_grads):
    np.random.seed(0)
    model = Fussy()
    inputs, targets = classification(12)
    if with_grads:
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
    return model, inputs, targets


def step_bits(model, loss, inputs, targets):
    """The bits that a step gives from a fixed random state."""
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    model = copy.deepcopy(model)
    report = ib.VirtualBatch(model, loss, micro_batch_size=3).backward(inputs, targets)
    return [report.loss, *(p.grad for p in model.parameters()), *model.buffers()]


def past_the_first_steps(model, loss, inputs, targets):
    """Steps 1, 2 and 4 look for mixed samples; what fails there ends that alone."""
    batch = ib.VirtualBatch(model, loss, micro_batch_size=3)
    grads = [p.grad for p in model.parameters()]
    buffers = [b.clone() for b in model.buffers()]
    model.zero_grad()
    for _ in range(2):
        batch.backward(inputs, targets)
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        parameter.grad = grad
    for buffer, value in zip(model.buffers(), buffers, strict=True):
        buffer.copy_(value)
    return batch
