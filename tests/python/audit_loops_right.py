"""Right loops for audits: none may be called wrong."""

from collections.abc import Iterator
from typing import Any

import torch
from audit_loops import (
    DRAWS,
    IGNORING,
    MEAN,
    NAMED,
    RATE,
    SUM,
    WEIGHTED,
    Batch,
    Both,
    Loop,
    N,
    X,
    Y,
    accumulate,
    by_name,
    clip_norm,
    clip_value,
    decayed,
    dropout_net,
    each_split,
    hooked,
    keyword_net,
    loss,
    micro_batches,
    net,
    noise,
    of,
    own_clip,
    own_masks,
    slices,
    taken,
    times,
    with_hooks,
    with_scaler,
)
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler


def tokens(piece: Any, batch: Any) -> float:
    return int((piece[1] != -100).sum()) / int((batch[1] != -100).sum())


def class_weights(piece: Any, batch: Any) -> float:
    weight = WEIGHTED.weight
    return float(weight[piece[1]].sum() / weight[batch[1]].sum())


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


def decay_once(model: Any, optimizer: Any, batch: Any) -> None:
    for piece in slices(batch):
        (decayed(model, piece) * (len(piece[0]) / N)).backward()
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


def own_noise(loop: Loop) -> list[torch.Tensor]:
    model = loop.model()
    torch.manual_seed(1)
    noised = torch.cat([x + 0.1 * torch.randn_like(x) for x in X.split(4)])
    return list(torch.autograd.grad(MEAN(model(noised), Y), list(model.parameters())))


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


def in_a_buffer(x: torch.Tensor) -> torch.Tensor:
    buffer = torch.empty(len(x), 6, dtype=torch.float64)
    buffer[:] = x
    return buffer


def floats(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(z[:, 0], y.double())


def all_of_it(model: Any, optimizer: Any, loader: Any) -> None:
    for piece in loader:
        (loss(model, piece) * (len(piece[0]) / N)).backward()
    optimizer.step()
    optimizer.zero_grad()


def one_ahead(model: Any, optimizer: Any, loader: Any) -> None:
    """As prefetchers and accelerate do: a batch is read before the one before it is used."""
    batches = iter(loader)
    following, batch = next(batches, None), None
    while following is not None:
        batch, following = following, next(batches, None)
        (loss(model, batch) * (len(batch[0]) / N)).backward()
    optimizer.step()
    optimizer.zero_grad()


def drawn() -> Any:
    sampler = WeightedRandomSampler(
        [1.0] * N,
        N,
        replacement=True,
        generator=torch.Generator(torch.get_default_device()).manual_seed(3),
    )
    return DataLoader(TensorDataset(X, Y), batch_size=4, sampler=sampler)


def of_the_drawn(model: Any, batch: Any) -> torch.Tensor:
    pieces = list(drawn())
    return loss(model, tuple(torch.cat(column) for column in zip(*pieces, strict=True)))


SCALED = (X * 3 + 1, Y)


IMAGES = (X.reshape(N, 2, 3), Y)


SINGLES = (X.float(), Y)


ALIKE = (torch.cat([X[:7], X[:7]]), torch.cat([Y[:7], Y[:7]]))


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
