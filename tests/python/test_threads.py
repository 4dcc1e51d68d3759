"""Two steps at once."""

import threading

import infinitybatch as ib
import pytest
import torch
from support import Calls, classification, mlp, native
from torch import nn


def in_threads(*functions):
    """Runs each in a thread of its own; gives their exceptions."""
    errors = [None] * len(functions)

    def run(i, function):
        try:
            function()
        except BaseException as error:  # noqa: BLE001
            errors[i] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(functions)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return errors


@pytest.mark.parametrize("options", [{"micro_batch_size": 1}, {"memory_budget": "64MiB"}])
def test_two_models_in_two_threads(options):
    pairs = [(mlp(), classification(60)) for _ in range(2)]
    wanted = [native(model, nn.CrossEntropyLoss(), *data) for model, data in pairs]
    batches = [ib.VirtualBatch(model, nn.CrossEntropyLoss(), **options) for model, _ in pairs]

    def work(i):
        def run():
            model, data = pairs[i]
            for _ in range(5):
                model.zero_grad()
                batches[i].backward(*data)

        return run

    assert in_threads(work(0), work(1)) == [None, None]
    for (model, _), result in zip(pairs, wanted, strict=True):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                parameter.grad, result.gradients[name], rtol=1e-12, atol=1e-15
            )


def waiting_model():
    """Its forward waits until the other thread has had its turn."""
    entered, leave = threading.Event(), threading.Event()

    def forward(self, x):
        entered.set()
        assert leave.wait(60)
        return self.net(x)

    return Calls(forward, net=mlp()), entered, leave


@pytest.mark.parametrize("same_object", [True, False])
def test_one_model_in_two_threads_is_refused(same_object):
    model, entered, leave = waiting_model()
    inputs, targets = classification(4)
    wanted = native(model.net, nn.CrossEntropyLoss(), inputs, targets)
    first = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=2)
    second = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=2)

    def other():
        assert entered.wait(60)
        try:
            (first if same_object else second).backward(inputs, targets)
        finally:
            leave.set()

    errors = in_threads(lambda: first.backward(inputs, targets), other)
    assert errors[0] is None
    assert isinstance(errors[1], ib.StateError)
    message = "running a step already" if same_object else "another step is running on parameter"
    assert message in str(errors[1])
    assert same_object or "one backward through what wrap made of it" in str(errors[1])
    for name, parameter in model.net.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted.gradients[name], rtol=1e-12, atol=1e-15)


def test_one_wrapped_model_in_two_threads_is_refused():
    model, entered, leave = waiting_model()
    inputs, targets = classification(4)
    wrapped = ib.wrap(model, micro_batch_size=2)
    wanted = native(model.net, nn.CrossEntropyLoss(), inputs, targets)

    def other():
        assert entered.wait(60)
        try:
            wrapped(inputs)
        finally:
            leave.set()

    def first():
        nn.functional.cross_entropy(wrapped(inputs), targets).backward()

    errors = in_threads(first, other)
    assert errors[0] is None
    assert isinstance(errors[1], ib.StateError)
    assert "at work in another thread" in str(errors[1])
    for name, parameter in model.net.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted.gradients[name], rtol=1e-12, atol=1e-15)


def test_a_step_inside_of_a_step_is_refused():
    inputs, targets = classification(4)
    batch = None
    batch = ib.VirtualBatch(
        mlp(),
        nn.CrossEntropyLoss(),
        micro_batch_size=2,
        on_micro_batch=lambda _: batch.backward(inputs, targets),
    )
    with pytest.raises(ib.StateError, match="around this call"):
        batch.backward(inputs, targets)


def test_python_runs_while_cpp_works():
    """The GIL is free: another thread counts while this one is inside of one long step."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        model = torch.jit.script(mlp())
    inputs, targets = classification(4000)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=1)
    inside, done, counted = threading.Event(), threading.Event(), 0

    def count():
        nonlocal counted
        inside.wait(60)
        while not done.is_set():
            counted += 1
            done.wait(0.001)

    thread = threading.Thread(target=count)
    thread.start()
    inside.set()
    batch.backward(inputs, targets)
    done.set()
    thread.join(60)
    assert counted > 10


def test_a_limit_holds_in_its_own_thread_only():
    results = {}

    def allocate():
        results["other"] = torch.zeros(2**20)

    with ib.memory.limit(ib.memory.stats().live + 1000):
        assert in_threads(allocate) == [None]
        with pytest.raises(torch.OutOfMemoryError):
            torch.zeros(2**20)
