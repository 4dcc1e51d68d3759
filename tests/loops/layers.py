import torch
from support import Calls
from torch import nn
from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

from .loop import N, Training, by_head, classify, features, labels, linear, loop, regress


def mlp(first: nn.Module) -> nn.Sequential:
    return nn.Sequential(first, nn.Tanh(), linear(8))


def token_ids(tokens: int = 3) -> torch.Tensor:
    return torch.randint(0, 5, (N, tokens))


@loop
def spectral_norm() -> Training:
    """Its power iteration moves a buffer once for each forward."""
    return classify(mlp(parametrizations.spectral_norm(linear(6, 8))))


@loop
def spectral_norm_by_hook() -> Training:
    return classify(mlp(nn.utils.spectral_norm(linear(6, 8))))


@loop
def weight_norm() -> Training:
    return classify(mlp(parametrizations.weight_norm(linear(6, 8))))


@loop
def orthogonal_weights() -> Training:
    return classify(mlp(parametrizations.orthogonal(linear(6, 8))))


class Standardised(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return (weight - weight.mean(1, keepdim=True)) / weight.std(1, keepdim=True)


@loop
def weight_standardisation_with_as_many_rows_as_samples() -> Training:
    """A mean over a dimension of size nine or three that is no batch."""
    first, second = linear(6, N), linear(N, 3)
    parametrize.register_parametrization(first, "weight", Standardised())
    parametrize.register_parametrization(second, "weight", Standardised())
    return classify(nn.Sequential(first, nn.Tanh(), second, linear(3)))


@loop
def gram_matrix_of_a_weight() -> Training:
    """Weights [9, 6] are decorrelated: `w @ w.T` looks like a similarity of nine samples."""

    def forward(self: Calls, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        weight = self.first.weight
        gram = weight @ weight.t()
        return F.linear(x, gram.softmax(0) @ weight)

    return regress(Calls(forward, first=linear(6, N)), width=N)


@loop
def batch_norm_with_cumulative_average() -> Training:
    return classify(
        nn.Sequential(linear(6, 8), nn.BatchNorm1d(8, momentum=None), nn.Tanh(), linear(8))
    )


@loop
def frozen_batch_norm() -> Training:
    model = nn.Sequential(linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), linear(8))
    model[1].eval()
    return classify(model)


@loop
def half_of_the_batch_norms_frozen() -> Training:
    model = nn.Sequential(linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.BatchNorm1d(8), linear(8))
    model[1].eval().requires_grad_(False)
    return classify(model)


@loop
def sync_batch_norm_in_eval() -> Training:
    model = nn.Sequential(linear(6, 8), nn.SyncBatchNorm(8), nn.Tanh(), linear(8))
    model[1].eval()
    return classify(model)


@loop
def instance_norm_with_running_statistics() -> Training:
    norm = nn.InstanceNorm1d(3, track_running_stats=True, affine=True)
    return classify(nn.Sequential(norm, nn.Flatten(), linear(18)), features(3, 6))


@loop
def batch_norm_over_time_folded_into_the_batch() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        folded = self.norm(x.reshape(-1, 6))
        return self.head(folded.view(len(x), -1, 6)).mean(1)

    return classify(by_head(forward, norm=nn.BatchNorm1d(6)), features(5, 6))


@loop
def embedding_gradients_by_frequency() -> Training:
    embedding = nn.Embedding(5, 6, scale_grad_by_freq=True)
    return classify(nn.Sequential(embedding, nn.Flatten(), linear(18)), token_ids())


@loop
def bag_gradients_by_frequency() -> Training:
    embedding = nn.EmbeddingBag(5, 6, scale_grad_by_freq=True, mode="sum")
    return classify(nn.Sequential(embedding, linear()), token_ids())


@loop
def embedding_with_largest_norm() -> Training:
    embedding = nn.Embedding(5, 6, max_norm=0.5)
    return classify(nn.Sequential(embedding, nn.Flatten(), linear(18)), token_ids())


@loop
def sparse_embedding() -> Training:
    embedding = nn.Embedding(5, 6, sparse=True)
    return classify(nn.Sequential(embedding, nn.Flatten(), linear(18)), token_ids())


@loop
def quantisation_aware() -> Training:
    """A moving minimum and maximum of each micro-batch."""
    fake = FakeQuantize(
        observer=MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8
    )
    model = nn.Sequential(linear(6, 8), fake, nn.ReLU(), linear(8)).float()
    return classify(model, features().float())


@loop
def lazy_linear() -> Training:
    return classify(mlp(nn.LazyLinear(8)))


@loop
def tied_weights() -> Training:
    model = nn.Sequential(linear(6, 6), nn.Tanh(), linear(6, 6))
    model[2].weight = model[0].weight
    return regress(model, width=6)


@loop
def tied_embedding_and_softmax() -> Training:
    def forward(self: Calls, ids: torch.Tensor) -> torch.Tensor:
        return F.linear(self.embedding(ids).mean(1), self.embedding.weight)

    return classify(Calls(forward, embedding=nn.Embedding(5, 6)), token_ids())


@loop
def complex_spectrum() -> Training:
    return regress(Calls(lambda self, x: self.head(torch.fft.rfft(x).abs()), head=linear(4)))


@loop
def complex_weights() -> Training:
    head = nn.Linear(6, 4, dtype=torch.complex128)
    return regress(Calls(lambda self, x: self.head(x + 0.5j * x.flip(1)).abs(), head=head))


class Named(torch.Tensor):
    """A subclass that changes nothing."""


@loop
def parameter_of_a_tensor_subclass() -> Training:
    weight = nn.Parameter(torch.randn(4, 6).as_subclass(Named))
    return classify(Calls(lambda self, x: F.linear(x, self.weight), weight=weight))


@loop
def images_with_group_norm_and_dropout_of_nothing() -> Training:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Dropout2d(0.0), nn.Flatten(), linear(64)
    )
    return Training(model, F.cross_entropy, (features(1, 6, 6),), (labels(),))
