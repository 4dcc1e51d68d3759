"""What a Trainer refuses, and what it notices of parts that others have changed."""

import re
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import infinitybatch as ib
import pytest
import torch
from torch import nn
from trainer_support import BATCHES, X, Y, bits, dataset, equal, net, shuffled, trainer

MODEL = net()
ADAM = torch.optim.Adam(MODEL.parameters())
LOSS = nn.CrossEntropyLoss()


def make(
    model: Any = MODEL, loss: Any = LOSS, optimizer: Any = ADAM, loader: Any = BATCHES, **more: Any
) -> ib.Trainer:
    return ib.Trainer(model, loss, optimizer, loader, micro_batch_size=7, **more)


def frozen() -> nn.Module:
    return net().requires_grad_(False)


def ended() -> Any:
    batches = iter(BATCHES)
    list(batches)
    return batches


def run_in_callback() -> None:
    class Runs(ib.Callback):
        def on_batch_end(self, event: Any) -> None:
            event.trainer(1)

    make(callbacks=Runs())(1)


def set_in_callback(name: str) -> Callable[[], None]:
    class Sets(ib.Callback):
        def on_batch_end(self, event: Any) -> None:
            setattr(event.trainer, name, getattr(event.trainer, name))

    return lambda: make(callbacks=Sets())(1) and None


def other_state(**changes: Any) -> Callable[[], None]:
    return lambda: make().load_state_dict({**make().state_dict(), **changes})


def step_in_callback() -> None:
    class Steps(ib.Callback):
        def on_batch_end(self, event: Any) -> None:
            event.trainer.step()

    make(callbacks=Steps())(1)


def loader_within_an_epoch() -> None:
    class Stops(ib.Callback):
        def on_batch_end(self, event: Any) -> None:
            event.trainer.stop()

    run = make(callbacks=Stops())
    run(1)
    run.loader = shuffled()


def optimizer_without_its_schedule() -> None:
    run = make(schedule=STEP_LR(ADAM, 1))
    run.optimizer = torch.optim.Adam(MODEL.parameters())
    run(1)


def back_with_a_generator(event: str) -> Callable[[], None]:
    """To a state that it has passed, or to a batch that is gone."""

    class Keeps(ib.Callback):
        state: Any = None

    def keep(self: Any, event: Any) -> None:
        self.state = event.trainer.state_dict()
        event.trainer.stop()

    setattr(Keeps, event, keep)

    def go() -> None:
        keeps = Keeps()
        run = make(loader=iter(BATCHES), callbacks=keeps)
        if event == "on_epoch_begin":
            run(1)
        else:
            with pytest.raises(ZeroDivisionError):
                run.callbacks = keeps + Raises()
                run(1)
        run.load_state_dict(keeps.state)
        run(1)

    return go


def written(content: bytes) -> str:
    path = Path(tempfile.mkdtemp()) / "training.pt"
    path.write_bytes(content)
    return str(path)


class Raises(ib.Callback):
    def on_batch_begin(self, event: Any) -> None:
        raise ZeroDivisionError


