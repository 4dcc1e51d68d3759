"""Losses of random cases: natively a function of the whole batch; for VirtualBatch another form."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Loss:
    #: An expression in `z`, the logits, and `y`, the targets: the loss of the whole batch.
    value: str
    #: "classes" (some ignored), "labels" (none is), "numbers", or "objects" (without rows).
    targets: str
    #: As a criterion of torch.nn, for models that return their logits.
    criterion: str = ""
    #: The sum over samples, and their part of the denominator, of a separable one.
    sum: str = ""
    denominator: str = ""

    @property
    def separable(self) -> bool:
        return bool(self.sum)


WEIGHTS = "torch.tensor([1.0, 0.5, 2.0, 1.5], dtype=torch.float64)"

LOSSES = {
    "cross entropy": Loss(
        f"F.cross_entropy(z, y, weight={WEIGHTS}, ignore_index=-100, label_smoothing=0.1)",
        "classes",
        f"nn.CrossEntropyLoss(weight={WEIGHTS}, ignore_index=-100, label_smoothing=0.1)",
        f"F.cross_entropy(z, y, weight={WEIGHTS}, ignore_index=-100, label_smoothing=0.1, reduction='sum')",
        f"{WEIGHTS}[y[y >= 0]].sum()",
    ),
    "plain cross entropy": Loss(
        "F.cross_entropy(z, y)",
        "classes",
        "nn.CrossEntropyLoss()",
        "F.cross_entropy(z, y, reduction='sum')",
        "(y >= 0).sum()",
    ),
    "squared error": Loss(
        "F.mse_loss(z, y)",
        "numbers",
        "nn.MSELoss()",
        "F.mse_loss(z, y, reduction='sum')",
        "y.numel()",
    ),
    "sum of absolute errors": Loss(
        "F.smooth_l1_loss(z, y, reduction='sum')",
        "numbers",
        "nn.SmoothL1Loss(reduction='sum')",
        "F.smooth_l1_loss(z, y, reduction='sum')",
        "None",
    ),
    "binary cross entropy": Loss(
        "F.binary_cross_entropy_with_logits(z, y.sigmoid(), pos_weight=2 * torch.ones(CLASSES))",
        "numbers",
        "",
        "F.binary_cross_entropy_with_logits(z, y.sigmoid(), pos_weight=2 * torch.ones(CLASSES), reduction='sum')",
        "y.numel()",
    ),
    "divergence": Loss(
        "F.kl_div(z.log_softmax(1), y.softmax(1), reduction='batchmean')",
        "numbers",
        "",
        "F.kl_div(z.log_softmax(1), y.softmax(1), reduction='sum')",
        "len(y)",
    ),
    "margin": Loss(
        "F.multi_margin_loss(z, y, margin=0.7)",
        "labels",
        "nn.MultiMarginLoss(margin=0.7)",
        "F.multi_margin_loss(z, y, margin=0.7, reduction='sum')",
        "len(y)",
    ),
    # Coupled.
    "contrastive": Loss(
        "F.cross_entropy(F.normalize(z, dim=1) @ F.normalize(y, dim=1).t() / 0.3, torch.arange(len(z)))",
        "numbers",
    ),
    "batch-hard triplets": Loss(
        "F.softplus((torch.cdist(z, z) - 9.0 * (y[:, None] != y)).amax(1)"
        " - (torch.cdist(z, z) + 9.0 * (y[:, None] == y)).amin(1)).mean()",
        "labels",
    ),
    "ranking": Loss(
        "F.softplus((z[:, :1] - z[:, 0]) * (y[:, :1] - y[:, 0]).sign()).mean()", "numbers"
    ),
    "listwise": Loss("-(z[:, 0].log_softmax(0) * y[:, 0].softmax(0)).sum()", "numbers"),
    "covariance": Loss(
        "((z - z.mean(0)).t() @ (z - z.mean(0)) / len(z)).square().sum() + F.mse_loss(z, y)",
        "numbers",
    ),
    "sorted": Loss("(z.sort(0).values - y.sort(0).values).abs().mean()", "numbers"),
    "in place": Loss("z.mul_(0.5).sub_(y).square().mean() if z.dim() else z", "numbers"),
    "information": Loss("ib.losses.info_nce(z, y, temperature=0.5)", "numbers"),
}

#: Of boxes: rows that say which sample they belong to, as many as there are; coupled.
LOSSES_OF_OBJECTS = {
    "squared error of objects": Loss(
        "F.mse_loss(z[y[:, 0].long()], y[:, 1:])",
        "objects",
    ),
    "nearest objects": Loss(
        "torch.cdist(z, y[:, 1:]).min(0).values.mean() + z.square().mean()",
        "objects",
    ),
}
