"""Files of wrapped modules that are read without trusting them: torch.load(weights_only=True)."""

import collections
import io

import infinitybatch as ib
import pytest
import torch
from torch import nn
from wrap_support import X, close, contrastive, grads


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


#: What torch wants to be told of the user's own model, wrapped or not.
OWN = [Net, nn.Sequential, nn.Linear, nn.Tanh, set, collections.OrderedDict]


@pytest.mark.parametrize("twice", [False, True])
def test_with_the_user_s_own_safe_globals(twice):
    model = ib.wrap(Net(), micro_batch_size=4)
    if twice:
        model = ib.wrap(nn.Sequential(model), micro_batch_size=3)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    with torch.serialization.safe_globals(OWN):
        read = torch.load(file, weights_only=True)
    assert isinstance(read, ib.Wrapped)
    for each in (model, read):
        contrastive(each(X)).backward()
    assert read.last_report.micro_batch_sizes == model.last_report.micro_batch_sizes
    close(grads(read), grads(model))


def test_without_them_torch_refuses():
    file = io.BytesIO()
    torch.save(ib.wrap(Net(), micro_batch_size=4), file)
    file.seek(0)
    with pytest.raises(Exception, match="Unsupported global"):
        torch.load(file, weights_only=True)
