import torch
from support import Calls
from torch.nn import functional as F

from .loop import Training, by_head, classify, features, labels, linear, loop, minimise_rows


@loop
def triplets_mined_in_the_model() -> Training:
    """A row for each anchor: its furthest positive and nearest negative in the batch."""

    def forward(self: Calls, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        distance = (z[:, None] - z[None]).pow(2).sum(-1)
        alike = y[:, None] == y[None]
        furthest = distance.masked_fill(~alike, 0.0).amax(1)
        nearest = distance.masked_fill(alike, 100.0).amin(1)
        return F.softplus(furthest - nearest)

    return minimise_rows(by_head(forward), features(), labels(3))


@loop
def negatives_are_the_other_samples() -> Training:
    """InfoNCE inside of the model, a row for each sample."""

    def forward(self: Calls, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        scores = F.normalize(self.head(x), dim=1) @ F.normalize(self.head(y), dim=1).t()
        return F.cross_entropy(scores / 0.5, torch.arange(len(x)), reduction="none")

    return minimise_rows(by_head(forward), features(), features())


@loop
def variance_of_features_beside_logits() -> Training:
    """VICReg's term as a scalar from the model."""

    def forward(self: Calls, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = self.head(x)
        return z, F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean()

    loss = lambda out, y: F.cross_entropy(out[0], y) + out[1]  # noqa: E731
    return Training(by_head(forward), loss, (features(),), (labels(),))


@loop
def weights_of_samples_sum_to_one() -> Training:
    """Learned weights, normalised over the batch."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        weights = self.weigh(x).exp()
        return self.head(x) * weights / weights.sum()

    return classify(by_head(forward, weigh=linear(6, 1)))


@loop
def curriculum_by_the_median_of_the_batch() -> Training:
    """Samples with a loss above the median count half."""

    def forward(self: Calls, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        rows = F.cross_entropy(self.head(x), y, reduction="none")
        return torch.where(rows > rows.detach().median(), 0.5 * rows, rows)

    return minimise_rows(by_head(forward), features(), labels())


@loop
def ranks_in_the_batch() -> Training:
    """Each sample is weighed by its rank, without a gradient through it."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        rank = z.detach().sum(1).argsort().argsort().double()
        return z / (1 + rank)[:, None]

    return classify(by_head(forward))


@loop
def graph_of_nearest_samples() -> Training:
    """Each sample takes the mean of its two nearest neighbours in the batch."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        near = torch.cdist(x, x).topk(min(3, len(x)), largest=False).indices
        return self.head(x[near].mean(1))

    return classify(by_head(forward))


@loop
def duplicates_are_found_and_weigh_less() -> Training:
    """Equal tokens of different samples share their weight."""

    def forward(self: Calls, x: torch.Tensor, token: torch.Tensor) -> torch.Tensor:
        _, where, counts = token.unique(return_inverse=True, return_counts=True)
        return self.head(x) / counts[where][:, None]

    return classify(by_head(forward), features(), labels(5))


@loop
def mean_of_each_class_by_scatter() -> Training:
    """Prototypes of the batch: the distance of each sample to the mean of its class."""

    def forward(self: Calls, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        sums = torch.zeros(3, 4).index_add(0, y, z)
        counts = torch.zeros(3).index_add(0, y, torch.ones(len(y))).clamp(min=1)
        return (z - (sums / counts[:, None])[y]).pow(2).sum(1)

    return minimise_rows(by_head(forward), features(), labels(3))


@loop
def each_sample_is_scored_by_those_before_it() -> Training:
    """Causal attention over the batch, as in-context learners over rows of a table."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = x[None]
        return self.head(F.scaled_dot_product_attention(z, z, z, is_causal=True)[0])

    return classify(by_head(forward))
