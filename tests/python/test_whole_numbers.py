"""Ids, flags, counts and padding that are held as floats: no rounding turns them, so what samples do
to each other by them is noticed; and a choice that rounding turns in one row explains no other."""

from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from same_rows_support import WAYS, N, Y, spread, step, steps
from support import Calls, classification, native, result_of, worst_error
from torch import nn

torch.manual_seed(1)
X = classification(N)[0].double()
IDS = (torch.arange(N) % 5).double()

Forward = Callable[[Any, torch.Tensor], torch.Tensor]


def group_means(h: torch.Tensor, same: torch.Tensor) -> torch.Tensor:
    """Of the rows that are alike."""
    weights = same.to(h.dtype)
    return h + weights @ h / weights.sum(1, keepdim=True).clamp_min(1)


def by_ids(ids: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    return group_means(h, ids[:, None] == ids)


def by_flag(flag: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
    chosen = h[flag]
    return h + chosen.sum(0) / max(1, len(chosen))


def with_column(column: torch.Tensor) -> torch.Tensor:
    return torch.cat([column[:, None].to(X), X[:, 1:]], 1)


def classes_of(self: Any, x: torch.Tensor) -> torch.Tensor:
    """One of the codes, which a buffer holds."""
    return (x[:, :1] == self.codes).double().argmax(1)


ONE_HOT = torch.cat([F.one_hot(IDS.long(), 5), X[:, 5:]], 1)
PIXELS = torch.randint(0, 256, (N, 6)).double()
PADDED = X * (torch.arange(6) < 1 + torch.arange(N)[:, None] % 6)
HALVES, TENTHS = IDS / 2, IDS / 10

#: Inputs, and a forward that combines samples by what is whole in them.
MIXES: dict[str, tuple[torch.Tensor, Forward]] = {
    "an id column": (with_column(IDS), lambda m, x: by_ids(x[:, 0], m.net(x))),
    "an id of a constant": (with_column(IDS), lambda m, x: by_flag(x[:, 0] == 3, m.net(x))),
    "flags": (with_column(IDS % 2), lambda m, x: by_flag(x[:, 0] == 1, m.net(x))),
    "flags of 0": (with_column(IDS % 2), lambda m, x: by_flag(x[:, 0] == 0, m.net(x))),
    "halves": (with_column(HALVES), lambda m, x: by_flag(x[:, 0] == 0.5, m.net(x))),
    "tenths": (with_column(TENTHS), lambda m, x: by_flag(x[:, 0] == 0.3, m.net(x))),
    "ids of real numbers": (with_column(X[IDS.long(), 0]), lambda m, x: by_ids(x[:, 0], m.net(x))),
    "ids after a cast": (
        with_column(IDS).float(),
        lambda m, x: by_flag(x.double()[:, 0] == 2, m.net(x.double())),
    ),
    "ids computed": (with_column(IDS), lambda m, x: by_ids(2 * x[:, 0] + 1, m.net(x))),
    "ids scaled back": (
        with_column(TENTHS),
        lambda m, x: by_flag((x[:, 0] * 10).round() == 3, m.net(x)),
    ),
    "ids cut": (
        with_column(IDS + 0.25),
        lambda m, x: by_flag(x[:, 0].long() == 3, m.net(x)),
    ),
    "floors": (with_column(IDS), lambda m, x: by_ids((x[:, 0] / 2).floor(), m.net(x))),
    "one hot": (ONE_HOT, lambda m, x: by_ids(x[:, :5] @ torch.arange(5.0).double(), m.net(x))),
    "one hot by its place": (
        ONE_HOT,
        lambda m, x: group_means(m.net(x), x[:, :5] @ x[:, :5].T == 1),
    ),
    "pixels": (PIXELS, lambda m, x: by_flag(x[:, 0] > x[:, 1], m.net(x / 255))),
    "pixels of a value": (PIXELS, lambda m, x: by_flag((x == PIXELS[3, 2]).any(1), m.net(x))),
    "padding": (PADDED, lambda m, x: by_ids((x != 0).sum(1), m.net(x))),
    "padding summed": (PADDED, lambda m, x: by_flag((x == 0).double().sum(1) == 2, m.net(x))),
    "codes of a buffer": (with_column(IDS), lambda m, x: by_ids(classes_of(m, x), m.net(x))),
    "a parameter of ones": (
        with_column(IDS % 2),
        lambda m, x: by_flag(x[:, 0] == m.still[0].detach(), m.net(x)),
    ),
    "a written buffer": (with_column(IDS), lambda m, x: m.net(x) + m.remember(x)),
}


class Mixing(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.how = forward
        self.net = nn.Linear(6, 5)
        self.still = nn.Parameter(torch.ones(5), requires_grad=False)
        self.register_buffer("codes", torch.arange(6))
        self.register_buffer("last", torch.full((1,), 3.0))
        self.register_buffer("seen", torch.zeros(1))

    def remember(self, x: torch.Tensor) -> torch.Tensor:
        """Combines samples of the id that a buffer holds, which forward writes."""
        self.last.copy_(torch.full_like(self.last, 3))
        chosen = self.net(x)[x[:, 0] == self.last]
        return chosen.sum(0) / max(1, len(chosen))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.how(self, x)


SPLITS = [("streaming", 4), ("coupled", 1), ("wrap", 4)]


@pytest.mark.parametrize(("way", "size"), SPLITS)
@pytest.mark.parametrize("name", MIXES)
def test_samples_combined_by_whole_numbers_are_noticed(name: str, way: str, size: int) -> None:
    torch.manual_seed(0)
    x, forward = MIXES[name]
    model = Mixing(forward).double()
    with pytest.raises(ib.CouplingError):
        step(way, model, x, micro_batch_size=size)


@pytest.mark.parametrize("name", MIXES)
def test_one_micro_batch_is_native(name: str) -> None:
    torch.manual_seed(0)
    x, forward = MIXES[name]
    model = Mixing(forward).double()
    wanted = native(model, spread, x, Y)
    step("wrap", model, x, micro_batch_size=N)
    assert worst_error(result_of(model, wanted.loss), wanted) <= 1e-12


#: Of one sample alone each is that sample, so that another rounding of it would turn the choice.
THRESHOLDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "mean": lambda h: h.mean(0),
    "median": lambda h: h.median(0).values,
    "quantile": lambda h: h.quantile(0.5, 0),
    "mean by a product": lambda h: torch.ones(1, len(h)).double() @ h / len(h),
    "norm": lambda h: h.norm(dim=0) / len(h) ** 0.5,
}


@pytest.mark.parametrize(("way", "size"), SPLITS)
@pytest.mark.parametrize("name", THRESHOLDS)
def test_thresholds_of_all_samples_are_noticed(name: str, way: str, size: int) -> None:
    torch.manual_seed(0)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = self.net(x)
        return torch.where(h > THRESHOLDS[name](h).detach(), h, 0.5 * h)

    with pytest.raises(ib.CouplingError):
        step(way, Calls(forward, net=nn.Linear(6, 5)).double(), X, micro_batch_size=size)


def boxes_of(self: Any, x: torch.Tensor, boxes: torch.Tensor) -> torch.Tensor:
    """Boxes of all images in one table, whose first column says which image each is of."""
    h = self.net(x)
    mine = [self.boxes(boxes[boxes[:, 0] == i, 1:]).sum(0) for i in range(len(x))]
    return h + torch.stack(mine)


@pytest.mark.parametrize("size", [1, 4])
def test_boxes_by_image_number(size: int) -> None:
    torch.manual_seed(0)
    boxes = torch.cat([torch.randint(0, N, (40, 1)).double(), torch.randn(40, 4).double()], 1)
    model = Calls(boxes_of, net=nn.Linear(6, 5), boxes=nn.Linear(4, 5)).double()
    with pytest.raises(ib.CouplingError):
        spread(ib.wrap(model, micro_batch_size=size)(X, ib.shared(boxes)), Y).backward()
    with pytest.raises(ib.CouplingError):
        ib.VirtualBatch(model, ib.losses.coupled(spread), micro_batch_size=size).backward(
            (X, ib.shared(boxes)), Y
        )


ALONE: dict[str, tuple[torch.Tensor, Forward]] = {
    "looked up": (with_column(IDS), lambda m, x: m.net(x) * m.table(x[:, 0].long())),
    "one hot": (ONE_HOT, lambda m, x: m.net(x)),
    "pixels": (PIXELS, lambda m, x: m.net(x / 255)),
    "padding": (PADDED, lambda m, x: m.net(x) / (x != 0).sum(1, keepdim=True)),
    "a flag": (with_column(IDS % 2), lambda m, x: torch.where(x[:, :1] == 1, m.net(x), -m.net(x))),
    "a code": (with_column(IDS), lambda m, x: m.net(x) * m.table(classes_of(m, x))),
}


@pytest.mark.parametrize(("way", "size"), SPLITS[1:])
@pytest.mark.parametrize("name", ALONE)
def test_rows_of_their_own_are_exact(name: str, way: str, size: int) -> None:
    torch.manual_seed(0)
    x, forward = ALONE[name]
    model = Mixing(forward)
    model.table = nn.Embedding(6, 5)
    model = model.double()
    wanted = native(model, spread, x, Y)
    step(way, model, x, micro_batch_size=size)
    assert worst_error(result_of(model, wanted.loss), wanted) <= 1e-12


def nearest(self: Any, x: torch.Tensor) -> torch.Tensor:
    """A codebook: larger batches add in another order, which turns what lies between two codes."""
    squares = (x[:, None, :5] - self.codes) ** 2
    pieces = squares.chunk(2, 2) if len(x) > 4 else squares.chunk(3, 2)
    distances = torch.stack([piece.sum(2) for piece in pieces]).sum(0)
    first = distances[:, :1] * (1 + (-2.3e-16 if len(x) > 4 else 2.3e-16))
    distances = torch.cat([first, distances[:, 1:]], 1)
    return self.net(x) + self.values[distances.argmin(1)]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("combines", [False, True])
def test_a_turned_row_explains_no_other(way: str, combines: bool) -> None:
    """Row 10 lies in the middle of two codes: its choice is rounding's. That rows of one id are added
    is not."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = nearest(self, x)
        return by_ids(x[:, 5], h) if combines else h

    torch.manual_seed(0)
    x = X.clone()
    x[:, 5] = IDS
    x[10, :5] = 0
    away, more = torch.randn(1, 5).double() / 9, torch.randn(6, 5).double()
    model = Calls(forward, net=nn.Linear(6, 5)).double()
    model.register_buffer("codes", torch.cat([away, away.flip(1), more + 5]))
    model.register_buffer("values", 9 * torch.randn(8, 5).double())
    if combines:
        with pytest.raises(ib.CouplingError):
            step(way, model, x, micro_batch_size=4)
    else:
        with torch.no_grad():
            assert (model(x)[10] - model(x[10:11])[0]).abs().max() > 1
        step(way, model, x, micro_batch_size=4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("size", [1, 4])
def test_neighbours_among_a_samples_points(way: str, size: int, dtype: torch.dtype) -> None:
    """A choice made of inputs alone, on a grid, where many are as near: larger batches add in
    another order."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        points = x.unflatten(1, (9, 2))
        apart = (points[:, :, None] - points[:, None]) ** 2 * self.scale
        near = apart.flip(3).sum(3) if len(x) > 4 else apart.sum(3)
        near = near * (1 - torch.finfo(dtype).eps * (len(x) > 4))
        chosen = near.topk(4, largest=False).indices
        return self.net(points[torch.arange(len(x))[:, None, None], chosen].flatten(1))

    torch.manual_seed(0)
    grid = torch.cartesian_prod(torch.arange(3.0), torch.arange(3.0)).flatten() * 0.1
    x = (grid + 0.013 * torch.arange(N)[:, None]).to(dtype)
    model = Calls(forward, net=nn.Linear(72, 5), scale=torch.tensor([0.7, 0.3])).to(dtype)
    step(way, model, x, micro_batch_size=size)


@pytest.mark.parametrize("way", WAYS)
def test_a_look_later_on_notices_too(way: str) -> None:
    """Steps 1 and 2 combine nothing."""
    torch.manual_seed(0)
    settings = {"combines": False}

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = self.net(x)
        return by_ids(x[:, 0], h) if settings["combines"] else h

    one = steps(way, Calls(forward, net=nn.Linear(6, 5)).double(), micro_batch_size=4)
    for _ in range(2):
        one(with_column(IDS), Y)
    settings["combines"] = True
    one(with_column(IDS), Y)
    with pytest.raises(ib.CouplingError, match="nothing differed in step 2"):
        one(with_column(IDS), Y)
