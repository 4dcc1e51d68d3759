"""Ways out of errors of the Trainer, its callbacks and loaders: what provokes one, and what its message
says."""

import tempfile
from pathlib import Path

import infinitybatch as ib
import torch
from followed_support import Case
from test_trainer_misuse import ADAM, LOSS, MODEL, STEP_LR, make
from test_trainer_misuse import MISUSE as TRAINER
from torch import nn
from trainer_support import BATCHES, X, Y, bits, equal, net, shuffled, trainer

ADAM_OF = torch.optim.Adam
FOLDER = Path(tempfile.mkdtemp())


def trains(run=None, **options):
    """One epoch that changes the model."""
    run = make(**options) if run is None else run
    before = bits(run.model)
    assert len(run(1)) == 1
    assert not equal(before, bits(run.model))
    return run


def generator():
    yield from BATCHES


def within_a_run(act):
    """`act(trainer)` in the middle of a run."""

    class Acts(ib.Callback):
        def on_batch_end(self, event):
            act(event.trainer)

    return make(callbacks=Acts())(1)


def after_a_stop(act):
    class Stops(ib.Callback):
        def on_batch_end(self, event):
            event.trainer.stop()

    run = make(callbacks=Stops())
    run(1)
    run.callbacks = []
    return act(run)


def sets_loader(run):
    run.epoch()
    run.loader = shuffled()
    trains(run)


def thawed():
    model = net().requires_grad_(False)
    for parameter in model.parameters():
        parameter.requires_grad_()
    return make(model=model, optimizer=ADAM_OF(model.parameters()))


def new_optimizer(schedule):
    model = net()
    first = ADAM_OF(model.parameters())
    run = make(model=model, optimizer=first, schedule=STEP_LR(first, 1))
    run.optimizer = ADAM_OF(model.parameters())
    schedule(run)
    run(1)


def replaced(remake):
    model = net(dropout=False)
    run = trainer(model)
    run(1)
    model[2] = nn.Linear(8, 4).double()
    if remake:
        run.optimizer = torch.optim.Adam(run.model.parameters())
    trains(run)


def saved():
    run = make()
    run.save(FOLDER / "training.pt")
    return make().load(FOLDER / "training.pt")


def plateau(by):
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(ADAM)
    run = make(schedule=schedule, schedule_by=by)
    outputs = MODEL(X)
    LOSS(outputs, Y).backward()
    run.step()


def plateau_with_its_loss():
    schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(ADAM)
    run = make(schedule=schedule, schedule_by="step")
    loss = LOSS(MODEL(X), Y)
    loss.backward()
    run.step(loss)


def unscaled(backward):
    run = make(grad_scaler=torch.amp.GradScaler("cpu"))
    loss = LOSS(MODEL(X), Y)
    backward(run, loss)
    run.step()


