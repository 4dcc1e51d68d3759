"""Models that draw random numbers, of the kinds that people train. Inputs are (N, 6)."""

import random

import torch
import torch.nn.functional as F
from support import Calls
from torch import nn

#: A generator of the user's own.
GENERATOR = torch.Generator()


def three_dropouts():
    return nn.Sequential(
        nn.Linear(6, 9),
        nn.Dropout(0.4),
        nn.ReLU(),
        nn.Linear(9, 9),
        nn.Dropout(0.2),
        nn.Tanh(),
        nn.Linear(9, 8),
        nn.Dropout(0.5),
        nn.Linear(8, 5),
    )


def in_place():
    def forward(self, x):
        x = F.dropout(self.first(x), 0.3, inplace=True)
        noise = torch.empty(len(x), 7, dtype=x.dtype).uniform_(-1, 1)
        mask = torch.ones_like(x)
        mask.bernoulli_(0.7)
        gate = torch.zeros_like(x).normal_(1.0, 0.1)
        return self.last(x * mask * gate + noise)

    return Calls(forward, first=nn.Linear(6, 7), last=nn.Linear(7, 5))


def convolutions(dropout):
    def forward(self, x):
        x = self.drop(self.first(self.up(x).unflatten(1, self.shape)))
        return self.last(self.drop(F.relu(x)).flatten(2).mean(2))

    dims = {nn.Dropout1d: 1, nn.Dropout2d: 2, nn.Dropout3d: 3, nn.FeatureAlphaDropout: 2}[dropout]
    model = Calls(
        forward,
        up=nn.Linear(6, 2 * 2**dims),
        first=(nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1](2, 4, 1),
        drop=dropout(0.4),
        last=nn.Linear(4, 5),
    )
    model.shape = (2,) + (2,) * dims
    return model


def channels_last():
    def forward(self, x):
        x = self.up(x).unflatten(1, (4, 3, 3)).contiguous(memory_format=torch.channels_last)
        return self.last(F.dropout2d(F.dropout(self.first(x), 0.3), 0.3).mean((2, 3)))

    return Calls(forward, up=nn.Linear(6, 36), first=nn.Conv2d(4, 4, 1), last=nn.Linear(4, 5))


def attention():
    """Attention weights in (batch, heads, time, time), and dropouts on both branches."""

    def forward(self, x):
        x = self.embed(x.unsqueeze(2))
        q, k, v = self.qkv(x).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        weights = F.dropout((q @ k.transpose(2, 3) / 2).softmax(3), 0.2)
        mixed = (weights @ v).transpose(1, 2).flatten(2)
        x = self.norm(x + F.dropout(mixed, 0.3))
        x = x + F.dropout(self.down(F.dropout(F.gelu(self.up(x)), 0.2)), 0.1)
        return self.head(x.mean(1))

    return Calls(
        forward,
        embed=nn.Linear(1, 8),
        qkv=nn.Linear(8, 24),
        norm=nn.LayerNorm(8),
        up=nn.Linear(8, 12),
        down=nn.Linear(12, 8),
        head=nn.Linear(8, 5),
    )


def encoder_layer(**options):
    def forward(self, x):
        x = self.embed(x.unsqueeze(2))
        x = x if self.first else x.transpose(0, 1)
        return self.head(self.layer(x).mean(1 if self.first else 0))

    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.2, **options)
    model = Calls(forward, embed=nn.Linear(1, 8), layer=layer, head=nn.Linear(8, 5))
    model.first = options["batch_first"]
    return model


def multihead(need_weights):
    def forward(self, x):
        x = self.embed(x.unsqueeze(2)).transpose(0, 1).contiguous()
        mixed, _ = self.attention(x, x, x, need_weights=self.weights)
        return self.head((x + mixed).mean(0))

    model = Calls(
        forward,
        embed=nn.Linear(1, 8),
        attention=nn.MultiheadAttention(8, 2, dropout=0.3),
        head=nn.Linear(8, 5),
    )
    model.weights = need_weights
    return model


def scaled_dot_product():
    def forward(self, x):
        q, k, v = self.qkv(x.unsqueeze(2)).unflatten(2, (3, 2, 4)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=0.3)
        return self.head(mixed.transpose(1, 2).flatten(2).mean(1))

    return Calls(forward, qkv=nn.Linear(1, 24), head=nn.Linear(8, 5))


