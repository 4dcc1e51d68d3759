"""Right and wrong training loops, each with the gradient that it should have sent to `step()`.

What a loop does send is read off plain SGD's update, which knows nothing of audits.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from audit_support import contrastive
from support import Calls
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler

#: In slices of four: 4, 4, 4 and 2 samples.
N = 14
DRAWS = torch.Generator().manual_seed(5)
X = torch.randn(N, 6, dtype=torch.float64, generator=DRAWS)
Y = torch.randint(5, (N,), generator=DRAWS)
FOREIGN = torch.randn(N, 6, dtype=torch.float64, generator=DRAWS)
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


def tokens(piece: Any, batch: Any) -> float:
    return int((piece[1] != -100).sum()) / int((batch[1] != -100).sum())


def class_weights(piece: Any, batch: Any) -> float:
    weight = WEIGHTED.weight
    return float(weight[piece[1]].sum() / weight[batch[1]].sum())


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


def one_piece(model: Any, optimizer: Any, batch: Any) -> None:
    optimizer.zero_grad()
    loss(model, batch).backward()
    optimizer.step()
    optimizer.zero_grad()


def by_closure(model: Any, optimizer: Any, batch: Any) -> None:
    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        value = loss(model, batch)
        value.backward()
        return value

    optimizer.step(closure)


def through_numpy(model: Any, optimizer: Any, batch: Any) -> None:
    x, y = batch[0].numpy(), batch[1].numpy()
    for i in range(0, N, 4):
        piece = torch.tensor(x[i : i + 4]), torch.tensor(y[i : i + 4])
        (loss(model, piece) * (len(piece[0]) / N)).backward()
    optimizer.step()
    optimizer.zero_grad()


def sample_by_sample(model: Any, optimizer: Any, batch: Any) -> None:
    for x, y in zip(*batch, strict=True):
        (loss(model, (x.unsqueeze(0), y[None])) / N).backward()
    optimizer.step()
    optimizer.zero_grad()


def stacked(model: Any, optimizer: Any, batch: Any) -> None:
    for i in range(0, N, 4):
        part = [(batch[0][j], batch[1][j]) for j in range(i, min(i + 4, N))]
        piece = torch.stack([x for x, _ in part]), torch.stack([y for _, y in part])
        (loss(model, piece) * (len(part) / N)).backward()
    optimizer.step()
    optimizer.zero_grad()


def looked_at_first(model: Any, optimizer: Any, batch: Any) -> None:
    with torch.no_grad():
        model(batch[0][:4])
    accumulate()(model, optimizer, batch)


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


def second_is_scaled(model: Any, optimizer: Any, batch: Any) -> None:
    for piece in slices(batch):
        (loss(model, piece) * (len(piece[0]) / N)).backward()
    optimizer.each[0].step()
    times(0.5)(model[2])
    optimizer.each[1].step()
    optimizer.zero_grad()


def decayed(model: Any, batch: Any) -> torch.Tensor:
    return loss(model, batch) + 0.1 * sum(p.square().sum() for p in model.parameters())


def decay_once(model: Any, optimizer: Any, batch: Any) -> None:
    for piece in slices(batch):
        (decayed(model, piece) * (len(piece[0]) / N)).backward()
    optimizer.step()
    optimizer.zero_grad()


def decay_in_each_slice(model: Any, optimizer: Any, batch: Any) -> None:
    for piece in slices(batch):
        value = loss(model, piece)
        (value * (len(piece[0]) / N) + decayed(model, piece) - value).backward()
    optimizer.step()
    optimizer.zero_grad()


def twice_consistent(model: Any, batch: Any) -> torch.Tensor:
    one, other = model(batch[0]), model(batch[0] * 1.0)
    return MEAN(one, batch[1]) + (one - other.square()).square().mean()


def consistent(model: Any, optimizer: Any, batch: Any) -> None:
    for piece in slices(batch):
        (twice_consistent(model, piece) * (len(piece[0]) / N)).backward()
    optimizer.step()
    optimizer.zero_grad()


def no_ignored_slice(batch: Batch) -> Iterator[Batch]:
    """Rows whose label is ignored are left out."""
    rows = (batch[1] != -100).nonzero().flatten()
    return slices((batch[0][rows], batch[1][rows]))


def step_each(model: Any, optimizer: Any, batch: Any) -> None:
    for piece in slices(batch):
        optimizer.zero_grad()
        loss(model, piece).backward()
        optimizer.step()


def zeroed_between(model: Any, optimizer: Any, batch: Any) -> None:
    for piece in slices(batch):
        optimizer.zero_grad()
        (loss(model, piece) * (len(piece[0]) / N)).backward()
    optimizer.step()
    optimizer.zero_grad()


def clipped_before_the_last(model: Any, optimizer: Any, batch: Any) -> None:
    for i, piece in enumerate(slices(batch)):
        if i == 3:
            clip_norm(model.parameters())
        (loss(model, piece) * (len(piece[0]) / N)).backward()
    optimizer.step()
    optimizer.zero_grad()


def without_a_graph_for_one(model: Any, optimizer: Any, batch: Any) -> None:
    for i, piece in enumerate(slices(batch)):
        with torch.set_grad_enabled(i != 1):
            value = loss(model, piece) * (len(piece[0]) / N)
        if i != 1:
            value.backward()
    optimizer.step()
    optimizer.zero_grad()


def detached_for_one(model: Any, optimizer: Any, batch: Any) -> None:
    outputs = []
    for i, (x, _) in enumerate(slices(batch)):
        out = model(x)
        outputs.append(out.detach() if i == 1 else out)
    MEAN(torch.cat(outputs), batch[1]).backward()
    optimizer.step()
    optimizer.zero_grad()


def twice_backward(model: Any, optimizer: Any, batch: Any) -> None:
    for i, piece in enumerate(slices(batch)):
        value = loss(model, piece) * (len(piece[0]) / N)
        if i == 2:
            value.backward(retain_graph=True)
        value.backward()
    optimizer.step()
    optimizer.zero_grad()


def frozen_for_one(model: Any, optimizer: Any, batch: Any) -> None:
    for i, piece in enumerate(slices(batch)):
        model[0].requires_grad_(i != 3)
        (loss(model, piece) * (len(piece[0]) / N)).backward()
    optimizer.step()
    optimizer.zero_grad()
    model[0].requires_grad_(True)


def sign_flipped_for_one(model: Any, optimizer: Any, batch: Any) -> None:
    for i, piece in enumerate(slices(batch)):
        (loss(model, piece) * ((-1 if i == 2 else 1) * len(piece[0]) / N)).backward()
    optimizer.step()
    optimizer.zero_grad()


def one_without_gradient(model: Any) -> None:
    model[2].bias.grad = None


def noisy(model: Any) -> None:
    for grad in grads(model):
        grad.add_(torch.full_like(grad, 0.01))


def all_reduced(model: Any) -> None:
    """As of two processes, of which one is all that there is."""
    for p in model.parameters():
        p.grad = p.grad.clone() / 2


def swapped(model: Any) -> None:
    model[0].weight.grad = model[0].weight.grad.flip(0)


class Halving(torch.optim.SGD):
    """A subclass whose step() changes gradients."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)
        return super().step(closure)