CASES: list[Case] = [
    (
        "model is the class {} itself; give an instance: {}(...)",
        TRAINER["model is a class"][0],
        lambda: trains(),
    ),
    (
        "they stand the other way round, VirtualBatch(model, loss)",
        TRAINER["model and loss"][0],
        lambda: trains(model=MODEL, loss=LOSS),
    ),
    (
        "optimizer must be an instance of torch.optim.Optimizer, not {}: torch.optim.Adam(model.parameters())",
        TRAINER["optimizer is a class"][0],
        lambda: trains(optimizer=torch.optim.Adam(MODEL.parameters())),
    ),
    (
        "use SGD, Adam or another optimizer without a closure",
        TRAINER["LBFGS"][0],
        lambda: (
            trains(optimizer=torch.optim.SGD(MODEL.parameters(), lr=0.1)),
            trains(optimizer=ADAM),
        ),
    ),
    (
        "make it of them: torch.optim.Adam(model.parameters())",
        TRAINER["optimizer of another model"][0],
        lambda: trains(model=(m := net()), optimizer=torch.optim.Adam(m.parameters())),
    ),
    (
        "there is nothing to train: parameter.requires_grad_()",
        TRAINER["frozen model"][0],
        lambda: trains(thawed()),
    ),
    (
        "make it anew, trainer.optimizer = torch.optim.Adam(trainer.model.parameters())",
        lambda: replaced(False),
        lambda: replaced(True),
    ),
    (
        "schedule must be one of torch.optim.lr_scheduler, not {}: StepLR(optimizer, step_size=10)",
        TRAINER["schedule"][0],
        lambda: trains(schedule=STEP_LR(ADAM, step_size=10)),
    ),
    (
        "make it with that one, StepLR(optimizer, step_size=10)",
        TRAINER["schedule of another optimizer"][0],
        lambda: trains(schedule=STEP_LR(ADAM, step_size=10)),
    ),
    (
        "trainer.schedule = StepLR(trainer.optimizer, 10), or set it to None",
        lambda: new_optimizer(lambda run: None),
        lambda: (
            new_optimizer(lambda run: setattr(run, "schedule", STEP_LR(run.optimizer, 10))),
            new_optimizer(lambda run: setattr(run, "schedule", None)),
        ),
    ),
    ("clip_norm must be a number, not {}", TRAINER["clip_norm"][0], lambda: trains(clip_norm=1.0)),
    (
        "clip_norm is {}; it is above 0, or None",
        TRAINER["clip_norm 0"][0],
        lambda: (trains(clip_norm=0.1), trains(clip_norm=None)),
    ),
    (
        "must have a method `scale` as torch.amp.GradScaler has, not be a {}",
        TRAINER["grad_scaler"][0],
        lambda: trains(grad_scaler=torch.amp.GradScaler("cpu")),
    ),
    (
        "override the method of an event in a class of your own, class Mine(ib.Callback)",
        TRAINER["callback"][0],
        lambda: trains(
            callbacks=type(
                "Mine", (ib.Callback,), {"on_batch_end": lambda self, event: print(end="")}
            )()
        ),
    ),
    (
        "batches_per_epoch is {}; an epoch has at least 1 batch",
        TRAINER["batches_per_epoch"][0],
        lambda: trains(batches_per_epoch=1),
    ),
    (
        "loader must be an iterable of batches, or a function that makes one for each epoch",
        TRAINER["loader"][0],
        lambda: [
            trains(loader=given)
            for given in (shuffled(), BATCHES, ib.windows(BATCHES, batches=2), generator)
        ],
    ),
    (
        "loader is a tensor; give batches, as in loader=[(inputs, targets)]",
        TRAINER["loader is a tensor"][0],
        lambda: trains(loader=[(X, Y)]),
    ),
    (
        "loader is a {}; give batches, as in [(inputs, targets)]",
        TRAINER["loader is a dict"][0],
        lambda: trains(loader=[(X, Y)]),
    ),
    (
        "make pairs with a generator: (((a, b), y) for a, b, y in loader)",
        TRAINER["loader gives triples"][0],
        lambda: trains(
            model=(m := Two()),
            optimizer=ADAM_OF(m.parameters()),
            loader=lambda: (((a, b), y) for a, b, y in [(X, X, Y)]),
        ),
    ),
    (
        "the loader is a generator that has ended, and another epoch begins; give a function that makes it",
        TRAINER["generator of one epoch"][0],
        lambda: make(loader=lambda: generator())(2),
    ),
    (
        "the loader is a generator that has given {} batches, and the state is after {}; give a new one, or a function that makes it",
        TRAINER["a generator back"][0],
        lambda: trains(loader=lambda: generator()),
    ),
    (
        "the loader gave no batch in epoch {}; give one that can be gone through once an epoch",
        TRAINER["empty loader"][0],
        lambda: trains(loader=BATCHES),
    ),
    (
        "the loader's function gave a {}; it makes an iterable of batches for one epoch",
        TRAINER["factory of nothing"][0],
        lambda: trains(loader=lambda: iter(BATCHES)),
    ),
    (
        "targets={} is no entry of a batch of the loader, which has {}",
        TRAINER["targets name"][0],
        lambda: trains(
            model=(m := Named()),
            optimizer=ADAM_OF(m.parameters()),
            loader=[{"x": X, "y": Y}],
            targets="y",
        ),
    ),
    ("epochs is {}; it is 0 or more", TRAINER["epochs below 0"][0], lambda: make()(0)),
    (
        "this trainer runs already, around this call; end that run with trainer.stop() first",
        TRAINER["run in a callback"][0],
        lambda: after_a_stop(trains),
    ),
    (
        "trainer.step() is for loops of your own, and this trainer runs its own loop",
        TRAINER["step in a callback"][0],
        lambda: (LOSS(MODEL(X), Y).backward(), make().step()),
    ),
    (
        "{} cannot be another one while the trainer runs: stop() first",
        TRAINER["optimizer in a callback"][0],
        lambda: after_a_stop(
            lambda run: (run.epoch(), setattr(run, "optimizer", ADAM_OF(MODEL.parameters())))
        ),
    ),
    (
        "end it with trainer.epoch() before the loader is another",
        TRAINER["loader in an epoch"][0],
        lambda: after_a_stop(sets_loader),
    ),
    (
        "metric '{}' gave a tensor of shape {} for one slice of {} samples; reduce it with .mean()",
        TRAINER["a metric of rows"][0],
        lambda: make().evaluate(
            BATCHES, {"right": lambda o, t: (o.argmax(1) == t).double().mean()}
        ),
    ),
    (
        "metric '{}' must be callable as metric(outputs, targets), or have update and compute",
        TRAINER["metric"][0],
        lambda: make().evaluate(BATCHES, {"a": lambda outputs, targets: outputs.mean()}),
    ),
    (
        "path is '{}': there is no folder {}: mkdir -p {}",
        lambda: make().save(FOLDER / "no/training.pt"),
        lambda message: (
            Path(message.split("mkdir -p ")[1]).mkdir(parents=True),
            make().save(FOLDER / "no/training.pt"),
        ),
    ),
    (
        "give what trainer.state_dict() returned, or what trainer.save(path) wrote",
        TRAINER["state"][0],
        lambda: (make().load_state_dict(make().state_dict()), saved()),
    ),
    (
        "which cannot be read as a checkpoint of a Trainer ({}); give a file that trainer.save(path) wrote",
        TRAINER["file of something else"][0],
        saved,
    ),
    (
        "call state_dict in on_batch_end",
        lambda: state_at("on_micro_batch"),
        lambda: state_at("on_batch_end"),
    ),
    (
        "the trainer runs; load a state between two runs",
        lambda: within_a_run(lambda run: run.load_state_dict(run.state_dict())),
        lambda: (run := trains(), run.load_state_dict(run.state_dict())),
    ),
    (
        "a Trainer cannot be copied or pickled, for its loader is in use: trainer.save(path), and load(path)",
        lambda: __import__("copy").deepcopy(make()),
        saved,
    ),
    (
        "unlike the one of the state; make the trainer as that one was made",
        lambda: state_of(schedule=STEP_LR(ADAM, 1)),
        lambda: state_of(),
    ),
    (
        "ReduceLROnPlateau goes on after each step and reads its loss: step(loss), or schedule_by=",
        lambda: plateau("step"),
        lambda: (plateau_with_its_loss(), plateau("epoch")),
    ),
    (
        "trainer.backward(loss) in place of loss.backward()",
        lambda: unscaled(lambda run, loss: loss.backward()),
        lambda: unscaled(lambda run, loss: run.backward(loss)),
    ),
]


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net()

    def forward(self, a, b):
        return self.net(a + b)


class Named(Two):
    def forward(self, x):
        return self.net(x)


def state_at(event):
    class Keeps(ib.Callback):
        pass

    setattr(Keeps, event, lambda self, event: event.trainer.state_dict())
    make(callbacks=Keeps())(1)


def state_of(**options):
    make().load_state_dict(make(**options).state_dict())
