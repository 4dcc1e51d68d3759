"""The face of a step: options, report, plan, callbacks."""

import copy
import gc
import inspect
import pickle
import warnings
import weakref

import infinitybatch as ib
import pytest
import torch
from measure import assert_within, gradients
from support import LOOKS, Calls, Log, classification, mlp, native, ours, worst_error
from torch import nn


def test_report():
    inputs, targets = classification(13)
    found = ours(mlp(), nn.CrossEntropyLoss(), inputs, targets, micro_batch_size=5)
    report = found.report
    assert report.loss.shape == () and not report.loss.requires_grad
    assert report.loss.dtype == torch.float64
    assert report.outputs is None
    assert report.micro_batch_sizes == [5, 5, 3]
    assert report.peak_bytes > 0 and report.memory_budget is None
    assert report.predicted_peak_bytes is None
    assert report.seconds > 0 and report.restarts == 0 and report.strategy == "stream"
    text = repr(report)
    assert "loss" in text and "[5 (2 times), 3]" in text


def test_the_loss_has_the_losses_own_type():
    inputs, targets = classification(8)
    found = ours(mlp().float(), nn.CrossEntropyLoss(), inputs.float(), targets, micro_batch_size=3)
    assert found.report.loss.dtype == torch.float32


def test_a_budget_is_kept_and_predicted():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    inputs, targets = torch.randn(4096, 64), torch.randint(10, (4096,))
    wanted = native(model, nn.CrossEntropyLoss(), inputs, targets)
    budget = ib.memory.stats().live + 2 * 2**20
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), memory_budget=budget)
    for _ in range(12):
        model.zero_grad()
        report = batch.backward(inputs, targets)
        assert report.peak_bytes <= budget == report.memory_budget
    assert report.restarts == 0
    assert report.predicted_peak_bytes is not None
    assert abs(report.predicted_peak_bytes - report.peak_bytes) <= 0.01 * report.peak_bytes
    assert_within(gradients(model), wanted.gradients, least=1e-5)  # float32, 4,096 samples


def test_budget_exceeded_says_what_would_do():
    model = mlp()
    inputs, targets = classification(32)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), memory_budget=1000)
    with pytest.raises(ib.BudgetExceeded) as raised:
        batch.backward(inputs, targets)
    error = raised.value
    assert isinstance(error, torch.OutOfMemoryError) and isinstance(error, ib.Error)
    assert error.limit == 1000 and error.needed > 1000
    assert all(p.grad is None for p in model.parameters())
    assert "memory_budget" in str(error)


def test_a_fixed_size_that_does_not_fit_its_budget():
    model = nn.Linear(1000, 1000)
    inputs, targets = torch.randn(4096, 1000), torch.randn(4096, 1000)
    budget = ib.memory.stats().live + 10_000_000
    batch = ib.VirtualBatch(model, nn.MSELoss(), memory_budget=budget, micro_batch_size=4096)
    with pytest.raises(ib.BudgetExceeded, match="micro_batch_size=4096") as raised:
        batch.backward(inputs, targets)
    assert raised.value.limit == budget and raised.value.needed > budget
    ib.VirtualBatch(model, nn.MSELoss(), memory_budget=budget, micro_batch_size=8).backward(
        inputs, targets
    )


@pytest.mark.parametrize("budget", [64 * 2**20, "64MiB", 0.5, "0.5", "auto", None])
def test_budgets_of_every_kind(budget):
    model = mlp()
    inputs, targets = classification(16)
    wanted = native(model, nn.CrossEntropyLoss(), inputs, targets)
    found = ours(model, nn.CrossEntropyLoss(), inputs, targets, memory_budget=budget)
    assert worst_error(found, wanted) < 1e-12
    assert found.report.memory_budget >= 2**20


def test_plan():
    model = mlp()
    inputs, targets = classification(64)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), memory_budget="64MiB")
    plan = batch.plan(inputs, targets)
    assert isinstance(plan, ib.Plan) and plan.strategy == "stream"
    assert plan.batch_size == sum(plan.micro_batch_sizes) == 64
    assert plan.micro_batch_size == max(plan.micro_batch_sizes)
    assert plan.budget_bytes == 64 * 2**20
    assert 0 < plan.baseline_bytes < plan.predicted_peak_bytes <= plan.budget_bytes
    assert plan.reason
    operations = [instruction.operation for instruction in plan.instructions]
    assert operations[:5] == ["load", "forward", "loss", "backward", "free"]
    assert operations[-1] == "hand out" and plan.instructions[-1].micro_batch == -1
    assert len(operations) == 5 * len(plan.micro_batch_sizes) + 1
    assert repr(plan.instructions[0]) == "<load 0>" and repr(plan.instructions[-1]) == "<hand out>"
    assert plan.candidates and all(isinstance(c, ib.Candidate) for c in plan.candidates)
    assert all(c.feasible and c.peak_bytes > 0 for c in plan.candidates)
    assert "Candidate(micro_batch_size=" in repr(plan.candidates[0])
    assert repr(plan).startswith("<Plan: stream, 64 samples")
    text = plan.explain()
    assert "64 samples" in text and "64 MiB" in text
    assert all(p.grad is None for p in model.parameters())