def halving(model: Any) -> Any:
    return Halving(model.parameters(), lr=RATE)


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


def halve(p: Any) -> None:
    p.grad.mul_(0.5)


def halving_as_it_accumulates() -> nn.Module:
    model = net()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(halve)
    return model


def tied() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Linear(6, 5)).double()
    model[2].weight = model[0].weight
    return model


def half_frozen() -> nn.Module:
    model = net()
    model[0].requires_grad_(False)
    return model


def frozen_norm() -> nn.Module:
    return net(nn.BatchNorm1d(8).eval())


def groups(model: Any) -> Any:
    return torch.optim.SGD(
        [{"params": model[0].parameters(), "momentum": 0.5}, {"params": model[2].parameters()}],
        lr=RATE,
    )


def keyword_net() -> nn.Module:
    return Calls(lambda self, ids, scale: self.net(ids) * scale, net=net())


def contrast(model: Any, batch: Any) -> torch.Tensor:
    return contrastive(model(batch[0]))


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


def own_noise(loop: Loop) -> list[torch.Tensor]:
    model = loop.model()
    torch.manual_seed(1)
    noised = torch.cat([x + 0.1 * torch.randn_like(x) for x in X.split(4)])
    return list(torch.autograd.grad(MEAN(model(noised), Y), list(model.parameters())))


