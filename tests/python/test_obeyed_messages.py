"""The way out that a message names, followed to the letter, works and is exact."""

import re
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
from audit_support import CRITERION, X, Y, loader, loss, net, sgd
from support import Calls
from torch import nn
from torch.nn import functional as F

N, TIME = 12, 7
DRAWS = torch.Generator().manual_seed(3)


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=DRAWS, dtype=torch.float64)


def labels(*shape: int) -> torch.Tensor:
    return torch.randint(1, 4, shape, generator=DRAWS)


SERIES, STATE, CELL, TARGETS = numbers(N, TIME, 5), numbers(2, N, 6), numbers(2, N, 6), labels(N)
LENGTHS = torch.tensor([2, 3] * (N // 2))
LETTERS = labels(int(LENGTHS.sum()))
BAGS = [numbers(2 + i % 3, 5) for i in range(N)]


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make().double()


def recurrent() -> nn.Module:
    def forward(self: Any, x: Any, h: Any) -> Any:
        return self.last(self.cells(x, h)[0][:, -1])

    return Calls(forward, cells=nn.GRU(5, 6, 2, batch_first=True), last=nn.Linear(6, 4))


def with_cells() -> nn.Module:
    def forward(self: Any, x: Any, state: Any) -> Any:
        return self.last(self.cells(x, tuple(state))[0][:, -1])

    return Calls(forward, cells=nn.LSTM(5, 6, 2, batch_first=True), last=nn.Linear(6, 4))


def time_first() -> nn.Module:
    def forward(self: Any, x: Any, h: Any) -> Any:
        return self.last(self.cells(x, h)[0][-1])

    return Calls(forward, cells=nn.GRU(5, 6, 2), last=nn.Linear(6, 4))


def letters() -> nn.Module:
    return Calls(lambda self, x: self.net(x).log_softmax(-1), net=nn.Linear(5, 4))


def with_positions() -> nn.Module:
    return Calls(
        lambda self, x, at: self.net(x + self.table(at)).mean(1),
        net=nn.Linear(5, 4),
        table=nn.Embedding(TIME, 5),
    )


def masked() -> nn.Module:
    return Calls(lambda self, x, mask: self.net(mask @ x).mean(1), net=nn.Linear(5, 4))


def of_bags() -> nn.Module:
    def forward(self: Any, x: Any, lengths: Any = None) -> Any:
        if lengths is None:
            return torch.stack([self.net(bag).mean(0) for bag in x])
        real = torch.arange(x.shape[1])[None] < lengths[:, None]
        return (self.net(x) * real[..., None]).sum(1) / lengths[:, None]

    return Calls(forward, net=nn.Linear(5, 4))


def connectionist(outputs: torch.Tensor, targets: Any) -> torch.Tensor:
    letters, lengths = targets
    frames = torch.full((len(outputs),), outputs.shape[1])
    return F.ctc_loss(outputs.transpose(0, 1), letters, frames, lengths)


COUPLED = ib.losses.coupled(connectionist)


def told(pattern: str) -> Callable[[str], Any]:
    """The code in a message that `pattern` finds, evaluated."""

    def find(message: str) -> Any:
        found = re.search(pattern, message)
        assert found, message
        return eval(found[1], {"torch": torch, "ib": ib})

    return find


BY_NAME = told(r"batch_dim=(\{.*?\})")
BY_MARK = told(r"ib\.batch_dim\(x, (\d)\)")
ALL = told(r"say batch_dim=(\d)")
WHOLE = told(r"(ib\.shared)\(x\)")
PADDED = told(r"(torch\.nn\.utils\.rnn\.pad_sequence)\(")
STACKED = told(r"(torch\.stack)\(")


def padded(message: str) -> torch.Tensor:
    if "torch.stack(padded)" in message:
        return STACKED(message)([F.pad(bag, (0, 0, 0, 4 - len(bag))) for bag in BAGS])
    return PADDED(message)(BAGS, batch_first=True)


Step = tuple[Any, Any, dict[str, Any]]

#: Model, loss, what provokes the error, and what the message makes of it: inputs, targets, options.
STEPS: dict[str, tuple[Any, Any, Any, Any, Callable[[str], Step]]] = {
    "hidden states by name": (
        recurrent,
        CRITERION,
        {"x": SERIES, "h": STATE},
        TARGETS,
        lambda m: ({"x": SERIES, "h": STATE}, TARGETS, {"batch_dim": BY_NAME(m)}),
    ),
    "hidden states": (
        recurrent,
        CRITERION,
        (SERIES, STATE),
        TARGETS,
        lambda m: ((SERIES, ib.batch_dim(STATE, BY_MARK(m))), TARGETS, {}),
    ),
    "hidden states and cells": (
        with_cells,
        CRITERION,
        (SERIES, (STATE, CELL)),
        TARGETS,
        lambda m: ((SERIES, ib.batch_dim((STATE, CELL), BY_MARK(m))), TARGETS, {}),
    ),
    "time first": (
        time_first,
        CRITERION,
        (SERIES.transpose(0, 1), STATE),
        TARGETS,
        lambda m: ((SERIES.transpose(0, 1), STATE), TARGETS, {"batch_dim": ALL(m)}),
    ),
    "positions": (
        with_positions,
        CRITERION,
        (SERIES, torch.arange(TIME)),
        TARGETS,
        lambda m: ((SERIES, WHOLE(m)(torch.arange(TIME))), TARGETS, {}),
    ),
    "a mask of time": (
        masked,
        CRITERION,
        (SERIES, torch.ones(TIME, TIME).double().tril()),
        TARGETS,
        lambda m: ((SERIES, WHOLE(m)(torch.ones(TIME, TIME).double().tril())), TARGETS, {}),
    ),
    "a number": (
        lambda: Calls(lambda self, x, by: self.net(x[:, 0] * by), net=nn.Linear(5, 4)),
        CRITERION,
        (SERIES, torch.tensor(2.0).double()),
        TARGETS,
        lambda m: ((SERIES, WHOLE(m)(torch.tensor(2.0).double())), TARGETS, {}),
    ),
    "bags of other sizes": (
        of_bags,
        CRITERION,
        (BAGS,),
        TARGETS,
        lambda m: ((padded(m), torch.tensor([len(bag) for bag in BAGS])), TARGETS, {}),
    ),
    "bags of one size": (
        of_bags,
        CRITERION,
        ([bag[:2] for bag in BAGS],),
        TARGETS,
        lambda m: ((STACKED(m)([bag[:2] for bag in BAGS]),), TARGETS, {}),
    ),
}


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def call(model: Any, inputs: Any) -> Any:
    if isinstance(inputs, dict):
        return model(**inputs)
    return model(*inputs) if isinstance(inputs, tuple) else model(inputs)


#: A wrapped model is called with arguments, and its criterion sees all targets.
BOTH = [(n, False) for n in STEPS] + [(n, True) for n, s in STEPS.items() if type(s[2]) is tuple]


@pytest.mark.parametrize(("name", "wrapped"), BOTH)
def test_a_step_that_obeys_is_exact(name: str, wrapped: bool) -> None:
    make, criterion, inputs, targets, obey = STEPS[name]
    native = seeded(make)
    criterion_of = connectionist if criterion is COUPLED else CRITERION
    whole = criterion_of(call(native, inputs), targets)
    whole.backward()

    def step(inputs: Any, targets: Any, options: Any) -> list[torch.Tensor]:
        model = seeded(make)
        if wrapped:
            criterion_of(ib.wrap(model, micro_batch_size=4, **options)(*inputs), targets).backward()
        else:
            virtual = ib.VirtualBatch(model, criterion, micro_batch_size=4, **options)
            virtual.backward(inputs, targets)
        return gradients(model)

    try:
        found = step(inputs, targets, {})
        assert wrapped  # few rows, as natively in one piece
    except ib.Error as error:
        found = step(*obey(str(error)))
    for one, wanted in zip(found, gradients(native), strict=True):
        torch.testing.assert_close(one, wanted, rtol=1e-11, atol=1e-13)


@pytest.mark.parametrize("edges", [torch.tensor([[0, 5, 11], [3, 8, 2]])])
def test_edges_of_a_graph_are_not_called_shared(edges: torch.Tensor) -> None:
    """Numbers of samples mean nothing in a micro-batch."""
    model = seeded(lambda: Calls(lambda self, x, e: self.net(x), net=nn.Linear(5, 4)))
    with pytest.raises(ib.BatchError, match="edges of a graph.*run this model as it is") as raised:
        ib.VirtualBatch(model, CRITERION, micro_batch_size=4).backward(
            (SERIES[:, 0], edges), TARGETS
        )
    assert "ib.shared" not in str(raised.value)


# Audits.


def clip_by_hand(parameters: Any) -> None:
    for p in parameters:
        p.grad.mul_(min(1.0, 0.02 / float(p.grad.norm())))


def whole_steps(criterion: Any, then: Callable[[Any], Any] = lambda p: None) -> Any:
    def run(model: Any, optimizer: Any, batches: Any) -> None:
        for x, y in batches:
            criterion(model(x), y).backward()
            then(list(model.parameters()))
            optimizer.step()
            optimizer.zero_grad()

    return run


def audited(run: Any, batches: Any, **options: Any) -> Any:
    model = net()
    with ib.audit.watch(model, loader=batches, **options) as watch:
        run(model, sgd(model), watch.loader if type(batches) is list else batches)
    return watch


def of(pattern: str, given: Any) -> Callable[[str], dict[str, Any]]:
    """The option that a message names, with what the user has for it."""

    def find(message: str) -> dict[str, Any]:
        found = re.search(pattern, message)
        assert found, message
        return {found[1]: given}

    return find


PAIRS = [(X[i : i + 4], Y[i : i + 4]) for i in range(0, 24, 4)]
SUM = nn.CrossEntropyLoss(reduction="sum")


def squared(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return CRITERION(z, y).square()


#: A loop, its batches and what the message makes of the call.
AUDITS: dict[str, tuple[Any, Any, Callable[[str], dict[str, Any]]]] = {
    "a sum": (
        whole_steps(SUM),
        loader(),
        of(r"give (loss)=", lambda model, batch: SUM(model(batch[0]), batch[1])),
    ),
    "a loss by hand": (
        whole_steps(lambda z, y: z.logsumexp(1).mean()),
        loader(),
        of(r"give (loss)=", lambda model, batch: model(batch[0]).logsumexp(1).mean()),
    ),
    "a loss that is squared": (
        whole_steps(squared),
        loader(),
        of(r"give (loss)=", lambda model, batch: squared(model(batch[0]), batch[1])),
    ),
    "a clip of its own": (
        whole_steps(CRITERION, clip_by_hand),
        loader(),
        of(r"watch\(\.\.\., (clip)=my_clip\)", clip_by_hand),
    ),
    "rows changed by NumPy": (
        lambda model, optimizer, batches: whole_steps(CRITERION)(
            model, optimizer, [(torch.from_numpy(x.numpy() * 2), y) for x, y in batches]
        ),
        loader(),
        of(r"give (loss)=", lambda model, batch: loss(model, (batch[0] * 2, batch[1]))),
    ),
}


@pytest.mark.parametrize("name", AUDITS)
def test_an_audit_that_obeys_is_right(name: str) -> None:
    run, batches, obey = AUDITS[name]
    try:
        watch = audited(run, batches)
        assert watch.report.verdict != "right"
        message = str(watch.report)
    except ib.Error as error:
        message = str(error)
    watch = audited(run, batches, **obey(message))
    assert watch.ok, print(watch)


def test_a_list_is_iterated_over_as_the_message_says() -> None:
    model = net()
    with pytest.raises(ib.StateError, match="for batch in watched.loader"):
        with ib.audit.watch(model, loader=PAIRS, loss=loss):
            whole_steps(CRITERION)(model, sgd(model), PAIRS)
    assert audited(whole_steps(CRITERION), PAIRS, loss=loss).ok
