"""Ways out of errors about states, loaders in the middle of an epoch, and what other threads, passes
and batches leave: what provokes one, and what its message says."""

import threading
from dataclasses import dataclass

import infinitybatch as ib
import numpy
import torch
from followed_support import Case, exact
from followed_trainer import ADAM_OF, trains
from infinitybatch.callbacks import NoiseScale
from misuse_support import CRITERION, X, Y, step
from support import Calls, mlp
from test_trainer_misuse import make
from torch import nn
from torch.nn import functional as F
from trainer_support import BATCHES, net, trainer

losses = ib.losses


def made(forward, **children):
    return Calls(forward, net=mlp(), **children)


# Trainers.


def state_of(optimizer=None, **options):
    model = net()
    return make(model=model, optimizer=(optimizer or ADAM_OF)(model.parameters()), **options)


def loaded(saved, into):
    saved(1)
    into.load_state_dict(saved.state_dict())


def raising():
    yield BATCHES[0]
    raise ZeroDivisionError


def goes_on(loader):
    run = make(loader=loader)
    try:
        run(1)
    except ZeroDivisionError:
        pass
    return run(1)


def once_more():
    """A loader that raises the first time alone."""
    begun = []

    def batches():
        begun.append(1)
        return raising() if len(begun) == 1 else iter(BATCHES)

    return batches


def in_own_loop(**options):
    model = net(dropout=False)
    run = make(model=model, optimizer=ADAM_OF(model.parameters()), **options)
    for x, y in BATCHES:
        run.backward(run.loss(run.forward(x), y))
        run.step()


def noise(model=None, **options):
    model = model or net(dropout=False)
    return trainer(model, callbacks=NoiseScale(), micro_batch_size=5, **options)(1)


# Batches.


@dataclass
class Pair:
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Known:
    x: torch.Tensor
    y: torch.Tensor


def paired():
    return made(lambda self, pair: self.net(pair.x * pair.y))


def known():
    torch.utils._pytree.register_dataclass(Known)
    exact(paired(), (Known(X, X),), natively=lambda m: CRITERION(m(Known(X, X)), Y))


def shared_pair():
    exact(
        made(lambda self, x, pair: self.net(x) + pair.x.sum()),
        (X, ib.shared(Pair(X[:1], X[:1]))),
        natively=lambda m: CRITERION(m(X, Pair(X[:1], X[:1])), Y),
    )


def packed(total):
    def forward(self, x, lengths):
        rows = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        states, _ = self.cells(rows)
        padded, _ = nn.utils.rnn.pad_packed_sequence(
            states, batch_first=True, total_length=x.shape[1] if total else None
        )
        return self.net(padded)

    model = Calls(forward, net=mlp(), cells=nn.GRU(6, 6, batch_first=True).double())
    loss = losses.coupled(lambda z, y: F.cross_entropy(z.sum(1), y))
    x, lengths = torch.randn(12, 7, 6).double(), torch.tensor([2, 3, 4, 4, 5, 6, 7, 7, 1, 1, 2, 3])
    batch = ib.VirtualBatch(model, loss, micro_batch_size=4)
    batch.backward((x, lengths), Y)


# Time first.

STEPS = torch.randn(7, 12, 6, dtype=torch.float64)


def last_step():
    return made(lambda self, x: self.net(x.cumsum(0)[-1]))


def rows_without_time():
    """Features are no samples."""
    ib.wrap(made(lambda self, x: self.net(x).sum(0)), micro_batch_size=4)(X)


# Graphs and threads.


def inside(act):
    """`act` in the middle of another step of the same VirtualBatch."""
    model, running = mlp(), []

    def on_micro_batch(micro_batch):
        running.append(1)
        if len(running) == 1:
            act(batch, model)

    batch = ib.VirtualBatch(model, CRITERION, micro_batch_size=4, on_micro_batch=on_micro_batch)
    batch.backward(X, Y)


