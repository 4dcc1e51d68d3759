"""What the loop in C++ asks of Python in a step: what nobody listens to is not made."""

import random
import signal

import infinitybatch as ib
import pytest
import torch
from infinitybatch import _random_state
from torch import nn


def made(callbacks=None, loader=None):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    batches = [(torch.randn(6, 4), torch.randint(2, (6,))) for _ in range(4)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return ib.Trainer(
        model,
        nn.CrossEntropyLoss(),
        optimizer,
        loader(batches) if loader else batches,
        micro_batch_size=2,
        callbacks=callbacks,
    )


class Heard(ib.callbacks.Callback):
    def __init__(self):
        self.steps = []


def test_a_method_that_is_set_while_training_runs_is_heard_from_then_on():
    heard = Heard()
    quiet = ib.callbacks.Callback()
    trainer = made([quiet, heard])
    trainer.epoch()
    heard.on_batch_end = lambda event: heard.steps.append((event.step, event.learning_rates))
    trainer.epoch()
    assert heard.steps == [(step, (0.1,)) for step in range(4, 8)]
    del heard.on_batch_end
    trainer.epoch()
    assert len(heard.steps) == 4


def test_an_exception_of_each_part_is_raised_as_it_is():
    class Mine(Exception):
        pass

    error = Mine("as it is")

    def fails(*_):
        raise error

    for place in ("on_batch_begin", "on_batch_end", "on_epoch_end"):
        heard = Heard()
        trainer = made([heard])
        setattr(heard, place, fails)
        with pytest.raises(Mine) as caught:
            trainer.epoch()
        assert caught.value is error


def test_a_signal_that_comes_while_parameters_are_written_is_handled_after_them():
    trainer = made()
    optimizer = trainer.optimizer
    counts = []
    before = signal.signal(signal.SIGTERM, lambda *_: counts.append(trainer.steps_done))
    step = optimizer.step

    def step_and_signal():
        step()
        signal.raise_signal(signal.SIGTERM)
        assert len(counts) < trainer.steps_done + 1

    optimizer.step = step_and_signal
    try:
        trainer.epoch()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert counts == [1, 2, 3, 4]


def test_a_loader_that_draws_is_watched_without_taking_its_numbers(monkeypatch):
    taken = []
    capture = _random_state.capture
    monkeypatch.setattr(_random_state, "capture", lambda: taken.append(1) or capture())

    def drawing(batches):
        def loader():
            for x, y in batches:
                yield x + random.random(), y

        return loader

    trainer = made(loader=drawing)
    trainer.epoch()
    assert not taken  # 1,250 numbers of Python and NumPy for each batch
    state = trainer.state_dict()
    assert taken
    assert isinstance(state["loader"]["before"]["torch"], torch.Tensor)
    assert isinstance(state["loader"]["begun"]["default"]["python"], tuple)
