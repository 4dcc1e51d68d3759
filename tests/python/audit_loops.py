"""Right and wrong training loops, each with the gradient that it should have sent to `step()`.

What a loop does send is read off plain SGD's update, which knows nothing of audits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from support import Calls
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data import DataLoader, TensorDataset

#: In slices of four: 4, 4, 4 and 2 samples.
N = 14
DRAWS = torch.Generator(torch.get_default_device()).manual_seed(5)
X = torch.randn(N, 6, dtype=torch.float64, generator=DRAWS)
Y = torch.randint(5, (N,), generator=DRAWS)
IGNORING = Y.where(torch.arange(N) % 5 != 0, -100).where(torch.arange(N) != 1, -100)
RATE = 0.5
MEAN = nn.CrossEntropyLoss()
SUM = nn.CrossEntropyLoss(reduction="sum")
WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 9, 1, 1, 4]).double())

Batch = tuple[Any, Any]


def net(*inner: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *inner, nn.Tanh(), nn.Linear(8, 5)).double()


def sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=RATE)


def loss(model: Any, batch: Any) -> torch.Tensor:
    return MEAN(model(batch[0]), batch[1])


@dataclass
class Loop:
    """One training loop."""

    #: One step, `run(model, optimizer, batch)`; or with a loader all that comes from it.
    run: Callable[[Any, Any, Any], Any]
    #: Causes that docs/audit.md has for it, "?" for any, "undecided" for that verdict.
    cause: str = ""
    model: Callable[[], nn.Module] = net
    optimizer: Callable[[Any], Any] = sgd
    batch: Any = (X, Y)
    #: The loss of the whole batch; None where an audit takes it from the loop.
    loss: Any = None
    #: The loss of the whole batch, for the true gradient.
    true_loss: Any = None
    #: What the loop rightly does to the whole batch's gradient (clipping).
    after: Callable[[list[nn.Parameter]], Any] = lambda parameters: None
    #: The gradient that is right, where it is no gradient of `true_loss`.
    truth: Callable[["Loop"], list[torch.Tensor]] | None = None
    #: A loader for `ib.audit.watch`, in place of one step.
    loader: Callable[[], Any] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def wanted(self) -> list[torch.Tensor]:
        torch.manual_seed(1)
        if self.truth:
            return self.truth(self)
        model = self.model()
        (self.true_loss or loss)(model, self.batch).backward()
        self.after(list(model.parameters()))
        return [torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()]

    def found(self) -> list[torch.Tensor]:
        """What SGD has subtracted."""
        model = self.model()
        before = [p.detach().clone() for p in model.parameters()]
        torch.manual_seed(1)
        self.run(model, self.optimizer(model), self.loader() if self.loader else self.batch)
        after = [p.detach() for p in model.parameters()]
        return [(b - a) / RATE for b, a in zip(before, after, strict=True)]

    def error(self) -> float:
        wanted, found = self.wanted(), self.found()
        size = max(float(w.norm()) for w in wanted)
        each = zip(found, wanted, strict=True)
        return max(float((f - w).norm()) / max(float(w.norm()), size / 100) for f, w in each)


def slices(batch: Batch, size: int = 4) -> Iterator[Batch]:
    return zip(batch[0].split(size), batch[1].split(size), strict=True)


def accumulate(
    pieces: Callable[[Batch], Any] = slices,
    weight: Callable[[Any, Any], float] = lambda piece, batch: len(piece[0]) / len(batch[0]),
    criterion: Any = MEAN,
    before: Callable[[Any], Any] = lambda x: x,
    between: Callable[[Any], Any] = lambda model: None,
    then: Callable[[Any], Any] = lambda model: None,
) -> Callable[[Any, Any, Any], None]:
    """Slices of a batch, the losses weighted, changed and stepped as told."""

    def run(model: Any, optimizer: Any, batch: Any) -> None:
        for piece in pieces(batch):
            value = criterion(model(before(piece[0])), piece[1])
            (value * weight(piece, batch)).backward()
            between(model)
        then(model)
        optimizer.step()
        optimizer.zero_grad()

    return run


def each(piece: Any, batch: Any) -> float:
    return 1 / 4


def grads(model: Any) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def times(factor: float) -> Callable[[Any], None]:
    def then(model: Any) -> None:
        for grad in grads(model):
            grad.mul_(factor)

    return then


def taken(*rows: Any) -> Callable[[Batch], list[Batch]]:
    return lambda batch: [(batch[0][r], batch[1][r]) for r in rows]


def own_clip(parameters: Any, limit: float) -> None:
    """Clips each parameter by its own norm, as no function of torch does."""
    for p in parameters:
        p.grad.data.mul_(min(1.0, limit / float(p.grad.norm())))


def clip_norm(parameters: Any) -> None:
    clip_grad_norm_(parameters, 0.05)


def clip_value(parameters: Any) -> None:
    clip_grad_value_(parameters, 0.01)


def of(function: Callable[[Any], Any]) -> Callable[[Any], None]:
    return lambda model: function(list(model.parameters()))


# Loops that are written out.


def with_scaler(
    clips_scaled: bool = False, unscales: bool = True
) -> Callable[[Any, Any, Any], None]:
    def run(model: Any, optimizer: Any, batch: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12)
        for piece in slices(batch):
            scaler.scale(loss(model, piece) * (len(piece[0]) / N)).backward()
        if clips_scaled:
            clip_norm(model.parameters())
        if unscales:
            scaler.unscale_(optimizer)
            clip_norm(model.parameters())
        scaler.step(optimizer)
        optimizer.zero_grad()

    return run


class Both:
    """Two optimizers, one for each half."""

    def __init__(self, model: Any) -> None:
        self.each = sgd(model[0]), sgd(model[2])

    def step(self) -> None:
        for optimizer in self.each:
            optimizer.step()

    def zero_grad(self) -> None:
        for optimizer in self.each:
            optimizer.zero_grad()


def decayed(model: Any, batch: Any) -> torch.Tensor:
    return loss(model, batch) + 0.1 * sum(p.square().sum() for p in model.parameters())


def hooked(hook: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def make(model: Any) -> Any:
        optimizer = sgd(model)
        optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: hook(model))
        return optimizer

    return make


def with_hooks(hook: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        model = net()
        for p in model.parameters():
            p.register_hook(hook)
        return model

    return make


def keyword_net() -> nn.Module:
    return Calls(lambda self, ids, scale: self.net(ids) * scale, net=net())


def dropout_net() -> nn.Module:
    torch.manual_seed(0)
    return net(nn.Dropout(0.3), nn.Linear(8, 8), nn.Dropout(0.3))


def own_masks(loop: Loop) -> list[torch.Tensor]:
    """Each slice's mean loss under the numbers that it draws, by share."""
    model = loop.model()
    summed = [torch.zeros_like(p) for p in model.parameters()]
    torch.manual_seed(1)
    for i in range(0, N, 4):
        x, y = X[i : i + 4], Y[i : i + 4]
        found = torch.autograd.grad(SUM(model(x), y) / N, list(model.parameters()))
        summed = [s + f for s, f in zip(summed, found, strict=True)]
    return summed


def noise(x: torch.Tensor) -> torch.Tensor:
    return x + 0.1 * torch.randn_like(x)


def by_name(batch: dict[str, Any]) -> Any:
    return [{n: v[i : i + 4] for n, v in batch.items()} for i in range(0, len(batch["labels"]), 4)]


def by_name_of_another(model: Any, optimizer: Any, batch: Any) -> None:
    for piece in by_name(batch):
        value = MEAN(model(piece["ids"], scale=piece["scale"].flip(0)), piece["labels"])
        (value * (len(piece["ids"]) / N)).backward()
    optimizer.step()
    optimizer.zero_grad()


# Loops over a loader.


def micro_batches(size: int = 4, **options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(TensorDataset(X, Y), batch_size=size, **options)


def each_split(run: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], None]:
    def loop(model: Any, optimizer: Any, loader: Any) -> None:
        for batch in loader:
            run(model, optimizer, batch)

    return loop


NAMED = {"ids": X, "scale": torch.linspace(1, 2, N).double()[:, None], "labels": Y}
