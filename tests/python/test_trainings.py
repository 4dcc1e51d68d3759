"""Whole trainings beside native ones: Adam, a schedule, clipping, a moving average of the weights, a
gradient scaler that skips a step, and ours begun anew from a checkpoint in the middle. What counts is
the weights at the end.

INFINITYBATCH_LONG_TESTS=1 runs 200 steps of each; else 24 of two.
"""

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import infinitybatch as ib
import pytest
import torch
from batch_norm_models import Residual
from fault_support import LONG
from measure import excess
from support import Calls
from torch import nn
from torch.nn import functional as F
from torch.optim import swa_utils

#: After so many steps rounding has grown; relative, where reversed batches move native less.
ALLOWED = 1e-11
Batch = tuple[torch.Tensor, ...]
Scale = Callable[[torch.Tensor], torch.Tensor]


def drawn(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64)


@dataclass
class Case:
    """A training.

    Attributes:
        make: the model; all of it in one module.
        data: one batch; draws.
        parts: submodules that are trained in turn, each by an optimizer of its own.
        native: the loss of a part, from the model and a batch.
        ours: how to run a part's backward, from the model and its scaler.
    """

    make: Callable[[], nn.Module]
    data: Callable[[], Batch]
    native: Callable[[nn.Module, str, Batch], torch.Tensor]
    ours: Callable[[nn.Module, Any], Callable[[str, Batch], None]]
    parts: tuple[str, ...] = ("",)


# ---- a residual net with BatchNorm, in micro-batches ------------------------------------------------


def images() -> Batch:
    return drawn(10, 3, 5, 5), torch.randint(5, (10,))


def residual_step(model: nn.Module, scaler: Any) -> Callable[[str, Batch], None]:
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4, grad_scaler=scaler)
    return lambda _, given: batch.backward(*given)


