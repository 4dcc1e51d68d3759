"""BatchNorm in training mode, in micro-batches: gradients and running statistics of the whole."""

import copy
import os

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from batch_norm_models import MODELS, Residual, images, make, single_layer
from batch_norm_support import assert_same, contrastive, noise_of
from measure import excess, worst
from support import Calls, Log, native, ours
from torch import nn

LONG = bool(os.environ.get("INFINITYBATCH_LONG_TESTS"))


SPLITS = [(11, 4), (9, 3), (8, 7), (7, 1)] if LONG else [(11, 4), (7, 1)]


@pytest.mark.parametrize("n, size", SPLITS)
@pytest.mark.parametrize("name", MODELS)
def test_exact(name, n, size):
    if size == 1 and name in ("neither", "computed weight"):
        n, size = 8, 2  # of one sample it cannot be told what its channels are: refused, see below
    model = make(name)
    inputs, targets = images(n)
    for criterion in (nn.CrossEntropyLoss(), contrastive):
        wanted = native(model, criterion, inputs, targets)
        tolerance = max(1e-12, 10 * noise_of(model, criterion, inputs, targets, wanted))
        loss = ib.losses.coupled(criterion) if criterion is contrastive else criterion
        found = ours(model, loss, inputs, targets, micro_batch_size=size)
        assert found.report.strategy == "cut"
        assert max(found.report.micro_batch_sizes) <= size
        assert_same(found, wanted, tolerance)
        assert found.report.restarts == 0


@pytest.mark.parametrize("retained", [0, 1, 3])
@pytest.mark.parametrize("coupled", [False, True])
def test_graphs_that_are_kept_give_the_same_bits(retained, coupled):
    model = make("residual, 6 layers")
    inputs, targets = images(11)
    loss = ib.losses.coupled(contrastive) if coupled else nn.CrossEntropyLoss()
    wanted = ours(model, loss, inputs, targets, micro_batch_size=4)
    found = ours(model, loss, inputs, targets, micro_batch_size=4, retained_micro_batches=retained)
    for name, gradient in wanted.gradients.items():
        assert torch.equal(found.gradients[name], gradient), name


@pytest.mark.parametrize("steps", [4])
def test_training_follows_the_native_one(steps):
    ours_model = make("residual, 6 layers")
    native_model = copy.deepcopy(ours_model)
    criterion = nn.CrossEntropyLoss()
    batch = ib.VirtualBatch(ours_model, criterion, micro_batch_size=3)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (ours_model, native_model)]
    for _ in range(steps):
        inputs, targets = images(10)
        for optimizer in optimizers:
            optimizer.zero_grad()
        batch.backward(inputs, targets)
        criterion(native_model(inputs), targets).backward()
        for optimizer in optimizers:
            optimizer.step()
    for (name, a), b in zip(
        ours_model.state_dict().items(), native_model.state_dict().values(), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_fp32_is_as_exact_as_native(layout):
    model = make("residual, 6 layers")
    inputs, targets = images(12)
    criterion = nn.CrossEntropyLoss()
    wanted = native(model, criterion, inputs, targets)
    small = copy.deepcopy(model).float().to(memory_format=layout)
    given = inputs.float().contiguous(memory_format=layout)
    here = native(small, criterion, given, targets)
    found = ours(small, criterion, given, targets, micro_batch_size=5)
    contract = {"least": 16 * torch.finfo(torch.float32).eps, "times": 4, "true_zero": 1e-2}
    assert (
        excess(found.gradients, wanted.gradients, [here.gradients], any_type=True, **contract) == {}
    )
    for name, buffer in wanted.buffers.items():
        torch.testing.assert_close(
            found.buffers[name].double(), buffer.double(), rtol=1e-5, atol=1e-6
        )


def test_autocast():
    torch.manual_seed(3)
    model = Residual(3)
    inputs, targets = images(12)
    inputs = inputs.float()
    criterion = nn.CrossEntropyLoss()
    wanted = native(copy.deepcopy(model).double(), criterion, inputs.double(), targets)
    with torch.autocast("cpu", torch.bfloat16):
        here = native(model, criterion, inputs, targets)
        found = ours(model, criterion, inputs, targets, micro_batch_size=5)
    assert found.report.strategy == "cut"
    errors = {
        which: worst(result.gradients, wanted.gradients, any_type=True, true_zero=1e-3)
        for which, result in (("native", here), ("ours", found))
    }
    assert errors["ours"] <= 2 * errors["native"] < 1, errors
    for name, buffer in here.buffers.items():
        torch.testing.assert_close(found.buffers[name], buffer, rtol=2e-2, atol=2e-2)


def test_dropout_keeps_its_masks_between_the_passes():
    """Gradients belong to the loss that was reported: finite differences under the same seed."""
    model = Calls(
        lambda self, x: self.head(
            F.dropout(self.norm(F.dropout(self.first(x), 0.3)), 0.4).mean((2, 3))
        ),
        first=nn.Conv2d(3, 6, 3),
        norm=nn.BatchNorm2d(6),
        head=nn.Linear(6, 5),
    ).double()
    inputs, targets = images(9)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4)

    def loss():
        torch.manual_seed(5)
        return float(batch.backward(inputs, targets).loss)

    loss()
    for parameter in (model.first.weight, model.norm.weight, model.head.bias):
        direction = torch.randn_like(parameter)
        model.zero_grad()
        loss()
        slope = float((parameter.grad * direction).sum())
        parameter.data.add_(direction, alpha=1e-6)
        above = loss()
        parameter.data.sub_(direction, alpha=2e-6)
        below = loss()
        parameter.data.add_(direction, alpha=1e-6)
        assert slope == pytest.approx((above - below) / 2e-6, rel=1e-5)


