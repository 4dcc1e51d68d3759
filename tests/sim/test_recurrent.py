"""Recurrent layers, whose dropout draws by a state on the device that no generator tells of."""

import infinitybatch as ib
import pytest
import torch
from support import Calls
from torch import nn


class Centred(torch.autograd.Function):
    """Combines samples in backward alone."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient - gradient.mean(0)


def test_in_eval_mode_they_draw_nothing_and_gradients_are_compared():
    torch.manual_seed(0)
    model = Calls(
        lambda self, x: self.head(Centred.apply(self.lstm(x[:, None])[0][:, 0])),
        lstm=nn.LSTM(6, 8, 2, dropout=0.3, batch_first=True).eval(),
        head=nn.Linear(8, 5),
    ).double()
    x, y = torch.randn(16, 6, dtype=torch.float64), torch.randint(5, (16,))
    with pytest.raises(ib.CouplingError, match="the gradient of samples"):
        ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4).backward(x, y)
