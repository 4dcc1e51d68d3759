"""Loops of the user's own, over Trainer and InfinityBatch: what must not go wrong in silence."""

from typing import Any

import infinitybatch as ib
import pytest
import torch
from infinitybatch import InfinityBatch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR
from trainer_support import BATCHES, X, Y, bits, equal, net, trainer

LOSS = nn.CrossEntropyLoss()


def manager(model: nn.Module, **options: Any) -> InfinityBatch:
    sgd = options.pop("optimizer", None) or torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"dataloader": BATCHES, "verbose": False, "micro_batch_size": 20} | options
    return InfinityBatch(model, sgd, LOSS, **options)


def native(epochs: int) -> nn.Module:
    model = net(dropout=False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for inputs, targets in BATCHES:
            sgd.zero_grad()
            LOSS(model(inputs), targets).backward()
            sgd.step()
    return model


def own_epoch(manager: InfinityBatch) -> None:
    for inputs, targets in BATCHES:
        manager.criterion(manager.batch_(inputs), targets).backward()
        manager.step()
        manager.zero_grad()


def assert_near(one: nn.Module, other: nn.Module) -> None:
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("run", [lambda m: m.epoch(), lambda m: m(1), lambda m: m.trainer(1)])
def test_an_own_loop_after_a_run_begins_with_clear_gradients(run: Any) -> None:
    mine = manager(net(dropout=False))
    run(mine)
    own_epoch(mine)
    run(mine)
    own_epoch(mine)
    assert_near(mine.model, native(4))


@pytest.mark.parametrize("end", ["stop", "exception", "interrupt"])
def test_and_after_one_that_was_ended(end: str) -> None:
    class Ends(ib.Callback):
        def on_batch_end(self, event: Any) -> None:
            if event.step == 2:
                event.trainer.stop()
                if end != "stop":
                    raise (ValueError if end == "exception" else KeyboardInterrupt)

    mine = manager(net(dropout=False), callbacks=Ends())
    try:
        mine(5)
    except (ValueError, KeyboardInterrupt):
        assert end != "stop"
    assert all(p.grad is None for p in mine.model.parameters())
    own_epoch(mine)
    assert_near(mine.model, native(2))


def test_an_own_loop_needs_no_dataloader() -> None:
    mine = manager(net(dropout=False), dataloader=None)
    own_epoch(mine)
    assert_near(mine.model, native(1))
    for run in (mine.epoch, lambda: mine(1), lambda: mine.trainer(1)):
        with pytest.raises(ib.StateError, match="no dataloader yet: ib.dataloader = loader"):
            run()
    mine.dataloader = BATCHES
    mine.epoch()
    assert_near(mine.model, native(2))


def test_a_plateau_by_steps_reads_losses_or_says_that_there_are_none() -> None:
    model = net(dropout=False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"schedule": ReduceLROnPlateau(sgd, patience=0), "schedule_by": "step"}
    mine = manager(model, optimizer=sgd, **options)
    mine.criterion(mine.batch_(X), Y).backward()
    before = bits(model)
    with pytest.raises(ib.StateError, match=r"step\(loss\)"):
        mine.step()
    assert equal(bits(model), before)
    for _ in range(5):  # falling losses
        mine.zero_grad()
        mine.batch_(X)
        mine.loss(Y)
        mine.backward()
        mine.step()
    assert sgd.param_groups[0]["lr"] == 0.1
    assert mine.trainer.schedule.best < 2
    mine.zero_grad()
    mine.criterion(mine.batch_(X), Y).backward()
    mine.step(10.0)
    assert sgd.param_groups[0]["lr"] == pytest.approx(0.01)


def test_a_schedule_by_epochs_goes_on_with_epochstart() -> None:
    model = net(dropout=False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    mine = manager(model, optimizer=sgd, schedule=StepLR(sgd, 1, gamma=0.5))
    rates = []
    for _ in range(3):
        mine.epochstart_()
        own_epoch(mine)
        rates.append(sgd.param_groups[0]["lr"])
    assert rates == [0.1, 0.05, 0.025]
    mine.epoch()  # ends the one before, and itself
    assert sgd.param_groups[0]["lr"] == 0.1 / 16
    mine.epochstart_()
    mine.epochstart_()  # without a step: no epoch
    assert sgd.param_groups[0]["lr"] == 0.1 / 16


def test_a_plateau_by_epochs_reads_their_mean_loss() -> None:
    model = net(dropout=False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.0)
    mine = manager(model, optimizer=sgd, schedule=ReduceLROnPlateau(sgd))
    mine.epochstart_()
    for inputs, targets in BATCHES:
        mine.batch_(inputs)
        mine.loss(targets)
        mine.backward()
        mine.step()
        mine.zero_grad()
    mine.epochstart_()
    assert mine.trainer.schedule.best == pytest.approx(LOSS(model(X), Y).item(), rel=1e-12)
    own_epoch(mine)
    with pytest.raises(ib.StateError, match=r"ib.loss\(targets\)"):
        mine.epochstart_()


def test_a_scalers_step_asks_for_a_scaled_backward() -> None:
    model = net(dropout=False).float()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    mine = manager(model, optimizer=sgd, grad_scaler=scaler)
    x = X.float()
    mine.criterion(mine.batch_(x), Y).backward()
    before = bits(model)
    with pytest.raises(ib.StateError, match=r"backward\(loss\) in place of loss.backward"):
        mine.step()
    assert equal(bits(model), before)
    wanted = net(dropout=False).float()
    LOSS(wanted(x), Y).backward()
    torch.optim.SGD(wanted.parameters(), lr=0.1).step()
    mine.zero_grad()
    mine.backward(mine.criterion(mine.batch_(x), Y))
    mine.step()
    for a, b in zip(model.parameters(), wanted.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)
    with pytest.raises(ib.StateError, match="since the last step"):
        mine.step()


def test_a_trainers_own_step_says_so_too() -> None:
    model = net(dropout=False)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    run = trainer(
        model, optimizer=sgd, schedule=ReduceLROnPlateau(sgd, patience=0), schedule_by="step"
    )
    loss = run.loss(run.forward(X), Y)
    run.backward(loss)
    with pytest.raises(ib.StateError, match="reads its loss"):
        run.step()
    run.step(loss)
    assert run.steps_done == 1
