"""`match_native_rng` where the batches of two steps lie in memory otherwise: transposed, expanded,
with holes, channels last. What is drawn "like" a tensor is filled in the order of its memory."""

from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
from torch import nn
from torch.nn import functional as F

SAMPLES = 8


def flat(make: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
    return lambda: make().double()


#: Batches of eight samples with six features.
LAYOUTS: dict[str, Callable[[], torch.Tensor]] = {
    "plain": flat(lambda: torch.randn(SAMPLES, 6)),
    "transposed": flat(lambda: torch.randn(6, SAMPLES).T),
    "one sample, expanded": lambda: torch.randn(1, 6).double().expand(SAMPLES, 6),
    "one feature, expanded": lambda: torch.randn(SAMPLES, 1).double().expand(SAMPLES, 6),
    "with holes": lambda: torch.randn(SAMPLES, 12).double()[:, ::2],
    "transposed, with holes": lambda: torch.randn(6, 2 * SAMPLES).double().T[::2],
}

DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.5),
    "gumbel_softmax": F.gumbel_softmax,
    "gumbel_softmax of a transpose": lambda x: F.gumbel_softmax(x.T, dim=0).T,
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn_like": lambda x: x + torch.randn_like(x),
    "bernoulli": lambda x: x * torch.bernoulli(torch.sigmoid(x)),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.5, True),
    "rrelu": lambda x: F.rrelu(-x.abs(), training=True),
    "exponential_": lambda x: x * torch.empty_like(x).exponential_(),
    "bernoulli_": lambda x: x * torch.zeros_like(x).bernoulli_(0.5),
    "normal": lambda x: torch.normal(x, 1.0),
    "multinomial": lambda x: x * torch.multinomial(x.softmax(-1), 1),
    "dropout, time first": lambda x: (
        F.dropout(x.reshape(-1, 3, 2).transpose(0, 1), 0.5).transpose(0, 1).flatten(1)
    ),
}


class Network(nn.Module):
    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.draw = draw
        self.first = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(self.draw(x))))


