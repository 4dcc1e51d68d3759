"""A step that Ctrl-C ends leaves everything as it was."""

import functools
import signal
import threading
import time
import types

import infinitybatch as ib
import pytest
import torch
from fault_support import MyError, State
from torch import nn
from transaction_support import OPTIONS, set_up


@pytest.mark.parametrize("options", OPTIONS)
def test_ctrl_c_between_micro_batches(options):
    """The model's Python code is over so quickly that the signal is seen by the step's own check."""
    model, inputs, targets = set_up(True)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), **options)
    state = State(model)
    # Raised by the handler: an exception of ours shows that Python's handlers ran.
    error = MyError("signal")

    def handler(*_):
        raise error

    previous = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(MyError) as raised:
            source = ib.BatchSource(
                12, lambda b, e: signal.raise_signal(signal.SIGUSR1) or inputs[b:e]
            )
            batch.backward(source, targets)
        assert raised.value is error
    finally:
        signal.signal(signal.SIGUSR1, previous)
    state.check()


def test_ctrl_c_reaches_a_step_that_runs_no_python_at_all():
    """No bytecode runs between micro-batches, so that only the step's own check can see it."""
    weight = torch.randn(5, 6, requires_grad=True)
    forward = functools.partial(nn.functional.linear, weight=weight)  # all of it is C
    view = types.SimpleNamespace(
        forward=forward,
        one_of_many=lambda function: function,
        parameters=lambda: [("weight", weight)],
        buffers=lambda: [],
        is_training=lambda: True,
        is_uncompiled=False,
    )
    batch = ib._C.VirtualBatch(view, ib.losses.cross_entropy(), micro_batch_size=1)
    main = threading.main_thread().ident
    timer = threading.Timer(0.3, lambda: signal.pthread_kill(main, signal.SIGINT))
    inputs = torch.randn(100_000, 6)  # seconds of work
    # A job in the background of a shell is started with the signal ignored.
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer.start()
    start = time.monotonic()
    try:
        with pytest.raises(KeyboardInterrupt):
            batch.backward(inputs, torch.zeros(len(inputs), dtype=torch.int64))
    finally:
        signal.signal(signal.SIGINT, previous)
    assert time.monotonic() - start < 2
    timer.join()
    assert weight.grad is None
