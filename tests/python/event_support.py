"""Events made by hand, for tests of callbacks that need no trainer."""

import types

import torch
from infinitybatch import callbacks as events

FEATURES = 6


def report(**values):
    given = {
        "outputs": None, "peak_bytes": 2**20, "micro_batch_sizes": [2, 1], "strategy": "stream",
        "restarts": 0, "seconds": 0.5,
    }  # fmt: skip
    return types.SimpleNamespace(**(given | values))


def batch(callback, epoch=0, batch=0, step=0, samples=3, micro=2, loss=0.5, outputs=None, **more):
    """The events of one logical batch; row i of its inputs is filled with i."""
    trainer = more.pop("trainer", None)
    inputs = torch.arange(samples * 1.0)[:, None].expand(samples, FEATURES).clone()
    targets = torch.arange(samples)
    place = {"trainer": trainer, "epoch": epoch, "step": step}
    callback.on_batch_begin(
        events.BatchBegin(**place, batch=batch, inputs=inputs, targets=targets)
    )  # fmt: skip
    if callback.listens("on_micro_batch"):
        for begin in range(0, samples, micro):
            end = min(begin + micro, samples)
            given = outputs(inputs[begin:end]) if outputs else inputs[begin:end] * 2
            callback.on_micro_batch(
                events.MicroBatch(
                    **place, begin=begin, end=end, outputs=given, targets=targets[begin:end]
                )
            )
    callback.on_batch_end(
        events.BatchEnd(
            **place, batch=batch, loss=loss, samples=samples,
            report=more.pop("report", report()), learning_rates=(0.1,),
        )
    )  # fmt: skip


def run(callback, epochs=2, batches=3, first=0, trainer=None, total=None, **more):
    """The events of a run, an evaluation after each epoch. Losses are 1 / (step + 1)."""
    step = first * batches
    callback.on_run_begin(
        events.RunBegin(trainer=trainer, epoch=first, step=step, epochs=total or epochs)
    )
    for epoch in range(first, first + epochs):
        callback.on_epoch_begin(events.EpochBegin(trainer=trainer, epoch=epoch, step=step))
        for number in range(batches):
            batch(callback, epoch, number, step, loss=1 / (step + 1), trainer=trainer, **more)
            step += 1
        callback.on_epoch_end(
            events.EpochEnd(
                trainer=trainer, epoch=epoch, step=step, loss=0.5, samples=3 * batches,
                batches=batches, seconds=1.5, learning_rates=(0.1,),
            )
        )  # fmt: skip
        where = {"trainer": trainer, "epoch": epoch + 1, "step": step}
        callback.on_evaluation_begin(events.EvaluationBegin(**where))
        callback.on_evaluation_end(
            events.EvaluationEnd(
                **where, loss=0.25, samples=5, metrics={"accuracy": torch.tensor(0.75)}, seconds=0.5
            )
        )
    callback.on_run_end(
        events.RunEnd(trainer=trainer, epoch=first + epochs, step=step, stopped=False)
    )
