"""`Trainer` beside loops by hand: the same bits, the same numbers as native."""

import copy
from typing import Any

import infinitybatch as ib
import pytest
import torch
from torch import nn
from trainer_support import BATCHES, X, Y, bits, dataset, equal, net, shuffled, trainer

CROSS_ENTROPY = nn.CrossEntropyLoss()


def by_hand(model: nn.Module, loader: Any, epochs: int, step: Any) -> None:
    for _ in range(epochs):
        for inputs, targets in loader:
            step(inputs, targets)


@pytest.mark.parametrize("make", [lambda: BATCHES, shuffled], ids=["list", "DataLoader"])
def test_the_bits_of_a_loop_by_hand(make: Any) -> None:
    ours, theirs = net(), net()
    torch.manual_seed(5)
    done = trainer(ours, loader=make())(3)

    torch.manual_seed(5)
    optimizer = torch.optim.Adam(theirs.parameters(), lr=0.01)
    batch = ib.VirtualBatch(theirs, CROSS_ENTROPY, micro_batch_size=7)
    losses: list[tuple[float, int]] = []

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        optimizer.zero_grad()
        losses.append((batch.backward(inputs, targets).loss.item(), len(inputs)))
        optimizer.step()

    by_hand(theirs, make(), 3, step)
    assert equal(bits(ours), bits(theirs))
    first = sum(loss * n for loss, n in losses[:3]) / 50
    assert done[0].loss == pytest.approx(first, rel=1e-15)
    assert [(e.epoch, e.samples, e.batches) for e in done] == [(i, 50, 3) for i in range(3)]


