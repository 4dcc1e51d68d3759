"""Ways out of errors of windows of loaders and of callbacks: what provokes one, and what its message
says."""

import infinitybatch as ib
import torch
from followed_support import Case
from followed_trainer import trains
from infinitybatch.callbacks import EMA, Checkpoint, EarlyStopping, NoiseScale
from test_trainer_misuse import LOSS, make
from test_windows import MISUSE as WINDOWS
from torch import nn
from trainer_support import BATCHES, X, Y, net, trainer


def windows(*loaders, **options):
    options = options or {"batches": 2}
    assert len(list(ib.windows(*(loaders or (BATCHES,)), **options))) > 0


def named(batch):
    return {"x": batch[0], "y": batch[1]}


def averaged(train):
    ema = EMA(0.9)
    run = make(callbacks=ema)
    if train:
        run(1)
    with ema.applied():
        pass
    return ema


def moved_ema(other=None):
    alone = EMA(0.9)
    alone.load_state_dict(averaged(True).state_dict())
    with alone.applied(other) if other is not None else alone.applied():
        pass


def in_applied(inside):
    ema = EMA(0.9)
    run = make(callbacks=ema)
    run(1)
    with ema.applied():
        if inside:
            run(1)
    trains(run)


def stopping(monitor):
    run = make(callbacks=EarlyStopping(3, monitor))
    run(1)
    run.evaluate(BATCHES, {"right": lambda o, t: (o.argmax(1) == t).double().mean()})


def state_into(saved_by, loaded_by):
    run = make(callbacks=saved_by)
    run(1)
    make(callbacks=loaded_by).load_state_dict(run.state_dict())


def efficiency(value):
    noise = NoiseScale()
    trains(trainer(callbacks=noise, micro_batch_size=5))
    noise.largest_useful_batch(value)


