"""Ways out of errors about batches: each case is what provokes one, and what its message says."""

import infinitybatch as ib
import torch
from followed_support import Case, exact
from misuse_support import CRITERION, X, Y, step
from support import Calls, mlp
from test_misuse_batches import MISUSES as BATCHES
from torch.utils.data import DataLoader, TensorDataset


def wrong(name):
    return BATCHES[name][0]


def two(forward=lambda self, x, by: self.net(x * by)):
    return Calls(forward, net=mlp())


SCALE = torch.tensor(2.0).double()
STEPS = torch.randn(7, 12, 6, dtype=torch.float64)
WORDS = torch.randint(5, (9, 12))
WHOLE = lambda m: CRITERION(m(X), Y)  # noqa: E731


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, i):
        return X[i], Y[i]


def counted(begin, end):
    return X[begin:end]


def time_first(forward=lambda self, x: self.net(x)):
    return Calls(forward, net=mlp())


def last(outputs, targets):
    return CRITERION(outputs.flatten(0, 1), targets.flatten())


TARGETS = torch.randint(5, (7, 12))


def summed(model):
    return model(X).square().sum()


CASES: list[Case] = [
    (
        "{} has {} samples, {} has {}; every leaf needs the same number: {}",
        wrong("sizes differ within inputs"),
        lambda: exact(two(), (X, X)),
    ),
    (
        "inputs have {} samples, targets {}; both need the same number",
        wrong("different sizes"),
        lambda: exact(targets=Y),
    ),
    (
        "{} is empty: it has 0 samples",
        wrong("an empty batch"),
        lambda: exact(inputs=X[:1], targets=Y[:1]),
    ),
    (
        "mark it, ib.shared(x), so that every micro-batch sees it whole",
        lambda: step(two(), (X, SCALE)),
        lambda: exact(two(), (X, ib.shared(SCALE)), natively=lambda m: CRITERION(m(X, SCALE), Y)),
    ),
    (
        "torch.tensor(rows), torch.stack(rows)",
        wrong("a list of numbers"),
        lambda: exact(inputs=torch.tensor(X.tolist(), dtype=X.dtype)),
    ),
    (
        "which has no dimension {} to split; give this leaf another batch_dim",
        wrong("a dimension that is not there"),
        lambda: exact(
            Calls(lambda self, x: self.net(x.T), net=mlp()),
            ib.batch_dim(X.T, 1),
            natively=lambda m: CRITERION(m(X.T), Y),
        ),
    ),
    (
        "batch_dim is {}; count dimensions from the front, starting at 0",
        wrong("a negative dimension"),
        lambda: exact(inputs=ib.batch_dim(X, 0), natively=WHOLE),
    ),
    (
        "read inputs and targets from it with infinitybatch.from_dataset(dataset)",
        wrong("a dataset"),
        lambda: exact(None, *ib.from_dataset(TensorDataset(X, Y)), natively=WHOLE),
    ),
    (
        "make a logical batch of what it gives with infinitybatch.from_batches(...)",
        wrong("a loader"),
        lambda: exact(None, *ib.from_batches(DataLoader(TensorDataset(X, Y), 5)), natively=WHOLE),
    ),
    (
        "a dataset needs __len__ and __getitem__, which {} lacks; read an iterable dataset into a list",
        lambda: ib.from_dataset(iter(zip(X, Y, strict=True))),
        lambda: exact(None, *ib.from_dataset(list(iter(zip(X, Y, strict=True)))), natively=WHOLE),
    ),
    (
        "name what is what with a collate_fn of your own",
        lambda: step(None, *ib.from_dataset([{"x": x, "y": y} for x, y in zip(X, Y, strict=True)])),
        lambda: exact(
            None,
            *ib.from_dataset(
                [{"x": x, "y": y} for x, y in zip(X, Y, strict=True)],
                collate_fn=lambda rows: (
                    torch.stack([row["x"] for row in rows]),
                    torch.stack([row["y"] for row in rows]),
                ),
            ),
            natively=WHOLE,
        ),
    ),
    (
        "make pairs with a generator: ((b['x'], b['y']) for b in loader)",
        lambda: ib.from_batches([{"x": X, "y": Y}]),
        lambda: exact(
            None, *ib.from_batches((b["x"], b["y"]) for b in [{"x": X, "y": Y}]), natively=WHOLE
        ),
    ),
    (
        "pieces must be an iterable of pairs (inputs, targets), not {}: from_batches(loader)",
        wrong("pieces that are a number"),
        lambda: exact(None, *ib.from_batches([(X[:5], Y[:5]), (X[5:], Y[5:])]), natively=WHOLE),
    ),
    (
        "there is no piece to make a batch of: the iterable was empty",
        wrong("no pieces"),
        lambda: exact(None, *ib.from_batches([(X, Y)]), natively=WHOLE),
    ),
    (
        "piece {} has another structure than piece 0",
        wrong("pieces of different structure"),
        lambda: exact(None, *ib.from_batches([(X[:5], Y[:5]), (X[5:], Y[5:])]), natively=WHOLE),
    ),
    (
        "piece {} needs tensors of one size along their first dimension",
        wrong("pieces whose tensors differ"),
        lambda: exact(None, *ib.from_batches([(X, Y)]), natively=WHOLE),
    ),
    (
        "pad all pieces alike, or let micro_batch_size divide their sizes",
        lambda: step(
            time_first(lambda self, x: self.net(x).mean(1)),
            *ib.from_batches([(STEPS[:3], Y[:3]), (STEPS[3:, :5], Y[3:7])]),
            micro_batch_size=2,
        ),
        lambda: exact(
            time_first(lambda self, x: self.net(x).mean(1)),
            *ib.from_batches([(STEPS[:3], Y[:3]), (STEPS[3:6, :5], Y[3:6])]),
            natively=lambda m: CRITERION(torch.cat([m(STEPS[:3]), m(STEPS[3:6, :5])]), Y[:6]),
            micro_batch_size=3,
        ),
    ),
    (
        "a BatchSource of size {} has nothing to split; give it one sample or more",
        wrong("a source of size 0"),
        lambda: exact(inputs=ib.BatchSource(12, counted), natively=WHOLE),
    ),
    (
        "rows must be a callable (begin, end) -> pytree, not {}",
        wrong("a source without a function"),
        lambda: exact(inputs=ib.BatchSource(12, counted), natively=WHOLE),
    ),
    (
        "the BatchSource was asked for rows {} to {} and gave {}; it must give end - begin",
        wrong("a source that gives too little"),
        lambda: exact(inputs=ib.BatchSource(12, counted), natively=WHOLE),
    ),
    (
        "{} takes {}, but is called with ({}): {}: ...",
        lambda: ib.BatchSource(12, lambda begin: X),
        lambda: exact(inputs=ib.BatchSource(12, lambda begin, end: X[begin:end]), natively=WHOLE),
    ),
    (
        "with one entry for each of {} samples and no tensor in it",
        wrong("targets that are numbers"),
        lambda: exact(targets=torch.tensor(Y.tolist()), natively=WHOLE),
    ),
    (
        "{} is a list of {} tensors without dimensions; stack it into one tensor: torch.stack({})",
        lambda: step(targets=list(Y)),
        lambda: exact(targets=torch.stack(list(Y)), natively=WHOLE),
    ),
    (
        "across_batch needs tensors whose first dimension is the batch; it was given a {}",
        lambda: step(Calls(lambda self, x: ib.across_batch(torch.sin, 3), net=mlp())),
        lambda: exact(
            Calls(lambda self, x: self.net(ib.across_batch(lambda x: x - x.mean(0), x)), net=mlp()),
            natively=lambda m: CRITERION(m.net(X - X.mean(0)), Y),
        ),
    ),
    (
        "the first argument of across_batch must be a function of the inputs that follow it",
        wrong("across_batch with its arguments swapped"),
        lambda: ib.across_batch(torch.sin, X),
    ),
    (
        "the function of across_batch returned a {}; it must return a tensor",
        lambda: ib.across_batch(lambda x: x.tolist(), X),
        lambda: ib.across_batch(lambda x: torch.tensor(x.tolist()), X),
    ),
    (
        "it must return one row for each, as in value.expand(len(x), …)",
        lambda: step(
            Calls(lambda self, x: self.net(x) + ib.across_batch(lambda x: x.mean(), x), net=mlp())
        ),
        lambda: exact(
            Calls(
                lambda self, x: (
                    self.net(x) + ib.across_batch(lambda x: x.mean().expand(len(x), 1), x)
                ),
                net=mlp(),
            ),
            natively=lambda m: CRITERION(m.net(X) + X.mean(), Y),
        ),
    ),
    (
        "across_batch needs tensors whose first dimension is the batch; one has no dimension",
        lambda: step(
            Calls(lambda self, x: ib.across_batch(lambda x: x, SCALE) * self.net(x), net=mlp())
        ),
        lambda: exact(
            Calls(
                lambda self, x: ib.across_batch(lambda x: x, x).sum(1)[:, None] * self.net(x),
                net=mlp(),
            ),
            natively=lambda m: CRITERION(X.sum(1)[:, None] * m.net(X), Y),
        ),
    ),
    (
        "its first dimension does not hold the samples",
        lambda: step(
            Calls(lambda self, x: self.net(ib.across_batch(lambda x: x, x.T).T), net=mlp())
        ),
        lambda: exact(
            Calls(lambda self, x: self.net(ib.across_batch(lambda x: x, x)), net=mlp()),
            natively=lambda m: CRITERION(m.net(X), Y),
        ),
    ),
    # Dimensions are named where their size fits.
    (
        "{}: {}, so micro-batches cannot give the gradient of all {}.",
        lambda: step(counting()),
        lambda message: (
            no_dimension(message),
            exact(
                Calls(
                    lambda self, x: self.net(ib.across_batch(lambda x: x - x.mean(), x)), net=mlp()
                ),
                natively=lambda m: CRITERION(m.net(X - X.mean()), Y),
            ),
            exact(counting(), micro_batch_size=12),
            step(counting(), batch_coupling="per_micro_batch", micro_batch_size=4),
        ),
    ),
    (
        "{}: {}, so micro-batches cannot give the gradient of all {}.",
        lambda: exact(time_first(averaging), STEPS, TARGETS, last),
        lambda message: (
            no_shared(message),
            exact(
                time_first(averaging),
                STEPS,
                TARGETS,
                last,
                batch_dim=int(between(message, "say batch_dim=", ".")),
            ),
        ),
    ),
    (
        "{}: {}, so micro-batches cannot give the gradient of all {}.",
        lambda: exact(time_first(averaging), STEPS, TARGETS, last, wrapped=True),
        lambda message: exact(
            time_first(averaging),
            STEPS,
            TARGETS,
            last,
            wrapped=True,
            batch_dim=int(between(message, "say batch_dim=", ".")),
        ),
    ),
]


def counting():
    return Calls(lambda self, x: self.net(x - x.mean().item()), net=mlp())


def averaging(self, x):
    """Over time, the first dimension, without a trace."""
    return self.net(x - torch.tensor(x.mean(0).tolist(), dtype=x.dtype))


def between(text, begin, end):
    assert begin in text, text
    return text.split(begin)[1].split(end)[0]


def no_dimension(message):
    assert "batch_dim" not in message and "shared" not in message, message


def no_shared(message):
    assert "shared" not in message, message
