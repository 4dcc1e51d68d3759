"""Every criterion of torch.nn, recognised and exact."""

import infinitybatch as ib
import pytest
import torch
from infinitybatch._criteria import _CRITERIA
from loss_support import WEIGHT, C, N, labels, rand
from support import Calls, assert_exact, classification, mlp, native, ours, worst_error
from torch import nn
from torch.nn import functional as F


def logits_model(*outputs):
    """Inputs (N, 6) to logits (N, 5), then `outputs` of them."""
    return Calls(
        lambda self, x: (
            outputs[0](self.net(x)) if len(outputs) == 1 else tuple(f(self.net(x)) for f in outputs)
        ),
        net=mlp(),
    )


def same(y):
    return y


def signs(*shape):
    return torch.randint(2, shape) * 2 - 1


def some_ignored():
    targets = labels()
    targets[::3] = -100
    return targets


def distance(a, b):
    return (a - b).abs().sum(1)


# name: (criterion, what the model returns of its logits, targets)
CRITERIA = {
    "cross_entropy": (nn.CrossEntropyLoss(), [same], labels),
    "cross_entropy weighted, ignoring, smoothed": (
        nn.CrossEntropyLoss(WEIGHT, ignore_index=-100, label_smoothing=0.1),
        [same],
        some_ignored,
    ),
    "cross_entropy sum": (nn.CrossEntropyLoss(reduction="sum"), [same], labels),
    "cross_entropy probabilities": (
        nn.CrossEntropyLoss(WEIGHT),
        [same],
        lambda: rand(N, C).softmax(1),
    ),
    "nll": (nn.NLLLoss(WEIGHT, ignore_index=2), [lambda y: y.log_softmax(1)], labels),
    "multi_margin": (nn.MultiMarginLoss(p=2, margin=0.5, weight=WEIGHT), [same], labels),
    "mse": (nn.MSELoss(), [same], lambda: rand(N, C)),
    "l1": (nn.L1Loss(), [same], lambda: rand(N, C)),
    "smooth_l1": (nn.SmoothL1Loss(beta=0.3), [same], lambda: rand(N, C)),
    "huber": (nn.HuberLoss(delta=0.3), [same], lambda: rand(N, C)),
    "poisson": (
        nn.PoissonNLLLoss(log_input=False, full=True, eps=1e-6),
        [torch.exp],
        lambda: torch.randint(9, (N, C)).double(),
    ),
    "gaussian": (
        nn.GaussianNLLLoss(full=True, eps=1e-3),
        [same],
        lambda: (rand(N, C), rand(N, C) + 0.1),
    ),
    "kl_div": (
        nn.KLDivLoss(reduction="batchmean", log_target=True),
        [lambda y: y.log_softmax(1)],
        lambda: rand(N, C).log_softmax(1),
    ),
    "kl_div mean": (
        nn.KLDivLoss(reduction="mean"),
        [lambda y: y.log_softmax(1)],
        lambda: rand(N, C).softmax(1),
    ),
    "bce": (nn.BCELoss(WEIGHT), [torch.sigmoid], lambda: rand(N, C)),
    "bce_with_logits": (
        nn.BCEWithLogitsLoss(weight=WEIGHT, pos_weight=WEIGHT),
        [same],
        lambda: rand(N, C),
    ),
    "soft_margin": (nn.SoftMarginLoss(), [same], lambda: signs(N, C)),
    "multilabel_margin": (
        nn.MultiLabelMarginLoss(),
        [same],
        lambda: torch.tensor([[3, 0, -1, 1, 2]]).repeat(N, 1),
    ),
    "multilabel_soft_margin": (
        nn.MultiLabelSoftMarginLoss(WEIGHT),
        [same],
        lambda: torch.randint(2, (N, C)).double(),
    ),
    "hinge_embedding": (nn.HingeEmbeddingLoss(margin=0.5), [same], lambda: signs(N, C)),
    "cosine_embedding": (
        nn.CosineEmbeddingLoss(margin=0.2),
        [same, lambda y: y.flip(1)],
        lambda: signs(N),
    ),
    "margin_ranking": (
        nn.MarginRankingLoss(margin=0.2),
        [lambda y: y[:, 0], lambda y: y[:, 1]],
        lambda: signs(N),
    ),
    "triplet": (
        nn.TripletMarginLoss(margin=0.7, p=1.5, eps=1e-5, swap=True),
        [same, torch.sin, torch.cos],
        lambda: (),
    ),
    "triplet with distance": (
        nn.TripletMarginWithDistanceLoss(distance_function=distance, margin=2.0, swap=True),
        [same, torch.sin, torch.cos],
        lambda: (),
    ),
}


@pytest.mark.parametrize("name", CRITERIA)
def test_criterion(name):
    criterion, outputs, targets = CRITERIA[name]
    assert_exact(logits_model(*outputs), criterion, rand(N, 6), targets(), tolerance=1e-12)