def sequence_first(contiguous):
    """(time, batch, features): the batch is the second dimension."""

    def forward(self, x):
        x = self.embed(x.unsqueeze(2)).transpose(0, 1)
        x = x.contiguous() if contiguous else x
        x = F.dropout(torch.tanh(self.mix(F.dropout(x, 0.3))), 0.2)
        return self.head((x + torch.randn_like(x) * 0.1).mean(0))

    return Calls(forward, embed=nn.Linear(1, 4), mix=nn.Linear(4, 4), head=nn.Linear(4, 5))


def flattened(time_first):
    """(batch · time, features), or (time · batch, features)."""

    def forward(self, x):
        x = self.embed(x.unsqueeze(2))
        x = (x.transpose(0, 1) if time_first else x).reshape(-1, 4)
        x = F.alpha_dropout(torch.tanh(self.mix(F.dropout(x, 0.3))), 0.2, training=True)
        x = F.dropout(x * F.gumbel_softmax(x, dim=1), 0.2)
        x = x.unflatten(0, (6, -1)).mean(0) if time_first else x.unflatten(0, (-1, 6)).mean(1)
        return self.head(x)

    return Calls(forward, embed=nn.Linear(1, 4), mix=nn.Linear(4, 4), head=nn.Linear(4, 5))