def test_plan_of_a_fixed_size():
    inputs, targets = classification(13)
    batch = ib.VirtualBatch(mlp(), nn.CrossEntropyLoss(), micro_batch_size=5)
    assert batch.plan(inputs, targets).micro_batch_sizes == [5, 5, 3]


def test_on_micro_batch():
    inputs, targets = classification(13)
    model = mlp()
    seen = []
    batch = ib.VirtualBatch(
        model, nn.CrossEntropyLoss(), micro_batch_size=5, on_micro_batch=seen.append
    )
    batch.backward(inputs, targets)
    assert [(m.begin, m.end) for m in seen] == [(0, 5), (5, 10), (10, 13)]
    assert all(isinstance(m, ib.MicroBatch) for m in seen)
    with torch.no_grad():
        joined = torch.cat([m.outputs for m in seen])
        assert_within({"outputs": joined}, {"outputs": model(inputs)})
    assert torch.equal(torch.cat([m.targets for m in seen]), targets)
    assert not any(m.outputs.requires_grad for m in seen)


def test_keep_outputs():
    inputs, targets = classification(13)
    model = mlp()
    for options in ({"micro_batch_size": 5}, {"memory_budget": "64MiB"}):
        found = ours(model, nn.CrossEntropyLoss(), inputs, targets, keep_outputs=True, **options)
        with torch.no_grad():
            assert_within({"outputs": found.report.outputs}, {"outputs": model(inputs)})
        assert not found.report.outputs.requires_grad


@pytest.mark.parametrize("enabled", [True, False])
def test_grad_scaler(enabled):
    model = mlp().float()
    inputs, targets = classification(13)
    inputs = inputs.float()
    wanted = native(model, nn.CrossEntropyLoss(), inputs, targets)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, enabled=enabled)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=5, grad_scaler=scaler)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    report = batch.backward(inputs, targets)
    assert_within({"loss": report.loss}, {"loss": wanted.loss}, least=1e-6)
    scale = 1024.0 if enabled else 1.0
    scaled = {name: scale * gradient for name, gradient in wanted.gradients.items()}
    assert_within(gradients(model), scaled, least=2e-6)
    before = model[0].weight.detach().clone()
    scaler.step(optimizer)
    scaler.update()
    moved = {"0.weight": model[0].weight.detach() - before}
    assert_within(moved, {"0.weight": -0.1 * wanted.gradients["0.weight"]}, least=1e-5)


def test_training_to_a_lower_loss():
    torch.manual_seed(1)
    model = mlp()
    inputs, targets = classification(64)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), memory_budget="64MiB")
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        losses.append(float(batch.backward(inputs, targets).loss))
        optimizer.step()
    assert losses[-1] < 0.7 * losses[0]


def test_modes_may_change_between_steps():
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 5)).double()
    inputs, targets = classification(16)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), memory_budget="64MiB")
    batch.backward(inputs, targets)
    model.eval()
    model.zero_grad()
    wanted = native(model, nn.CrossEntropyLoss(), inputs, targets)
    batch.backward(inputs, targets)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted.gradients[name], rtol=1e-12, atol=1e-16)


def test_batches_may_change_between_steps():
    model = mlp()
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), memory_budget="64MiB")
    for n in (1, 2, 3, 5, 64, 7):
        inputs, targets = classification(n)
        model.zero_grad()
        wanted = native(model, nn.CrossEntropyLoss(), inputs, targets)
        report = batch.backward(inputs, targets)
        assert sum(report.micro_batch_sizes) == n
        torch.testing.assert_close(report.loss, wanted.loss, rtol=1e-12, atol=0)
        for name, p in model.named_parameters():
            torch.testing.assert_close(p.grad, wanted.gradients[name], rtol=1e-11, atol=1e-15)


def test_repr():
    batch = ib.VirtualBatch(mlp(), nn.MSELoss(), memory_budget="8GiB")
    assert repr(batch) == "VirtualBatch(Sequential, mse_loss, memory_budget='8GiB')"