def noise(x: torch.Tensor) -> torch.Tensor:
    return x + 0.1 * torch.randn_like(x)


def by_name(batch: dict[str, Any]) -> Any:
    return [{n: v[i : i + 4] for n, v in batch.items()} for i in range(0, len(batch["labels"]), 4)]


def run_by_name(model: Any, optimizer: Any, batch: Any) -> None:
    for piece in by_name(batch):
        value = MEAN(model(piece["ids"], scale=piece["scale"]), piece["labels"])
        (value * (len(piece["ids"]) / N)).backward()
    optimizer.step()
    optimizer.zero_grad()


def list_of_samples(model: Any, optimizer: Any, batch: Any) -> None:
    for i in range(0, N, 4):
        part = batch[i : i + 4]
        piece = torch.stack([x for x, _ in part]), torch.stack([y for _, y in part])
        (loss(model, piece) * (len(part) / N)).backward()
    optimizer.step()
    optimizer.zero_grad()


def of_samples(model: Any, batch: Any) -> torch.Tensor:
    return loss(model, (torch.stack([x for x, _ in batch]), torch.stack([y for _, y in batch])))


def attacked(model: Any, batch: Any) -> torch.Tensor:
    """The loss on inputs that are moved up its own gradient."""
    x = batch[0].clone().requires_grad_()
    (up,) = torch.autograd.grad(loss(model, (x, batch[1])), x)
    return loss(model, (batch[0] + 0.1 * up.sign(), batch[1]))


def attack(model: Any, optimizer: Any, batch: Any) -> None:
    for piece in slices(batch):
        (attacked(model, piece) * (len(piece[0]) / N)).backward()
    optimizer.step()
    optimizer.zero_grad()


