"""Callbacks that are ready to use, and how callbacks are composed."""

import os
from typing import Any

import infinitybatch as ib
import pytest
import torch
from infinitybatch.callbacks import EMA, Callbacks, Checkpoint, EarlyStopping
from trainer_support import BATCHES, bits, equal, net, shuffled, trainer


def test_composed_callbacks_are_flat_and_in_order() -> None:
    a, b, c = (EarlyStopping(1) for _ in range(3))
    assert list((a + b) + c) == list(a + (b + c)) == [a, b, c]
    assert list(sum([a, b, c])) == [a, b, c]  # type: ignore[arg-type]
    assert trainer(callbacks=[a + b, c]).callbacks.listens("on_epoch_end")
    assert not (a + b).listens("on_micro_batch")
    assert len(Callbacks()) == 0


def test_early_stopping_stops_when_nothing_is_better() -> None:
    model = net(dropout=False)
    stop = EarlyStopping(2, min_delta=10.0)
    run = trainer(model, callbacks=stop)
    assert len(run(20)) == 3  # the first is the best
    assert (stop.waited, run.epochs_done) == (2, 3)


@pytest.mark.parametrize("monitor", ["evaluation", "right"])
def test_early_stopping_by_an_evaluation(monitor: str) -> None:
    values = iter([1.0, 3.0, 2.0, 2.5, 5.0])

    class Measures(ib.Callback):
        def on_epoch_end(self, event: Any) -> None:
            value = next(values)
            event.trainer.evaluate(BATCHES, {"right": lambda *_: value})

    stop = EarlyStopping(2, monitor, mode="max", min_delta=100.0 if monitor != "right" else 0.0)
    run = trainer(callbacks=stop + Measures())
    run(5)
    assert run.epochs_done == (4 if monitor == "right" else 3)
    with pytest.raises(ib.InvalidArgument, match="'wrong', and the evaluation has 'x'"):
        trainer(callbacks=EarlyStopping(1, "wrong")).evaluate(BATCHES, {"x": lambda *_: 1.0})


def test_averages_are_those_by_hand_and_go_on_elsewhere() -> None:
    model, ema = net(), EMA(0.9)
    torch.manual_seed(1)
    by_hand = [p.detach().clone() for p in model.parameters()]

    class Follows(ib.Callback):
        def on_batch_end(self, event: Any) -> None:
            for mine, parameter in zip(by_hand, model.parameters(), strict=True):
                mine.copy_(0.9 * mine + 0.1 * parameter.detach())

    run = trainer(model, loader=shuffled(), callbacks=ema + Follows())
    run(1)
    state = run.state_dict()
    state = {**state, "model": {n: t.clone() for n, t in state["model"].items()}}
    run(1)
    for mine, average in zip(by_hand, ema.averages.values(), strict=True):
        torch.testing.assert_close(mine, average, rtol=1e-12, atol=1e-12)
    now = bits(model)
    with ema.applied() as averaged:
        assert all(map(torch.equal, averaged.parameters(), ema.averages.values()))
        torch.testing.assert_close(
            list(averaged.parameters()), by_hand, rtol=1e-12, atol=1e-12, check_dtype=False
        )
        with pytest.raises(ib.StateError):
            run(1)
    assert equal(now, bits(model))

    other, other_ema = net(), EMA(0.9)
    again = trainer(other, loader=shuffled(), callbacks=other_ema + ib.Callback())
    again.load_state_dict(state)
    # Adam's state was changed in place since: only what the loader and averages need is compared.
    assert again.epochs_done == 1
    assert list(other_ema.averages) == list(ema.averages)


def test_checkpoints_are_written_and_read(tmp_path: Any) -> None:
    name = tmp_path / "at-{step}.pt"
    run = trainer(loader=shuffled(), callbacks=Checkpoint(name, every_steps=2, every_epochs=2))
    torch.manual_seed(5)
    run(2)
    assert sorted(os.listdir(tmp_path)) == ["at-2.pt", "at-4.pt", "at-6.pt"]
    again = trainer(net(), loader=shuffled(), callbacks=ib.Callback())
    again.load(tmp_path / "at-4.pt")
    again(1)
    assert equal(bits(again.model), bits(run.model))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: EarlyStopping(0), "patience is 0"),
        (lambda: EarlyStopping(1, mode="best"), "mode is 'best'"),
        (lambda: EMA(1.0), "decay is 1"),
        (lambda: EMA("a half"), "decay must be a number"),
        (lambda: Checkpoint("x", every_steps=-1), "every_steps is -1"),
        (lambda: EMA().applied().__enter__(), "no run has begun"),
        (lambda: Checkpoint("{epochs}.pt"), "braces in it are {epoch} and {step}"),
        (lambda: Checkpoint("a{b.pt"), "braces in it"),
        (lambda: Checkpoint(3), "path must be a path"),  # type: ignore[arg-type]
    ],
)
def test_misuse(make: Any, message: str) -> None:
    with pytest.raises(ib.Error, match=message):
        make()


