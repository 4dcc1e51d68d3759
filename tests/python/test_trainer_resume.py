"""A training that ends at any event goes on with the bits of one that was never ended."""

import io
import os
import signal
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
from infinitybatch.callbacks import METHODS
from torch import nn
from trainer_support import BATCHES, X, Y, bits, dataset, equal, net, shuffled, trainer

RUN_EVENTS = [name for name in METHODS if name.split("_")[1] not in ("evaluation", "checkpoint")]
RUN_EVENTS.remove("on_failure")


class Drawing(torch.utils.data.Dataset):
    """Augments each sample with random numbers of this process."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return X[i] + torch.rand(6, dtype=torch.float64), Y[i]


LOADERS: dict[str, Callable[[], Any]] = {
    "DataLoader": shuffled,
    "own generator": lambda: torch.utils.data.DataLoader(
        dataset(), 20, shuffle=True, generator=torch.Generator().manual_seed(4)
    ),
    "factory": lambda: lambda: iter(shuffled()),
    "windows": lambda: ib.windows(
        torch.utils.data.DataLoader(dataset(), 10, shuffle=True), batches=2
    ),
}


def make(loader: Any, *listeners: ib.Callback) -> ib.Trainer:
    model = net(batch_norm=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    torch.manual_seed(7)
    return trainer(
        model,
        optimizer=optimizer,
        loader=loader,
        schedule=torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
        schedule_by="step",
        callbacks=[*listeners],
        batch_coupling="exact",
    )


def uninterrupted(loader: Any) -> ib.Trainer:
    run = make(loader)
    run(3)
    return run


def raises_once(event: str, count: int, error: Callable[[], object]) -> ib.Callback:
    """Calls `error` the `count`-th time that the event is told."""

    class Raises(ib.Callback):
        told = 0

    def tell(self: Any, event: Any) -> None:
        self.told += 1
        if self.told == count:
            error()

    setattr(Raises, event, tell)
    return Raises()


def throw(error: BaseException) -> Callable[[], object]:
    def call() -> None:
        raise error

    return call


def finish(run: ib.Trainer, epochs: int = 3) -> None:
    run(epochs - run.epochs_done)


@pytest.mark.parametrize(
    ("event", "count"),
    [
        (event, count)
        for event in RUN_EVENTS
        for count in {"run": [1], "epoch": [1, 2, 3]}.get(event.split("_")[1], [1, 2, 5])
    ],
)
def test_goes_on_after_an_exception_at(event: str, count: int) -> None:
    run = make(shuffled(), raises_once(event, count, throw(ZeroDivisionError())))
    with pytest.raises(ZeroDivisionError):
        run(3)
    finish(run)
    whole = uninterrupted(shuffled())
    assert equal(bits(run.model), bits(whole.model))
    assert [e.loss for e in run.history] == [e.loss for e in whole.history]


@pytest.mark.parametrize("where", ["before", "in the middle of", "between"])
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("event", ["on_batch_begin", "on_batch_end", "on_epoch_end", "on_failure"])
def test_goes_on_in_another_process(event: str, loader: str, where: str) -> None:
    """The state is taken at the event; the new trainer has other weights and random numbers."""
    saved: list[bytes] = []
    count = {"before": 1, "in the middle of": 2, "between": 3}[where]
    if event == "on_failure":
        count = 1

    def save() -> None:
        file = io.BytesIO()
        torch.save(run.state_dict(), file)
        saved.append(file.getvalue())

    extra = [raises_once("on_batch_begin", 5, throw(ZeroDivisionError()))]
    run = make(LOADERS[loader](), raises_once(event, count, save), *extra)
    with pytest.raises(ZeroDivisionError):
        run(3)
    if event == "on_epoch_end" and count > 1:
        assert not saved
        return
    again = make(LOADERS[loader](), ib.Callback(), ib.Callback())
    torch.manual_seed(99)
    torch.nn.init.zeros_(again.model[0].weight)
    again.load_state_dict(torch.load(io.BytesIO(saved[0]), weights_only=True))
    finish(again)
    whole = uninterrupted(LOADERS[loader]())
    assert equal(bits(again.model), bits(whole.model))
    assert [e.loss for e in again.history] == [e.loss for e in whole.history]
    assert again.steps_done == 9


@pytest.mark.parametrize("event", ["on_batch_begin", "on_batch_end"])
def test_data_that_draw_in_this_process_go_on_in_another(event: str) -> None:
    def run_from(*listeners: ib.Callback) -> ib.Trainer:
        run = make(torch.utils.data.DataLoader(Drawing(), 20, shuffle=True), *listeners)
        torch.manual_seed(11)
        return run

    file = io.BytesIO()
    run = run_from(raises_once(event, 2, lambda: torch.save(run.state_dict(), file)))
    run(1)
    again = run_from(ib.Callback())
    file.seek(0)
    again.load_state_dict(torch.load(file, weights_only=True))
    finish(again, 1)
    assert equal(bits(again.model), bits(run.model))


#: Where a step that is discarded does not put it back.
CALLS: dict[str, int] = {}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("place", ["optimizer", "hook of the model", "loader"])
def test_a_signal_anywhere(place: str, number: int) -> None:
    """Within the optimizer's step it waits for its end; elsewhere the step is discarded."""

    class Terminated(BaseException):
        pass

    def terminate(number: int, frame: Any) -> None:
        raise Terminated

    def arrive() -> None:
        CALLS[place] += 1
        if CALLS[place] == 4:
            os.kill(os.getpid(), number)

    class Slow(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            first, *rest = (p for group in self.param_groups for p in group["params"])
            with torch.no_grad():
                first.mul_(0.999)
            if place == "optimizer":
                arrive()
            with torch.no_grad():
                for parameter in rest:
                    parameter.mul_(0.999)
            return super().step()

    class Arriving(torch.utils.data.TensorDataset):
        def __getitem__(self, i: Any) -> Any:
            if place == "loader" and i == 17:
                arrive()
            return super().__getitem__(i)

    def run_with(signalled: bool) -> ib.Trainer:
        first = -40 if place == "hook of the model" else 0  # the first steps look at rows
        CALLS[place] = first if signalled else 100
        model = net()
        torch.manual_seed(7)
        if place == "hook of the model":
            model[0].register_forward_pre_hook(lambda *_: arrive())
        loader = torch.utils.data.DataLoader(Arriving(X, Y), 20, shuffle=True)
        run = trainer(model, optimizer=Slow(model.parameters(), lr=0.05), loader=loader)
        if signalled:
            with pytest.raises((KeyboardInterrupt, Terminated)):
                run(5)
            assert run.steps_done > 0
        finish(run, 5)
        return run

    before = signal.signal(number, terminate)
    try:
        assert equal(bits(run_with(True).model), bits(run_with(False).model))
        assert signal.getsignal(number) is terminate
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("place", ["model", "loss", "loader", "backward"])
def test_goes_on_after_an_exception_in(place: str) -> None:
    def fails(*_: Any) -> None:
        CALLS[place] += 1
        if CALLS[place] == 4:
            raise ZeroDivisionError

    class Failing(torch.utils.data.TensorDataset):
        def __getitem__(self, i: Any) -> Any:
            if i == 30:
                fails()
            return super().__getitem__(i)

    def run_with(failing: bool) -> ib.Trainer:
        CALLS[place] = 0 if failing else 100
        model = net()
        torch.manual_seed(7)
        loader: Any = shuffled()
        criterion: Any = nn.CrossEntropyLoss()
        if place == "loader":
            loader = torch.utils.data.DataLoader(Failing(X, Y), 20, shuffle=True)
        if place == "model":
            model[0].register_forward_pre_hook(fails)
        if place == "backward":
            model[0].weight.register_hook(lambda g: fails())
        if place == "loss":
            inner = nn.CrossEntropyLoss(reduction="sum")

            def total(outputs: Any, targets: Any) -> Any:
                fails()
                return inner(outputs, targets)

            criterion = ib.losses.separable(total, lambda targets: len(targets))
        adam = torch.optim.Adam(model.parameters(), lr=0.01)
        run = ib.Trainer(model, criterion, adam, loader, micro_batch_size=7)
        if failing:
            with pytest.raises(ZeroDivisionError):
                run(5)
        finish(run, 5)
        return run

    assert equal(bits(run_with(True).model), bits(run_with(False).model))


def test_stop_ends_after_the_step_at_work() -> None:
    class Stops(ib.Callback):
        def on_batch_begin(self, event: Any) -> None:
            if event.step == 4:
                event.trainer.stop()

    ends: list[Any] = []

    class Ends(ib.Callback):
        def on_run_end(self, event: Any) -> None:
            ends.append((event.epoch, event.step, event.stopped))

    run = make(shuffled(), Stops() + Ends())
    assert len(run(3)) == 1
    assert (run.epochs_done, run.steps_done) == (1, 5)
    finish(run)
    assert ends == [(1, 5, True), (3, 9, False)]
    assert equal(bits(run.model), bits(uninterrupted(shuffled()).model))


def test_events_come_in_order_and_once() -> None:
    told: list[str] = []

    class All(ib.Callback):
        pass

    for name in METHODS:
        setattr(All, name, lambda self, event: told.append(type(event).__name__))
    run = trainer(loader=BATCHES[:1], micro_batch_size=10, callbacks=All())
    run(1)
    batch = ["BatchBegin", "MicroBatch", "MicroBatch", "BatchEnd"]
    assert told == ["RunBegin", "EpochBegin", *batch, "EpochEnd", "RunEnd"]
    told.clear()
    run.evaluate(BATCHES)
    assert told == ["EvaluationBegin", "EvaluationEnd"]


def test_others_hear_of_an_event_at_which_one_raises() -> None:
    steps: list[int] = []

    class Counts(ib.Callback):
        def on_batch_end(self, event: Any) -> None:
            steps.append(event.step)

    failures: list[BaseException] = []

    class Fails(ib.Callback):
        def on_failure(self, event: Any) -> None:
            failures.append(event.exception)

    error = ZeroDivisionError()
    run = make(BATCHES, raises_once("on_batch_end", 2, throw(error)), Counts(), Fails())
    with pytest.raises(ZeroDivisionError):
        run(2)
    assert failures == [error]
    finish(run, 2)
    assert steps == list(range(6))


def test_a_state_is_taken_between_steps_only() -> None:
    class Takes(ib.Callback):
        def on_micro_batch(self, event: Any) -> None:
            event.trainer.state_dict()

    run = trainer(callbacks=Takes())
    with pytest.raises(ib.StateError, match="call state_dict in on_batch_end"):
        run(1)


def test_save_and_load(tmp_path: Any) -> None:
    paths: list[str] = []

    class Paths(ib.Callback):
        def on_checkpoint_saved(self, event: Any) -> None:
            paths.append(event.path)

    run = make(shuffled(), Paths())
    run(1)
    run.save(tmp_path / "a.pt")
    assert os.listdir(tmp_path) == ["a.pt"] and paths == [str(tmp_path / "a.pt")]
    again = make(shuffled(), Paths())
    again.load(tmp_path / "a.pt")
    finish(again)
    assert equal(bits(again.model), bits(uninterrupted(shuffled()).model))