STEP_LR = torch.optim.lr_scheduler.StepLR
MISUSE: dict[str, tuple[Callable[[], Any], type, str]] = {
    "model": (lambda: make(model=3), ib.InvalidType, "model"),
    "model is a class": (lambda: make(model=nn.Linear), ib.InvalidType, "Linear"),
    "loss": (lambda: make(loss=3), ib.InvalidType, "loss"),
    "loss is a class": (lambda: make(loss=nn.MSELoss), ib.InvalidType, "MSELoss"),
    "model and loss": (
        lambda: make(LOSS, nn.Linear(2, 2)),
        ib.InvalidType,
        "the other way round",
    ),
    "optimizer": (lambda: make(optimizer=None), ib.InvalidType, "NoneType: torch.optim.Adam"),
    "optimizer is a class": (
        lambda: make(optimizer=torch.optim.Adam),
        ib.InvalidType,
        "optimizer must be an instance",
    ),
    "LBFGS": (
        lambda: make(optimizer=torch.optim.LBFGS(MODEL.parameters())),
        ib.InvalidType,
        "LBFGS asks for the loss several times",
    ),
    "optimizer of another model": (
        lambda: make(model=net()),
        ib.InvalidArgument,
        "has none of the model's 4 parameters",
    ),
    "frozen model": (lambda: make(model=frozen()), ib.InvalidArgument, "none of the model's 4"),
    "schedule": (lambda: make(schedule=0.1), ib.InvalidType, "schedule must be one of"),
    "schedule is a class": (lambda: make(schedule=STEP_LR), ib.InvalidType, "the class StepLR"),
    "schedule of another optimizer": (
        lambda: make(schedule=STEP_LR(torch.optim.Adam(net().parameters()), 1)),
        ib.InvalidArgument,
        "another optimizer",
    ),
    "schedule_by": (
        lambda: make(schedule_by="batch"),
        ib.InvalidArgument,
        "schedule_by is 'batch'",
    ),
    "clip_norm": (lambda: make(clip_norm="big"), ib.InvalidType, "clip_norm must be a number"),
    "clip_norm 0": (lambda: make(clip_norm=0), ib.InvalidArgument, "clip_norm is 0"),
    "clip_norm nan": (lambda: make(clip_norm=float("nan")), ib.InvalidArgument, "clip_norm is nan"),
    "grad_scaler": (lambda: make(grad_scaler=2.0), ib.InvalidType, "grad_scaler must have"),
    "scaler": (lambda: make(scaler=None), ib.InvalidArgument, "use grad_scaler"),
    "callback": (lambda: make(callbacks=print), ib.InvalidType, "callbacks must be Callback"),
    "callbacks": (lambda: make(callbacks=[ib.Callback]), ib.InvalidType, "not Callback"),
    "batches_per_epoch": (lambda: make(batches_per_epoch=0), ib.InvalidArgument, "at least 1"),
    "batches_per_epoch half": (lambda: make(batches_per_epoch=0.5), ib.InvalidType, "whole number"),
    "memory_budget": (lambda: make(memory_budget="much"), ib.InvalidArgument, "much"),
    "micro_batch_size": (
        lambda: ib.Trainer(MODEL, LOSS, ADAM, BATCHES, micro_batch_size=0)(1),
        ib.InvalidArgument,
        "micro_batch_size",
    ),
    "loader": (lambda: make(loader=7), ib.InvalidType, "loader must be an iterable"),
    "loader is a tensor": (lambda: make(loader=X), ib.InvalidType, "loader is a tensor"),
    "loader is a dict": (lambda: make(loader={"x": X}), ib.InvalidType, "loader is a dict"),
    "loader gives numbers": (lambda: make(loader=[1, 2])(1), ib.InvalidType, "each batch"),
    "loader gives triples": (lambda: make(loader=[(X, X, Y)])(1), ib.InvalidType, "tuple of 3"),
    "loader gives samples": (lambda: make(loader=dataset())(1), ib.InvalidType, "a DataLoader"),
    "empty loader": (lambda: make(loader=[])(1), ib.StateError, "gave no batch in epoch 0"),
    "ended generator": (lambda: make(loader=ended())(1), ib.StateError, "loader=lambda"),
    "generator of one epoch": (
        lambda: make(loader=iter(BATCHES))(2),
        ib.StateError,
        "loader=lambda",
    ),
    "factory of nothing": (lambda: make(loader=lambda: None)(1), ib.InvalidType, "gave a NoneType"),
    "targets name": (
        lambda: make(loader=[{"x": X}], targets="y")(1),
        ib.InvalidType,
        "targets='y' is no entry",
    ),
    "unequal sizes": (lambda: make(loader=[(X, Y[:9])])(1), ib.BatchError, "9"),
    "epochs below 0": (lambda: make()(-1), ib.InvalidArgument, "epochs is -1"),
    "half an epoch": (lambda: make()(0.5), ib.InvalidType, "epochs must be a whole number"),
    "no_grad": (lambda: torch.no_grad()(make())(1), ib.StateError, "no_grad"),
    "run in a callback": (run_in_callback, ib.StateError, "runs already"),
    "step in a callback": (step_in_callback, ib.StateError, "for loops of your own"),
    "optimizer in a callback": (
        set_in_callback("optimizer"),
        ib.StateError,
        "while the trainer runs",
    ),
    "model in a callback": (set_in_callback("model"), ib.StateError, "while the trainer runs"),
    "loader in an epoch": (loader_within_an_epoch, ib.StateError, "end it with trainer.epoch"),
    "step without gradients": (
        lambda: (ADAM.zero_grad(), make().step()),
        ib.StateError,
        "no parameter of the optimizer has a gradient",
    ),
    "optimizer without its schedule": (
        optimizer_without_its_schedule,
        ib.StateError,
        "was one of the optimizer before",
    ),
    "a generator back": (
        back_with_a_generator("on_epoch_begin"),
        ib.StateError,
        "has given 1 batches, and the state is after 0",
    ),
    "a generator's batch at work": (
        back_with_a_generator("on_batch_begin"),
        ib.StateError,
        "has already given the current batch",
    ),
    "metric": (lambda: make().evaluate(BATCHES, {"a": 3}), ib.InvalidType, "metric 'a'"),
    "evaluate nothing": (lambda: make().evaluate([]), ib.StateError, "no batch"),
    "state": (lambda: make().load_state_dict({}), ib.InvalidArgument, "not the state of a Trainer"),
    "a metric of rows": (
        lambda: make().evaluate(BATCHES, {"right": lambda o, t: o.argmax(1) == t}),
        ib.InvalidType,
        "metric 'right' gave a tensor of shape (7,) for one slice",
    ),
    "a folder that is not there": (
        lambda: make().save("/nowhere/training.pt"),
        ib.InvalidArgument,
        "there is no folder /nowhere: mkdir -p /nowhere",
    ),
    "batch_size": (lambda: make(batch_size=64), ib.InvalidArgument, "ib.windows(loader, samples"),
    "epochs": (lambda: make(epochs=3), ib.InvalidArgument, "trainer(epochs)"),
    "lr": (lambda: make(lr=0.1), ib.InvalidArgument, "torch.optim.Adam(model.parameters(), lr="),
    "metrics": (lambda: make(metrics={}), ib.InvalidArgument, "trainer.evaluate(loader, metrics)"),
    "file of something else": (
        lambda: make().load(written(b"abc")),
        ib.InvalidArgument,
        "cannot be read as a checkpoint",
    ),
    "state of a schedule": (other_state(schedule={}), ib.InvalidArgument, "has none for schedule"),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse(name: str) -> None:
    call, error, message = MISUSE[name]
    before = bits(MODEL)
    with pytest.raises(error, match=re.escape(message)):
        call()
    if name not in ("generator of one epoch", "loader in an epoch") and "callback" not in name:
        assert equal(before, bits(MODEL))


def test_a_generator_that_has_raised_is_not_taken_for_ended() -> None:
    def batches() -> Any:
        yield BATCHES[0]
        raise ZeroDivisionError

    run = make(loader=batches())
    with pytest.raises(ZeroDivisionError):
        run(1)
    with pytest.raises(ib.StateError, match="has raised and cannot go on"):
        run(1)
    assert run.epochs_done == 0


def test_replaced_parameters_are_noticed_between_epochs_and_within_one() -> None:
    model = net(dropout=False)
    run = trainer(model)
    run(1)
    model[2] = nn.Linear(8, 4).double()
    before = bits(model)
    with pytest.raises(ib.StateError, match=r"2 of the model's .* \('2.weight', '2.bias'\)"):
        run(1)
    assert equal(before, bits(model))
    run.optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    run(1)
    assert not equal(before, bits(model))

    class Replaces(ib.Callback):
        def on_batch_end(self, event: Any) -> None:
            for name, parameter in list(model.named_parameters()):
                owner, _, key = name.rpartition(".")
                setattr(model.get_submodule(owner), key, nn.Parameter(parameter.detach().clone()))

    run.callbacks = Replaces()
    with pytest.raises(ib.StateError, match="no parameter of the optimizer has a gradient"):
        run(1)


def test_a_rebuilt_optimizer_is_noticed() -> None:
    model = net(dropout=False)
    run = trainer(model)
    del run.optimizer.param_groups[0]["params"][0]
    with pytest.raises(ib.StateError, match=r"1 of the model's parameters .* \('0.weight'\)"):
        run(1)


def test_parameters_that_were_never_trained_may_stay_so() -> None:
    model = net(dropout=False)
    run = trainer(model, optimizer=torch.optim.SGD(model[2].parameters(), lr=0.1))
    run(1)
    assert run.epochs_done == 1


def test_a_cast_model_takes_the_optimizer_along_and_says_so() -> None:
    model, native = net(dropout=False).float(), net(dropout=False).float()
    run = trainer(model, loader=[(x.float(), y) for x, y in BATCHES])
    run(1)
    model.double()
    run.loader = BATCHES
    with pytest.warns(
        ib.MovedModelNotice, match=r"^IB106: .*float32 to cpu in float64.* 8 tensors"
    ):
        run(1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(1)
    adam = torch.optim.Adam(native.parameters(), lr=0.01)
    for inputs, targets in [(x.float(), y) for x, y in BATCHES]:
        adam.zero_grad()
        LOSS(native(inputs), targets).backward()
        adam.step()
    native.double()
    for state in adam.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key] = state[key].double()
    for inputs, targets in BATCHES * 2:
        adam.zero_grad()
        LOSS(native(inputs), targets).backward()
        adam.step()
    for a, b in zip(bits(model), bits(native), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_parts_may_be_set_later() -> None:
    one, other = net(dropout=False), net(dropout=False)
    run = trainer(net(dropout=False))
    run.model = one
    run.optimizer = torch.optim.Adam(one.parameters(), lr=0.01)
    run.criterion = nn.MultiMarginLoss()
    run(1)
    expected = ib.Trainer(
        other,
        nn.MultiMarginLoss(),
        torch.optim.Adam(other.parameters(), lr=0.01),
        BATCHES,
        micro_batch_size=7,
    )
    expected(1)
    assert equal(bits(one), bits(other))


def test_parameters_that_join_the_optimizer_are_trained_without_a_word() -> None:
    model = net()
    sgd = torch.optim.SGD(model[-1].parameters(), lr=0.1)
    run = make(model, optimizer=sgd)
    run(1)
    sgd.add_param_group({"params": list(model[0].parameters())})
    before = model[0].weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run(1)
    assert not torch.equal(before, model[0].weight)


def test_counts_of_steps_stay_what_they_are_beside_scalar_parameters() -> None:
    class Tempered(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()
            self.temperature = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x: Any) -> Any:
            return self.inner(x.to(self.temperature.dtype)) * self.temperature

    model = Tempered()
    adam = torch.optim.Adam(model.parameters())
    run = make(model, optimizer=adam)
    run(1)
    dtype = adam.state[model.temperature]["step"].dtype
    model.bfloat16()
    with pytest.warns(ib.errors.MovedModelNotice):
        run(1)
    state = adam.state[model.temperature]
    assert state["step"].dtype == dtype and state["exp_avg"].dtype == torch.bfloat16


def test_a_schedule_that_ends_leaves_whole_steps() -> None:
    def run(by: str, steps: int) -> tuple[ib.Trainer, Any]:
        model = net()
        adam = torch.optim.Adam(model.parameters())
        schedule = torch.optim.lr_scheduler.OneCycleLR(adam, 0.1, total_steps=steps)
        torch.manual_seed(7)
        return make(model, optimizer=adam, schedule=schedule, schedule_by=by), schedule

    short, _ = run("step", 5)
    with pytest.raises(ValueError, match="total steps"):
        short(3)
    assert (short.steps_done, short.epochs_done) == (6, 1)
    by_epoch, _ = run("epoch", 1)
    with pytest.raises(ValueError, match="total steps"):
        by_epoch(3)
    assert (by_epoch.steps_done, by_epoch.epochs_done, len(by_epoch.history)) == (6, 2, 2)
