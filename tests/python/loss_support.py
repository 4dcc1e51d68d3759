"""What tests of losses share: sizes, targets, weights of classes."""

import torch

N, C = 11, 5


def rand(*shape):
    return torch.rand(*shape, dtype=torch.float64)


def labels():
    return torch.randint(C, (N,))


WEIGHT = torch.tensor([0.5, 2.0, 1.0, 3.0, 0.1], dtype=torch.float64)
