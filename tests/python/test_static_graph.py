"""`static_graph=True`: user code leaves the loop once its tape is confirmed."""

import copy

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from batch_norm_models import Residual, images, make, single_layer
from measure import excess, gradients
from support import Calls, Tally, classification, mlp, native
from torch import nn

LOSSES = {
    "separable": nn.CrossEntropyLoss(),
    "coupled": lambda outputs, targets: (
        (outputs @ outputs.T / 3).logsumexp(1).mean() + F.cross_entropy(outputs, targets)
    ),
}


def ours_of(loss):
    return loss if isinstance(loss, nn.Module) else ib.losses.coupled(loss)


@pytest.mark.parametrize("retained", [0, 2, 4])
@pytest.mark.parametrize("which", LOSSES)
@pytest.mark.parametrize("name", ["residual, 6 layers", "used twice", "no BatchNorm"])
def test_steps_follow_the_native_ones(name, which, retained):
    model = mlp() if name == "no BatchNorm" else make(name)
    twin = copy.deepcopy(model)
    loss = LOSSES[which]
    batch = ib.VirtualBatch(
        model,
        ours_of(loss),
        micro_batch_size=3,
        retained_micro_batches=retained,
        static_graph=True,
    )
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (model, twin)]
    for _ in range(4):
        inputs, targets = classification(11) if name == "no BatchNorm" else images(11)
        for optimizer in optimizers:
            optimizer.zero_grad()
        report = batch.backward(inputs, targets)
        value = loss(twin(inputs), targets)
        value.backward()
        assert report.strategy == "cut"
        torch.testing.assert_close(report.loss, value.detach(), rtol=1e-9, atol=0)
        for optimizer in optimizers:
            optimizer.step()
    for (key, a), b in zip(model.state_dict().items(), twin.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-11, msg=lambda m, n=key: f"{n}: {m}")


def test_user_code_leaves_the_loop():
    calls = []

    def forward(self, x):
        calls.append(len(x))
        return self.net(x)

    model = Calls(forward, net=single_layer()).double()
    inputs, targets = images(11)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4, static_graph=True)
    batch.backward(inputs, targets)
    assert calls, "the first step records"
    batch.backward(inputs, targets)
    calls.clear()
    for _ in range(3):
        model.zero_grad()
        batch.backward(inputs, targets)
    assert calls == []
    wanted = native(model, nn.CrossEntropyLoss(), inputs, targets)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted.gradients[name], rtol=1e-10, atol=1e-13)


def test_dropout_draws_anew_in_every_step_and_keeps_its_masks_between_passes():
    model = Calls(
        lambda self, x: self.head(F.dropout(self.norm(self.first(x)), 0.4).mean((2, 3))),
        first=nn.Conv2d(3, 6, 3),
        norm=nn.BatchNorm2d(6),
        head=nn.Linear(6, 5),
    ).double()
    inputs, targets = images(8)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4, static_graph=True)
    for _ in range(2):
        batch.backward(inputs, targets)

    def loss():
        torch.manual_seed(5)
        return float(batch.backward(inputs, targets).loss)

    first = loss()
    assert loss() == first, "the same seed draws the same masks"
    assert float(batch.backward(inputs, targets).loss) != first
    parameter = model.first.weight
    direction = torch.randn_like(parameter)
    model.zero_grad()
    loss()
    slope = float((parameter.grad * direction).sum())
    parameter.data.add_(direction, alpha=1e-6)
    above = loss()
    parameter.data.sub_(direction, alpha=2e-6)
    below = loss()
    assert slope == pytest.approx((above - below) / 2e-6, rel=1e-5)


def test_a_forward_that_is_not_static_is_named():
    calls = Tally()  # a number in plain state would be put back

    def forward(self, x):
        calls()
        x = self.net[0](x)
        return self.net[2](x.relu() if calls.count % 2 else x.tanh())

    model = Calls(forward, net=mlp())
    inputs, targets = classification(12)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4, static_graph=True)
    with pytest.raises((ib.Unsupported, ib.CouplingError), match="aten::(relu|tanh)"):
        for _ in range(3):
            batch.backward(inputs, targets)


def test_values_of_the_data_are_named():
    def forward(self, x):
        return self.net(x * float(x.abs().max()))

    model = Calls(forward, net=mlp())
    inputs, targets = classification(12)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4, static_graph=True)
    with pytest.raises(ib.Unsupported, match="static_graph says .* value"):
        batch.backward(inputs, targets)
    assert all(p.grad is None for p in model.parameters())


