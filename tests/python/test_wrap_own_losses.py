"""A model that computes a cross entropy from its own targets and returns it, as language models do: the
mean of micro-batches is weighed by the targets that count, whatever is ignored."""

import copy
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from wrap_support import close, grads

N, T, C = 11, 6, 5


class Model(nn.Module):
    def __init__(self, loss: Any, norm: Any = nn.Identity) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), norm(T), nn.Tanh(), nn.Linear(8, C)).double()
        self.loss = loss

    def forward(self, x: torch.Tensor, y: torch.Tensor, items: Any = None) -> Any:
        logits = self.net(x)
        return logits, self.loss(logits, y, items)


WEIGHTS = torch.tensor([1.0, 0.25, 3.0, 0.0, 2.0], dtype=torch.float64)


def flat(**options: Any) -> Any:
    return lambda z, y, items: F.cross_entropy(z.flatten(0, 1), y.flatten(), **options)


def divided(z: torch.Tensor, y: torch.Tensor, items: Any) -> torch.Tensor:
    total = F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="sum")
    return total / items.to(total.device)


LOSSES = {
    "ignored labels": flat(),
    "another label is ignored": lambda z, y, items: F.cross_entropy(
        z.flatten(0, 1), y.flatten().where(y.flatten() >= 0, 2), ignore_index=2
    ),
    "classes that weigh differently": flat(weight=WEIGHTS),
    "images": lambda z, y, items: F.cross_entropy(z.movedim(2, 1), y),
    "negative log likelihood": lambda z, y, items: F.nll_loss(
        z.log_softmax(2).flatten(0, 1), y.flatten(), ignore_index=-100
    ),
    "views of it": lambda z, y, items: flat()(z, y, items).view(1).view(()),
    "a sum": flat(reduction="sum"),
    "a sum over a number for all": divided,
}


def data(ragged: bool = True) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, T, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(C, (N, T), generator=generator)
    for sample in range(4, N) if ragged else ():  # the first micro-batch's weigh the same
        y[sample, : sample % T] = -100
    y[8:10] = -100  # two in one micro-batch of two
    return x, y, (y != -100).sum()


@pytest.mark.parametrize("norm", [nn.Identity, nn.BatchNorm1d])
@pytest.mark.parametrize("said", [None, "as it is"])
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("name", LOSSES)
def test_it_is_joined_exactly(name: str, size: int, said: Any, norm: Any) -> None:
    model = Model(LOSSES[name], norm)
    twin = copy.deepcopy(model)
    reduce = None if said is None else "sum" if name.startswith("a sum") else "mean"
    wrapped = ib.wrap(model, micro_batch_size=size, reduce=reduce)
    x, y, items = data()
    for _ in range(3):
        model.zero_grad(), twin.zero_grad()
        logits, loss = wrapped(x, y, items)
        whole, native = twin(x, y, items)
        (loss * 3 + logits.pow(2).sum()).backward()
        (native * 3 + whole.pow(2).sum()).backward()
        assert loss.shape == () and loss.dtype == native.dtype
        close(loss, native)
        close(grads(model), grads(twin))
    assert len(wrapped.last_report.micro_batch_sizes) > 2
    model.eval(), twin.eval()
    with torch.no_grad():
        close(wrapped(x, y, items)[1], twin(x, y, items)[1])


def test_nothing_counts() -> None:
    model = Model(LOSSES["ignored labels"])
    x, y, _ = data()
    y.fill_(-100)
    assert Model(model.loss)(x, y)[1].isnan()
    assert ib.wrap(model, micro_batch_size=3)(x, y)[1].isnan()


def smoothed(z: torch.Tensor, y: torch.Tensor, items: Any) -> torch.Tensor:
    return F.cross_entropy(z.flatten(0, 1), y.flatten(), label_smoothing=0.1)


def counted(z: torch.Tensor, y: torch.Tensor, items: Any) -> torch.Tensor:
    return F.cross_entropy(z.flatten(0, 1), y.flatten(), reduction="sum") / (y != -100).sum()


def doubled(z: torch.Tensor, y: torch.Tensor, items: Any) -> torch.Tensor:
    loss = flat()(z, y, items)
    return loss.mul_(2 + z.mean().detach())


@pytest.mark.parametrize("loss", [smoothed, counted, doubled])
def test_what_is_not_known_is_refused(loss: Any) -> None:
    x, y, items = data()
    with pytest.raises(ib.BatchError, match=r"outputs\[1\] is one number.*cannot be joined"):
        ib.wrap(Model(loss), micro_batch_size=3)(x, y, items)


def pairs(z: torch.Tensor, y: torch.Tensor, items: Any) -> torch.Tensor:
    rows = z.flatten(1)
    return F.cross_entropy(rows @ rows.T, torch.arange(len(z)))


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("scale", [1.0, 0.0])
def test_a_cross_entropy_over_the_batch_is_refused(scale: float, size: int) -> None:
    """Also where it is the same for any samples, until the model has learned something."""
    model = Model(pairs)
    with torch.no_grad():
        model.net[3].weight.mul_(scale), model.net[3].bias.mul_(scale)
    x, y, _ = data()
    with pytest.raises((ib.BatchError, ib.CouplingError)):
        ib.wrap(model, micro_batch_size=size)(x, y)


@pytest.mark.parametrize("norm", [nn.Identity, nn.BatchNorm1d])
@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("fresh", [False, True])
def test_a_wrong_claim_is_found_where_losses_are_alike(fresh: bool, later: bool, norm: Any) -> None:
    """Of a head that begins at zero all losses are the same; of the first samples all weigh the same."""

    def by_hand(z: torch.Tensor, y: torch.Tensor, items: Any) -> torch.Tensor:
        kept = y != -100
        return -z.log_softmax(-1)[kept].gather(1, y[kept].unsqueeze(1)).mean()

    model = Model(by_hand, norm)
    if fresh:
        with torch.no_grad():
            model.net[3].weight.zero_(), model.net[3].bias.zero_()
    x, y, _ = data(ragged=False)
    y[8:10] = 0
    y[10 if later else 1, :3] = -100
    with pytest.raises(ib.BatchError, match="is not a mean over samples, as reduce="):
        ib.wrap(model, micro_batch_size=2, reduce="mean")(x, y)


@pytest.mark.parametrize("ratio", [lambda h: h.std(0).mean(), lambda h: h.sum() / (len(h) - 1)])
def test_halves_that_are_no_numbers_are_told_as_such(ratio: Any) -> None:
    class Measured(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ratio(self.net(x))

    torch.manual_seed(0)
    with pytest.raises(ib.BatchError, match="two halves give") as raised:
        ib.wrap(Measured(), micro_batch_size=2, reduce="mean")(torch.randn(12, 8))
    assert "two halves give NaN (not a number);" in str(raised.value)