def test_masks_by_hand():
    """Several dropout layers whose masks come with the batch: exactly what native computes."""

    def forward(self, x, first, second):
        x = F.relu(self.one(self.a(x))) * first[:, :, None, None]
        x = F.relu(self.two(self.b(x))) * second[:, :, None, None]
        return self.head(x.mean((2, 3)))

    model = Calls(
        forward,
        a=nn.Conv2d(3, 6, 3),
        one=nn.BatchNorm2d(6),
        b=nn.Conv2d(6, 6, 3),
        two=nn.BatchNorm2d(6),
        head=nn.Linear(6, 5),
    ).double()
    inputs, targets = images(11)
    masks = [(torch.rand(11, 6) > 0.3).double() / 0.7 for _ in range(2)]
    wanted = native(model, nn.CrossEntropyLoss(), (inputs, *masks), targets)
    found = ours(model, nn.CrossEntropyLoss(), (inputs, *masks), targets, micro_batch_size=3)
    assert_same(found, wanted, 1e-12)


def test_random_numbers_are_drawn_once():
    model = nn.Sequential(single_layer(), nn.Dropout(0.5)).double()
    inputs, targets = images(8)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4)
    states = []
    for _ in range(2):
        torch.manual_seed(0)
        batch.backward(inputs, targets)
        states.append(torch.get_rng_state())
    torch.manual_seed(0)
    for part in inputs.split(4):
        model(part)
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[1], torch.get_rng_state())


def test_user_code_runs_once_for_each_micro_batch():
    calls = Log()

    def forward(self, x):
        calls.append(len(x))
        return self.net(x)

    model = Calls(forward, net=single_layer()).double()
    inputs, targets = images(11)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4)
    for _ in range(2):  # these look at rows
        batch.backward(inputs, targets)
    calls.clear()
    fired = []
    model.net.head.bias.register_hook(lambda gradient: fired.append(gradient.clone()))
    batch.backward(inputs, targets)
    assert calls == [4, 4, 3]
    assert len(fired) == 1


def test_outputs_and_callbacks_see_what_the_whole_batch_gives():
    model = make("residual, 6 layers")
    inputs, targets = images(10)
    wanted = copy.deepcopy(model)(inputs).detach()
    for loss in (nn.CrossEntropyLoss(), ib.losses.coupled(contrastive)):
        seen = []
        report = ib.VirtualBatch(
            copy.deepcopy(model),
            loss,
            micro_batch_size=4,
            keep_outputs=True,
            on_micro_batch=lambda part, seen=seen: seen.append(part.outputs),
        ).backward(inputs, targets)
        torch.testing.assert_close(report.outputs, wanted, rtol=1e-11, atol=1e-13)
        torch.testing.assert_close(torch.cat(seen[-3:]), wanted, rtol=1e-11, atol=1e-13)


def test_inputs_that_require_grad():
    model = on_inputs = make("on the input")
    inputs, targets = images(9)
    a = inputs.clone().requires_grad_()
    b = inputs.clone().requires_grad_()
    nn.CrossEntropyLoss()(copy.deepcopy(model)(a), targets).backward()
    ib.VirtualBatch(on_inputs, nn.CrossEntropyLoss(), micro_batch_size=4).backward(b, targets)
    torch.testing.assert_close(b.grad, a.grad, rtol=1e-11, atol=1e-14)