def test_other_parameters_are_recorded_anew():
    model = make("residual, 2 layers")
    inputs, targets = images(9)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=3, static_graph=True)
    for _ in range(2):
        batch.backward(inputs, targets)
    model.head.weight = nn.Parameter(torch.randn_like(model.head.weight))
    model.zero_grad()
    wanted = native(model, nn.CrossEntropyLoss(), inputs, targets)
    batch.backward(inputs, targets)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted.gradients[name], rtol=1e-10, atol=1e-13)


def test_under_a_budget():
    model = Residual(3).double()
    inputs, targets = images(40)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), memory_budget="64MiB", static_graph=True)
    for _ in range(4):
        model.zero_grad()
        wanted = native(model, nn.CrossEntropyLoss(), inputs, targets)
        report = batch.backward(inputs, targets)
        assert report.peak_bytes <= report.memory_budget
        assert excess(gradients(model), wanted.gradients, least=1e-10) == {}
        for name, buffer in model.named_buffers():
            torch.testing.assert_close(buffer, wanted.buffers[name], rtol=1e-12, atol=1e-14)


def test_misuse():
    with pytest.raises(ib.InvalidArgument, match="per_micro_batch"):
        ib.VirtualBatch(
            mlp(), nn.CrossEntropyLoss(), static_graph=True, batch_coupling="per_micro_batch"
        )
    with pytest.raises(ib.InvalidArgument, match="use_tapes"):
        ib.VirtualBatch(mlp(), nn.CrossEntropyLoss(), static_graph=True, use_tapes=False)


@pytest.mark.parametrize("n", [9, 11])
@pytest.mark.parametrize("which", LOSSES)
def test_a_momentum_that_counts_steps(which, n):
    """Python reads it from a buffer, so that no step's number is that of the next."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.Linear(8, 5))
    twin = copy.deepcopy(model.double())
    loss = LOSSES[which]
    batch = ib.VirtualBatch(model, ours_of(loss), micro_batch_size=3, static_graph=True)
    for _ in range(4):
        inputs, targets = classification(n)
        for m in (model, twin):
            m.zero_grad()
        batch.backward(inputs, targets)
        loss(twin(inputs), targets).backward()
        for a, b in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-12)
        for a, b in zip(model.buffers(), twin.buffers(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


class Remembering(nn.Module):
    """Leaves something of its outputs in a buffer that its next forward reads."""

    def __init__(self, kind):
        super().__init__()
        self.head = nn.Linear(6, 5).double()
        self.kind = kind
        self.register_buffer("kept", torch.zeros(5, dtype=torch.float64))

    def forward(self, x):
        y = self.head(x)
        z, seen = y + self.kept, y.detach()
        if self.kind == "mean":
            self.kept.mul_(0.9).add_(seen.mean(0), alpha=0.1)
        if self.kind == "queue":
            self.kept.copy_(seen[-1])
        if self.kind == "another tensor":
            self.kept = self.kept * 0.9 + seen.mean(0) * 0.1
        if self.kind == "equal at first":
            most = seen.abs().amax(0)
            self.kept.copy_(torch.where(most > 1e3, most, 0.0))
        if self.kind == "counter":
            self.kept += 1
        return z


@pytest.mark.parametrize("by", ["VirtualBatch", "coupled", "wrap"])
@pytest.mark.parametrize("kind", ["mean", "queue", "another tensor", "equal at first", "counter"])
def test_what_micro_batches_leave_in_buffers_is_compared(kind, by):
    """Recorded, and where recordings are used again: none of them may speak for the others."""
    model = Remembering(kind)
    twin = copy.deepcopy(model)
    options = {"micro_batch_size": 3, "static_graph": True}
    if by == "wrap":
        run = ib.wrap(model, **options)
        step = lambda x, y: F.cross_entropy(run(x), y).backward()  # noqa: E731
    else:
        loss = ib.losses.coupled(F.cross_entropy) if by == "coupled" else nn.CrossEntropyLoss()
        step = ib.VirtualBatch(model, loss, **options).backward
    inputs, targets = classification(9)
    steps = []
    for scale in (1, 1, 1, -1e4):
        found = model.kept.clone()
        try:
            step(inputs * scale, targets)
        except ib.CouplingError as error:
            assert "'kept'" in str(error)
            assert torch.equal(model.kept, found)
            break
        F.cross_entropy(twin(inputs * scale), targets).backward()
        assert excess(gradients(model), gradients(twin)) == {}
        torch.testing.assert_close(model.kept, twin.kept, rtol=1e-12, atol=0)
        steps.append(scale)
    assert len(steps) == {"counter": 4, "equal at first": 3}.get(kind, 0)
