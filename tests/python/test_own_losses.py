"""Losses of the user's own: functions, subclasses, losses that models return, unknown ones."""

import copy
import functools

import infinitybatch as ib
import pytest
import torch
from infinitybatch import _coupled
from loss_support import WEIGHT, N, labels, rand
from measure import assert_within
from support import assert_exact, classification, mlp, native, ours, worst_error
from torch import nn
from torch.nn import functional as F


def test_functions_and_partials_of_them():
    inputs, targets = classification(N)
    model = mlp()
    for function, criterion in [
        (F.cross_entropy, nn.CrossEntropyLoss()),
        (
            functools.partial(F.cross_entropy, ignore_index=2, reduction="sum"),
            nn.CrossEntropyLoss(ignore_index=2, reduction="sum"),
        ),
        (
            functools.partial(functools.partial(F.cross_entropy, weight=WEIGHT), ignore_index=2),
            nn.CrossEntropyLoss(WEIGHT, ignore_index=2),
        ),
    ]:
        wanted = native(model, criterion, inputs, targets)
        found = ours(model, function, inputs, targets, micro_batch_size=3)
        assert worst_error(found, wanted) < 1e-12


def test_a_loss_can_be_asked_for_its_parts():
    loss = ib.losses.cross_entropy(ignore_index=0)
    outputs, targets = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    wanted = F.cross_entropy(outputs, targets, ignore_index=0, reduction="sum")
    assert_within({"sum": loss.sum(outputs, targets)}, {"sum": wanted}, least=1e-6)
    assert float(loss.denominator(targets, 4)) == 2
    assert ib.losses.mse(reduction="sum").denominator(targets, 4) is None


class Focal(nn.CrossEntropyLoss):
    def forward(self, input, target):
        return super().forward(2 * input, target)


class Renamed(nn.CrossEntropyLoss):
    """A subclass that computes the same."""


def test_a_subclass_that_overrides_nothing_is_its_base():
    inputs, targets = classification(N)
    assert_exact(mlp(), Renamed(), inputs, targets)


def test_separable():
    inputs, targets = classification(N)
    per_class = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)
    loss = ib.losses.separable(
        lambda outputs, labels: F.cross_entropy(outputs, labels, weight=per_class, reduction="sum"),
        lambda labels: per_class[labels].sum(),
    )
    assert_exact(
        mlp(), nn.CrossEntropyLoss(per_class), inputs, targets, wrap=lambda criterion: loss
    )


@pytest.mark.parametrize(
    "denominator", [lambda t, samples: samples, lambda t: float(len(t)), lambda *both: both[1]]
)
def test_denominators_may_ask_for_the_number_of_samples(denominator):
    inputs, targets = classification(N)
    loss = ib.losses.separable(lambda o, t: F.cross_entropy(o, t, reduction="sum"), denominator)
    assert_exact(mlp(), nn.CrossEntropyLoss(), inputs, targets, wrap=lambda criterion: loss)


def test_penalty_counts_once():
    inputs, targets = classification(N)
    model = mlp()
    model.zero_grad()
    value = F.cross_entropy(model(inputs), targets) + 0.1 * model[0].weight.square().sum()
    value.backward()
    wanted = [p.grad for p in model.parameters()]
    for loss in (
        ib.losses.with_penalty(nn.CrossEntropyLoss(), lambda: 0.1 * model[0].weight.square().sum()),
        ib.losses.separable(
            lambda o, t: F.cross_entropy(o, t, reduction="sum"),
            lambda t, samples: samples,
            penalty=lambda: 0.1 * model[0].weight.square().sum(),
        ),
    ):
        model.zero_grad()
        report = ib.VirtualBatch(model, loss, micro_batch_size=3).backward(inputs, targets)
        torch.testing.assert_close(report.loss, value.detach(), rtol=1e-12, atol=0)
        for p, gradient in zip(model.parameters(), wanted, strict=True):
            torch.testing.assert_close(p.grad, gradient, rtol=1e-12, atol=1e-16)


def test_a_loss_with_parameters_of_its_own():
    temperature = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
    inputs, targets = classification(N)
    model = mlp()
    F.cross_entropy(model(inputs) / temperature, targets).backward()
    wanted, temperature.grad = temperature.grad, None
    loss = ib.losses.separable(
        lambda o, t: F.cross_entropy(o / temperature, t, reduction="sum"),
        lambda t, samples: samples,
    )
    ib.VirtualBatch(model, loss, micro_batch_size=3).backward(inputs, targets)
    torch.testing.assert_close(temperature.grad, wanted, rtol=1e-12, atol=0)


class LanguageModel(nn.Module):
    """Returns its own mean loss as Hugging Face's models do."""

    def __init__(self, shape):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20)
        self.double()
        self.shape = shape

    def forward(self, input_ids, labels):
        logits = self.head(self.embedding(input_ids))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return self.shape(loss, logits)


class Output:
    def __init__(self, loss, logits):
        self.loss, self.logits = loss, logits


