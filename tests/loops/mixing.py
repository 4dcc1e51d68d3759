import torch
from support import Calls
from torch import nn
from torch.nn import functional as F

from .loop import N, Training, by_head, classify, features, linear, loop, regress


@loop
def mixed_with_the_flipped_batch() -> Training:
    return classify(by_head(lambda self, x: self.head(0.7 * x + 0.3 * x.flip(0))))


@loop
def mixed_with_the_rolled_batch() -> Training:
    return classify(by_head(lambda self, x: self.head(0.7 * x + 0.3 * x.roll(1, 0))))


@loop
def cut_and_pasted_from_the_flipped_batch() -> Training:
    """CutMix with a fixed box."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        x[:, 2:4] = x.flip(0)[:, 2:4]
        return self.head(x)

    return classify(by_head(forward))


@loop
def normalised_over_the_batch() -> Training:
    return classify(by_head(lambda self, x: self.head(F.normalize(x, dim=0))))


@loop
def softmax_over_the_batch() -> Training:
    return regress(by_head(lambda self, x: self.head(x).softmax(0)))


@loop
def attention_over_the_batch() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.scaled_dot_product_attention(x[None], x[None], x[None])[0])

    return classify(by_head(forward))


@loop
def attention_with_time_first() -> Training:
    """`batch_first=True` is forgotten: attention is over samples."""
    attention = nn.MultiheadAttention(6, 2)

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(x, x, x)[0]).mean(1)

    return classify(by_head(forward, attention=attention), features(5, 6))


@loop
def lstm_with_time_first() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0]).mean(1)

    return classify(by_head(forward, lstm=nn.LSTM(6, 6)), features(5, 6))


@loop
def similarities_of_all_samples() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        return z @ z.t()

    return regress(by_head(forward), width=N)


@loop
def divided_by_the_largest_value() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        return z / (1 + z.detach().abs().max())

    return classify(by_head(forward))


@loop
def stable_softmax_by_the_largest_value() -> Training:
    """The maximum of the batch cancels."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        z = (z - z.max().detach()).exp()
        return z / z.sum(-1, keepdim=True)

    return regress(by_head(forward))


@loop
def summed_up_over_the_batch() -> Training:
    return regress(by_head(lambda self, x: self.head(x).cumsum(0)))


@loop
def sorted_over_the_batch() -> Training:
    return regress(by_head(lambda self, x: self.head(x).sort(0).values))


@loop
def fourier_transform_over_the_batch() -> Training:
    return regress(by_head(lambda self, x: self.head(torch.fft.fft(x, dim=0).abs())))


@loop
def first_sample_is_the_anchor() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        return z - z[:1]

    return regress(by_head(forward))


@loop
def last_sample_is_the_anchor() -> Training:
    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        return z - z[-1:].detach()

    return regress(by_head(forward))


@loop
def thirds_of_the_batch_are_multiplied() -> Training:
    """A batch of one has no thirds: forward itself fails there."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        a, b = self.head(x).chunk(3)[:2]
        return torch.cat([a * b, a, b])

    return regress(by_head(forward))


@loop
def context_of_the_whole_set() -> Training:
    """A neural process: the mean of all samples' codes modulates each."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        context = self.encoder(x).mean(0, keepdim=True)
        return self.head(x * torch.sigmoid(context))

    return regress(by_head(forward, encoder=linear(6, 6)))


@loop
def whitened_by_the_covariance() -> Training:
    """Decorrelated batch normalisation."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.first(x)
        centred = z - z.mean(0)
        covariance = centred.t() @ centred / len(z) + torch.eye(3)
        factor = torch.linalg.cholesky(covariance)
        return self.second(torch.linalg.solve_triangular(factor, centred.t(), upper=False).t())

    return regress(Calls(forward, first=linear(6, 3), second=linear(3)))


@loop
def normalised_together_with_a_reference_batch() -> Training:
    """Virtual batch normalisation: a fixed batch stands beside the samples."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = torch.cat([self.reference, self.first(x)])
        return self.second(F.batch_norm(z, None, None, training=True)[len(self.reference) :])

    model = Calls(forward, first=linear(), second=linear(4), reference=torch.randn(6, 4))
    return regress(model)
