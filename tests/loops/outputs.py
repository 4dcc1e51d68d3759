from typing import Any

import torch
from support import Calls
from torch import nn
from torch.nn import functional as F

from .loop import N, Training, by_head, classify, features, labels, linear, loop


def expert_sum(self: Calls, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A mixture of three experts and the gates of each sample."""
    gates = self.gate(x).softmax(-1)
    return sum(gates[:, i : i + 1] * self.experts[i](x) for i in range(3)), gates


def mixture(forward: Any) -> Calls:
    experts = nn.ModuleList(linear() for _ in range(3))
    return Calls(forward, gate=linear(6, 3), experts=experts)


@loop
def balance_of_experts_left_on_the_module() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        result, gates = expert_sum(self, x)
        self.balance = gates.mean(0).pow(2).sum()
        return result

    model = mixture(forward)
    loss = lambda outputs, y: F.cross_entropy(outputs, y) + 0.5 * model.balance  # noqa: E731
    return Training(model, loss, (features(),), (labels(),))


@loop
def balance_of_experts_returned_as_a_number() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result, gates = expert_sum(self, x)
        return result, gates.mean(0).pow(2).sum()

    loss = lambda outputs, y: F.cross_entropy(outputs[0], y) + 0.5 * outputs[1]  # noqa: E731
    return Training(mixture(forward), loss, (features(),), (labels(),))


@loop
def balance_of_experts_repeated_for_each_sample() -> Training:
    """A row for each sample, so that data parallel code can gather it."""

    def forward(self: Calls, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        result, gates = expert_sum(self, x)
        return result, gates.mean(0).pow(2).sum().expand(len(x))

    loss = lambda outputs, y: F.cross_entropy(outputs[0], y) + 0.5 * outputs[1].mean()  # noqa: E731
    return Training(mixture(forward), loss, (features(),), (labels(),))


@loop
def balance_of_experts_in_the_loss() -> Training:
    """Gates of each sample are returned: the loss takes their mean."""

    def loss(outputs: tuple[torch.Tensor, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
        result, gates = outputs
        chosen = F.one_hot(gates.argmax(-1), 3).double().mean(0)
        return F.cross_entropy(result, y) + 0.5 * (chosen * gates.mean(0)).sum() * 3

    return Training(mixture(expert_sum), loss, (features(),), (labels(),))


@loop
def temperature_returned_beside_logits() -> Training:
    model = by_head(lambda self, x: (self.head(x), self.temperature.exp()))
    model.temperature = nn.Parameter(torch.zeros(()))
    loss = lambda out, y: F.cross_entropy(out[0] * out[1], y) + out[1]  # noqa: E731
    return Training(model, loss, (features(),), (labels(),))


@loop
def mapping_of_outputs() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"logits": self.head(x), "mean": self.head(x).mean(1)}

    def loss(outputs: dict[str, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs["logits"], y) + outputs["mean"].pow(2).mean()

    return Training(by_head(forward), loss, (features(),), (labels(),))


@loop
def mean_loss_inside_of_the_model() -> Training:
    model = by_head(lambda self, x, y: F.cross_entropy(self.head(x), y))
    return Training(model, lambda loss: loss, (features(), labels()))


@loop
def summed_loss_inside_of_the_model() -> Training:
    model = by_head(lambda self, x, y: F.cross_entropy(self.head(x), y, reduction="sum"))
    return Training(model, lambda loss: loss / N, (features(), labels()))


@loop
def mean_loss_and_logits() -> Training:
    def forward(self: Calls, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = self.head(x)
        return F.cross_entropy(logits, y), logits

    return Training(by_head(forward), lambda out: out[0], (features(), labels()))


@loop
def adaptive_softmax() -> Training:
    """Its layer returns a row for each sample and its own mean loss."""
    softmax = nn.AdaptiveLogSoftmaxWithLoss(6, 8, cutoffs=[3])
    model = Calls(lambda self, x, y: self.softmax(x, y).output, softmax=softmax)
    return Training(model, lambda rows: -rows.mean(), (features(), labels(8)))


@loop
def two_views_joined_into_one_output() -> Training:
    """SimCLR: rows of the second view follow all rows of the first, 2 N together."""

    def forward(self: Calls, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.head(torch.cat([one, other])), dim=1)

    def loss(z: torch.Tensor) -> torch.Tensor:
        similar = (z @ z.t() / 0.5).masked_fill(torch.eye(len(z), dtype=torch.bool), -torch.inf)
        return F.cross_entropy(similar, torch.arange(len(z)).roll(len(z) // 2))

    return Training(by_head(forward), loss, (features(), features()))


@loop
def two_views_in_two_outputs() -> Training:
    def forward(self: Calls, one: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.head(one), self.head(other)

    def loss(views: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        one, other = (F.normalize(view, dim=1) for view in views)
        return F.cross_entropy(one @ other.t() / 0.5, torch.arange(len(one)))

    return Training(by_head(forward), loss, (features(), features()))


@loop
def several_rows_for_each_sample() -> Training:
    """Each sample's two rows follow one another: 2 N rows, in the order of the batch."""
    model = by_head(lambda self, x: self.head(x.repeat_interleave(2, 0)))
    target = torch.randn(2 * N, 4)
    return Training(model, lambda rows: F.mse_loss(rows, target), (features(),))


@loop
def chosen_and_rejected_in_one_pass() -> Training:
    """DPO: both answers go through the model as one batch of 2 N, and come out as a pair."""

    def forward(self: Calls, chosen: torch.Tensor, rejected: torch.Tensor) -> torch.Tensor:
        scores = self.body(torch.cat([chosen, rejected])).mean(1)
        good, bad = scores.chunk(2)
        return good - bad

    body = nn.Sequential(linear(), nn.BatchNorm1d(4))
    loss = lambda margin: -F.logsigmoid(margin).mean()  # noqa: E731
    return Training(Calls(forward, body=body), loss, (features(), features()))


@loop
def siamese_with_shared_batch_norm() -> Training:
    """One body is called for each view: its statistics move two times, view by view."""

    def forward(self: Calls, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return (self.body(one) - self.body(other)).pow(2).sum(1)

    body = nn.Sequential(linear(), nn.BatchNorm1d(4))
    return Training(Calls(forward, body=body), torch.mean, (features(), 2 * features()))


@loop
def readout_of_graphs() -> Training:
    """Nodes are the rows of inputs, graphs those of outputs."""

    def forward(self: Calls, nodes: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        z = torch.tanh(self.head(nodes))
        return torch.zeros(int(graph.max()) + 1, 4).index_add(0, graph, z)

    graph, target = torch.arange(N) // 3, torch.randn(3, 4)
    return Training(by_head(forward), lambda out: F.mse_loss(out, target), (features(), graph))


@loop
def input_is_changed_in_place() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        x.mul_(0.5).sub_(0.1)
        return self.head(x)

    return classify(by_head(forward))
