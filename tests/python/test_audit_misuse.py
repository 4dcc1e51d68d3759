"""What an audit refuses: each mistake with its error and what the message says."""

import re
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
from audit_support import CRITERION, X, Y, accumulate, loader, loss, net, sgd, share, watched
from torch import nn
from torch.nn import functional as F

MODEL = net()
OPTIMIZER = sgd(MODEL)
PAIRS = [(X[i : i + 4], Y[i : i + 4]) for i in range(0, 24, 4)]


def run(model: Any, optimizer: Any, batches: Any) -> None:
    accumulate(model, optimizer, batches, share)


def over_a_list() -> None:
    with ib.audit.watch(MODEL, OPTIMIZER, PAIRS, loss=loss):
        run(MODEL, OPTIMIZER, PAIRS)


def over_another_loader() -> None:
    with ib.audit.watch(MODEL, OPTIMIZER, loader(), loss=loss):
        run(MODEL, OPTIMIZER, loader())


def entered_twice() -> None:
    watch = ib.audit.watch(MODEL, OPTIMIZER)
    for _ in range(2):
        with watch:
            run(MODEL, OPTIMIZER, PAIRS)


def no_step() -> None:
    with ib.audit.watch(MODEL, OPTIMIZER):
        pass


def another_model() -> None:
    other = net()
    with ib.audit.watch(MODEL):
        run(other, sgd(other), PAIRS)


def with_loss(of: Callable[[Any, Any], Any], **options: Any) -> Callable[[], Any]:
    """A loop whose own loss is `of(outputs, targets)`."""

    def loop(model: Any, optimizer: Any, batches: Any) -> None:
        accumulate(model, optimizer, batches, share, criterion=of)

    return lambda: watched(loop, **options)


def twice(model: Any, optimizer: Any, batches: Any) -> None:
    for x, y in batches:
        (CRITERION(model(x), y) + CRITERION(model(-x), y)).backward()
        optimizer.step()


def lengths(model: Any, optimizer: Any, batches: Any) -> None:
    for i, (x, y) in enumerate(batches):
        width = 6 if i % 2 else 5
        CRITERION(model(F.pad(x[:, :width], (0, 6 - width))), y).backward()
        if i % 2:
            optimizer.step()


def different(key: str) -> list[Any]:
    values = {"shape": (X[:4, :5], X[:4]), "structure": ((X[:4],), X[:4]), "number": (1, 2)}[key]
    return [((x if key != "number" else X[:4]), Y[:4], x) for x in values]


def joined(key: str) -> None:
    def loop(model: Any, optimizer: Any, batches: Any) -> None:
        for i, (_, y, _) in enumerate(batches):
            CRITERION(model(X[:4]), y).backward()
            if i == 1:
                optimizer.step()

    watched(loop, batches=different(key), loss=loss)


def triples(model: Any, optimizer: Any, batches: Any) -> None:
    for x, y, _ in batches:
        CRITERION(model(x), y).backward()
        optimizer.step()


def frozen() -> nn.Module:
    return net().requires_grad_(False)


def step(model: Any, batch: Any) -> None:
    loss(model, batch).backward()


def raises(model: Any, batch: Any) -> Any:
    raise KeyError("mine")