def test_native_to_rounding_with_schedule_clipping_and_batch_norm() -> None:
    ours, theirs = net(dropout=False, batch_norm=True), net(dropout=False, batch_norm=True)
    adam = torch.optim.SGD(ours.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(adam, 9)
    run = trainer(ours, optimizer=adam, schedule=schedule, schedule_by="step", clip_norm=0.2)
    run(3)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.1, momentum=0.9)
    native_schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 9)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        optimizer.zero_grad()
        CROSS_ENTROPY(theirs(inputs), targets).backward()
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.2)
        optimizer.step()
        native_schedule.step()

    by_hand(theirs, BATCHES, 3, step)
    for a, b in zip(bits(ours), bits(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert adam.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    assert run.steps_done == 9


@pytest.mark.parametrize("plateau", [False, True])
def test_schedules_by_epoch(plateau: bool) -> None:
    model = net(dropout=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    if plateau:
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(
            optimizer, factor=0.5, patience=0, threshold=1e9, threshold_mode="abs"
        )
    rates: list[float] = []

    class Rates(ib.Callback):
        def on_batch_end(self, event: Any) -> None:
            rates.extend(event.learning_rates)

    trainer(model, optimizer=optimizer, schedule=scheduler, callbacks=Rates())(3)
    assert rates == [1.0] * 6 + [0.5] * 3 if plateau else [1.0] * 3 + [0.5] * 3 + [0.25] * 3


def test_grad_scaler_and_clipping_unscale_first() -> None:
    ours, theirs = net(dropout=False).float(), net(dropout=False).float()
    data = [(x.float(), y) for x, y in BATCHES]
    sgd = torch.optim.SGD(ours.parameters(), lr=0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    trainer(ours, optimizer=sgd, grad_scaler=scaler, clip_norm=0.1, loader=data)(2)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.5)
    native = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def step(inputs: torch.Tensor, targets: torch.Tensor) -> None:
        optimizer.zero_grad()
        native.scale(CROSS_ENTROPY(theirs(inputs), targets)).backward()
        native.unscale_(optimizer)
        nn.utils.clip_grad_norm_(theirs.parameters(), 0.1)
        native.step(optimizer)
        native.update()

    by_hand(theirs, data, 2, step)
    for a, b in zip(bits(ours), bits(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert scaler.state_dict() == native.state_dict()


def test_stages_apart_are_a_loop_by_hand() -> None:
    ours, theirs = net(dropout=False, batch_norm=True), net(dropout=False, batch_norm=True)
    run = trainer(ours)
    optimizer = torch.optim.Adam(theirs.parameters(), lr=0.01)
    for inputs, targets in BATCHES:
        run.zero_grad()
        loss = run.loss(run.forward(inputs), targets)
        run.backward(loss)
        run.step(loss)
        optimizer.zero_grad()
        CROSS_ENTROPY(theirs(inputs), targets).backward()
        optimizer.step()
    for a, b in zip(bits(ours), bits(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    assert (run.steps_done, run.epochs_done) == (3, 0)


LOADERS = {
    "list": lambda: BATCHES,
    "DataLoader": lambda: torch.utils.data.DataLoader(dataset(), batch_size=20),
    "factory": lambda: lambda: iter(BATCHES),
    "factory of epochs": lambda: lambda epoch: iter(BATCHES),
    "windows": lambda: ib.windows(torch.utils.data.DataLoader(dataset(), batch_size=10), batches=2),
    "generator": lambda: (batch for _ in range(2) for batch in BATCHES),
}


@pytest.mark.parametrize("name", LOADERS)
def test_loaders_of_any_shape_are_the_same_training(name: str) -> None:
    runs = [
        trainer(net(dropout=False), loader=make(), batches_per_epoch=3)
        for make in (LOADERS["list"], LOADERS[name])
    ]
    for run in runs:
        assert len(run(2)) == 2
    assert equal(bits(runs[0].model), bits(runs[1].model))


def test_dicts_and_losses_of_the_model_itself() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net(dropout=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    named = Named()
    batches = [{"x": x, "y": y} for x, y in BATCHES]
    trainer(named, loader=batches, targets="y")(2)
    plain = net(dropout=False)
    trainer(plain)(2)
    assert equal(bits(named), bits(plain))


def test_evaluate_is_the_whole_set_and_leaves_no_trace() -> None:
    model = net(batch_norm=True)
    run = trainer(model)
    run(1)
    model[0].eval()  # a module of its own mode
    run._batch.backward(*BATCHES[0])
    gradients = [p.grad.clone() for p in model.parameters()]
    before = (bits(model), [m.training for m in model.modules()], torch.get_rng_state())
    seen: list[int] = []

    class Seen:
        total = 0

        def reset(self) -> None:
            self.total = 0

        def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
            assert not outputs.requires_grad
            seen.append(len(outputs))
            self.total += int((outputs.argmax(1) == targets).sum())
            torch.rand(3)

        def compute(self) -> torch.Tensor:
            return torch.tensor(self.total)

    def accuracy(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return (outputs.argmax(1) == targets).double().mean()

    result = run.evaluate(shuffled(), {"right": Seen(), "accuracy": accuracy})
    assert equal(before[0], bits(model)) and torch.equal(before[2], torch.get_rng_state())
    assert before[1] == [m.training for m in model.modules()]
    assert all(map(torch.equal, gradients, (p.grad for p in model.parameters())))
    assert sum(seen) == result.samples == 50 and max(seen) == 7
    reference = copy.deepcopy(model).eval()
    with torch.no_grad():
        outputs = reference(X)
        assert result.loss == pytest.approx(CROSS_ENTROPY(outputs, Y).item(), rel=1e-14)
        right = int((outputs.argmax(1) == Y).sum())
    assert result.metrics["right"] == right
    assert result.metrics["accuracy"] == pytest.approx(right / 50)


def test_evaluate_is_put_back_after_an_exception() -> None:
    model = net()
    run = trainer(model)
    state = torch.get_rng_state()

    def fails(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        torch.rand(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run.evaluate(BATCHES, fails)
    assert all(m.training for m in model.modules())
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.parametrize("loss", ["sum", "coupled", "weighted"])
def test_evaluate_with_other_losses(loss: str) -> None:
    weight = torch.tensor([1.0, 2.0, 0.5, 3.0], dtype=torch.float64)
    criterion: Any = {
        "sum": nn.CrossEntropyLoss(reduction="sum"),
        "coupled": ib.losses.coupled(lambda out, y: out.logsumexp(0).sum()),
        "weighted": nn.CrossEntropyLoss(weight=weight, ignore_index=2),
    }[loss]
    model = net(dropout=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = ib.Trainer(model, criterion, optimizer, BATCHES, micro_batch_size=7)
    found = run.evaluate(BATCHES).loss
    with torch.no_grad():
        if loss == "coupled":
            parts = [model(x).logsumexp(0).sum().item() * len(x) / 50 for x, _ in BATCHES]
            assert found == pytest.approx(sum(parts), rel=1e-13)
        else:
            assert found == pytest.approx(criterion(model(X), Y).item(), rel=1e-13)


def test_evaluate_stays_inside_the_budget() -> None:
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = torch.randn(4000, 64), torch.randint(4, (4000,))
    budget = ib.memory.stats("cpu").live + 2**20  # all rows at once take 16 MiB
    run = ib.Trainer(model, CROSS_ENTROPY, optimizer, [(inputs, targets)], memory_budget=budget)
    with ib.memory.limit(budget + 2**14):
        result = run.evaluate([(inputs, targets)])
    with torch.no_grad():
        assert result.loss == pytest.approx(CROSS_ENTROPY(model(inputs), targets).item(), rel=1e-5)


def test_evaluate_with_torchmetrics() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    run = trainer(net(dropout=False))
    found = run.evaluate(
        BATCHES,
        [
            torchmetrics.Accuracy(task="multiclass", num_classes=4),
            torchmetrics.ConfusionMatrix(task="multiclass", num_classes=4),
        ],
    ).metrics
    with torch.no_grad():
        predicted = run.model.eval()(X).argmax(1)
    assert found["MulticlassAccuracy"] == pytest.approx((predicted == Y).double().mean().item())
    assert found["MulticlassConfusionMatrix"].sum() == 50
