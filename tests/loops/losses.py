import torch
from support import Calls
from torch import nn
from torch.nn import functional as F

from .loop import N, Training, by_head, classify, features, labels, linear, loop, regress


@loop
def masked_mean() -> Training:
    """Targets are values and a mask; the mean is over what the mask leaves."""

    def loss(outputs: torch.Tensor, targets: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        values, mask = targets
        return ((outputs.squeeze(-1) - values).pow(2) * mask).sum() / mask.sum()

    mask = (torch.arange(N * 5).view(N, 5) % 3 > 0).double()
    return Training(linear(6, 1), loss, (features(5, 6),), (features(5), mask))


@loop
def weighted_cross_entropy() -> Training:
    loss = nn.CrossEntropyLoss(weight=torch.rand(4), label_smoothing=0.1, ignore_index=2)
    return Training(linear(), loss, (features(),), (labels(),))


@loop
def penalty_on_parameters() -> Training:
    model = linear()

    def loss(outputs: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, y) + 0.1 * sum(p.pow(2).sum() for p in model.parameters())

    return Training(model, loss, (features(),), (labels(),))


@loop
def redundancy_of_features() -> Training:
    """Barlow twins of one view."""

    def loss(outputs: torch.Tensor) -> torch.Tensor:
        z = (outputs - outputs.mean(0)) / outputs.std(0)
        return (z.t() @ z / len(z) - torch.eye(4)).pow(2).sum()

    return Training(linear(), loss, (features(),))


@loop
def variance_and_covariance() -> Training:
    """VICReg."""

    def of_one(z: torch.Tensor) -> torch.Tensor:
        centred = z - z.mean(0)
        covariance = centred.t() @ centred / (len(z) - 1)
        apart = covariance.pow(2).sum() - covariance.diagonal().pow(2).sum()
        return F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean() + 0.04 * apart / 4

    def loss(views: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        one, other = views
        return 25 * F.mse_loss(one, other) + 25 * (of_one(one) + of_one(other))

    model = by_head(lambda self, x, y: (self.head(x), self.head(y)))
    return Training(model, loss, (features(), features()))


@loop
def smoothing_by_the_classes_of_the_batch() -> Training:
    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        share = torch.bincount(y, minlength=4) / len(y)
        target = 0.9 * F.one_hot(y, 4) + 0.1 * share
        return -(target * logits.log_softmax(-1)).sum(1).mean()

    return Training(linear(), loss, (features(),), (labels(),))


@loop
def logits_adjusted_by_the_classes_of_the_batch() -> Training:
    """The same, inside of the model: it sees its micro-batch's classes."""

    def forward(self: Calls, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.head(x) + (torch.bincount(y, minlength=4) / len(y) + 1e-3).log()

    return classify(by_head(forward), features(), labels())


@loop
def focal_loss_by_positives() -> Training:
    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        p = logits.squeeze(1).sigmoid()
        rows = F.binary_cross_entropy(p, y, reduction="none") * (p - y).abs().pow(2)
        return rows.sum() / y.sum().clamp(min=1)

    return Training(linear(6, 1), loss, (features(),), ((torch.arange(N) % 4 == 0).double(),))


@loop
def focal_rows_by_positives_in_the_model() -> Training:
    def forward(self: Calls, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows = F.binary_cross_entropy_with_logits(self.one(x).squeeze(1), y, reduction="none")
        return rows / y.sum().clamp(min=1)

    y = (torch.arange(N) % 4 == 0).double()
    return Training(Calls(forward, one=linear(6, 1)), torch.sum, (features(), y))


@loop
def triplets_mined_in_the_loss() -> Training:
    return Training(linear(), hardest_triplets, (features(),), (labels(3),))


def hardest_triplets(z: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    distance = (z[:, None] - z[None]).pow(2).sum(-1)
    alike = y[:, None] == y[None]
    furthest = distance.masked_fill(~alike, -torch.inf).amax(1)
    nearest = distance.masked_fill(alike, torch.inf).amin(1)
    return F.softplus(furthest - nearest).mean()


@loop
def hardest_samples_only() -> Training:
    """Online hard example mining."""

    def loss(logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows = F.cross_entropy(logits, y, reduction="none")
        return rows.topk(len(rows) // 2).values.mean()

    return Training(linear(), loss, (features(),), (labels(),))


@loop
def assignments_by_sinkhorn() -> Training:
    """SwAV: codes are balanced over the batch without a gradient."""

    def loss(views: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        one, other = views
        codes = (one.detach() / 0.5).exp()
        for _ in range(3):
            codes = codes / codes.sum(0, keepdim=True)
            codes = codes / codes.sum(1, keepdim=True)
        return -(codes * other.log_softmax(-1)).sum(1).mean()

    model = by_head(lambda self, x, y: (self.head(x), self.head(y)))
    return Training(model, loss, (features(), features()))


@loop
def labels_mixed_in_the_collate_function() -> Training:
    """Mixup outside of the model: two labels for each sample and one share for the batch."""

    def loss(logits: torch.Tensor, y: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return 0.7 * F.cross_entropy(logits, y[0]) + 0.3 * F.cross_entropy(logits, y[1])

    x, y = features(), labels()
    return Training(linear(), loss, (0.7 * x + 0.3 * x.flip(0),), (y, y.flip(0)))


@loop
def advantages_normalised_over_the_batch() -> Training:
    """PPO's surrogate."""

    def loss(logits: torch.Tensor, targets: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        actions, advantages = targets
        ratio = (logits.log_softmax(-1).gather(1, actions[:, None]).squeeze(1) + 1.4).exp()
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        return -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).mean()

    return Training(linear(), loss, (features(),), (labels(), torch.randn(N)))


class OfItsOwn(nn.Module):
    """Losses with parameters, buffers or state."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.scales = nn.Parameter(torch.zeros(4))
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mean", torch.ones(()))
        self.calls = 0
        self.memory: list[torch.Tensor] = []

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.kind == "uncertainty":
            errors = (outputs - targets).pow(2).mean(0)
            return (errors * (-self.scales).exp() + self.scales).sum()
        if self.kind == "running mean":
            value = F.mse_loss(outputs, targets)
            self.mean.mul_(0.9).add_(value.detach(), alpha=0.1)
            return value / self.mean
        if self.kind == "batch norm":
            return F.mse_loss(self.norm(outputs), targets)
        self.memory = [*self.memory, outputs.detach()][-2:]
        return F.mse_loss(outputs, targets) + outputs.mm(torch.cat(self.memory).t()).pow(2).mean()


@loop
def tasks_weighted_by_learned_uncertainty() -> Training:
    """The loss has parameters, which the optimizer trains too."""
    training = regress(linear())
    training.loss = OfItsOwn("uncertainty")
    return training


@loop
def loss_divided_by_its_running_mean() -> Training:
    training = regress(linear())
    training.loss = OfItsOwn("running mean")
    return training


@loop
def batch_norm_inside_of_the_loss() -> Training:
    training = regress(linear())
    training.loss = OfItsOwn("batch norm")
    return training


@loop
def outputs_of_former_batches_in_the_loss() -> Training:
    """Cross-batch memory."""
    training = regress(linear())
    training.loss = OfItsOwn("memory")
    return training


@loop
def temperature_of_the_model_read_by_the_loss() -> Training:
    """CLIP: two towers, and a scale that the loss takes from the module."""
    model = Calls(lambda self, x, y: (self.one(x), self.other(y)), one=linear(), other=linear())
    model.scale = nn.Parameter(torch.tensor(0.5))

    def loss(towers: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        one, other = (F.normalize(tower, dim=1) for tower in towers)
        scores = model.scale.exp() * one @ other.t()
        places = torch.arange(len(scores))
        return (F.cross_entropy(scores, places) + F.cross_entropy(scores.t(), places)) / 2

    return Training(model, loss, (features(), features()))