class Plain(torch.optim.Optimizer):
    """An optimizer that is none of torch's."""

    def __init__(self, model: Any) -> None:
        super().__init__(model.parameters(), {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.sub_(RATE * p.grad)


def clipped_late(model: Any, optimizer: Any, batch: Any) -> None:
    for piece in slices(batch):
        (loss(model, piece) * (len(piece[0]) / N)).backward()
    for half, own in zip((model[0], model[2]), optimizer.each, strict=True):
        clip_grad_norm_(half.parameters(), 0.02)
        own.step()
    optimizer.zero_grad()


def each_half(parameters: Any) -> None:
    clip_grad_norm_(parameters[:2], 0.02)
    clip_grad_norm_(parameters[2:], 0.02)


def second_is_emptied(model: Any, optimizer: Any, batch: Any) -> None:
    for piece in slices(batch):
        (loss(model, piece) * (len(piece[0]) / N)).backward()
    optimizer.each[0].step()
    optimizer.each[1].zero_grad()
    optimizer.each[1].step()
    optimizer.zero_grad()


def in_a_buffer(x: torch.Tensor) -> torch.Tensor:
    buffer = torch.empty(len(x), 6, dtype=torch.float64)
    buffer[:] = x
    return buffer


def first_in_a_buffer(x: torch.Tensor) -> torch.Tensor:
    buffer = torch.empty(len(x), 6, dtype=torch.float64)
    buffer[:] = X[: len(x)]
    return buffer


def whitened(x: torch.Tensor) -> torch.Tensor:
    return x @ torch.linalg.inv(torch.cov(x.T) + torch.eye(6).double())


def half_of_the_outputs(model: Any, optimizer: Any, batch: Any) -> None:
    MEAN(model(batch[0])[:8], batch[1][:8]).backward()
    optimizer.step()
    optimizer.zero_grad()


def evaluated_for_one(model: Any, optimizer: Any, batch: Any) -> None:
    for i, piece in enumerate(slices(batch)):
        model.train(i != 1)
        (loss(model, piece) * (len(piece[0]) / N)).backward()
    model.train()
    optimizer.step()
    optimizer.zero_grad()


def stepped_in_the_middle(model: Any, optimizer: Any, batch: Any) -> None:
    for i, piece in enumerate(slices(batch)):
        (loss(model, piece) * (len(piece[0]) / N)).backward()
        if i == 1:
            optimizer.step()
    optimizer.step()
    optimizer.zero_grad()


def sharpness_aware(model: Any, optimizer: Any, batch: Any) -> None:
    loss(model, batch).backward()
    moves = [0.05 * p.grad for p in model.parameters()]
    with torch.no_grad():
        for p, move in zip(model.parameters(), moves, strict=True):
            p.add_(move)
        model.zero_grad()
    loss(model, batch).backward()
    with torch.no_grad():
        for p, move in zip(model.parameters(), moves, strict=True):
            p.sub_(move)
    optimizer.step()
    optimizer.zero_grad()


def by_name_of_another(model: Any, optimizer: Any, batch: Any) -> None:
    for piece in by_name(batch):
        value = MEAN(model(piece["ids"], scale=piece["scale"].flip(0)), piece["labels"])
        (value * (len(piece["ids"]) / N)).backward()
    optimizer.step()
    optimizer.zero_grad()


def floats(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(z[:, 0], y.double())


def padded(*more: torch.Tensor) -> Callable[[Batch], list[Batch]]:
    """The last slice filled up to four."""
    return lambda batch: [
        *list(slices(batch))[:3],
        tuple(torch.cat([column[12:], m]) for column, m in zip(batch, more, strict=True)),
    ]


def of_sixteen(piece: Any, batch: Any) -> float:
    return len(piece[0]) / 16


# Loops over a loader.


def micro_batches(size: int = 4, **options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(TensorDataset(X, Y), batch_size=size, **options)


def all_of_it(model: Any, optimizer: Any, loader: Any) -> None:
    for piece in loader:
        (loss(model, piece) * (len(piece[0]) / N)).backward()
    optimizer.step()
    optimizer.zero_grad()


def each_split(run: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], None]:
    def loop(model: Any, optimizer: Any, loader: Any) -> None:
        for batch in loader:
            run(model, optimizer, batch)

    return loop


def one_ahead(model: Any, optimizer: Any, loader: Any) -> None:
    """As prefetchers and accelerate do: a batch is read before the one before it is used."""
    batches = iter(loader)
    following, batch = next(batches, None), None
    while following is not None:
        batch, following = following, next(batches, None)
        (loss(model, batch) * (len(batch[0]) / N)).backward()
    optimizer.step()
    optimizer.zero_grad()


def first_again(model: Any, optimizer: Any, loader: Any) -> None:
    """Uses the first batch in place of each."""
    first = None
    for batch in loader:
        first = batch if first is None else first
        (loss(model, first) / 4).backward()
    optimizer.step()
    optimizer.zero_grad()


def every_other(model: Any, optimizer: Any, loader: Any) -> None:
    for i, batch in enumerate(loader):
        if i % 2 == 0:
            (loss(model, batch) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()


def without_the_last(model: Any, optimizer: Any, loader: Any) -> None:
    for batch in loader:
        for piece in slices(batch):
            if len(piece[0]) == 4:
                (loss(model, piece) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()


def drawn() -> Any:
    sampler = WeightedRandomSampler(
        [1.0] * N, N, replacement=True, generator=torch.Generator().manual_seed(3)
    )
    return DataLoader(TensorDataset(X, Y), batch_size=4, sampler=sampler)


def of_the_drawn(model: Any, batch: Any) -> torch.Tensor:
    pieces = list(drawn())
    return loss(model, tuple(torch.cat(column) for column in zip(*pieces, strict=True)))


SCALED = (X * 3 + 1, Y)
IMAGES = (X.reshape(N, 2, 3), Y)
SINGLES = (X.float(), Y)
ALIKE = (torch.cat([X[:7], X[:7]]), torch.cat([Y[:7], Y[:7]]))
NAMED = {"ids": X, "scale": torch.linspace(1, 2, N).double()[:, None], "labels": Y}
SAMPLES = [(X[i], Y[i]) for i in range(N)]


def unscaled(x: torch.Tensor) -> torch.Tensor:
    return (x - 1) / 3


RIGHT: dict[str, Loop] = {
    "one piece": Loop(one_piece),
    "slices by share": Loop(accumulate()),
    "the loss is given": Loop(accumulate(), loss=loss),
    "in reverse": Loop(accumulate(lambda b: reversed(list(slices(b))))),
    "strided": Loop(accumulate(taken(*(slice(i, None, 4) for i in range(4))))),
    "strided, the loss is given": Loop(
        accumulate(taken(*(slice(i, None, 4) for i in range(4)))), loss=loss
    ),
    "permuted": Loop(accumulate(taken(*torch.randperm(N, generator=DRAWS).split(4)))),
    "sums over all": Loop(accumulate(criterion=SUM, weight=lambda p, b: 1 / N), loss=loss),
    "even means": Loop(accumulate(weight=lambda p, b: 1 / 3), batch=(X[:12], Y[:12]), loss=None),
    "divided after the sum": Loop(accumulate(weight=lambda p, b: len(p[0]), then=times(1 / N))),
    "clipped": Loop(accumulate(then=of(clip_norm)), after=clip_norm),
    "clipped by value": Loop(accumulate(then=of(clip_value)), after=clip_value),
    "clipped without effect": Loop(accumulate(then=of(lambda p: clip_grad_norm_(p, 1e3)))),
    "clipped twice": Loop(
        accumulate(then=lambda m: (of(clip_value)(m), of(clip_norm)(m))),
        after=lambda p: (clip_value(p), clip_norm(p)),
    ),
    "clipped by the largest": Loop(
        accumulate(then=of(lambda p: clip_grad_norm_(p, 0.02, norm_type=float("inf")))),
        after=lambda p: clip_grad_norm_(p, 0.02, norm_type=float("inf")),
    ),
    "clipped by its own function": Loop(
        accumulate(then=of(lambda p: own_clip(p, 0.03))),
        after=lambda p: own_clip(p, 0.03),
        options={"clip": own_clip},
    ),
    "clipped in a hook of the optimizer": Loop(
        accumulate(), optimizer=hooked(of(clip_norm)), after=clip_norm
    ),
    "ignored labels, by tokens": Loop(accumulate(weight=tokens), batch=(X, IGNORING)),
    "rows with ignored labels left out": Loop(
        accumulate(no_ignored_slice, tokens), batch=(X, IGNORING)
    ),
    "class weights": Loop(
        accumulate(weight=class_weights, criterion=WEIGHTED),
        true_loss=lambda m, b: WEIGHTED(m(b[0]), b[1]),
    ),
    "normalised in the loop": Loop(
        accumulate(before=unscaled),
        batch=SCALED,
        true_loss=lambda m, b: loss(m, (unscaled(b[0]), b[1])),
    ),
    "cast in the loop": Loop(
        accumulate(before=torch.Tensor.double),
        batch=SINGLES,
        true_loss=lambda m, b: loss(m, (b[0].double(), b[1])),
    ),
    "flattened in the loop": Loop(
        accumulate(before=lambda x: x.flatten(1)),
        batch=IMAGES,
        true_loss=lambda m, b: loss(m, (b[0].flatten(1), b[1])),
    ),
    "noise on the inputs": Loop(accumulate(before=noise), truth=own_noise),
    "through NumPy": Loop(through_numpy),
    "sample by sample": Loop(sample_by_sample),
    "stacked": Loop(stacked),
    "a list of samples": Loop(list_of_samples, batch=SAMPLES, true_loss=of_samples),
    "by name": Loop(
        run_by_name,
        model=keyword_net,
        batch=NAMED,
        true_loss=lambda m, b: MEAN(m(b["ids"], b["scale"]), b["labels"]),
    ),
    "dropout": Loop(accumulate(), model=dropout_net, truth=own_masks),
    "BatchNorm that is frozen": Loop(accumulate(), model=frozen_norm),
    "half of it frozen": Loop(accumulate(), model=half_frozen),
    "tied weights": Loop(accumulate(), model=tied),
    "groups of parameters": Loop(accumulate(), optimizer=groups),
    "two optimizers": Loop(accumulate(), optimizer=Both),
    "GradScaler and clipping": Loop(with_scaler(), after=clip_norm),
    "decay in the loss": Loop(decay_once, loss=decayed, true_loss=decayed),
    "a closure": Loop(by_closure),
    "hooks that scale": Loop(accumulate(), model=with_hooks(lambda g: g * 0.5)),
    "seen under no_grad first": Loop(looked_at_first),
    "two calls for each slice": Loop(consistent, loss=twice_consistent, true_loss=twice_consistent),
    "picked by a mask": Loop(
        accumulate(lambda b: [(b[0][b[1] == c], b[1][b[1] == c]) for c in b[1].unique()])
    ),
    "picked by an index": Loop(
        accumulate(
            lambda b: [
                (b[0].index_select(0, i), b[1].index_select(0, i))
                for i in torch.randperm(N).split(4)
            ]
        )
    ),
    "by a loader of its own": Loop(
        accumulate(lambda b: DataLoader(TensorDataset(*b), batch_size=4, shuffle=True))
    ),
    "targets as floats": Loop(
        accumulate(criterion=floats), true_loss=lambda m, b: floats(m(b[0]), b[1])
    ),
    "targets that are inputs": Loop(
        accumulate(lambda b: [(x, x[:, :5]) for x in b[0].split(4)], criterion=F.mse_loss),
        true_loss=lambda m, b: F.mse_loss(m(b[0]), b[0][:, :5]),
    ),
    "copied to a buffer": Loop(accumulate(before=in_a_buffer)),
    "inputs that are attacked": Loop(attack, loss=attacked, true_loss=attacked),
    "an optimizer of its own": Loop(accumulate(), optimizer=Plain),
    "two optimizers, clipped one by one": Loop(clipped_late, optimizer=Both, after=each_half),
    "samples that are alike": Loop(accumulate(), batch=ALIKE),
    "a loader of micro-batches": Loop(all_of_it, loader=micro_batches()),
    "a loader of micro-batches, the loss is given": Loop(
        all_of_it, loader=micro_batches(), loss=loss
    ),
    "a loader of batches": Loop(each_split(accumulate()), loader=micro_batches(N)),
    "a loader that is read ahead": Loop(one_ahead, loader=micro_batches()),
    "a sampler with replacement": Loop(all_of_it, loader=drawn, true_loss=of_the_drawn),
}

WRONG: dict[str, Loop] = {
    "one slice four times": Loop(accumulate(taken(*[slice(0, 4)] * 4), each), "other_rows"),
    "one slice four times, the loss is given": Loop(
        accumulate(taken(*[slice(0, 4)] * 4), each), "other_rows", loss=loss
    ),
    "overlapping windows": Loop(
        accumulate(taken(*(slice(i, i + 5) for i in (0, 3, 6, 9))), each), "other_rows"
    ),
    "one slice twice": Loop(
        accumulate(taken(*(slice(i, i + 4) for i in (0, 4, 8, 8))), each), "other_rows"
    ),
    "the last slice dropped": Loop(
        accumulate(lambda b: list(slices(b))[:3], lambda p, b: 1 / 3), "other_rows"
    ),
    "drawn with replacement": Loop(
        accumulate(taken(*torch.randint(N, (16,), generator=DRAWS).split(4)), each), "other_rows"
    ),
    "labels of another slice": Loop(
        accumulate(lambda b: zip(b[0].split(4), b[1].roll(4).split(4), strict=True)), "other_rows"
    ),
    "rows of another batch": Loop(accumulate(lambda b: slices((FOREIGN, b[1]))), "undecided"),
    "rows of another batch, the loss is given": Loop(
        accumulate(lambda b: slices((FOREIGN, b[1]))), "?", loss=loss
    ),
    "one slice four times, with noise": Loop(
        accumulate(taken(*[slice(0, 4)] * 4), each, before=noise), "other_rows"
    ),
    "one slice four times, with dropout": Loop(
        accumulate(taken(*[slice(0, 4)] * 4), each), "other_rows", model=dropout_net
    ),
    "one slice four times, and not divided": Loop(
        accumulate(taken(*[slice(0, 4)] * 4), lambda p, b: 1.0), "other_rows no_division"
    ),
    "centred in each slice": Loop(
        accumulate(before=lambda x: x - x.mean(0)),
        "samples_combined",
        true_loss=lambda m, b: loss(m, (b[0] - b[0].mean(0), b[1])),
    ),
    "gradients halved": Loop(accumulate(then=times(0.5)), "scaled_after_sum"),
    "gradients negated": Loop(accumulate(then=times(-1.0)), "scaled_after_sum"),
    "halved after clipping": Loop(
        accumulate(then=lambda m: (of(clip_norm)(m), times(0.5)(m))),
        "changed_after_clipping",
        after=clip_norm,
    ),
    "clipped while scaled": Loop(
        with_scaler(clips_scaled=True, unscales=False), "changed_after_clipping", after=clip_norm
    ),
    "one gradient removed": Loop(accumulate(then=one_without_gradient), "changed_after_sum"),
    "all-reduced by hand": Loop(accumulate(then=all_reduced), "scaled_after_sum"),
    "noise on the gradient": Loop(accumulate(then=noisy), "changed_after_sum"),
    "rows of a gradient flipped": Loop(accumulate(then=swapped), "changed_after_sum"),
    "halved in a hook of the optimizer": Loop(
        accumulate(), "scaled_after_sum", optimizer=hooked(times(0.5))
    ),
    "halved in step()": Loop(accumulate(), "scaled_after_sum", optimizer=halving),
    "the second optimizer's halved": Loop(second_is_scaled, "scaled_after_sum", optimizer=Both),
    "clipped by a function of its own": Loop(
        accumulate(then=of(lambda p: own_clip(p, 0.03))), "undecided"
    ),
    "a wrong sum that is clipped": Loop(
        accumulate(weight=lambda p, b: 1.0, then=of(clip_value)), "no_division mean_of_means"
    ),
    "mean of means": Loop(accumulate(weight=each), "mean_of_means"),
    "not divided": Loop(accumulate(weight=lambda p, b: 1.0), "no_division", batch=(X[:12], Y[:12])),
    "divided as if all were full": Loop(
        accumulate(weight=lambda p, b: len(p[0]) / 16), "divided_by_nominal"
    ),
    "divided twice": Loop(accumulate(weight=lambda p, b: len(p[0]) / N / 4), "divided_twice"),
    "ignored labels, by samples": Loop(accumulate(), "weighted_by_samples", batch=(X, IGNORING)),
    "class weights, by samples": Loop(
        accumulate(criterion=WEIGHTED),
        "weighted_by_samples",
        true_loss=lambda m, b: WEIGHTED(m(b[0]), b[1]),
    ),
    "decay in each slice": Loop(decay_in_each_slice, "?", loss=decayed, true_loss=decayed),
    "emptied between slices": Loop(zeroed_between, "zeroed_between"),
    "each slice clipped": Loop(accumulate(between=of(clip_norm)), "clipped_before_sum"),
    "clipped before the last slice": Loop(clipped_before_the_last, "clipped_before_sum"),
    "stepped for each slice": Loop(step_each, "stepped_early"),
    "BatchNorm of each slice": Loop(
        accumulate(), "batch_norm", model=lambda: net(nn.BatchNorm1d(8))
    ),
    "negatives of each slice": Loop(
        accumulate(criterion=lambda z, y: contrastive(z)),
        "fraction_of_negatives",
        loss=contrast,
        true_loss=contrast,
    ),
    "filled up with zeros": Loop(
        accumulate(padded(torch.zeros(2, 6).double(), torch.zeros(2).long()), of_sixteen),
        "other_rows",
    ),
    "filled up with the first rows": Loop(
        accumulate(padded(X[:2], Y[:2]), of_sixteen), "other_rows"
    ),
    "the first rows copied to a buffer": Loop(accumulate(before=first_in_a_buffer), "other_rows"),
    "whitened in each slice": Loop(
        accumulate(before=whitened),
        "samples_combined",
        true_loss=lambda m, b: loss(m, (whitened(b[0]), b[1])),
    ),
    "centred in each slice by a number": Loop(
        accumulate(before=lambda x: x - x.mean().item()),
        "undecided",
        true_loss=lambda m, b: loss(m, (b[0] - b[0].mean(), b[1])),
    ),
    "sorted in each slice": Loop(accumulate(before=lambda x: x.sort(0).values), "undecided"),
    "mixed up in each slice": Loop(
        accumulate(before=lambda x: 0.7 * x + 0.3 * x.flip(0)), "undecided"
    ),
    "labels permuted by NumPy": Loop(
        accumulate(lambda b: slices((b[0], torch.tensor(b[1].numpy()[::-1].copy())))), "undecided"
    ),
    "an input of another sample": Loop(
        by_name_of_another,
        "undecided",
        model=keyword_net,
        batch=NAMED,
        true_loss=lambda m, b: MEAN(m(b["ids"], b["scale"]), b["labels"]),
    ),
    "inputs of other samples, the loss is given": Loop(
        by_name_of_another,
        "other_rows",
        model=keyword_net,
        batch=NAMED,
        loss=lambda m, b: MEAN(m(b["ids"], b["scale"]), b["labels"]),
        true_loss=lambda m, b: MEAN(m(b["ids"], b["scale"]), b["labels"]),
    ),
    "a scale that is not undone": Loop(
        accumulate(weight=lambda p, b: 1024 * len(p[0]) / N), "other_factor"
    ),
    "a penalty over each slice": Loop(
        accumulate(criterion=lambda z, y: MEAN(z, y) + z.norm()),
        "?",
        loss=lambda m, b: (lambda z: MEAN(z, b[1]) + z.norm())(m(b[0])),
        true_loss=lambda m, b: (lambda z: MEAN(z, b[1]) + z.norm())(m(b[0])),
    ),
    "half of the outputs": Loop(half_of_the_outputs, "undecided"),
    "evaluation mode for one slice": Loop(
        evaluated_for_one, "undecided", model=dropout_net, truth=own_masks
    ),
    "normalised gradients": Loop(
        accumulate(then=lambda m: [g.div_(g.norm()) for g in grads(m)]), "changed_after_sum"
    ),
    "the second optimizer's emptied": Loop(second_is_emptied, "changed_after_sum", optimizer=Both),
    "parameters moved in between": Loop(sharpness_aware, "undecided"),
    "a step in the middle": Loop(stepped_in_the_middle, "stepped_early"),
    "a slice without a graph": Loop(without_a_graph_for_one, "other_rows"),
    "a slice detached": Loop(detached_for_one, "?", loss=loss),
    "a slice twice backward": Loop(twice_backward, "?", loss=loss),
    "a part frozen for one slice": Loop(frozen_for_one, "?"),
    "a slice's sign flipped": Loop(sign_flipped_for_one, "?"),
    "hooks that clip each slice": Loop(
        accumulate(), "?", model=with_hooks(lambda g: g.clamp(-0.002, 0.002))
    ),
    "halved as it accumulates": Loop(accumulate(), "?", model=halving_as_it_accumulates),
    "the loader's first batch again": Loop(first_again, "other_rows", loader=micro_batches()),
    "every other batch of the loader": Loop(every_other, "other_rows", loader=micro_batches()),
    "the loader's batch without its last slice": Loop(
        without_the_last, "other_rows", loader=micro_batches(N)
    ),
    "stepped for each slice of the loader's batch": Loop(
        each_split(step_each), "stepped_early", loader=micro_batches(N)
    ),
}