def in_a_thread(model):
    """One step of it in another thread."""
    failed = []

    def run():
        try:
            ib.VirtualBatch(model, CRITERION, micro_batch_size=4).backward(X, Y)
        except ib.Error as error:
            failed.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if failed:
        raise failed[0]


def selected(before):
    """BatchNorm of rows that values select."""

    def forward(self, x):
        chosen = x[:, 0] > 0
        rows = self.norm(x)[chosen] if before else self.norm(x[chosen])
        return torch.zeros_like(x).masked_scatter(chosen[:, None].expand_as(x), rows)

    model = Calls(
        lambda self, x: self.net(self.pick(x)),
        net=mlp(),
        pick=Calls(forward, norm=nn.BatchNorm1d(6).double()),
    )
    x = X.clone()
    x[:, 0] = -1.0
    x[[0, 5], 0] = 1.0
    return model, x


CASES: list[Case] = [
    (
        "make it of the same parameters in the same order",
        lambda: loaded(state_of(lambda p: torch.optim.Adam(list(p)[::-1])), state_of()),
        lambda: loaded(state_of(), state_of()),
    ),
    (
        "and this trainer's has {} of {}; make it as that one was made",
        lambda: loaded(state_of(lambda p: torch.optim.Adam(list(p)[:1])), state_of()),
        lambda: loaded(state_of(), state_of()),
    ),
    (
        "make this trainer with {}, load, and give it another {} afterwards",
        lambda: loaded(state_of(torch.optim.Adam), state_of(lambda p: torch.optim.SGD(p, lr=0.1))),
        lambda: (
            into := state_of(),
            loaded(state_of(), into),
            setattr(into, "optimizer", torch.optim.SGD(into.model.parameters(), lr=0.1)),
            trains(into),
        ),
    ),
    (
        "the loader is a generator that has raised and cannot go on; give a function that makes it",
        lambda: goes_on(raising()),
        lambda: goes_on(once_more()),
    ),
    (
        "the loader gave no batch to evaluate",
        lambda: make().evaluate([]),
        lambda: make().evaluate(BATCHES),
    ),
    (
        "train with trainer(epochs), or leave checkpoint_segments out",
        lambda: in_own_loop(checkpoint_segments=2),
        lambda: (in_own_loop(), trains(checkpoint_segments=2)),
    ),
    (
        "compute the loss of outputs with one of torch.nn",
        lambda: in_own_loop(loss=losses.cross_entropy()),
        lambda: in_own_loop(loss=nn.CrossEntropyLoss()),
    ),
    (
        "train without NoiseScale, or with a loss that is a sum over samples and a model that does not couple them",
        lambda: noise(net(dropout=False, batch_norm=True)),
        lambda: (noise(), trainer(net(batch_norm=True))(1)),
    ),
    # Batches.
    (
        "register it with torch.utils._pytree.register_dataclass({}), or wrap it in shared(...)",
        lambda: step(paired(), (Pair(X, X),)),
        lambda: (known(), shared_pair()),
    ),
    (
        "is of a type that torch has no tensors of; convert it, for example: x.astype(numpy.float64)",
        lambda: step(inputs=X.numpy().astype(numpy.longdouble)),
        lambda: exact(
            inputs=X.numpy().astype(numpy.longdouble).astype(numpy.float64),
            natively=lambda m: CRITERION(m(X), Y),
        ),
    ),
    (
        "make it the same for every micro-batch (pad_packed_sequence takes total_length=)",
        lambda: packed(False),
        lambda: packed(True),
    ),
    # Time first, where sizes allow it.
    (
        "no dimension follows the micro-batch, so the parts cannot be joined; return one value for each sample (a list with a tensor for each as torch.stack(outputs)); ",
        lambda: exact(last_step(), STEPS, wrapped=True),
        lambda message: exact(
            last_step(), STEPS, wrapped=True, batch_dim=int(message.split("say batch_dim=")[1][0])
        ),
    ),
    (
        "no dimension follows the micro-batch, so the parts cannot be joined; return one value for each sample (a list with a tensor for each as torch.stack(outputs)); ",
        rows_without_time,
        lambda message: (without_dimension(message), ib.wrap(mlp(), micro_batch_size=4)(X).sum(0)),
    ),
    # Layers over rows that are selected.
    (
        "Normalise all rows and select afterwards, put the layer into eval mode",
        lambda: step(*selected(False)),
        lambda: (
            exact(*selected(True)),
            step((both := selected(False))[0].eval(), both[1]),
            exact(*selected(False), micro_batch_size=12),
        ),
    ),
    # Threads.
    (
        "this VirtualBatch is running a step already, in another thread or around this call",
        lambda: inside(lambda batch, model: batch.backward(X, Y)),
        lambda: inside(lambda batch, model: in_a_thread(mlp())),
    ),
    (
        "another step is running on {}; a model can take one VirtualBatch step",
        lambda: inside(lambda batch, model: in_a_thread(model)),
        lambda: inside(lambda batch, model: in_a_thread(mlp())),
    ),
    # Losses.
    (
        "{} takes embeddings of one floating point type on one device",
        lambda: losses.info_nce(torch.randn(4, 3), torch.randn(4, 3).double()),
        lambda: losses.info_nce(torch.randn(4, 3), torch.randn(4, 3)),
    ),
    (
        "{}: {} embeddings need as many partners, but there are {}",
        lambda: losses.siglip(torch.randn(4, 3), torch.randn(3, 3)),
        lambda: losses.siglip(torch.randn(4, 3), torch.randn(4, 3)),
    ),
    (
        "{} takes floating point embeddings (N, D) or (N, views, D), but was given {}",
        lambda: losses.sup_con(torch.randn(4), torch.arange(4)),
        lambda: (
            losses.sup_con(torch.randn(4, 3), torch.arange(4)),
            losses.sup_con(torch.randn(4, 2, 3), torch.arange(4)),
        ),
    ),
    (
        "{}: weight has shape {}, but there are {} classes",
        lambda: losses.linear_cross_entropy(
            torch.randn(4, 3), torch.randn(5, 3), torch.arange(4), weight=torch.ones(4)
        ),
        lambda: losses.linear_cross_entropy(
            torch.randn(4, 3), torch.randn(5, 3), torch.arange(4), weight=torch.ones(5)
        ),
    ),
    (
        "{}: outputs of type {} do not go with a linear_weight of type {}",
        lambda: losses.linear_cross_entropy(
            torch.randn(4, 3), torch.randn(5, 3).double(), torch.arange(4)
        ),
        lambda: losses.linear_cross_entropy(torch.randn(4, 3), torch.randn(5, 3), torch.arange(4)),
    ),
    (
        "pad_ctc_targets: the lengths of {} targets add up to {}, but there are {} labels",
        lambda: losses.pad_ctc_targets(torch.arange(6), torch.tensor([2, 3])),
        lambda: losses.pad_ctc_targets(torch.arange(6), torch.tensor([2, 4])),
    ),
    (
        "pad_ctc_targets takes (sum of target_lengths) and (N), but got {} and {}",
        lambda: losses.pad_ctc_targets(torch.ones(2, 3), torch.tensor([2, 4])),
        lambda: losses.pad_ctc_targets(torch.arange(6), torch.tensor([2, 4])),
    ),
    (
        "the weight of shape {} must have the shape of the outputs, {}",
        lambda: step(targets=(torch.randn(12, 5).double(), torch.ones(12, 4)), loss=losses.mse()),
        lambda: step(
            targets=(torch.randn(12, 5).double(), torch.ones(12, 5).double()), loss=losses.mse()
        ),
    ),
]


def without_dimension(message):
    assert "batch_dim" not in message, message
