"""What a trainer's state holds, and that a state that does not fit changes nothing."""

import copy
import os
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import numpy as np
import pytest
import torch
from infinitybatch.callbacks import EMA, EarlyStopping
from torch import nn
from trainer_support import BATCHES, X, Y, bits, equal, net, trainer


class Scaled(nn.Module):
    """A criterion with a parameter and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))
        self.register_buffer("shift", torch.zeros(4, dtype=torch.float64))

    def forward(self, outputs: Any, targets: Any) -> Any:
        return nn.functional.cross_entropy(outputs * self.scale + self.shift, targets)


@pytest.mark.filterwarnings("ignore:IB101")
def test_a_criterion_and_parameters_outside_the_model_go_along(tmp_path: Any) -> None:
    def make() -> tuple[ib.Trainer, Scaled, nn.Parameter]:
        model, loss = net(dropout=False), Scaled()
        outside = nn.Parameter(torch.ones(4, dtype=torch.float64))
        model[0].register_forward_hook(lambda m, i, o: o * outside.sum())
        adam = torch.optim.Adam([*model.parameters(), outside, *loss.parameters()], lr=0.1)
        run = ib.Trainer(model, loss, adam, BATCHES, micro_batch_size=50)
        return run, loss, outside

    run, loss, outside = make()
    run(1)
    loss.shift.fill_(0.25)
    assert loss.scale.item() != 1 and not torch.equal(outside, torch.ones_like(outside))
    run.save(tmp_path / "a.pt")
    again, other_loss, other_outside = make()
    again.load(tmp_path / "a.pt")
    assert equal(bits(loss), bits(other_loss)) and torch.equal(outside, other_outside)
    run(1)
    again(1)
    assert equal(bits(run.model), bits(again.model)) and equal(bits(loss), bits(other_loss))


@pytest.mark.parametrize("kind", ["function", "module", "method"])
def test_a_callable_model_is_saved(kind: str, tmp_path: Any) -> None:
    def make() -> tuple[nn.Module, ib.Trainer]:
        inner = net(batch_norm=kind != "function")
        calls: Any = {"function": lambda x: inner(x), "module": inner, "method": inner.forward}
        model = ib.make_model(calls[kind], list(inner.parameters()))
        sgd = torch.optim.SGD(list(inner.parameters())[1:], lr=0.1)
        run = ib.Trainer(model, nn.CrossEntropyLoss(), sgd, BATCHES, micro_batch_size=50)
        return inner, run

    inner, run = make()
    with torch.no_grad():
        next(inner.parameters()).mul_(2)  # not the optimizer's
    run(1)
    run.save(tmp_path / "a.pt")
    other, again = make()
    again.load(tmp_path / "a.pt")
    assert equal(bits(inner), bits(other))


@pytest.mark.parametrize("method", [False, True])
def test_a_callable_module_is_evaluated_in_evaluation_mode(method: bool) -> None:
    inner = net()
    model = ib.make_model(inner.forward if method else inner, list(inner.parameters()))
    sgd = torch.optim.SGD(inner.parameters(), lr=0.1)
    found = ib.Trainer(model, nn.CrossEntropyLoss(), sgd, BATCHES).evaluate(BATCHES).loss
    assert all(module.training for module in inner.modules())
    inner.eval()
    assert found == pytest.approx(nn.functional.cross_entropy(inner(X), Y).item(), rel=1e-12)


def test_a_state_in_memory_stays_what_it_was() -> None:
    ema = EMA(0.5)
    run = trainer(callbacks=ema)
    run(1)
    state = run.state_dict()
    begun, averages = bits(run.model), copy.deepcopy(ema.averages)
    run(2)
    ended = bits(run.model)
    for _ in range(2):  # nor does what is loaded hold the state's tensors
        run.load_state_dict(state)
        assert equal(begun, bits(run.model))
        assert equal(list(averages.values()), list(ema.averages.values()))
        run(2)
        assert equal(ended, bits(run.model))


def test_a_file_holds_shared_numbers_once(tmp_path: Any) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(200, 200)
            self.b = nn.Linear(200, 200)
            self.b.weight = self.a.weight

        def forward(self, x: Any) -> Any:
            return self.b(self.a(x))

    model = Tied()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    run = ib.Trainer(model, nn.MSELoss(), sgd, [(torch.ones(2, 200),) * 2])
    run.save(tmp_path / "a.pt")
    torch.save(run.state_dict(), tmp_path / "b.pt")
    assert all(os.path.getsize(tmp_path / name) < 250_000 for name in ("a.pt", "b.pt"))


class Keeps(ib.Callback):
    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> dict[str, Any]:
        return {"deep": [{"value": self.value}]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state["deep"][0]["value"] == "refused":
            raise ZeroDivisionError
        self.value = state["deep"][0]["value"]


class Other(Keeps):
    pass


STEP_LR = torch.optim.lr_scheduler.StepLR


def scheduled(make: Callable[[Any], Any] | None = None, **options: Any) -> ib.Trainer:
    model = net(dropout=False)
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    return trainer(model, optimizer=adam, schedule=make(adam) if make else None, **options)


def chained(optimizer: Any, schedule: Any) -> Any:
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer)
    return torch.optim.lr_scheduler.ChainedScheduler([constant, schedule])


def grouped(order: int) -> ib.Trainer:
    model = net(dropout=False)
    parameters: Any = [*model.parameters()][::order]
    if order == 2:
        parameters = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    return trainer(model, optimizer=torch.optim.Adam(parameters, lr=0.01))


def with_criterion(criterion: nn.Module) -> ib.Trainer:
    model = net(dropout=False)
    return ib.Trainer(model, criterion, torch.optim.Adam(model.parameters()), BATCHES)


def with_sgd() -> ib.Trainer:
    model = net(dropout=False)
    return trainer(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))


CASES: dict[str, tuple[Callable[[], ib.Trainer], Callable[[], ib.Trainer], str]] = {
    "callback added": (scheduled, lambda: scheduled(callbacks=Keeps()), "only this trainer has"),
    "callback left out": (
        lambda: scheduled(callbacks=Keeps() + Keeps()),
        lambda: scheduled(callbacks=Keeps()),
        "only the state has the callback Keeps",
    ),
    "EMAs swapped": (
        lambda: scheduled(callbacks=EMA(0.1) + EMA(0.9)),
        lambda: scheduled(callbacks=EMA(0.9) + EMA(0.1)),
        "EMA with decay 0.1, and this one has 0.9",
    ),
    "EarlyStoppings swapped": (
        lambda: scheduled(callbacks=EarlyStopping(3) + EarlyStopping(3, "right")),
        lambda: scheduled(callbacks=EarlyStopping(3, "right") + EarlyStopping(3)),
        "monitors 'loss', and this one monitors 'right'",
    ),
    "groups": (lambda: grouped(1), lambda: grouped(2), r"1 groups of \[4\].* 2 of \[2, 2\]"),
    "order": (lambda: grouped(1), lambda: grouped(-1), "is model.0.weight, .* model.2.bias"),
    "optimizer": (scheduled, with_sgd, "whose optimizer is Adam, and this one's is SGD"),
    "schedule": (
        lambda: scheduled(lambda o: STEP_LR(o, 2)),
        lambda: scheduled(lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5)),
        "whose schedule is StepLR",
    ),
    "schedules in one": (
        lambda: scheduled(lambda o: chained(o, STEP_LR(o, 2))),
        lambda: scheduled(lambda o: chained(o, torch.optim.lr_scheduler.ExponentialLR(o, 0.5))),
        r"whose schedule is ChainedScheduler\(ConstantLR, StepLR\)",
    ),
    "model's names": (scheduled, lambda: trainer(net()), "'2.bias' is the state's alone"),
    "model's shapes": (
        scheduled,
        lambda: trainer(nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 4)).double()),
        r"'0.bias' is \(9,\) here and \(8,\) in the state",
    ),
    "criterion": (
        lambda: with_criterion(nn.CrossEntropyLoss()),
        lambda: with_criterion(Scaled()),
        "the state's criterion",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_state_that_does_not_fit_changes_nothing(name: str) -> None:
    make, other, message = CASES[name]
    saved = make()
    saved(1)
    into = other()
    into(2)
    before = into.state_dict()
    state = saved.state_dict()
    with pytest.raises(ib.InvalidArgument, match=message):
        into.load_state_dict(state)
    after = into.state_dict()
    for part in before.keys() - {"random", "loader"}:
        assert same(before[part], after[part]), part
    assert into.epochs_done == 2


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(v, other[k]) for k, v in one.items())
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_a_callback_that_refuses_its_state_leaves_the_others_as_they_were() -> None:
    state = scheduled(callbacks=Keeps(1) + Other("refused")).state_dict()
    first, second = Keeps(5), Other(6)
    run = scheduled(callbacks=first + second)
    before = bits(run.model)
    with pytest.raises(ZeroDivisionError):
        run.load_state_dict(state)
    assert (first.value, second.value) == (5, 6) and equal(before, bits(run.model))


def test_callbacks_are_told_apart_by_class_and_order() -> None:
    state = scheduled(callbacks=[Keeps(1), Other(2), ib.Callback(), Keeps(3)]).state_dict()
    mine = [Other(), Keeps(), ib.Progress(), Keeps()]
    scheduled(callbacks=mine).load_state_dict(state)
    assert [c.value for c in mine if isinstance(c, Keeps)] == [2, 1, 3]


def test_numbers_of_numpy_are_saved_as_numbers(tmp_path: Any) -> None:
    class Metric:
        def update(self, outputs: Any, targets: Any) -> None: ...
        def compute(self) -> Any:
            return np.float64(0.5)

    history, keeps = ib.histories.History(), Keeps(np.float32(1.5))
    run = trainer(callbacks=history + keeps)
    run(1)
    assert type(run.evaluate(BATCHES, {"half": Metric()}).metrics["half"]) is float
    run.save(tmp_path / "a.pt")
    run.load(tmp_path / "a.pt")
    assert type(keeps.value) is float and keeps.value == 1.5


class Factor:
    def __init__(self) -> None:
        self.factors = np.ones(3)

    def __call__(self, epoch: int) -> float:
        return float(self.factors[0])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: scheduled(lambda o: torch.optim.lr_scheduler.LambdaLR(o, Factor())),
            r"^schedule\['lr_lambdas'\]\[0\]\['factors'\], a ndarray",
        ),
        (lambda: scheduled(callbacks=Keeps(np.ones(2))), r"\['deep'\]\[0\]\['value'\], a ndarray"),
        (lambda: scheduled(callbacks=Keeps(lambda: 1)), r"\['deep'\]\[0\]\['value'\], a function"),
    ],
)
def test_what_load_would_refuse_is_not_saved(make: Any, message: str, tmp_path: Any) -> None:
    path = tmp_path / "a.pt"
    scheduled().save(path)
    before = path.read_bytes()
    with pytest.raises(ib.StateError, match=message):
        make().save(path)
    assert os.listdir(tmp_path) == ["a.pt"] and path.read_bytes() == before


def test_a_part_that_cannot_be_used_leaves_the_trainer_as_it_was() -> None:
    run = trainer()
    model, criterion = run.model, run.criterion
    for name in ("model", "criterion", "callbacks"):
        with pytest.raises(ib.InvalidType):
            setattr(run, name, 3)
    assert run.model is model and run.criterion is criterion
    run(1)
    assert run.epochs_done == 1


@pytest.mark.parametrize("copies", [pickle.dumps, copy.deepcopy, copy.copy])
def test_a_trainer_is_saved_and_not_copied(copies: Any) -> None:
    with pytest.raises(ib.Unsupported, match=r"trainer\.save\(path\)"):
        copies(trainer())


def test_a_moved_model_is_told_at_the_users_line() -> None:
    model = net().float()
    run = trainer(model, loader=[(x.float(), y) for x, y in BATCHES])
    run(1)
    model.double()
    run.loader = BATCHES
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        run(1)
    assert [w.filename for w in told if w.category is ib.MovedModelNotice] == [__file__]