def train(
    model: nn.Module, batches: list[Any], way: str, **options: Any
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Gradients, and where the generator stands, of each step."""
    options["match_native_rng"] = True
    call: Any = ib.wrap(model, **options) if way == "wrap" else model
    if way == "stream":
        step = ib.VirtualBatch(model, nn.MSELoss(), **options).backward
    else:

        def step(x: torch.Tensor, target: torch.Tensor) -> Any:
            F.mse_loss(call(x), target).backward()

    torch.manual_seed(3)
    found = []
    for x in batches:
        model.zero_grad()
        step(x, torch.linspace(-1, 1, 3 * len(x)).double().view(len(x), 3))
        gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        found.append((gradient, torch.get_rng_state()))
    return found


def compare(make: Callable[[], nn.Module], batches: list[Any], way: str, **options: Any) -> None:
    wanted = train(make(), batches, "native")
    found = train(make(), batches, way, **options)
    for step, ((gradient, state), (exact, stands)) in enumerate(zip(found, wanted, strict=True)):
        error = (gradient - exact).norm() / exact.norm()
        assert error < 1e-10, f"step {step}: {error:.2g}"
        assert torch.equal(state, stands)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("way", ["stream", "wrap"])
@pytest.mark.parametrize("draw", DRAWS)
def test_steps_with_batches_of_other_layouts(draw: str, way: str, size: int) -> None:
    torch.manual_seed(5)
    names = ["plain", "transposed", *list(LAYOUTS)[2:], "transposed", "plain"]
    batches = [LAYOUTS[name]() for name in names]
    compare(lambda: Network(DRAWS[draw]), batches, way, micro_batch_size=size)


@pytest.mark.parametrize("draw", ["dropout", "exponential_"])
@pytest.mark.parametrize("layout", list(LAYOUTS)[1:])
@pytest.mark.parametrize("way", ["stream", "wrap"])
def test_a_static_graph(way: str, layout: str, draw: str) -> None:
    torch.manual_seed(5)
    batches = [LAYOUTS[name]() for name in ("plain", "plain", "plain", layout, layout, layout)]
    make = lambda: Network(DRAWS[draw])  # noqa: E731
    compare(make, batches, way, micro_batch_size=3, static_graph=True)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("way", ["stream", "wrap"])
def test_images_and_weights_become_channels_last(way: str, size: int) -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.conv = nn.Conv2d(3, 4, 2)
            self.head = nn.Linear(4 * 9, 3)
            self.double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(F.dropout(self.conv(F.dropout(x, 0.3)), 0.5).flatten(1))

    torch.manual_seed(5)
    images = [torch.randn(SAMPLES, 3, 4, 4).double() for _ in range(3)]
    last = [x.to(memory_format=torch.channels_last) for x in images]
    compare(Images, [images[0], last[0], images[1], last[1], last[2]], way, micro_batch_size=size)

    def trained(way: str, **options: Any) -> list[Any]:
        model = Images()
        found = train(model, images[:1], way, **options)
        model.to(memory_format=torch.channels_last)
        return found + train(model, images[1:], way, **options)

    for (gradient, _), (exact, _) in zip(
        trained(way, micro_batch_size=size), trained("native"), strict=True
    ):
        assert (gradient - exact).norm() / exact.norm() < 1e-10


@pytest.mark.parametrize("size", [1, 3])
def test_weights_become_channels_last_between_steps(size: int) -> None:
    class Images(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(1)
            self.conv = nn.Conv2d(3, 4, 2).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return F.dropout(self.conv(x), 0.5).mean((2, 3))[:, :3]

    torch.manual_seed(5)
    images = [torch.randn(SAMPLES, 3, 4, 4).double() for _ in range(4)]
    ours, native = Images(), Images()
    batch = ib.VirtualBatch(ours, nn.MSELoss(), micro_batch_size=size, match_native_rng=True)
    target = torch.linspace(-1, 1, 3 * SAMPLES).double().view(SAMPLES, 3)
    for i, x in enumerate(images):
        if i == 2:
            ours.to(memory_format=torch.channels_last)
            native.to(memory_format=torch.channels_last)
        for model, step in ((ours, batch.backward), (native, None)):
            torch.manual_seed(i)
            model.zero_grad()
            step(x, target) if step else F.mse_loss(model(x), target).backward()
        torch.testing.assert_close(
            ours.conv.weight.grad, native.conv.weight.grad, rtol=1e-12, atol=1e-12
        )


def test_rows_of_the_users_own_making() -> None:
    """How a source's batch would lie in memory is that of two of its rows, in each step."""
    torch.manual_seed(5)
    batches = [LAYOUTS[name]() for name in ("plain", "transposed", "plain", "transposed")]
    make = lambda: Network(DRAWS["dropout"])  # noqa: E731
    wanted = train(make(), batches, "native")
    model = make()
    batch = ib.VirtualBatch(model, nn.MSELoss(), micro_batch_size=1, match_native_rng=True)
    torch.manual_seed(3)
    for x, (exact, _) in zip(batches, wanted, strict=True):
        model.zero_grad()
        target = torch.linspace(-1, 1, 3 * len(x)).double().view(len(x), 3)
        batch.backward(ib.BatchSource(len(x), lambda a, b, x=x: x[a:b]), target)
        found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        assert (found - exact).norm() / exact.norm() < 1e-10


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("draw", ["dropout", "rand_like", "alpha_dropout", "bernoulli_"])
def test_dropout_of_a_batch_that_lies_otherwise_combines_no_samples(draw: str, layout: str) -> None:
    """Exchanging samples must not exchange the order in which numbers are drawn for them."""
    torch.manual_seed(5)
    batch = ib.VirtualBatch(Network(DRAWS[draw]), nn.MSELoss(), micro_batch_size=3)
    for _ in range(2):
        batch.backward(LAYOUTS[layout](), torch.randn(SAMPLES, 3).double())
