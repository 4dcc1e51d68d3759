"""A thousand epochs leave nothing behind but what was asked for."""

import gc
import inspect
import weakref
from typing import Any

import infinitybatch as ib
from trainer_support import BATCHES, net, trainer


def test_a_thousand_epochs_do_not_grow() -> None:
    class Counts(ib.Callback):
        told = 0

        def on_batch_end(self, event: Any) -> None:
            self.told += 1

    run = trainer(net(), loader=BATCHES[2:], micro_batch_size=10, callbacks=Counts())
    run(1010)  # a full history
    gc.collect()
    live, before = ib.memory.stats("cpu").live, len(gc.get_objects())
    run(300)
    gc.collect()
    grown = len(gc.get_objects()) - before
    assert ib.memory.stats("cpu").live <= live
    assert grown < 100, "objects; one an epoch would be 300"
    assert len(run.history) == 1000 and run.history[-1].epoch == 1309


def test_a_trainer_is_collected() -> None:
    run = trainer()
    run(1)
    gone = weakref.ref(run)
    del run
    gc.collect()
    assert gone() is None


def test_every_option_of_virtual_batch_is_one_of_trainer() -> None:
    def options(function: Any) -> dict[str, Any]:
        parameters = inspect.signature(function).parameters.values()
        return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}

    ours = options(ib.Trainer)
    for name, default in options(ib.VirtualBatch).items():
        assert ours[name] == default and type(ours[name]) is type(default), name
        assert f"{name}" in (inspect.getdoc(ib.Trainer) or ""), name