MISUSE: dict[str, tuple[Callable[[], Any], type, str]] = {
    "model": (lambda: ib.audit.watch(3), ib.InvalidType, "model must be a torch.nn.Module"),
    "model is a class": (lambda: ib.audit.watch(nn.Linear), ib.InvalidType, r"Linear\(\.\.\.\)"),
    "frozen": (lambda: ib.audit.watch(frozen()), ib.InvalidArgument, "no parameter that requires"),
    "optimizer": (
        lambda: ib.audit.watch(MODEL, "sgd"),
        ib.InvalidType,
        "optimizer must be a torch.optim.Optimizer, not str",
    ),
    "loader as optimizer": (
        lambda: ib.audit.watch(MODEL, loader()),
        ib.InvalidType,
        r"not DataLoader: watch\(model, optimizer, loader\)",
    ),
    "optimizer is a class": (
        lambda: ib.audit.watch(MODEL, torch.optim.SGD),
        ib.InvalidType,
        "not SGD",
    ),
    "another's optimizer": (
        lambda: ib.audit.watch(net(), OPTIMIZER),
        ib.InvalidArgument,
        "the SGD holds no parameter of this Sequential",
    ),
    "loader": (
        lambda: ib.audit.watch(MODEL, OPTIMIZER, 3),
        ib.InvalidType,
        "loader must be an iterable of batches, not int",
    ),
    "loss": (
        lambda: ib.audit.watch(MODEL, loss=3),
        ib.InvalidType,
        "loss must be a criterion of torch.nn or a function of model and batch, not int",
    ),
    "loss is a class": (
        lambda: ib.audit.watch(MODEL, loss=nn.MSELoss),
        ib.InvalidType,
        r"MSELoss\(\)",
    ),
    "join": (lambda: ib.audit.watch(MODEL, join=3), ib.InvalidType, "join must be a function"),
    "steps": (lambda: ib.audit.watch(MODEL, steps=0), ib.InvalidArgument, "steps must be at least"),
    "steps is no number": (lambda: ib.audit.watch(MODEL, steps="a"), ib.InvalidType, "steps must"),
    "same_random_numbers": (
        lambda: ib.audit.watch(MODEL, same_random_numbers=1),
        ib.InvalidType,
        "same_random_numbers is 1; it is True or False",
    ),
    "budget": (
        lambda: watched(run, batches=loader(), memory_budget="much"),
        ib.InvalidArgument,
        "much",
    ),
    "report before the loop": (
        lambda: ib.audit.watch(MODEL).report,
        ib.StateError,
        "no step was examined yet",
    ),
    "entered twice": (entered_twice, ib.StateError, "make another one for another loop"),
    "no step": (no_step, ib.StateError, "no backward.. reached the parameters of Sequential"),
    "another model": (another_model, ib.StateError, "watch the very model that is trained"),
    "a list": (over_a_list, ib.StateError, r"a loop over a list .* for batch in watched.loader"),
    "another loader": (over_another_loader, ib.StateError, "watch the loader that it iterates"),
    "sum": (
        with_loss(nn.CrossEntropyLoss(reduction="sum")),
        ib.StateError,
        "cross_entropy has reduction='sum'.*give loss=lambda model, batch",
    ),
    "a loss by hand": (
        with_loss(lambda z, y: z.logsumexp(1).mean()),
        ib.StateError,
        "no criteria of torch.nn.functional are called on the model's outputs; give loss=",
    ),
    "a loss of something else": (
        with_loss(lambda z, y: F.cross_entropy(z @ z.T, y[: len(z)] % len(z))),
        ib.StateError,
        "cross_entropy is called on something else than the model's outputs",
    ),
    "two losses": (
        with_loss(lambda z, y: F.cross_entropy(z, y) + F.mse_loss(z, torch.zeros_like(z))),
        ib.StateError,
        "2 criteria of torch.nn.functional",
    ),
    "two calls": (lambda: watched(twice), ib.StateError, "called 2 times for one backward"),
    "shapes": (
        lambda: joined("shape"),
        ib.BatchError,
        r"batch\[0\] has shapes \[\(4, 5\), \(4, 6\)\].*join=",
    ),
    "structure": (lambda: joined("structure"), ib.BatchError, "differ in their structure.*join="),
    "numbers": (lambda: joined("number"), ib.BatchError, r"batch\[2\] differs.*join="),
    "criterion for triples": (
        lambda: watched(triples, batches=[(*PAIRS[0], 3)], loss=CRITERION),
        ib.BatchError,
        r"each batch is a pair \(inputs, targets\)",
    ),
    "loss returns a number": (
        lambda: watched(run, loss=lambda m, b: loss(m, b).item()),
        ib.InvalidType,
        r"scalar tensor, not float: remove \.item\(\)",
    ),
    "loss returns many": (
        lambda: watched(run, loss=lambda m, b: m(b[0])),
        ib.InvalidArgument,
        r"not a tensor of shape \(12, 5\)",
    ),
    "loss without a gradient": (
        lambda: watched(run, loss=lambda m, b: loss(m, b).detach()),
        ib.InvalidArgument,
        "without a gradient",
    ),
    "loss fails": (
        lambda: watched(run, loss=raises),
        ib.Unsupported,
        "could not be computed again, KeyError: 'mine'",
    ),
    "step": (lambda: ib.audit(3, MODEL, (X, Y)), ib.InvalidType, "step must be a function"),
    "step without a step": (
        lambda: ib.audit(step, MODEL, (X, Y)),
        ib.StateError,
        "did not reach optimizer.step",
    ),
}


@pytest.mark.parametrize("name", MISUSE)
def test_misuse(name: str) -> None:
    call, kind, message = MISUSE[name]
    with pytest.raises(ib.Error) as raised:
        call()
    assert type(raised.value) is kind, raised.value
    assert re.search(message, str(raised.value)), raised.value
    assert "\n" not in str(raised.value) and len(str(raised.value)) < 300


def test_nothing_is_left_behind_after_an_error() -> None:
    model = net()
    batches = loader()
    with pytest.raises(ib.Error):
        watched(run, model, batches, loss=raises)
    assert type(batches) is torch.utils.data.DataLoader
    assert not any(p._backward_hooks for p in model.parameters())
    assert not any(m._forward_pre_hooks for m in model.modules())
    optimizer = sgd(model)
    accumulate(model, optimizer, batches, share)  # no hook of an optimizer is left either


def test_an_exception_of_the_loop_comes_back() -> None:
    def stops(model: Any, optimizer: Any, batches: Any) -> None:
        run(model, optimizer, batches)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        watched(stops)


def test_a_later_failure_leaves_the_training_alone() -> None:
    """The third step's batches cannot be joined: undecided, and the loop goes on."""
    batches = [*PAIRS, (X[:4], Y[:4]), (X[:2], Y[:2].tolist())]
    done = []

    def loop(model: Any, optimizer: Any, batches: Any) -> None:
        for i, (x, y) in enumerate(batches):
            (CRITERION(model(x), torch.as_tensor(y)) / 2).backward()
            if i % 2:
                optimizer.step()
                optimizer.zero_grad()
                done.append(i)

    watch = watched(loop, batches=batches, loss=loss)
    assert done == [1, 3, 5, 7]
    assert [r.verdict for r in watch.reports] == ["right", "right", "right", "undecided"]
    assert watch.report.verdict == "undecided" and "join=" in str(watch)
    watch.raise_if_wrong()


def test_one_process_of_several_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    distributed = torch.distributed
    monkeypatch.setattr(distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(distributed, "get_world_size", lambda: 2)
    with pytest.raises(ib.Unsupported, match="looks at one process, and there are 2"):
        ib.audit.watch(MODEL)
