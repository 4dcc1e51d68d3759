"""Ways out of errors about arguments: of wrap, batch_dim and trim; what provokes one, and what its
message says."""

import infinitybatch as ib
import torch
from followed_support import Case, exact
from misuse_support import CRITERION, X, Y, step
from support import Calls, mlp
from test_batch_dim_misuse import MISUSE as DIMS
from test_misuse_options import MISUSES as OPTIONS
from torch import nn


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(5, 6), nn.Linear(6, 5)

    def forward(self, words, hidden=None):
        return self.head(self.table(words).mean(0))


def words(dims):
    """Seven samples of five words, time first."""
    model, ids = Words().double(), torch.randint(5, (5, 7))
    found = ib.wrap(model, batch_dim=dims, micro_batch_size=3)(ids)
    torch.testing.assert_close(found, model(ids), rtol=1e-10, atol=1e-12)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def forward(self, x):
        return self.net(x)

    def encode(self, x):
        return self.net[0](x)


def trimmed(model=None, **options):
    model = model or Calls(lambda self, x, mask: (self.net(x) * mask[..., None]).sum(1), net=mlp())
    x = torch.randn(12, 7, 6, dtype=torch.float64)
    mask = torch.ones(12, 7, dtype=torch.float64)
    for i in range(12):
        mask[i, 2 + i % 5 :] = 0
    options = {"trim": ib.trim_padding(mask="mask"), "micro_batch_size": 4} | options
    options = {name: value for name, value in options.items() if value is not None}
    batch = ib.VirtualBatch(model, CRITERION, **options)
    return batch.backward({"x": x, "mask": mask}, Y)


CASES: list[Case] = [
    # batch_dim.
    (
        "must be a dimension or a dict of dimensions by argument",
        DIMS["text"][0],
        lambda: (words(1), words({"words": 1, "hidden": None})),
    ),
    (
        "{} has the key {}; arguments are named or counted",
        DIMS["a key of another type"][0],
        lambda: (words({"words": 1}), words({0: 1})),
    ),
    (
        "{} has the key {}; count arguments from 0",
        DIMS["a negative position"][0],
        lambda: words({0: 1}),
    ),
    (
        "{} is {}; count dimensions from the front, starting at 0",
        DIMS["negative"][0],
        lambda: words(1),
    ),
    (
        "which is no argument of the model's forward; it has {}",
        DIMS["an unknown name"][0],
        lambda message: words({message.split("it has '")[1].split("'")[0]: 1}),
    ),
    (
        "two dimensions, by its name and by its position; leave one of them out",
        DIMS["two dimensions"][0],
        lambda: (words({"words": 1}), words({0: 1})),
    ),
    # wrap.
    (
        "checkpoint_segments means nothing for wrap",
        lambda: ib.wrap(mlp(), micro_batch_size=4, checkpoint_segments=2),
        lambda: (exact(checkpoint_segments=2), exact(wrapped=True, micro_batch_size=2)),
    ),
    (
        "keep_outputs means nothing for wrap",
        lambda: ib.wrap(mlp(), micro_batch_size=4, keep_outputs=True),
        lambda: exact(wrapped=True),
    ),
    (
        "output_batch_dim is {}, but outputs have at most {} dimensions",
        OPTIONS["an output_batch_dim that no output has"][0],
        lambda: exact(wrapped=True, output_batch_dim=0),
    ),
    (
        'methods must be a tuple of names, ("encode",), not {}',
        lambda: ib.wrap(Encoder(), micro_batch_size=4, methods="encode"),
        lambda: encoded(("encode",)),
    ),
    (
        "methods names {}, which is no method that {} has",
        lambda: ib.wrap(Encoder(), micro_batch_size=4, methods=("embed",)),
        lambda: encoded(("encode",)),
    ),
    (
        "micro_batch_tokens counts positions, and only trim tells how many",
        lambda: step(micro_batch_tokens=16),
        lambda: trimmed(micro_batch_tokens=16, micro_batch_size=None),
    ),
    (
        "micro_batch_tokens is {}; it is a number of positions, 1 or more",
        lambda: trimmed(micro_batch_tokens=0, micro_batch_size=None),
        lambda: trimmed(micro_batch_tokens=16, micro_batch_size=None),
    ),
    (
        "static_graph=True reuses one recording for each number of rows, and trim",
        lambda: trimmed(static_graph=True),
        lambda: (trimmed(), exact(static_graph=True)),
    ),
    (
        "match_native_rng=True gives the random numbers of the whole batch, padding included",
        lambda: trimmed(match_native_rng=True),
        lambda: (trimmed(), exact(match_native_rng=True)),
    ),
    (
        "trim_padding takes a mask or lengths, one of them",
        lambda: ib.trim_padding(),
        lambda: trimmed(),
    ),
    ("{} must be what ib.trim_padding(mask=", lambda: trimmed(trim="mask"), lambda: trimmed()),
    (
        "padding must be a number, not {}",
        lambda: ib.trim_padding(mask="mask", padding="x"),
        lambda: trimmed(trim=ib.trim_padding(mask="mask", padding=0)),
    ),
    (
        "{} of trim_padding is {}; count arguments from 0",
        lambda: ib.trim_padding(mask=-1),
        lambda: ib.trim_padding(mask=1),
    ),
    (
        "must be the name or the position of an argument, not {}",
        lambda: ib.trim_padding(mask=1.5),
        lambda: ib.trim_padding(mask=1),
    ),
    (
        "names no tensor among the arguments: {}",
        lambda: trimmed(trim=ib.trim_padding(lengths="long")),
        lambda: trimmed(trim=ib.trim_padding(lengths=lambda x, mask: mask.sum(1).long())),
    ),
    (
        "trim= names the mask '{}', which {}; name one tensor of shape [samples, time]",
        lambda: trimmed(trim=ib.trim_padding(mask="other")),
        lambda: trimmed(),
    ),
    # What fails in forward itself, with a note.
    (
        "infinitybatch: forward ran on a micro-batch of {} of the {} samples",
        lambda: step(on_all_rows()),
        lambda message: (
            no_marks(message),
            exact(on_all_rows(), micro_batch_size=int(message.split("micro_batch_size=")[1])),
        ),
    ),
    (
        "infinitybatch: forward ran on a micro-batch of {} of the {} samples",
        lambda: step(on_time(), STEPS, TARGETS, over_time),
        lambda message: exact(
            on_time(),
            STEPS,
            TARGETS,
            over_time,
            batch_dim=int(message.split("say batch_dim=")[1].split(".")[0]),
        ),
    ),
]


STEPS, TARGETS = torch.randn(7, 12, 6, dtype=torch.float64), torch.randint(5, (7, 12))


def over_time(outputs, targets):
    return CRITERION(outputs.flatten(0, 1), targets.flatten())


def on_all_rows():
    return Calls(lambda self, x: self.net(x + self.by), net=mlp(), by=torch.randn(12, 6).double())


def on_time():
    by = torch.randn(7, 1, 6).double()
    return Calls(lambda self, x: self.net(x + self.by), net=mlp(), by=by)


def no_marks(message):
    assert "batch_dim" not in message and "shared" not in message, message


def encoded(methods):
    ib.wrap(Encoder(), micro_batch_size=4, methods=methods).encode(X).sum().backward()