class Stops(ib.Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_batch_end(self, event: Any) -> None:
        if event.step + 1 == self.step:
            event.trainer.stop()


@pytest.mark.parametrize("every", [{"every_steps": 4}, {"every_epochs": 1}])
def test_a_checkpoint_holds_what_others_made_of_its_event(tmp_path: Any, every: Any) -> None:
    def parts() -> tuple[EMA, ib.histories.History, EarlyStopping]:
        return EMA(0.5), ib.histories.History(), EarlyStopping(3, min_delta=10.0)

    first = parts()
    path = tmp_path / "{step}.pt"
    run = trainer(loader=shuffled(), callbacks=[Checkpoint(path, **every), *first])
    run(2)
    second = parts()
    again = trainer(loader=shuffled(), callbacks=[Checkpoint(path, **every), *second])
    again.load(tmp_path / ("4.pt" if "every_steps" in every else "3.pt"))
    assert second[1].losses.epochs == ([0, 1] if "every_steps" in every else [0])
    again(1)
    assert equal(list(first[0].averages.values()), list(second[0].averages.values()))
    assert first[1].losses[1][2] == second[1].losses[1][2]
    assert first[2].waited == second[2].waited == 1


def test_early_stopping_between_runs_ends_the_next_one_once() -> None:
    stop = EarlyStopping(2, "evaluation", min_delta=1e9)
    run = trainer(callbacks=stop)
    for _ in range(10):
        if run.epoch() is None:
            break
        run.evaluate(BATCHES)
    assert (run.epochs_done, run.steps_done) == (3, 9)
    assert run.epoch() is not None  # asked once more, it goes on, and waits anew
    run.evaluate(BATCHES)
    assert run.epoch() is not None and stop.waited == 1


def test_a_stop_between_runs_ends_the_next_one_once() -> None:
    run = trainer()
    run.stop()
    assert run(3) == [] and run.steps_done == 0
    assert len(run(3)) == 3
    run = trainer(callbacks=Stops(3))  # within a run it is that run's alone
    assert len(run(3)) == 1 and len(run(3)) == 3


def test_early_stopping_that_has_stopped_waits_anew(tmp_path: Any) -> None:
    def make() -> ib.Trainer:
        path = tmp_path / "{epoch}.pt"
        return trainer(callbacks=[EarlyStopping(2, min_delta=1e9), Checkpoint(path)])

    run = make()
    assert len(run(10)) == 3
    assert len(run(10)) == 2
    again = make()  # a run that was told to stop, and gone on with, has nothing left to do
    again.load(tmp_path / "3.pt")
    assert again(10) == [] and len(again(10)) == 2


def test_averages_of_half_precision_are_kept_in_float32() -> None:
    model = net(dropout=False).bfloat16()
    ema = EMA(0.999)
    wanted = [p.detach().float() for p in model.parameters()]

    class Follows(ib.Callback):
        def on_batch_end(self, event: Any) -> None:
            for mine, p in zip(wanted, model.parameters(), strict=True):
                mine.lerp_(p.detach().float(), 0.001)

    data = [(x.bfloat16(), y) for x, y in BATCHES]
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    trainer(model, loader=data, optimizer=sgd, callbacks=ema + Follows())(20)
    assert equal(list(ema.averages.values()), wanted)
    before = bits(model)
    with ema.applied() as averaged:
        assert equal(bits(averaged), [value.bfloat16() for value in wanted])
    assert equal(bits(model), before) and equal(list(ema.averages.values()), wanted)


def test_a_finished_checkpoint_is_evaluated_with_its_averages(tmp_path: Any) -> None:
    ema = EMA(0.5)
    run = trainer(callbacks=ema)
    run(1)
    run.save(tmp_path / "done.pt")
    with ema.applied():
        wanted = run.evaluate(BATCHES).loss
    other = EMA(0.5)
    again = trainer(callbacks=other)
    again.load(tmp_path / "done.pt")
    with other.applied():
        assert again.evaluate(BATCHES).loss == wanted
    alone = EMA(0.5)
    alone.load_state_dict(other.state_dict())
    with pytest.raises(ib.StateError, match="no model"), alone.applied():
        pass
    with pytest.raises(ib.StateError, match="another model"), alone.applied(torch.nn.Linear(2, 2)):
        pass
    model = net()
    with alone.applied(model) as averaged:
        assert averaged is model
        assert equal(list(model.parameters()), list(ema.averages.values()))


def test_a_checkpoints_folder_is_made_at_the_beginning(tmp_path: Any) -> None:
    seen: list[bool] = []

    class Looks(ib.Callback):
        def on_epoch_begin(self, event: Any) -> None:
            seen.append((tmp_path / "runs/a").is_dir())

    fixed = Checkpoint(tmp_path / "runs/a/ck.pt")
    trainer(callbacks=[fixed, Checkpoint(tmp_path / "at{epoch:03d}/{{x}}.pt"), Looks()])(1)
    assert seen == [True]
    assert sorted(os.listdir(tmp_path)) == ["at001", "runs"]
    assert os.listdir(tmp_path / "runs/a") == ["ck.pt"]
    assert os.listdir(tmp_path / "at001") == ["{x}.pt"]