# ---- a small GPT whose adapters are trained, with dropout ------------------------------------------


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank adapter (Hu et al., 2021)."""

    def __init__(self, inputs: int, outputs: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, inputs) / 4)
        self.up = nn.Parameter(torch.zeros(outputs, rank))
        self.drop = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.drop(x) @ self.down.T @ self.up.T


class Gpt(nn.Module):
    def __init__(self, words: int = 23, width: int = 12, length: int = 6, layers: int = 2) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.layers = nn.ModuleList()
        for _ in range(layers):
            layer = {"queries": Adapted(width, 3 * width), "out": Adapted(width, width)}
            layer |= {"wide": Adapted(width, 2 * width), "narrow": Adapted(2 * width, width)}
            layer |= {"first": nn.LayerNorm(width), "second": nn.LayerNorm(width)}
            self.layers.append(nn.ModuleDict(layer))
        self.words.requires_grad_(False)
        self.drop = nn.Dropout(0.1)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.drop(self.words(words) + self.places(torch.arange(words.shape[1])))
        for layer in self.layers:
            q, k, v = (
                t.unflatten(2, (2, -1)).transpose(1, 2)
                for t in layer["queries"](layer["first"](x)).chunk(3, 2)
            )
            seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + layer["out"](seen.transpose(1, 2).flatten(2))
            x = x + layer["narrow"](F.gelu(layer["wide"](layer["second"](x))))
        return (x @ self.words.weight.T).transpose(1, 2)


def sentences() -> Batch:
    words = torch.randint(23, (9, 7))
    targets = words[:, 1:].clone()
    targets[::3, 4:] = -100
    return words[:, :-1].contiguous(), targets


def gpt_step(model: nn.Module, scaler: Any) -> Callable[[str, Batch], None]:
    options = {"micro_batch_size": 4, "match_native_rng": True, "grad_scaler": scaler}
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), **options)
    return lambda _, given: batch.backward(*given)


# ---- SimCLR: two views of each sample, every pair of the batch -------------------------------------


def siamese() -> nn.Module:
    return Calls(
        lambda self, x: self.net(x.flatten(0, 1)).unflatten(0, (-1, 2)),
        net=nn.Sequential(
            nn.Linear(6, 12, bias=False), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 5)
        ),
    )


def nt_xent(views: torch.Tensor) -> torch.Tensor:
    """Of (samples, 2, features)."""
    rows = F.normalize(views.flatten(0, 1), dim=1)
    scores = (rows @ rows.T / 0.5).masked_fill(torch.eye(len(rows), dtype=torch.bool), -1e9)
    return F.cross_entropy(scores, torch.arange(len(rows)) ^ 1)


def siamese_step(model: nn.Module, scaler: Any) -> Callable[[str, Batch], None]:
    loss = ib.losses.coupled(lambda outputs, _: nt_xent(outputs))
    batch = ib.VirtualBatch(model, loss, micro_batch_size=4, grad_scaler=scaler)
    return lambda _, given: batch.backward(*given)


# ---- a GAN: two wrapped models, one loss through both ----------------------------------------------


def gan() -> nn.Module:
    return nn.ModuleDict(
        {
            "critic": nn.Sequential(nn.Linear(4, 12), nn.LeakyReLU(0.2), nn.Linear(12, 1)),
            "maker": nn.Sequential(
                nn.Linear(3, 12, bias=False), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4)
            ),
        }
    )


def gan_loss(critic: Any, maker: Any, part: str, batch: Batch) -> torch.Tensor:
    real, noise = batch
    made = maker(noise)
    if part == "maker":
        return F.softplus(-critic(made)).mean()
    return F.softplus(-critic(real)).mean() + F.softplus(critic(made.detach())).mean()


def gan_step(model: nn.Module, scaler: Any) -> Callable[[str, Batch], None]:
    critic = ib.wrap(model["critic"], micro_batch_size=4)
    maker = ib.wrap(model["maker"], micro_batch_size=3)

    def step(part: str, batch: Batch) -> None:
        scaler.scale(gan_loss(critic, maker, part, batch)).backward()

    return step


CASES = {
    "residual net": Case(
        lambda: Residual(2), images, lambda m, _, b: F.cross_entropy(m(b[0]), b[1]), residual_step
    ),
    "GPT with adapters": Case(
        Gpt, sentences, lambda m, _, b: F.cross_entropy(m(b[0]), b[1]), gpt_step
    ),
    "SimCLR": Case(
        siamese, lambda: (drawn(10, 2, 6),), lambda m, _, b: nt_xent(m(b[0])), siamese_step
    ),
    "GAN": Case(
        gan,
        lambda: (drawn(10, 4) + 2, drawn(10, 3)),
        lambda m, part, b: gan_loss(m["critic"], m["maker"], part, b),
        gan_step,
        ("critic", "maker"),
    ),
}


class Training:
    """Everything that a checkpoint has to hold."""

    def __init__(self, case: Case, steps: int, ours: bool) -> None:
        torch.manual_seed(0)
        self.case, self.ours = case, ours
        self.model = case.make().double()
        self.average = swa_utils.AveragedModel(
            self.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=True
        )
        parts = [self.model.get_submodule(part) for part in case.parts]
        self.trained = [[p for p in part.parameters() if p.requires_grad] for part in parts]
        self.optimizers = [torch.optim.Adam(each, lr=3e-3) for each in self.trained]
        self.schedules = [
            torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps + 1)
            for optimizer in self.optimizers
        ]
        self.scaler = torch.amp.GradScaler("cpu", init_scale=512.0, growth_interval=20)
        self.poison = False
        for each in self.trained:  # a gradient that overflows, once
            each[-1].register_hook(lambda g: g * float("inf") if self.poison else None)
        self.step_of_ours = case.ours(self.model, self.scaler) if ours else None
        self.skipped = 0

    def stateful(self) -> list[Any]:
        return [self.model, self.average, self.scaler, *self.optimizers, *self.schedules]

    def saved(self) -> list[dict[str, Any]]:
        return copy.deepcopy([each.state_dict() for each in self.stateful()])

    def load(self, states: list[dict[str, Any]]) -> None:
        for each, state in zip(self.stateful(), states, strict=True):
            each.load_state_dict(state)

    def step(self, number: int, backwards: bool, poison: bool) -> None:
        torch.manual_seed(100 + number)
        batch = self.case.data()
        if backwards:
            batch = tuple(tensor.flip(0) for tensor in batch)
        self.poison = poison
        for i, part in enumerate(self.case.parts):
            torch.manual_seed(number)
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            if self.step_of_ours is not None:
                self.step_of_ours(part, batch)
            else:
                self.scaler.scale(self.case.native(self.model, part, batch)).backward()
            optimizer = self.optimizers[i]
            self.scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(self.trained[i], 0.5)
            before = self.trained[i][0].detach().clone()
            self.scaler.step(optimizer)
            self.skipped += torch.equal(before, self.trained[i][0])
            self.scaler.update()
            self.schedules[i].step()
        self.average.update_parameters(self.model)

    def left(self) -> dict[str, torch.Tensor]:
        found = {f"model {name}": value for name, value in self.model.state_dict().items()}
        return found | {f"average {n}": v for n, v in self.average.state_dict().items()}


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a skipped step is one that the schedule did not see
        yield


def trained(case: Case, steps: int, ours: bool, backwards: bool = False) -> Training:
    training = Training(case, steps, ours)
    for number in range(steps):
        if ours and number == steps // 2:
            states, skipped = training.saved(), training.skipped
            training = Training(case, steps, ours)
            training.load(states)
            training.skipped = skipped
        training.step(number, backwards, poison=number == steps // 3)
    return training


@pytest.mark.parametrize("name", CASES if LONG else ["residual net", "GAN"])
def test_the_weights_at_the_end_are_those_of_native_training(name):
    case, steps = CASES[name], 200 if LONG else 24
    with quiet():
        wanted = trained(case, steps, ours=False)
        found = trained(case, steps, ours=True)
        # Dropout draws by place, so that reversed samples would meet others' masks.
        drops = any(isinstance(module, nn.Dropout) for module in wanted.model.modules())
        moved = [] if drops else [trained(case, steps, ours=False, backwards=True).left()]
    assert wanted.skipped == found.skipped == len(case.parts)
    assert found.scaler.get_scale() == wanted.scaler.get_scale()
    start = dict(Training(case, steps, ours=False).model.state_dict())
    assert any(not torch.equal(value, start[n]) for n, value in found.model.state_dict().items())
    assert excess(found.left(), wanted.left(), moved, least=ALLOWED) == {}
