"""Ways out of errors about what goes into a step and what is read behind it: what provokes one, and
what its message says."""

import copy
import tempfile

import infinitybatch as ib
import numpy
import torch
from followed_support import Case, exact
from misuse_support import CRITERION, X, Y, step
from support import Calls, mlp
from torch import nn
from torch.nn import functional as F

losses = ib.losses


def made(forward, **children):
    return Calls(forward, net=mlp(), **children)


def wrapped(model=None, **options):
    return ib.wrap(model or mlp(), **({"micro_batch_size": 4} | options))


def pool(self, x):
    return self.net(x).mean(1)


NAMES = numpy.array([f"row {i}" for i in range(12)])
PARTS = [torch.randn(2 + i % 3, 6, dtype=torch.float64) for i in range(12)]
PADDED = nn.utils.rnn.pad_sequence(PARTS, batch_first=True)
LONG = torch.tensor([len(part) for part in PARTS])


def whole_of(x):
    return lambda m: CRITERION(m(x), Y)


def source_of(x):
    return ib.BatchSource(12, lambda begin, end: x[begin:end])


# Trimming.


def masked(self, x, mask):
    return (self.net(x) * mask[..., None]).sum(1)


MASK = (torch.arange(4)[None] < LONG[:, None]).double()


def trimmed(trim, x=PADDED, mask=MASK, model=None, **options):
    model = model or made(masked)
    inputs = {"x": x, "mask": mask}
    native = copy.deepcopy(model)
    CRITERION(native(x.detach(), mask), Y).backward()
    options = {"micro_batch_size": 4} | options
    ib.VirtualBatch(model, CRITERION, trim=trim, **options).backward(inputs, Y)
    for one, other in zip(model.parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-12)


BY_MASK = ib.trim_padding(mask="mask")


def by_lengths(of):
    return ib.trim_padding(lengths=of, inputs=["x", "mask"])


# What is read behind forward.


def changed(before):
    model = wrapped()
    z = model(X)
    if not before:
        CRITERION(z, Y).backward()
    with torch.no_grad():
        next(iter(ib.unwrap(model).parameters())).mul_(2)
    if before:
        CRITERION(z, Y).backward()