@pytest.mark.parametrize(
    "shape",
    [
        lambda loss, logits: {"loss": loss, "logits": logits},
        lambda loss, logits: (loss, logits),
        lambda loss, logits: loss,
        Output,
    ],
)
@pytest.mark.parametrize("size", [1, 4, 20])
def test_models_that_return_their_own_loss(shape, size):
    ids = torch.randint(20, (N, 6))
    labels = ids.clone()
    labels[2, :] = -100  # a sample without any label, alone in its micro-batch at size 1
    labels[torch.rand(labels.shape) < 0.4] = -100
    model = LanguageModel(lambda loss, logits: loss)
    value = model(ids, labels)
    value.backward()
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    model.shape = shape
    loss = ib.losses.from_model(lambda labels: (labels[:, 1:] != -100).sum())
    report = ib.VirtualBatch(model, loss, micro_batch_size=size).backward(
        {"input_ids": ids, "labels": labels}, labels
    )
    torch.testing.assert_close(report.loss, value.detach(), rtol=1e-12, atol=0)
    for p, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-11, atol=1e-16)


def test_from_model_with_a_number_for_denominator():
    model = LanguageModel(lambda loss, logits: (loss, logits))
    ids = torch.randint(20, (N, 6))
    loss = ib.losses.from_model(lambda labels, samples: 5 * samples)
    report = ib.VirtualBatch(model, loss, micro_batch_size=4).backward((ids, ids), ids)
    with torch.no_grad():
        torch.testing.assert_close(report.loss, model(ids, ids)[0], rtol=1e-12, atol=0)


def uniformity(outputs, targets):
    return (outputs @ outputs.T).logsumexp(1).mean()


class Head(nn.Linear):
    """A criterion of one argument, with parameters of its own."""

    def forward(self, outputs):
        return super().forward(outputs).tanh().std()


def hooked():
    criterion = nn.MSELoss()
    criterion.register_forward_hook(lambda module, args, loss: loss.square())
    return criterion


def replaced():
    criterion = nn.MSELoss()
    criterion.forward = lambda outputs, targets: (outputs - targets).square().mean().square()
    return criterion


# What nobody knows to be separable: the loss, the targets, and how the notice begins.
UNKNOWN = {
    "a function of one's own": (uniformity, labels(), "uniformity is not known"),
    "a lambda": (lambda o, t: uniformity(o, t).exp(), labels(), "<lambda> is not known"),
    "a lambda of one argument": (lambda o: o.std(), None, "<lambda> is not known"),
    "a module of one's own": (Head(5, 1).double(), None, "Head is not known"),
    "an overridden forward": (
        Focal(),
        labels(),
        "Focal, which overrides the forward of CrossEntropyLoss, is not known",
    ),
    "hooks": (hooked(), rand(N, 5), "MSELoss with its hooks is not known"),
    "a forward of one object": (
        replaced(),
        rand(N, 5),
        "MSELoss, whose forward was replaced, is not known",
    ),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_an_unknown_loss_is_coupled_and_says_so(name):
    loss, targets, message = UNKNOWN[name]
    model = mlp()
    inputs = rand(N, 6)
    native = copy.deepcopy(model)
    arguments = (native(inputs),) if targets is None else (native(inputs), targets)
    wanted = loss(*arguments)
    wanted.backward()
    _coupled._told.clear()
    with pytest.warns(ib.CoupledLossNotice, match="IB101") as notices:
        batch = ib.VirtualBatch(model, loss, micro_batch_size=4)
        ib.VirtualBatch(model, loss, micro_batch_size=4)
    (notice,) = notices  # once for each loss
    assert message in str(notice.message) and "losses.separable" in str(notice.message)
    assert notice.filename == __file__
    report = batch.backward(inputs, targets)
    assert report.strategy == "replay"
    torch.testing.assert_close(report.loss, wanted.detach(), rtol=1e-12, atol=0)
    for a, b in zip(model.parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("later", ["hooks", "a forward of one object"])
def test_what_is_put_on_a_criterion_later_counts_from_then_on(later):
    model, inputs, targets = mlp(), rand(N, 6), rand(N, 5)
    criterion = nn.MSELoss()
    batch = ib.VirtualBatch(model, criterion, micro_batch_size=4)
    batch.backward(inputs, targets)
    model.zero_grad()
    if later == "hooks":
        criterion.register_forward_hook(lambda module, args, loss: loss.square())
    else:
        criterion.forward = replaced().forward
    _coupled._told.clear()
    with pytest.warns(ib.CoupledLossNotice):
        report = batch.backward(inputs, targets)
    native = copy.deepcopy(model)
    native.zero_grad()
    wanted = criterion(native(inputs), targets)
    wanted.backward()
    torch.testing.assert_close(report.loss, wanted.detach(), rtol=1e-12, atol=0)
    for a, b in zip(model.parameters(), native.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-12, atol=1e-16)


def test_a_penalty_beside_a_coupled_loss_is_refused():
    with pytest.raises(ib.InvalidType, match="add the penalty inside of it"):
        ib.losses.with_penalty(ib.losses.coupled(uniformity), lambda: torch.zeros(()))


REFUSED = {
    "no loss at all": ("mse", ib.InvalidType, "loss must be a callable"),
    "None": (None, ib.InvalidType, "loss must be a callable"),
    "reduction none": (nn.MSELoss(reduction="none"), ib.InvalidArgument, "one loss per element"),
    "an unknown reduction": (
        functools.partial(F.mse_loss, reduction="max"),
        ib.InvalidArgument,
        "is no reduction",
    ),
    "positional arguments fixed": (
        functools.partial(F.cross_entropy, None),
        ib.InvalidType,
        "by keyword only",
    ),
    "an option that is none": (
        functools.partial(F.mse_loss, size_average=True),
        ib.InvalidArgument,
        "size_average",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_losses_that_are_refused(name):
    loss, kind, message = REFUSED[name]
    with pytest.raises(kind, match=message):
        ib.VirtualBatch(mlp(), loss, micro_batch_size=2)
