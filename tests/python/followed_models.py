"""Ways out of errors about what forward does: what provokes one, and what its message says, each of
the ways where it names several."""

import infinitybatch as ib
import torch
from followed_support import Case, exact
from misuse_support import CRITERION, X, Y, step
from support import Calls, mlp
from torch import nn

losses = ib.losses


def made(forward, **children):
    return Calls(forward, net=mlp(), **children)


def whole_or_apart(make, whole=exact):
    """A budget for the whole batch, and the gradient of each micro-batch for itself."""
    whole(make(), micro_batch_size=12)
    step(make(), batch_coupling="per_micro_batch", micro_batch_size=4)


def called_first(make):
    """Forward ran over the whole batch in front of the first step."""
    model = make()
    with torch.no_grad():
        model(X)
    exact(model)


# Buffers and parameters.


class Centred(nn.Module):
    """Keeps the mean of the first batch."""

    def __init__(self, always=False):
        super().__init__()
        self.net, self.always = mlp(), always
        self.register_buffer("mean", torch.zeros(6).double())
        self.register_buffer("known", torch.tensor(False))

    def forward(self, x):
        if self.training and (self.always or not self.known):
            self.mean.copy_(x.mean(0).detach())
            self.known.fill_(True)
        return self.net(x - self.mean)


class Made(nn.Module):
    """Makes its buffer of the first batch."""

    def __init__(self):
        super().__init__()
        self.net = mlp()
        self.register_buffer("mean", None)

    def forward(self, x):
        if self.mean is None:
            self.mean = x.mean(0).detach()
        return self.net(x - self.mean)


class Scaled(nn.Module):
    """Initialises a parameter from its first batch."""

    def __init__(self):
        super().__init__()
        self.net, self.scale = mlp(), nn.Parameter(torch.zeros(6).double())

    def forward(self, x):
        if not self.scale.any():
            with torch.no_grad():
                self.scale.copy_(1 / x.std(0))
        return self.net(x * self.scale)


def evaluated():
    """The module that owns the buffer is in eval mode."""
    exact(Centred(always=True).eval())


# What forward keeps in Python.


class Counts(nn.Module):
    def __init__(self, count=len):
        super().__init__()
        self.net, self.count, self.seen = mlp(), count, 0

    def forward(self, x, by=None):
        if by is not None:
            self.seen = by
            return self.net(x)
        self.seen += self.count(x)
        return self.net(x)


class Iterates(nn.Module):
    def __init__(self, values, kind="next"):
        super().__init__()
        self.net, self.values, self.kind, self.step = mlp(), values, kind, 0

    def forward(self, x):
        if self.kind == "next":
            return self.net(x) * next(self.values)
        self.step += 1
        return self.net(x) * self.values[self.step % 2]


def generator():
    yield from (1.0, 2.0, 3.0, 4.0, 5.0, 6.0)


class Keeps(nn.Module):
    """Reads a tensor of the call before."""

    def __init__(self):
        super().__init__()
        self.net, self.last = mlp(), torch.zeros(6).double()

    def forward(self, x):
        mean, self.last = self.last, x.mean(0).detach()
        return self.net(x + mean)


class Handed(nn.Module):
    """The same, handed in and out."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x, mean):
        return self.net(x + mean)


class Cleared(Keeps):
    def forward(self, x):
        self.last = torch.zeros(6).double()
        return super().forward(x)


class Spare(nn.Module):
    """Puts another parameter into its place."""

    def __init__(self, writes=False):
        super().__init__()
        self.net, self.weight, self.writes = mlp(), nn.Parameter(torch.ones(6).double()), writes

    def forward(self, x):
        values = self.weight.detach() / self.weight.detach().norm()
        if self.writes:
            with torch.no_grad():
                self.weight.copy_(values)
        else:
            self.weight = nn.Parameter(values)
        return self.net(x * self.weight)


# In place.


def in_place(self, x):
    x -= 1.0
    return self.net(x)


def out_of_place(self, x):
    x = x - 1.0
    return self.net(x)


def normed(forward):
    return Calls(forward, net=nn.Sequential(nn.BatchNorm1d(6), nn.Linear(6, 5)).double())


def fresh(model, **options):
    step(model, X.clone(), **({"micro_batch_size": 4} | options))


# Outputs.


def all_of(outputs, targets):
    return CRITERION(outputs, targets)


def over_all(rows):
    return ib.across_batch(lambda rows: rows.mean().expand(len(rows)), rows)


# Draws.


# static_graph.


CASES: list[Case] = [
    (
        "buffer '{}' depends on the samples, or counts them",
        lambda: exact(Centred()),
        lambda: (
            called_first(Centred),
            evaluated(),
            step(Centred(), batch_coupling="per_micro_batch", micro_batch_size=4),
        ),
    ),
    (
        "forward makes the buffer '{}' of its first batch",
        lambda: exact(Made()),
        lambda: (called_first(Made), exact(Made(), micro_batch_size=12)),
    ),
    (
        "forward writes into the parameter '{}' what depends on the samples",
        lambda: exact(Scaled()),
        lambda: (called_first(Scaled), whole_or_apart(Scaled)),
    ),
    (
        "forward changes '{}', a number that it keeps in Python, by another amount",
        lambda: exact(Counts(lambda x: len(x) ** 2)),
        lambda: (
            exact(
                Counts(),
                {"x": X, "by": ib.shared(torch.tensor(12))},
                natively=lambda m: CRITERION(m(X, torch.tensor(12)), Y),
            ),
            whole_or_apart(lambda: Counts(lambda x: len(x) ** 2)),
        ),
    ),
    (
        "forward advances '{}', a generator or iterator that Python cannot copy",
        lambda: step(Iterates(generator())),
        lambda: (
            exact(Iterates([1.0, 2.0], "step")),
            step(Iterates(iter([1.0, 2.0, 3.0]))),
            step(Iterates(__import__("itertools").count(1))),
            exact(Iterates([1.0, 2.0], "step")),
        ),
    ),
    (
        "forward reads '{}', a tensor in a plain attribute of a module, and leaves another value",
        lambda: exact(Keeps()),
        lambda: (
            exact(
                Handed(),
                {"x": X, "mean": ib.shared(X[0])},
                natively=lambda m: CRITERION(m(X, X[0]), Y),
            ),
            exact(Cleared()),
            whole_or_apart(Keeps),
        ),
    ),
    (
        "forward puts another parameter into '{}' in each call",
        lambda: step(Spare()),
        lambda: (step(Spare(), micro_batch_size=12), step(Spare(writes=True))),
    ),
    # In place.
    (
        "forward changes its inputs in place, which are rows of one tensor",
        lambda: fresh(made(in_place), loss=losses.coupled(CRITERION), retained_micro_batches=3),
        lambda: (
            exact(made(out_of_place), retained_micro_batches=3),
            fresh(made(in_place), loss=losses.coupled(CRITERION), retained_micro_batches=0),
        ),
    ),
    (
        "forward changes its inputs in place, and has to run on them again",
        lambda: fresh(normed(in_place)),
        lambda: exact(normed(out_of_place)),
    ),
]