class Left(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        self.features = self.net[0](x)
        return self.net[2](self.net[1](self.features))


def of_slope(vectorized):
    model = wrapped(made(lambda self, x: self.net(x).sum(1)), use_tapes=False)
    for row in torch.eye(12, dtype=X.dtype) if not vectorized else [None]:
        z = model(X)
        if vectorized:
            grads = torch.eye(12, dtype=X.dtype)
            torch.autograd.grad(z, list(model.parameters()), grads, is_grads_batched=True)
        else:
            torch.autograd.grad(z, list(model.parameters()), row)


def of_mapped(model):
    torch.func.vmap(model)(X[None])


def tangents(model):
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        model(forward_ad.make_dual(X, torch.ones_like(X)))


def unpacked():
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level():
        wrapped()(forward_ad.unpack_dual(forward_ad.make_dual(X, torch.ones_like(X))).primal)


# verify.


def verified(model=None, **options):
    report = ib.verify(model or mlp(), CRITERION, X, Y, **({"micro_batch_size": 4} | options))
    assert report.exact, print(report)


def dropping(p=0.5):
    return nn.Sequential(nn.Linear(6, 8), nn.Dropout(p), nn.Linear(8, 5)).double()


def copied(loss):
    copy.deepcopy(ib.VirtualBatch(mlp(), loss, micro_batch_size=4)).backward(X, Y)


OUTSIDE = torch.randn(5, dtype=torch.float64, requires_grad=True)


def computed(shared):
    """A tensor with a graph of its own beside the model's."""
    factor = OUTSIDE * 2
    if shared:
        native = ib.wrap(made(lambda self, x, by: self.net(x) * by), micro_batch_size=4)
        native(X, ib.shared(factor)).sum().backward()
    else:
        wrapped(made(lambda self, x: self.net(x) * factor))(X).sum().backward()


def computed_inside():
    wrapped(
        made(lambda self, x: self.net(x) * (self.by * 2), by=nn.Parameter(torch.ones(5).double()))
    )(X).sum().backward()


def capturing(inside):
    def forward(self, x):
        z, by = self.net(x), self.net(x) * 2
        if inside:
            return ib.across_batch(lambda z, by: z - by.mean(0), z, by)
        return ib.across_batch(lambda z: z - by.mean(0), z)

    exact(made(forward), natively=lambda m: CRITERION(m.net(X) - (m.net(X) * 2).mean(0), Y))


def offloaded(directory):
    options = {"offload": ib.Offload(when="always", directory=directory, host_budget=1)}
    model = mlp()
    batch = ib.VirtualBatch(model, losses.coupled(CRITERION), micro_batch_size=4, **options)
    batch.backward(X, Y)


CASES: list[Case] = [
    (
        "{} is a {} with an entry of tensors for each of {} samples, which was taken for",
        lambda: step(made(lambda self, x: torch.stack([self.net(p).mean(0) for p in x])), (PARTS,)),
        lambda: exact(made(lambda self, x: self.net(x).sum(1)), PADDED),
    ),
    (
        "{} is an array of {} with {} rows, which every micro-batch would see whole; {}",
        lambda: step(made(lambda self, x, names: self.net(x)), (X, NAMES)),
        lambda: (
            exact(made(lambda self, x, numbers: self.net(x)), (X, torch.arange(12))),
            exact(
                made(lambda self, x, names: self.net(x)),
                (X, ib.shared(NAMES)),
                natively=lambda m: CRITERION(m(X, NAMES), Y),
            ),
        ),
    ),
    (
        "is a nested tensor, which has no rows to slice; pad it, or pass a BatchSource",
        lambda: step(made(pool), torch.nested.nested_tensor(PARTS, layout=torch.jagged)),
        lambda: (
            exact(made(pool), PADDED),
            exact(made(pool), source_of(PADDED), natively=whole_of(PADDED)),
        ),
    ),
    (
        "is a sparse tensor, whose rows are no views; pass a BatchSource that makes the rows",
        lambda: step(inputs=X.to_sparse()),
        lambda: exact(
            inputs=ib.BatchSource(12, lambda begin, end: X.to_sparse().to_dense()[begin:end]),
            natively=whole_of(X),
        ),
    ),
    (
        "detach it, or make what computed it a part of the model",
        lambda: step(inputs=X.clone().requires_grad_() * 2),
        lambda: (
            exact(inputs=(X.clone().requires_grad_() * 2).detach()),
            exact(made(lambda self, x: self.net(x * 2))),
        ),
    ),
    (
        "{} is on the meta device and has no values; make it on the model's device",
        lambda: step(inputs=X.to("meta")),
        lambda: exact(inputs=torch.empty_like(X, device="cpu").copy_(X)),
    ),
    (
        "{} is a whole number of more than 64 bits",
        lambda: ib.batch_dim(X, 10**30),
        lambda: ib.batch_dim(X, 1),
    ),
    ("{} must be a whole number, not {}", lambda: ib.batch_dim(X, "0"), lambda: ib.batch_dim(X, 0)),
    # Layers that see the whole batch.
    (
        "which is the first micro-batch's; give it to across_batch as an input",
        lambda: capturing(False),
        lambda: capturing(True),
    ),
    # trim=.
    (
        "the mask of trim=, '{}', has shape {}; it has to be [samples, time]",
        lambda: step(
            made(lambda self, x, mask: self.net(x).sum(1)),
            {"x": PADDED, "mask": MASK[:, 0]},
            trim=BY_MASK,
            micro_batch_size=4,
        ),
        lambda: trimmed(BY_MASK),
    ),
    (
        "lengths of trim= have shape {} for {} samples; give one number for each",
        lambda: trimmed(by_lengths(lambda x, mask: mask.long())),
        lambda: trimmed(by_lengths(lambda x, mask: mask.sum(1).long())),
    ),
    (
        "trim= gives sample {} the length {}, but there are {} positions",
        lambda: trimmed(by_lengths(lambda x, mask: mask.sum(1).long() + 9)),
        lambda: trimmed(by_lengths(lambda x, mask: mask.sum(1).long())),
    ),
    (
        "requires grad and would be trimmed; leave trim out, or detach it",
        lambda: trimmed(BY_MASK, PADDED.clone().requires_grad_()),
        lambda: (
            trimmed(BY_MASK, PADDED.clone().requires_grad_().detach()),
            trimmed(None, PADDED.clone().requires_grad_()),
        ),
    ),
    (
        "with trim= these are copies, so that the caller's would stay; write that out of place",
        lambda: trimmed(
            BY_MASK,
            PADDED.clone(),
            model=made(lambda self, x, mask: masked(self, x.sub_(1.0), mask)),
        ),
        lambda: trimmed(BY_MASK, model=made(lambda self, x, mask: masked(self, x - 1.0, mask))),
    ),
    # verify.
    (
        "call eval(), set dropout to 0, or (for torch's own numbers) use match_native_rng=True",
        lambda: verified(dropping()),
        lambda: (
            verified(dropping().eval()),
            verified(dropping(0.0)),
            verified(dropping(), match_native_rng=True),
        ),
    ),
    (
        "with a criterion of torch.nn, or a function of your own, it can be copied",
        lambda: copied(losses.coupled(CRITERION)),
        lambda: (copied(CRITERION), copied(F.cross_entropy)),
    ),
    # wrap.
    (
        "that forward read has been changed in place since (version {}, expected {}); run backward before changing it",
        lambda: changed(True),
        lambda: changed(False),
    ),
    (
        "which micro-batches cannot take; take one after the other, or call the model itself",
        lambda: of_slope(True),
        lambda: of_slope(False),
    ),
    (
        "is at work, which sees nothing of what is computed micro-batch by micro-batch; {}",
        lambda: of_mapped(wrapped()),
        lambda: of_mapped(mlp()),
    ),
    (
        "call the model itself there, without infinitybatch, or unpack the tensor with torch.autograd.forward_ad.unpack_dual",
        lambda: tangents(wrapped()),
        lambda: (tangents(mlp()), unpacked()),
    ),
    (
        "so its gradient cannot be split; pass it as an input (shared, if every sample needs it)",
        lambda: computed(False),
        lambda: (computed(True), computed_inside()),
    ),
    (
        "{} is {}; it is {} or {}",
        lambda: step(batch_coupling="off"),
        lambda message: [
            step(batch_coupling=given, micro_batch_size=4)
            for given in ("exact", "per_micro_batch")
            if given in message
        ],
    ),
    (
        "no file for offloaded tensors can be made in '{}' ({}); name a directory that can be written to",
        lambda: offloaded("/nowhere"),
        lambda: offloaded(tempfile.mkdtemp()),
    ),
]
