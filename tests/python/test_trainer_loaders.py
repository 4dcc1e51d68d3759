"""Loaders of all kinds go on where a training was: the same samples in the same order."""

import io
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
from trainer_support import BATCHES, X, Y, bits, dataset, equal, net, shuffled, trainer

Loader = torch.utils.data.DataLoader


def own() -> torch.Generator:
    return torch.Generator().manual_seed(5)


STAYING: list[Any] = []


@pytest.fixture(autouse=True, scope="module")
def _ask_workers_often() -> Any:
    """torch waits five seconds for workers of a loader within a cycle of references, before it ends
    them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.2)
        yield


@pytest.fixture(autouse=True)
def _end_workers() -> Any:
    yield
    while STAYING:
        STAYING.pop()._iterator = None


def workers(**more: Any) -> Any:
    STAYING.append(
        Loader(dataset(), 10, shuffle=True, num_workers=1, persistent_workers=True, **more)
    )
    return STAYING[-1]


class Resets:
    """Begins anew in __iter__ and is its own iterator."""

    def __iter__(self) -> Any:
        self.order = torch.randperm(50).split(20)
        self.at = 0
        return self

    def __next__(self) -> Any:
        if self.at == len(self.order):
            raise StopIteration
        self.at += 1
        rows = self.order[self.at - 1]
        return X[rows], Y[rows]


def kept(loader: Any) -> Callable[[], Any]:
    return lambda: loader


def begun(loader: Any) -> Callable[[], Any]:
    return lambda: iter(loader)


def made_of(generator: torch.Generator) -> Callable[[], Any]:
    return lambda: Loader(dataset(), 10, shuffle=True, generator=generator)


LOADERS: dict[str, Callable[[], Any]] = {
    "persistent": workers,
    "persistent, own generator": lambda: workers(generator=own()),
    "persistent in windows": lambda: ib.windows(workers(), batches=2),
    "persistent of a function": lambda: kept(workers()),
    "own generator in windows": lambda: ib.windows(
        Loader(dataset(), 10, shuffle=True, generator=own()), batches=2
    ),
    "own generator of a function": lambda: kept(
        Loader(dataset(), 10, shuffle=True, generator=own())
    ),
    "a function that makes one of one generator": lambda: made_of(own()),
    "a function that makes both": lambda: lambda: made_of(own())(),
    "a bound method": lambda: Loader(dataset(), 20, shuffle=True, generator=own()).__iter__,
    "a function that begins persistent ones": lambda: begun(workers(generator=own())),
    "workers in windows": lambda: ib.windows(
        Loader(dataset(), 10, shuffle=True, num_workers=1), samples=20
    ),
    "resets": Resets,
}


@pytest.mark.parametrize("step", [3, 7])
@pytest.mark.parametrize("loader", LOADERS)
def test_goes_on_in_another_process(loader: str, step: int) -> None:
    file = io.BytesIO()

    class Saves(ib.Callback):
        def on_batch_end(self, event: Any) -> None:
            if event.step == step:
                torch.save(event.trainer.state_dict(), file)

    model = net()
    torch.manual_seed(9)
    whole = trainer(model, loader=LOADERS[loader](), callbacks=Saves())
    whole(4)
    again = trainer(net(), loader=LOADERS[loader](), callbacks=ib.Callback())
    torch.manual_seed(17)
    file.seek(0)
    again.load_state_dict(torch.load(file, weights_only=True))
    again(4 - again.epochs_done)
    assert equal(bits(again.model), bits(whole.model))
    assert [e.loss for e in again.history] == [e.loss for e in whole.history]


@pytest.mark.parametrize("epochs", [2])
@pytest.mark.parametrize("loader", LOADERS)
def test_goes_on_from_an_epochs_end(loader: str, epochs: int) -> None:
    torch.manual_seed(9)
    whole = trainer(net(), loader=LOADERS[loader]())
    torch.manual_seed(9)
    whole(epochs)
    file = io.BytesIO()
    torch.save(whole.state_dict(), file)
    state = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    again = trainer(net(), loader=LOADERS[loader]())
    again.load_state_dict(state)
    again(2)
    whole.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    whole(2)
    assert equal(bits(again.model), bits(whole.model))


class Failing(torch.utils.data.Dataset):
    """Fails once for one row."""

    def __init__(self, marker: Any, row: int) -> None:
        self.marker, self.row = str(marker), row

    def __len__(self) -> int:
        return 50

    def __getitem__(self, i: int) -> Any:
        if i == self.row and not os.path.exists(self.marker):
            with open(self.marker, "w"):
                pass
            raise OSError("disk")
        return X[i], Y[i]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("row", [3, 30])
def test_goes_on_after_an_exception_of_a_worker(row: int, persistent: bool, tmp_path: Any) -> None:
    def run(failing: bool) -> ib.Trainer:
        data = Failing(tmp_path / "failed", row if failing else -1)
        loader = Loader(
            data, 10, shuffle=True, num_workers=1, persistent_workers=persistent, prefetch_factor=1
        )
        model = net()
        torch.manual_seed(4)
        run = trainer(model, loader=loader)
        if failing:
            with pytest.raises(OSError, match="disk"):
                run(2)
        run(2 - run.epochs_done)
        return run

    assert equal(bits(run(True).model), bits(run(False).model))


def test_persistent_workers_give_the_order_of_a_loop_by_hand() -> None:
    seen: list[list[float]] = [[], []]

    class Sees(ib.Callback):
        def on_batch_begin(self, event: Any) -> None:
            seen[0].extend(event.inputs[:, 0].tolist())

    model = net(dropout=False)
    torch.manual_seed(4)
    trainer(model, loader=workers(), callbacks=Sees())(3)
    torch.manual_seed(4)
    loader = workers()
    for _ in range(3):
        for inputs, _ in loader:
            seen[1].extend(inputs[:, 0].tolist())
    assert seen[0] == seen[1]


def test_workers_that_stayed_have_to_stay() -> None:
    whole = trainer(loader=workers(), callbacks=stops(7))
    whole(2)
    again = trainer(loader=shuffled(), callbacks=ib.Callback())
    again.load_state_dict(whole.state_dict())
    with pytest.raises(ib.StateError, match="persistent_workers=True"):
        again(1)


def stops(step: int) -> ib.Callback:
    class Stops(ib.Callback):
        def on_batch_end(self, event: Any) -> None:
            if event.step == step:
                event.trainer.stop()

    return Stops()


def distributed() -> Any:
    return torch.utils.data.DistributedSampler(dataset(), num_replicas=1, rank=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Loader(dataset(), 10, sampler=distributed()),
        lambda: ib.windows(Loader(dataset(), 10, sampler=distributed()), batches=2),
        lambda: Loader(
            dataset(), batch_sampler=torch.utils.data.BatchSampler(distributed(), 10, False)
        ),
        lambda: kept(Loader(dataset(), 10, sampler=distributed())),
    ],
    ids=["sampler", "windows", "batch_sampler", "function"],
)
def test_samplers_hear_of_each_epoch(make: Callable[[], Any]) -> None:
    orders: list[list[float]] = [[], []]

    class Sees(ib.Callback):
        def on_micro_batch(self, event: Any) -> None:
            orders[event.epoch].extend(event.outputs[:, 0].tolist())

    model = net(dropout=False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    trainer(model, optimizer=sgd, loader=make(), callbacks=Sees())(2)
    assert orders[0] != orders[1] and len(orders[0]) == len(orders[1])


def test_loaders_that_reset_themselves_give_every_epoch() -> None:
    run = trainer(loader=Resets())
    assert [e.samples for e in run(3)] == [50, 50, 50]


def test_iterators_without_a_reset_are_gone_through_once() -> None:
    class Endless:
        at = 0

        def __iter__(self) -> Any:
            """Itself."""
            return self

        def __next__(self) -> Any:
            self.at += 1
            return BATCHES[self.at % 3]

    run = trainer(loader=Endless(), batches_per_epoch=2)
    run(3)
    assert run.loader.at == 6


def test_no_worker_is_left_when_an_epoch_ends_before_its_loader() -> None:
    before = set(multiprocessing.active_children())
    run = trainer(loader=Loader(dataset(), 10, shuffle=True, num_workers=1), batches_per_epoch=2)
    run(1)
    assert not set(multiprocessing.active_children()) - before


@pytest.mark.parametrize("make", [workers, Resets, lambda: kept(workers())])
def test_the_loader_at_work_is_not_evaluated(make: Callable[[], Any]) -> None:
    class Evaluates(ib.Callback):
        def on_batch_end(self, event: Any) -> None:
            with pytest.raises(ib.StateError, match="on_epoch_end"):
                event.trainer.evaluate(event.trainer.loader)

        def on_epoch_end(self, event: Any) -> None:
            event.trainer.evaluate(event.trainer.loader)

    def run(*listeners: ib.Callback) -> ib.Trainer:
        model = net()
        torch.manual_seed(9)
        run = trainer(model, loader=make(), callbacks=[*listeners])
        run(3)
        return run

    assert equal(bits(run(Evaluates()).model), bits(run().model))


@pytest.mark.parametrize("make", [shuffled, workers, lambda: Loader(dataset(), 9, True)])
def test_an_evaluation_of_the_trainers_loader_before_a_run_leaves_no_trace(
    make: Callable[[], Any],
) -> None:
    def run(evaluates: bool) -> ib.Trainer:
        model = net()
        torch.manual_seed(9)
        run = trainer(model, loader=make())
        if evaluates:
            run.evaluate(run.loader)
        run(2)
        return run

    assert equal(bits(run(True).model), bits(run(False).model))


def test_an_evaluation_leaves_a_loaders_own_generator() -> None:
    generator = own()
    run = trainer()
    run.evaluate(ib.windows(Loader(dataset(), 10, shuffle=True, generator=generator), batches=2))
    assert torch.equal(generator.get_state(), own().get_state())