CASES: list[Case] = [
    # Windows of a loader.
    ("windows needs an iterable of batches, not {}", WINDOWS["no iterable"][0], lambda: windows()),
    (
        "windows needs either batches= or samples=, and got {}: windows(loader, batches=8)",
        WINDOWS["no size"][0],
        lambda: windows(BATCHES, batches=8),
    ),
    (
        "{} must be at least 1, not {}",
        WINDOWS["no batches"][0],
        lambda: windows(BATCHES, batches=1),
    ),
    ("{} must be an int, not {}", WINDOWS["a fraction"][0], lambda: windows(BATCHES, samples=1)),
    (
        "make pairs with a generator: (((a, b), y) for a, b, y in loader)",
        WINDOWS["triples"][0],
        lambda: windows((((a, b), y) for a, b, y in [(X, X, Y)])),
    ),
    (
        "targets={} is no entry of a batch of the loader, which has {}",
        WINDOWS["an entry that is not there"][0],
        lambda: windows(map(named, BATCHES), batches=2, targets="y"),
    ),
    (
        "targets={} names an entry of mappings, and the loader gives {}",
        WINDOWS["an entry of pairs"][0],
        lambda: (windows(), windows(map(named, BATCHES), batches=2, targets="y")),
    ),
    (
        "a batch of the loader needs tensors of one size along their first dimension",
        WINDOWS["inputs and targets of other lengths"][0],
        lambda: windows([(X, Y)], samples=4),
    ),
    (
        "the loader gives pairs (inputs, targets), and inputs alone",
        WINDOWS["pairs and inputs alone"][0],
        lambda: windows([(X, Y), (X, Y)]),
    ),
    (
        "pieces of shapes {} cannot be joined, and a micro-batch lies in both; pad all pieces alike",
        WINDOWS["rows of other lengths"][0],
        lambda: next(
            iter(ib.windows([(X, Y), (torch.nn.functional.pad(X[:, :3], (0, 3)), Y)], batches=2))
        )[0].rows(40, 60),
    ),
    # Callbacks.
    ("patience is {}; it is 1 or more epochs", lambda: EarlyStopping(0), lambda: EarlyStopping(1)),
    (
        'mode is {}; it is "min" or "max"',
        lambda: EarlyStopping(1, mode="best"),
        lambda: (EarlyStopping(1, mode="min"), EarlyStopping(1, mode="max")),
    ),
    (
        "monitor is {}, and the evaluation has {}; name one of its metrics",
        lambda: stopping("wrong"),
        lambda message: stopping("right" if "right" in message else ""),
    ),
    ("decay is {}; it is at least 0 and below 1", lambda: EMA(1.0), lambda: (EMA(0.0), EMA(0.999))),
    ("decay must be a number, not {}", lambda: EMA("a half"), lambda: EMA(0.5)),
    (
        "braces in it are {epoch} and {step}, or doubled where they are meant ({})",
        lambda: Checkpoint("{epochs}.pt"),
        lambda: (Checkpoint("{epoch}-{step}.pt"), Checkpoint("{{epochs}}.pt")),
    ),
    (
        "there are no averages to apply: {}; train first, or load",
        lambda: averaged(False),
        lambda: averaged(True),
    ),
    (
        "these averages have no model: applied(model), or give them a trainer",
        moved_ema,
        lambda: (moved_ema(net()), averaged(True)),
    ),
    (
        "averages are of another model: there is none for its {}",
        lambda: moved_ema(nn.Linear(2, 2)),
        lambda: moved_ema(net()),
    ),
    (
        "averages are applied; train after `with ema.applied()` has ended",
        lambda: in_applied(True),
        lambda: in_applied(False),
    ),
    (
        "the state is of an EMA with decay {}, and this one has {}; give the callbacks in the order of the saved trainer",
        lambda: state_into([EMA(0.9), EMA(0.5)], [EMA(0.5), EMA(0.9)]),
        lambda: state_into([EMA(0.9), EMA(0.5)], [EMA(0.9), EMA(0.5)]),
    ),
    (
        "the state is of an EarlyStopping that monitors {}, and this one monitors {}; give the callbacks in the order",
        lambda: state_into(
            [EarlyStopping(3, "loss"), EarlyStopping(3, "evaluation")],
            [EarlyStopping(3, "evaluation"), EarlyStopping(3, "loss")],
        ),
        lambda: state_into(
            [EarlyStopping(3, "loss"), EarlyStopping(3, "evaluation")],
            [EarlyStopping(3, "loss"), EarlyStopping(3, "evaluation")],
        ),
    ),
    (
        "make the trainer with the callbacks that it was saved with, and others after loading: trainer.callbacks = [...]",
        lambda: state_into([EMA(0.9)], []),
        lambda: state_into([EMA(0.9)], [EMA(0.9)]),
    ),
    (
        "{} is {}; it is 1 or more",
        lambda: Checkpoint("x", every_steps=-1),
        lambda: Checkpoint("x", every_steps=1),
    ),
    ("{} must be a path, not {}", lambda: Checkpoint(3), lambda: Checkpoint("3")),
    (
        'fields is {}, one string: Progress(["epoch", "loss"])',
        lambda: ib.Progress("loss"),
        lambda: ib.Progress(["epoch", "loss"]),
    ),
    ("fields must be names, not {}", lambda: ib.Progress([1]), lambda: ib.Progress(["epoch"])),
    (
        "interval is {}; it is 0 seconds or more",
        lambda: ib.Progress(interval=-1),
        lambda: ib.Progress(interval=0),
    ),
    (
        'interval must be seconds, None or "auto", not {}',
        lambda: ib.Progress(interval="often"),
        lambda: [ib.Progress(interval=given) for given in (1.5, None, "auto")],
    ),
    (
        'For example: format="{epoch}/{epochs} loss {loss:.3f}"',
        lambda: ib.Progress(format="{loss"),
        lambda: ib.Progress(format="{epoch}/{epochs} loss {loss:.3f}"),
    ),
    (
        "format must be a string, not {}",
        lambda: ib.Progress(format=3),
        lambda: ib.Progress(format="{epoch}"),
    ),
    ("decay must be a number, not {}", lambda: NoiseScale("much"), lambda: NoiseScale(0.9)),
    (
        "decay is {}; it must be at least 0 and below 1",
        lambda: NoiseScale(1),
        lambda: NoiseScale(0),
    ),
    (
        "efficiency is {}; it must be above 0 and below 1",
        lambda: efficiency(1),
        lambda: efficiency(0.5),
    ),
    ("efficiency must be a number, not {}", lambda: efficiency("a"), lambda: efficiency(0.5)),
    (
        "no step of two or more micro-batches was measured yet; train a step whose micro_batch_size is at most half",
        lambda: NoiseScale().largest_useful_batch(0.5),
        lambda: efficiency(0.5),
    ),
    (
        "declare it with ib.losses.separable(sum, denominator) if it is one, or train without NoiseScale",
        lambda: noise_of(ib.losses.coupled(LOSS)),
        lambda: (
            noise_of(
                ib.losses.separable(
                    lambda o, t: nn.functional.cross_entropy(o, t, reduction="sum"), len
                )
            ),
            trains(loss=ib.losses.coupled(LOSS)),
        ),
    ),
    (
        "so that NoiseScale would measure something else; train without one of them",
        lambda: trains(callbacks=NoiseScale(), batch_coupling="per_micro_batch"),
        lambda: (trains(callbacks=NoiseScale()), trains(batch_coupling="per_micro_batch")),
    ),
    (
        "which does not say which entries are kept: {}=ib.histories.last(100)",
        lambda: ib.histories.History(outputs=10),
        lambda: ib.histories.History(outputs=ib.histories.last(100)),
    ),
    ("{} is {}; it is 1 or more", lambda: ib.histories.last(0), lambda: ib.histories.last(1)),
]


def noise_of(loss):
    return trains(loss=loss, callbacks=NoiseScale())
