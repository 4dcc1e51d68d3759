"""What tests of offloaded graphs behind `wrap` share: steps and their gradients."""

import gc

import infinitybatch as ib
from test_offloaded_graphs import spread


def live():
    gc.collect()
    return ib.memory.stats().live


def grads(module):
    return [parameter.grad for parameter in module.parameters()]


def step(module, x, targets, times=1, loss=spread):
    """What one forward and so many backward passes leave."""
    module.zero_grad()
    x = x.clone().requires_grad_()
    outputs = module(x)
    value = loss(outputs, targets)
    for i in range(times):
        value.backward(retain_graph=i + 1 < times)
    left = [outputs.detach(), value.detach(), x.grad, *grads(module), *module.buffers()]
    return [tensor.clone() for tensor in left]