def test_gaussian_with_the_variance_predicted():
    """torch's own order is (input, target, variance); ours is outputs, then targets."""
    criterion = nn.GaussianNLLLoss(eps=1e-3)
    model = logits_model(same, torch.exp)
    inputs, targets = rand(N, 6), rand(N, C)
    mean, variance = model(inputs)
    criterion(mean, targets, variance).backward()
    wanted = [p.grad for p in model.parameters()]
    model.zero_grad()
    ib.VirtualBatch(model, criterion, micro_batch_size=3).backward(inputs, targets)
    for p, gradient in zip(model.parameters(), wanted, strict=True):
        torch.testing.assert_close(p.grad, gradient, rtol=1e-12, atol=1e-16)


def test_ctc():
    def forward(self, x):
        return self.net(x).log_softmax(2).transpose(0, 1)

    model = Calls(forward, net=mlp())
    x = torch.randn(N, 9, 6, dtype=torch.float64)
    target = torch.randint(1, C, (N, 4))
    lengths = torch.full((N,), 9), torch.randint(1, 5, (N,))
    assert_exact(model, nn.CTCLoss(zero_infinity=True), x, (target, *lengths))


def test_concatenated_ctc_targets_can_be_padded():
    lengths = torch.tensor([2, 1, 3])
    padded = ib.losses.pad_ctc_targets(torch.tensor([1, 2, 3, 4, 5, 6]), lengths)
    assert padded.shape == (3, 3)
    assert padded[0, :2].tolist() == [1, 2] and padded[2].tolist() == [4, 5, 6]


def test_every_criterion_of_torch_is_known():
    """A new release with a criterion more shows here."""
    ours_by_hand = {"AdaptiveLogSoftmaxWithLoss", "LinearCrossEntropyLoss"}
    found = {
        name
        for name, value in vars(torch.nn.modules.loss).items()
        if isinstance(value, type)
        and issubclass(value, nn.modules.loss._Loss)
        and not name.startswith("_")
    }
    known = {criterion.__name__ for criterion in _CRITERIA}
    # Deprecated: NLLLoss2d is an NLLLoss.
    assert found - known - ours_by_hand == set()


def test_adaptive_log_softmax():
    criterion = nn.AdaptiveLogSoftmaxWithLoss(5, 20, [4, 9]).double()
    model = mlp()
    inputs, targets = rand(N, 6), torch.randint(20, (N,))
    criterion(model(inputs), targets).loss.backward()
    wanted = [p.grad for p in (*model.parameters(), *criterion.parameters())]
    model.zero_grad()
    criterion.zero_grad()
    ib.VirtualBatch(model, criterion, micro_batch_size=3).backward(inputs, targets)
    found = [p.grad for p in (*model.parameters(), *criterion.parameters())]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-16)


@pytest.mark.skipif(
    not hasattr(nn, "LinearCrossEntropyLoss"), reason="LinearCrossEntropyLoss is new in torch 2.13"
)
@pytest.mark.parametrize("options", [{}, {"bias": True, "label_smoothing": 0.1, "ignore_index": 2}])
def test_linear_cross_entropy(options):
    criterion = nn.LinearCrossEntropyLoss(5, 7, weight=None, **options).double()
    model = mlp()
    inputs, targets = rand(N, 6), torch.randint(7, (N,))
    F.cross_entropy(
        criterion.linear(model(inputs)),
        targets,
        ignore_index=options.get("ignore_index", -100),
        label_smoothing=options.get("label_smoothing", 0.0),
    ).backward()
    wanted = [p.grad for p in (*model.parameters(), *criterion.parameters())]
    model.zero_grad()
    criterion.zero_grad()
    ib.VirtualBatch(model, criterion, micro_batch_size=3).backward(inputs, targets)
    found = [p.grad for p in (*model.parameters(), *criterion.parameters())]
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-14)


def test_ready_made_losses_by_name():
    inputs, targets = classification(N)
    model = mlp()
    wanted = native(model, nn.CrossEntropyLoss(label_smoothing=0.2), inputs, targets)
    loss = ib.losses.cross_entropy(label_smoothing=0.2)
    assert loss.name == "cross_entropy" and repr(loss) == "<SeparableLoss cross_entropy>"
    assert worst_error(ours(model, loss, inputs, targets, micro_batch_size=3), wanted) < 1e-12


def test_all_labels_ignored_is_what_torch_gives():
    inputs, _ = classification(N)
    found = ours(mlp(), nn.CrossEntropyLoss(), inputs, torch.full((N,), -100), micro_batch_size=3)
    assert found.loss.isnan()


def test_changes_of_a_criterion_between_steps_are_seen():
    inputs, targets = classification(N)
    criterion = nn.CrossEntropyLoss()
    model = mlp()
    batch = ib.VirtualBatch(model, criterion, micro_batch_size=3)
    for change in (
        lambda: None,
        lambda: setattr(criterion, "label_smoothing", 0.3),
        lambda: setattr(criterion, "weight", WEIGHT.clone()),
        lambda: criterion.weight.mul_(torch.arange(1, 6)),
    ):
        change()
        model.zero_grad()
        wanted = native(model, criterion, inputs, targets)
        report = batch.backward(inputs, targets)
        torch.testing.assert_close(report.loss, wanted.loss, rtol=1e-12, atol=0)
