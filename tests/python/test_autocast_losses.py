"""Losses under autocast on the CPU, beside native's: against fp64, micro-batches are at most twice as
far off. (They compute separable losses in fp32, as an accelerator's autocast does.)"""

import copy

import infinitybatch as ib
import pytest
import torch
from torch import nn
from torch.nn import functional as F

GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(24, 6, generator=GENERATOR)
CLASSES = torch.randint(0, 5, (24,), generator=GENERATOR)
NUMBERS = torch.randn(24, 5, generator=GENERATOR)
SETS = (NUMBERS < 0).float()
LOSSES = {
    "cross entropy": (nn.CrossEntropyLoss(), CLASSES),
    "label smoothing": (nn.CrossEntropyLoss(label_smoothing=0.1), CLASSES),
    "nll": (lambda z, y: F.nll_loss(z.log_softmax(1), y), CLASSES),
    "mse": (nn.MSELoss(), NUMBERS),
    "l1": (nn.L1Loss(), NUMBERS),
    "smooth l1": (nn.SmoothL1Loss(), NUMBERS),
    "huber": (nn.HuberLoss(), NUMBERS),
    "bce with logits": (nn.BCEWithLogitsLoss(), SETS),
    "kl": (nn.KLDivLoss(reduction="batchmean"), NUMBERS.softmax(1)),
    "poisson": (nn.PoissonNLLLoss(), SETS),
    "soft margin": (nn.SoftMarginLoss(), SETS * 2 - 1),
    "multi-label": (nn.MultiLabelSoftMarginLoss(), SETS),
    "multi margin": (nn.MultiMarginLoss(), CLASSES),
}


def native(model, loss, x, y):
    return loss(model(x), y)


def wrapped(model, loss, x, y):
    return loss(ib.wrap(model, micro_batch_size=7)(x), y)


def streamed(model, loss, x, y):
    ib.VirtualBatch(model, loss, micro_batch_size=7).backward(x, y)


def coupled(model, loss, x, y):
    ib.VirtualBatch(model, ib.losses.coupled(loss), micro_batch_size=7).backward(x, y)


def gradient(model, way, loss, x, y, autocast=True):
    model = copy.deepcopy(model).to(x.dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        value = way(model, loss, x, y)
    if value is not None:
        value.backward()
    return torch.cat([p.grad.flatten().double() for p in model.parameters()])


@pytest.mark.filterwarnings("ignore:IB101")
@pytest.mark.parametrize("way", [wrapped, streamed, coupled])
@pytest.mark.parametrize("name", LOSSES)
def test_as_close_as_native(name, way):
    loss, y = LOSSES[name]
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 5))
    double = y.double() if y.is_floating_point() else y
    exact = gradient(model, native, loss, X.double(), double, autocast=False)
    allowed = 2 * (gradient(model, native, loss, X, y) - exact).norm()
    assert 0 < (gradient(model, way, loss, X, y) - exact).norm() <= allowed