def autoencoder():
    def forward(self, x):
        mean, scale = self.encode(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (scale / 2).exp()
        return self.decode(F.dropout(z, 0.2))

    return Calls(forward, encode=nn.Linear(6, 8), decode=nn.Linear(4, 5))


def distributions():
    def forward(self, x):
        mean, scale = self.encode(x).chunk(2, 1)
        z = torch.distributions.Normal(mean, scale.exp(), validate_args=False).rsample()
        gamma = torch.distributions.Gamma(z.exp(), scale.exp(), validate_args=False).rsample()
        kept = torch.distributions.Bernoulli(logits=z, validate_args=False).sample()
        mixture = torch._sample_dirichlet(gamma.detach() + 0.5)
        return self.decode(gamma * kept + z + mixture)

    return Calls(forward, encode=nn.Linear(6, 8), decode=nn.Linear(4, 5))


def gumbel():
    def forward(self, x):
        return self.last(F.gumbel_softmax(self.first(x), tau=0.7))

    return Calls(forward, first=nn.Linear(6, 7), last=nn.Linear(7, 5))


def shared_noise():
    """Numbers whose shape does not follow the batch, and a mask on a weight."""

    def forward(self, x):
        x = self.first(x) + torch.rand(7, dtype=x.dtype)
        x = F.linear(x, F.dropout(self.weight, 0.3))
        return F.dropout(x, 0.2) * torch.randn((), dtype=x.dtype)

    return Calls(forward, first=nn.Linear(6, 7), weight=nn.Parameter(torch.randn(5, 7)))


def stochastic_depth():
    def forward(self, x):
        x = self.first(x).unflatten(1, (2, 4))
        for layer in (self.a, self.b):
            keep = (torch.rand(len(x), 1, 1, dtype=x.dtype) < 0.6).to(x.dtype)
            x = x + keep * torch.tanh(layer(x)) / 0.6
        return self.last(x.flatten(1))

    return Calls(
        forward,
        first=nn.Linear(6, 8),
        a=nn.Linear(4, 4),
        b=nn.Linear(4, 4),
        last=nn.Linear(8, 5),
    )


def batch_norm():
    def forward(self, x):
        x = F.dropout(self.a(self.first(x)), 0.3)
        x = self.b(self.second(F.rrelu(x, training=True)))
        return self.last(torch.tanh(F.dropout(x, 0.2, inplace=True)))

    return Calls(
        forward,
        first=nn.Linear(6, 8),
        a=nn.BatchNorm1d(8),
        second=nn.Linear(8, 8),
        b=nn.BatchNorm1d(8),
        last=nn.Linear(8, 5),
    )


def whole_batch_of_tokens():
    """A BatchNorm in front of dropout on flattened tokens."""

    def forward(self, x):
        x = self.norm(torch.tanh(self.embed(x.unsqueeze(2))).flatten(0, 1))
        return self.head(F.dropout(x, 0.3).unflatten(0, (-1, 6)).mean(1))

    return Calls(forward, embed=nn.Linear(1, 4), norm=nn.BatchNorm1d(4), head=nn.Linear(4, 5))


def leaky():
    """Which numbers are drawn depends on values."""

    def forward(self, x):
        x = F.rrelu(self.first(x), training=True)
        x = self.second(x).unsqueeze(2).transpose(0, 1).contiguous()  # (7, batch, 1)
        return self.last(F.rrelu(x, training=True).squeeze(2).T)

    return Calls(forward, first=nn.Linear(6, 7), second=nn.Linear(7, 7), last=nn.Linear(7, 5))


def sampling():
    def forward(self, x):
        probabilities = self.first(x).softmax(1)
        picked = torch.multinomial(probabilities, 3)
        again = torch.multinomial(probabilities, 2, replacement=True)
        shifts = torch.randint(0, 4, (len(x), 1))
        counts = torch.poisson(probabilities.detach() * 4)
        kept = torch.bernoulli(probabilities)
        tries = torch.binomial(torch.full_like(probabilities, 5.0), probabilities.detach())
        spread = torch.normal(probabilities, probabilities.detach())
        chosen = probabilities.gather(1, picked).sum(1, keepdim=True)
        chosen = chosen + probabilities.gather(1, again).sum(1, keepdim=True)
        chosen = chosen * probabilities.gather(1, shifts)
        return self.last(probabilities * (counts + kept + tries + spread) * chosen)

    return Calls(forward, first=nn.Linear(6, 7), last=nn.Linear(7, 5))


def own_generator():
    def forward(self, x):
        x = self.first(x)
        keep = torch.bernoulli(torch.full_like(x, 0.7), generator=GENERATOR)
        noise = torch.randn(x.shape, generator=GENERATOR, dtype=x.dtype)
        return self.last(F.dropout(x * keep + noise, 0.2))

    return Calls(forward, first=nn.Linear(6, 7), last=nn.Linear(7, 5))


def fresh_generator():
    def forward(self, x):
        noise = torch.rand(7, generator=torch.Generator().manual_seed(5), dtype=x.dtype)
        return self.last(F.dropout(self.first(x) * noise, 0.2))

    return Calls(forward, first=nn.Linear(6, 7), last=nn.Linear(7, 5))


def layer_drop():
    """Python's own numbers, one for each forward."""

    def forward(self, x):
        x = self.first(x)
        for layer in (self.a, self.b, self.c):
            if random.random() < 0.5:
                x = F.dropout(torch.tanh(layer(x)), 0.2)
        return self.last(x)

    return Calls(
        forward,
        first=nn.Linear(6, 7),
        a=nn.Linear(7, 7),
        b=nn.Linear(7, 7),
        c=nn.Linear(7, 7),
        last=nn.Linear(7, 5),
    )


MODELS = {
    "three dropouts": three_dropouts,
    "in place": in_place,
    "Dropout1d": lambda: convolutions(nn.Dropout1d),
    "Dropout2d": lambda: convolutions(nn.Dropout2d),
    "Dropout3d": lambda: convolutions(nn.Dropout3d),
    "FeatureAlphaDropout": lambda: convolutions(nn.FeatureAlphaDropout),
    "channels last": channels_last,
    "attention": attention,
    "encoder layer": lambda: encoder_layer(batch_first=True),
    "encoder layer, sequence first": lambda: encoder_layer(batch_first=False),
    "MultiheadAttention": lambda: multihead(False),
    "MultiheadAttention, weights": lambda: multihead(True),
    "scaled_dot_product_attention": scaled_dot_product,
    "sequence first": lambda: sequence_first(True),
    "sequence first, a view": lambda: sequence_first(False),
    "batch · time": lambda: flattened(False),
    "time · batch": lambda: flattened(True),
    "autoencoder": autoencoder,
    "distributions": distributions,
    "gumbel": gumbel,
    "shared noise": shared_noise,
    "stochastic depth": stochastic_depth,
    "BatchNorm": batch_norm,
    "BatchNorm of tokens": whole_batch_of_tokens,
    "rrelu": leaky,
    "sampling": sampling,
    "a generator of its own": own_generator,
    "a fresh generator": fresh_generator,
    "LayerDrop": layer_drop,
}


def make(name):
    return MODELS[name]().double().train()
