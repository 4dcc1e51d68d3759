"""BatchNorm in training mode, in micro-batches: gradients and running statistics of the whole."""

import copy
import os

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from batch_norm_models import MODELS, Residual, images, make, single_layer
from measure import excess, gradients, worst
from support import Calls, Tally, native, ours, worst_error
from torch import nn

LONG = bool(os.environ.get("INFINITYBATCH_LONG_TESTS"))
SPLITS = [(11, 4), (9, 3), (8, 7), (7, 1)] if LONG else [(11, 4), (7, 1)]


def noise_of(model, criterion, inputs, targets, wanted):
    """How far native itself moves when the batch is reversed."""
    return worst_error(native(model, criterion, inputs.flip(0), targets.flip(0)), wanted)


def assert_same(found, wanted, tolerance):
    assert worst_error(found, wanted) <= tolerance
    torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-12, atol=0)
    for name, buffer in wanted.buffers.items():
        torch.testing.assert_close(found.buffers[name], buffer, rtol=1e-12, atol=1e-14)


def contrastive(outputs, targets):
    return (outputs @ outputs.T / 3).logsumexp(1).mean() + F.cross_entropy(outputs, targets)


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
    calls = []

    def forward(self, x):
        calls.append(len(x))
        return self.net(x)

    model = Calls(forward, net=single_layer()).double()
    inputs, targets = images(11)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4)
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


def test_eval_mode_couples_nothing():
    model = make("residual, 2 layers").eval()
    inputs, targets = images(8)
    found = ours(model, nn.CrossEntropyLoss(), inputs, targets, micro_batch_size=3)
    assert found.report.strategy == "stream"
    assert worst_error(found, native(model, nn.CrossEntropyLoss(), inputs, targets)) <= 1e-12


def test_train_and_eval_in_turn():
    model = make("residual, 2 layers")
    inputs, targets = images(8)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=3)
    assert batch.backward(inputs, targets).strategy == "cut"
    assert (model.eval(), batch.backward(inputs, targets))[1].strategy == "stream"
    assert (model.train(), batch.backward(inputs, targets))[1].strategy == "cut"


def test_instance_norm_is_not_coupled():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.Flatten(), nn.Linear(144, 5)
    ).double()
    inputs, targets = images(8)
    found = ours(model, nn.CrossEntropyLoss(), inputs, targets, micro_batch_size=3)
    assert found.report.strategy == "stream"


class Tokens(nn.Module):
    """The gradient of its BatchNorm's output is a transposed view: of a single sample its strides
    may mean one layout or the other, and torch's kernel takes the wrong one.
    """

    def __init__(self):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8))
        self.norm, self.head = nn.LayerNorm(8), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.norm(self.stem(x).flatten(2).transpose(1, 2)).mean(1))


@pytest.mark.parametrize("n, size", [(4, 1), (5, 2), (5, 4)])
def test_micro_batches_of_one_sample_whose_layout_is_ambiguous(n, size):
    torch.manual_seed(6)
    model = Tokens().double()
    inputs, targets = torch.randn(n, 3, 9, 9, dtype=torch.float64), torch.randint(4, (n,))
    criterion = nn.CrossEntropyLoss()
    wanted = native(model, criterion, inputs, targets)
    assert_same(ours(model, criterion, inputs, targets, micro_batch_size=size), wanted, 1e-12)


