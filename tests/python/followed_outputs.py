"""Ways out of errors about outputs, random numbers and what is asked of a wrapped model: what provokes
one, and what its message says."""

import infinitybatch as ib
import torch
from followed_models import losses, made, whole_or_apart
from followed_support import Case, exact, gradients
from misuse_support import CRITERION, X, Y, step
from support import mlp
from torch import nn
from torch.nn import functional as F

WHOLE = lambda m: CRITERION(m(X), Y)  # noqa: E731


def returns(value):
    return made(lambda self, x: value(self.net(x), x))


def compared(outputs, targets):
    return F.cross_entropy(outputs @ outputs.T, targets)


class Auxiliary(nn.Module):
    """Leaves a number of all samples for the loss."""

    def __init__(self, detached=False, returned=False, over=None):
        super().__init__()
        self.net, self.aux = mlp(), None
        self.detached, self.returned, self.over = detached, returned, over

    def forward(self, x):
        z = self.net(x)
        rows = z.square().sum(1)
        if self.returned:
            return z, rows
        self.aux = (self.over or (lambda rows: rows.mean()))(
            rows.detach() if self.detached else rows
        )
        return z


def with_auxiliary(model, loss=None, **options):
    loss = loss or (lambda z, y: CRITERION(z, y) + model.aux)
    step(model, loss=losses.coupled(loss), **({"micro_batch_size": 4} | options))


def unequal(self, x):
    """Permutes what other micro-batches hold too."""
    return self.net(x[torch.randperm(len(x))])


def seeded(self, x):
    torch.manual_seed(3)
    return F.dropout(self.net(x), 0.5)


class Branches(nn.Module):
    """Another program for some values, which computes the same."""

    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        z = self.net(x)
        return z.tanh() if float(x[0, 0].detach()) > 0 else z.clone().tanh()


def signs(*first):
    x = X.clone()
    for place, sign in zip((0, 4, 8), first, strict=True):
        x[place, 0] = sign
    return x


MIXED = signs(1, -1, 1)