def test_torchs_warnings_become_pythons():
    """A warning that a C++ op raises outside of any Python call of torch."""
    model = mlp()
    inputs, _ = classification(6)

    def sum_of(outputs, targets):
        warnings.warn("mine", UserWarning, stacklevel=1)
        return outputs.sum()

    batch = ib.VirtualBatch(model, ib.losses.separable(sum_of, None), micro_batch_size=3)
    with pytest.warns(UserWarning, match="mine"):
        batch.backward(inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(UserWarning, match="mine"):
            batch.backward(inputs)


@pytest.mark.parametrize("steps", [0, 1])
def test_a_model_that_holds_its_own_step_is_collected(steps):
    model = mlp()
    model.batch = ib.VirtualBatch(
        model, nn.CrossEntropyLoss(), micro_batch_size=3, on_micro_batch=lambda m, s=model: None
    )
    for _ in range(steps):
        model.batch.backward(*classification(6))
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


def test_a_model_that_holds_its_own_step_can_be_copied():
    model = mlp()
    model.batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=3)
    twin = copy.deepcopy(model)
    assert twin.batch is not model.batch and repr(twin.batch) == repr(model.batch)
    twin.batch.backward(*classification(6))
    assert twin[0].weight.grad is not None and model[0].weight.grad is None


@pytest.mark.parametrize("around", ["anomaly", "profiler", "save_on_cpu", "saved_tensors_hooks"])
def test_contexts_around_a_step(around):
    contexts = {
        "anomaly": lambda: torch.autograd.detect_anomaly(check_nan=True),
        "profiler": lambda: torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True, with_stack=True
        ),
        "save_on_cpu": torch.autograd.graph.save_on_cpu,
        "saved_tensors_hooks": lambda: torch.autograd.graph.saved_tensors_hooks(
            lambda x: x.numpy(force=True), torch.from_numpy
        ),
    }
    model = mlp()
    inputs, targets = classification(13)
    wanted = native(model, nn.CrossEntropyLoss(), inputs, targets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # anomaly mode warns that it is slow
        with contexts[around]():
            for options in ({"micro_batch_size": 4}, {"memory_budget": "64MiB"}):
                found = ours(model, nn.CrossEntropyLoss(), inputs, targets, **options)
                assert worst_error(found, wanted) < 1e-12


def test_anomaly_mode_finds_what_it_should():
    class Bad(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * float("nan")

    model = mlp()
    model.insert(1, Calls(lambda self, x: Bad.apply(x)))
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.autograd.detect_anomaly(), pytest.raises(RuntimeError, match="BadBackward"):
            batch.backward(*classification(12))
    assert all(p.grad is None for p in model.parameters())


def test_nothing_is_held_after_a_step():
    model = mlp()
    inputs, targets = classification(64)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4)
    batch.backward(inputs, targets)
    model.zero_grad()
    gc.collect()
    live = ib.memory.stats().live
    for _ in range(3):
        batch.backward(inputs, targets)
        model.zero_grad()
    gc.collect()
    assert ib.memory.stats().live == live


def test_objects_that_the_model_returns_are_let_go():
    class Extra:
        pass

    alive = Log()

    def forward(self, x):
        extra = Extra()
        alive.append(weakref.ref(extra))
        return self.net(x), extra

    model = Calls(forward, net=mlp())
    loss = ib.losses.separable(lambda o, t: o[0].sum(), None)
    inputs, _ = classification(9)
    ib.VirtualBatch(model, loss, micro_batch_size=3).backward(inputs)
    assert len(alive) == 3 + LOOKS and not any(ref() for ref in alive)


def test_every_public_name_has_its_words():
    for name in ib.__all__:
        value = getattr(ib, name)
        if name == "__version__" or inspect.ismodule(value):
            continue
        assert value.__doc__, f"infinitybatch.{name} has no docstring"
    for name in ib.losses.__all__:
        assert getattr(ib.losses, name).__doc__, f"infinitybatch.losses.{name} has no docstring"
    for name in ib.memory.__all__:
        assert getattr(ib.memory, name).__doc__, f"infinitybatch.memory.{name} has no docstring"


def test_a_loss_of_the_librarys_cannot_be_copied():
    step = ib.VirtualBatch(mlp(), ib.losses.cross_entropy(), micro_batch_size=3)
    for copied in (copy.copy, copy.deepcopy, pickle.dumps):
        with pytest.raises(ib.Unsupported, match="cannot be copied or pickled.*for the copy"):
            copied(step)