class TwiceNormalised(nn.Module):
    """What its second BatchNorm is given has a mean of zero, exactly so in some micro-batches."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.second(self.first(x) * 0.5))


def test_statistics_that_a_micro_batch_leaves_as_they_were():
    torch.manual_seed(8)
    model = TwiceNormalised().double()
    inputs, targets = torch.randn(4, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0])
    inputs[1] = -inputs[0]
    probe = copy.deepcopy(model)
    probe(inputs[:2])
    assert not probe.second.running_mean.any()
    criterion = nn.CrossEntropyLoss()
    wanted = native(model, criterion, inputs, targets)
    tolerance = max(1e-12, 10 * noise_of(model, criterion, inputs, targets, wanted))
    assert_same(ours(model, criterion, inputs, targets, micro_batch_size=2), wanted, tolerance)


class StandardisedConv(nn.Conv2d):
    """Weight standardisation as image models write it: a BatchNorm over the weight."""

    def forward(self, x):
        weight = F.batch_norm(
            self.weight.reshape(1, self.out_channels, -1), None, None, training=True, eps=1e-6
        ).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias)


@pytest.mark.parametrize("with_batch_norm", [False, True])
def test_standardised_weights_couple_nothing(with_batch_norm):
    torch.manual_seed(7)
    model = nn.Sequential(
        StandardisedConv(3, 6, 3),
        nn.BatchNorm2d(6) if with_batch_norm else nn.GroupNorm(2, 6),
        nn.ReLU(),
        StandardisedConv(6, 4, 3),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
    ).double()
    inputs, targets = torch.randn(7, 3, 8, 8, dtype=torch.float64), torch.randint(4, (7,))
    for criterion in (nn.CrossEntropyLoss(), contrastive):
        wanted = native(model, criterion, inputs, targets)
        loss = ib.losses.coupled(criterion) if criterion is contrastive else criterion
        found = ours(model, loss, inputs, targets, micro_batch_size=3)
        plain = "replay" if criterion is contrastive else "stream"
        assert found.report.strategy == ("cut" if with_batch_norm else plain)
        assert_same(found, wanted, 1e-12)


def with_instance_norm(*behind):
    layers = nn.Conv2d(3, 4, 3), nn.InstanceNorm2d(4, affine=True, track_running_stats=True)
    return nn.Sequential(*layers, *behind, nn.Flatten(), nn.Linear(144, 5)).double()


@pytest.mark.parametrize("criterion", [nn.CrossEntropyLoss(), contrastive])
@pytest.mark.parametrize("twice", [False, True])
def test_running_statistics_of_instance_norm_are_means_over_samples(criterion, twice):
    model = with_instance_norm()
    if twice:
        model.insert(2, model[1])
    inputs, targets = images(7)
    inputs += torch.arange(7.0).reshape(7, 1, 1, 1)  # each sample has another mean
    loss = ib.losses.coupled(criterion) if criterion is contrastive else criterion
    wanted = native(model, criterion, inputs, targets)
    assert not torch.equal(wanted.buffers["1.running_mean"], model[1].running_mean)
    for size in (1, 3, 4, 7):
        found = ours(model, loss, inputs, targets, micro_batch_size=size)
        assert_same(found, wanted, 1e-12)
    assert_same(ours(model, loss, inputs, targets, memory_budget="8MiB"), wanted, 1e-12)
    wrapped = copy.deepcopy(model)
    same = ib.wrap(wrapped, micro_batch_size=3)
    criterion(same(inputs), targets).backward()
    assert excess(dict(wrapped.named_buffers()), wanted.buffers, least=1e-12) == {}
    assert excess(gradients(wrapped), wanted.gradients, least=1e-12) == {}


def test_running_statistics_that_are_read_are_refused():
    """What follows would depend on the other samples."""
    reading = Calls(
        lambda self, x: self.net(x) + self.net[1].running_mean.mean(), net=with_instance_norm()
    )
    model = with_instance_norm(nn.BatchNorm2d(4))  # cut: its statistics are provisional
    inputs, targets = images(7)
    for each in (reading, model):
        with pytest.raises(ib.CouplingError):
            ours(each, nn.CrossEntropyLoss(), inputs, targets, micro_batch_size=3)
    model.eval()
    wanted = native(model, nn.CrossEntropyLoss(), inputs, targets)
    found = ours(model, nn.CrossEntropyLoss(), inputs, targets, micro_batch_size=3)
    assert_same(found, wanted, 1e-12)


def test_a_single_sample_without_any_statistics_is_refused():
    inputs, targets = images(4)
    with pytest.raises(ib.CouplingError, match="micro-batches of two samples or more"):
        ours(make("neither"), nn.CrossEntropyLoss(), inputs, targets, micro_batch_size=1)


def test_one_sample_raises_what_native_raises():
    model = make("1d")
    inputs, targets = images(1)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        model(inputs)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        ours(model, nn.CrossEntropyLoss(), inputs, targets, micro_batch_size=1)


REFUSED = {
    "a value on the host": (
        lambda self, x: (
            self.head(self.norm(self.first(x)).mean((2, 3)))
            * (2.0 if float(self.norm(self.first(x)).abs().max()) > 1e9 else 1.0)
        ),
        "reads values",
    ),
    "a list": (
        lambda self, x: (
            self.head(self.norm(self.first(x)).mean((2, 3)))
            * self.norm(self.first(x)).mean((0, 2, 3)).tolist()[0]
        ),
        "took another way|reads values|changed",
    ),
    "a shape": (
        lambda self, x: self.head(
            (lambda y: y.mean((2, 3)) + y[y > 0].sum() / y[y > 0].numel())(self.norm(self.first(x)))
        ),
        "reads values",
    ),
    "statistics that forward writes": (
        lambda self, x: (
            (self.norm.reset_running_stats(), self.norm(self.first(x)))[1].mean((2, 3))
            @ self.head.weight.T
        ),
        "running statistics",
    ),
    "a parameter": (
        lambda self, x: self.head(
            (self.first(x) + self.norm(self.first.weight.repeat(1, 2, 1, 1)).sum()).mean((2, 3))
        ),
        "does not come from the samples",
    ),
    "other layers": (
        lambda self, x: self.head(
            (self.norm if int(x[0, 0, 0, 0] * 1e6) % 2 else self.twin)(self.first(x)).mean((2, 3))
        ),
        "do not run the same layers",
    ),
    "running statistics": (
        lambda self, x: (
            self.head(self.norm(self.first(x)).mean((2, 3))) + self.norm.running_mean.sum()
        ),
        "running statistics",
    ),
    "samples in the channels": (
        lambda self, x: self.head(
            F.batch_norm(self.first(x).flatten(0, 1)[None], None, None, training=True)
            .unflatten(1, (-1, 6))[0]
            .mean((2, 3))
        ),
        "first dimension does not hold the samples",
    ),
    "rows that forward selects": (
        lambda self, x: self.head(
            F.batch_norm(
                (y := self.first(x).mean((2, 3)))[y[:, 0] > y[:, 0].median()],
                None,
                None,
                training=True,
            ).sum(0)
            + y
        ),
        "too few rows.*select afterwards",
    ),
    "no row is selected": (
        lambda self, x: self.head(
            self.first(x).mean((2, 3))
            + F.batch_norm(self.first(x)[x[:, 0, 0, 0] > 1e-6], None, None, training=True).sum()
        ),
        "first dimension does not hold the samples",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused(name):
    forward, message = REFUSED[name]
    model = Calls(
        forward,
        first=nn.Conv2d(3, 6, 3),
        norm=nn.BatchNorm2d(6),
        twin=nn.BatchNorm2d(6),
        head=nn.Linear(6, 5),
    ).double()
    inputs, targets = images(8)
    inputs[:, 0, 0, 0] = torch.arange(8) // 3 % 2 * 1e-6 + 1e-7  # micro-batches of 3 differ in it
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    with pytest.raises(ib.CouplingError, match=message):
        ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=3).backward(inputs, targets)
    assert torch.equal(torch.get_rng_state(), state)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), key
    assert all(p.grad is None for p in model.parameters())


def test_a_number_of_layers_that_changes_ends_in_an_error():
    """It once began again for ever."""

    def forward(self, x):
        times = 1 + int(x.abs().sum() * 1e6) % 3
        x = self.first(x)
        for _ in range(times):
            x = self.norm(x)
        return self.head(x.mean((2, 3)))

    model = Calls(
        forward, first=nn.Conv2d(3, 6, 3), norm=nn.BatchNorm2d(6), head=nn.Linear(6, 5)
    ).double()
    inputs, targets = images(12)
    try:
        ours(model, nn.CrossEntropyLoss(), inputs, targets, memory_budget="64MiB")
    except ib.CouplingError as error:
        assert "equally often" in str(error) or "do not run the same layers" in str(error)


def test_inputs_that_forward_changes_are_refused():
    model = Calls(
        lambda self, x: self.head(self.norm(self.first(x.mul_(2))).mean((2, 3))),
        first=nn.Conv2d(3, 6, 3),
        norm=nn.BatchNorm2d(6),
        head=nn.Linear(6, 5),
    ).double()
    for options in ({"micro_batch_size": 3}, {"memory_budget": "64MiB"}):
        inputs, targets = images(8)
        with pytest.raises(ib.Unsupported, match="changes its inputs in place"):
            ib.VirtualBatch(model, nn.CrossEntropyLoss(), **options).backward(inputs, targets)
    plain = Calls(lambda self, x: self.head(x.mul_(2).mean((2, 3))), head=nn.Linear(3, 5)).double()
    inputs, targets = images(40)
    batch = ib.VirtualBatch(plain, ib.losses.coupled(F.cross_entropy), memory_budget="64MiB")
    with pytest.raises(ib.Unsupported, match="changes its inputs in place"):
        batch.backward(inputs, targets)


def test_whole_numbers_may_choose_what_a_layer_gave():
    """Masks decide about a shape, indices do not."""
    model = Calls(
        lambda self, x: self.head(
            self.norm(self.first(x))[:, torch.arange(5, -1, -1)].mean((2, 3))
        ),
        first=nn.Conv2d(3, 6, 3),
        norm=nn.BatchNorm2d(6),
        head=nn.Linear(6, 5),
    ).double()
    inputs, targets = images(8)
    found = ours(model, nn.CrossEntropyLoss(), inputs, targets, micro_batch_size=3)
    assert_same(found, native(model, nn.CrossEntropyLoss(), inputs, targets), 1e-12)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x * 2

    @staticmethod
    def backward(context, gradient):
        return gradient * 2


def test_opaque_code_and_batch_norm():
    model = Calls(
        lambda self, x: self.head(Doubled.apply(self.norm(self.first(x))).mean((2, 3))),
        first=nn.Conv2d(3, 6, 3),
        norm=nn.BatchNorm2d(6),
        head=nn.Linear(6, 5),
    ).double()
    inputs, targets = images(8)
    with pytest.raises(ib.CouplingError, match="cannot be cut: .*autograd function"):
        ours(model, nn.CrossEntropyLoss(), inputs, targets, micro_batch_size=3)
    # As one micro-batch it couples nothing.
    found = ours(model, nn.CrossEntropyLoss(), inputs, targets, memory_budget="64MiB")
    assert worst_error(found, native(model, nn.CrossEntropyLoss(), inputs, targets)) <= 1e-12


def test_failures_leave_everything_as_it_was():
    model = make("residual, 6 layers")
    inputs, targets = images(11)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4)
    batch.backward(inputs, targets)
    wanted = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    model.load_state_dict(copy.deepcopy(model.state_dict()))
    before = copy.deepcopy(model.state_dict())
    # At every place where a hook of the user's runs, and in the loss.
    for failing in range(1, 4):
        tally = Tally()  # a number in the closure would be put back

        def fail(*_, failing=failing, tally=tally):
            tally()
            if tally.count == failing:
                raise KeyboardInterrupt

        handle = model.norms[2].register_forward_hook(fail)
        with pytest.raises(KeyboardInterrupt):
            batch.backward(inputs, targets)
        handle.remove()
        for key, value in model.state_dict().items():
            assert torch.equal(value, before[key]), key
        assert all(p.grad is None for p in model.parameters())
    for name, buffer in model.named_buffers():  # statistics as in the first step
        buffer.copy_(before[name])
    batch.backward(inputs, targets)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.grad, wanted[name])