CASES: list[Case] = [
    # Outputs.
    (
        "so they cannot be joined; return the same ones for every batch",
        lambda: step(
            returns(lambda y, x: (y, y) if x[0, 0] > 0 else (y,)),
            MIXED,
            Y,
            losses.coupled(lambda o, t: o[0].sum()),
        ),
        lambda: step(
            returns(lambda y, x: (y, y)), MIXED, Y, losses.coupled(lambda o, t: o[0].sum())
        ),
    ),
    (
        "Return what is compared, and let the loss compare: losses.coupled(lambda z, t: loss(z @ z.T, t))",
        lambda: step(returns(lambda y, x: y @ y.T), X, Y, losses.coupled(F.cross_entropy)),
        lambda message: exact(
            returns(lambda y, x: y),
            X,
            Y,
            eval(
                message.split("let the loss compare: ")[1],
                {"losses": losses, "loss": F.cross_entropy},
            ),
            natively=lambda m: compared(m(X), Y),
        ),
    ),
    (
        "no dimension follows the micro-batch, so the parts cannot be joined, and {}; return one value for each sample",
        lambda: step(
            returns(lambda y, x: y.mean(0)), X, Y, losses.coupled(lambda z, t: z.square().sum())
        ),
        lambda: exact(
            returns(lambda y, x: y),
            X,
            Y,
            losses.coupled(lambda z, t: z.mean(0).square().sum()),
            natively=lambda m: m(X).mean(0).square().sum(),
        ),
    ),
    (
        "outputs{} is sparse, and cannot be joined from micro-batches; return it dense",
        lambda: step(
            returns(lambda y, x: y.to_sparse()),
            X,
            Y,
            losses.coupled(lambda z, t: z.to_dense().sum()),
        ),
        lambda: exact(
            returns(lambda y, x: y.to_sparse().to_dense()),
            X,
            Y,
            losses.coupled(lambda z, t: z.to_sparse().to_dense().sum()),
            natively=lambda m: m(X).sum(),
        ),
    ),
    (
        "and that is no output: each of the {} micro-batches left its own",
        lambda: with_auxiliary(Auxiliary()),
        lambda: (
            exact(
                Auxiliary(returned=True),
                X,
                Y,
                losses.coupled(lambda o, y: CRITERION(o[0], y) + o[1].mean()),
                natively=lambda m: CRITERION(m(X)[0], Y) + m(X)[1].mean(),
            ),
            with_auxiliary(Auxiliary(detached=True), lambda z, y: CRITERION(z, y)),
            with_auxiliary(Auxiliary(), micro_batch_size=12),
        ),
    ),
    (
        "the loss does not depend on anything that requires grad; check that the model's parameters require grad",
        lambda: step(returns(lambda y, x: y.detach()), X, Y, losses.coupled(CRITERION)),
        lambda: exact(returns(lambda y, x: y), X, Y, losses.coupled(CRITERION), natively=WHOLE),
    ),
    (
        "the loss writes outputs[{}] in place, and another output lies in the same memory",
        lambda: step(
            returns(lambda y, x: (y, y.view(-1, 5))),
            X,
            Y,
            losses.coupled(lambda o, t: o[0].mul_(2).sum() + o[1].sum()),
        ),
        lambda: (
            step(
                returns(lambda y, x: (y, y.view(-1, 5))),
                X,
                Y,
                losses.coupled(lambda o, t: o[0].clone().mul_(2).sum() + o[1].sum()),
            ),
            exact(
                returns(lambda y, x: y),
                X,
                Y,
                losses.coupled(lambda a, t: a.mul(2).sum() + a.view(-1, 5).sum()),
                natively=lambda m: m(X).sum() * 3,
            ),
        ),
    ),
    # Samples that are combined.
    (
        "{} combines samples: outputs{} of one sample depend on others in the batch",
        lambda: exact(made(lambda self, x: self.net(x - x.mean(0)))),
        lambda: (
            exact(
                made(lambda self, x: self.net(ib.across_batch(lambda x: x - x.mean(0), x))),
                natively=lambda m: CRITERION(m.net(X - X.mean(0)), Y),
            ),
            whole_or_apart(lambda: made(lambda self, x: self.net(x - x.mean(0)))),
        ),
    ),
    (
        "{} is given a number that counts the samples of a batch, {}scale by it in the loss",
        lambda: exact(made(lambda self, x: self.net(x) / len(x))),
        lambda: (
            exact(
                made(lambda self, x: self.net(x)),
                X,
                Y,
                losses.coupled(lambda z, y: CRITERION(z / len(z), y)),
                natively=lambda m: CRITERION(m(X) / 12, Y),
            ),
            whole_or_apart(lambda: made(lambda self, x: self.net(x) / len(x))),
        ),
    ),
    # Random numbers.
    (
        "permute the batch before the step",
        lambda: step(made(unequal), micro_batch_size=4, match_native_rng=True),
        lambda: step(
            mlp(),
            X[(order := torch.randperm(12))],
            Y[order],
            micro_batch_size=4,
            match_native_rng=True,
        ),
    ),
    (
        "seed before the step, or leave match_native_rng out",
        lambda: step(made(seeded), micro_batch_size=4, match_native_rng=True),
        lambda: (
            torch.manual_seed(3),
            step(
                made(lambda self, x: F.dropout(self.net(x), 0.5)),
                micro_batch_size=4,
                match_native_rng=True,
            ),
        ),
    ),
    (
        "draw them before the step, or use a coupled loss, which is computed once",
        lambda: step(
            loss=losses.separable(lambda z, y: F.dropout(z).sum(), len),
            micro_batch_size=4,
            match_native_rng=True,
        ),
        lambda: step(
            loss=losses.coupled(lambda z, y: F.dropout(z).mean()),
            micro_batch_size=4,
            match_native_rng=True,
        ),
    ),
    (
        "draw in forward and give the numbers to across_batch as an input, or leave match_native_rng out",
        lambda: step(
            made(lambda self, x: self.net(ib.across_batch(lambda x: x - F.dropout(x.mean(0)), x))),
            micro_batch_size=4,
            match_native_rng=True,
        ),
        lambda: (
            step(
                made(
                    lambda self, x: self.net(
                        ib.across_batch(
                            lambda x, mask: x - (x * mask).mean(0), x, F.dropout(torch.ones_like(x))
                        )
                    )
                ),
                micro_batch_size=4,
                match_native_rng=True,
            ),
            step(
                made(
                    lambda self, x: self.net(ib.across_batch(lambda x: x - F.dropout(x.mean(0)), x))
                ),
                micro_batch_size=4,
            ),
        ),
    ),
    # static_graph.
    (
        "static_graph says that forward is the same program for each micro-batch of {} samples",
        lambda: step(Branches(), MIXED, micro_batch_size=4, static_graph=True),
        lambda: exact(Branches(), MIXED),
    ),
    # Backward of a wrapped model.
    (
        "run this batch through ib.unwrap(model), or give a micro_batch_size as large as the batch",
        lambda: of_slopes(ib.wrap(mlp(), micro_batch_size=4)),
        lambda: (
            of_slopes(ib.unwrap(ib.wrap(mlp(), micro_batch_size=4))),
            of_slopes(ib.wrap(mlp(), micro_batch_size=12)),
        ),
    ),
    (
        'say reduce="sum" or "mean" if it is a sum or a mean over samples, or return one value for each sample',
        lambda: ib.wrap(returns(lambda y, x: y.mean()), micro_batch_size=4)(X).backward(),
        lambda: (
            of_numbers(lambda y, x: y.mean(), reduce="mean"),
            of_numbers(lambda y, x: y.sum(), reduce="sum"),
            of_numbers(lambda y, x: y.mean(1)),
        ),
    ),
    (
        'of which no mean can be taken; return it as a floating point number, or say reduce="sum"',
        lambda: ib.wrap(
            returns(lambda y, x: (y, (x > 0).sum())), micro_batch_size=4, reduce="mean"
        )(X),
        lambda: (
            ib.wrap(
                returns(lambda y, x: (y, (x > 0).double().mean())),
                micro_batch_size=4,
                reduce="mean",
            )(X),
            ib.wrap(returns(lambda y, x: (y, (x > 0).sum())), micro_batch_size=4, reduce="sum")(X),
        ),
    ),
    (
        "return one value for each sample, and let the loss reduce them",
        lambda: ib.wrap(
            returns(lambda y, x: y.square().mean().sqrt()), micro_batch_size=4, reduce="mean"
        )(X).backward(),
        lambda: (
            ib.wrap(returns(lambda y, x: y.square().mean(1)), micro_batch_size=4)(X)
            .mean()
            .sqrt()
            .backward()
        ),
    ),
]


def of_slopes(model):
    x = X.clone().requires_grad_()
    (slope,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
    slope.square().sum().backward()


def of_numbers(value, **options):
    model, native = returns(value), returns(value)
    native.load_state_dict(model.state_dict())
    ib.wrap(model, micro_batch_size=4, **options)(X).sum().backward()
    native(X).sum().backward()
    for one, wanted in zip(gradients(model), gradients(native), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-10, atol=1e-12)
