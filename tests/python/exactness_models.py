"""Models of whatever Python and torch.nn offer, by the shape of their inputs."""

import torch
from support import (
    Calls,
    Square,
    mlp,
)
from torch import nn
from torch.utils.checkpoint import checkpoint


def attention_mask(n: int = 7) -> torch.Tensor:
    return nn.Transformer.generate_square_subsequent_mask(n, dtype=torch.float64)


def double_sequence(n: int, length: int = 7, width: int = 8) -> torch.Tensor:
    return torch.randn(n, length, width, dtype=torch.float64)


def convnet():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 5),
    ).double()


def lstm():
    return Calls(
        lambda self, x: self.head(self.lstm(x)[0][:, -1]),
        lstm=nn.LSTM(8, 6, num_layers=2, batch_first=True, bidirectional=True),
        head=nn.Linear(12, 5),
    ).double()


def gru():
    return Calls(
        lambda self, x: self.head(self.gru(x)[1][-1]),
        gru=nn.GRU(8, 6, batch_first=True),
        head=nn.Linear(6, 5),
    ).double()


def multihead():
    def forward(self, x):
        y, _ = self.attention(x, x, x, need_weights=False)
        return self.head(y.mean(1))

    return Calls(
        forward, attention=nn.MultiheadAttention(8, 2, batch_first=True), head=nn.Linear(8, 5)
    ).double()


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return Calls(
        lambda self, x: self.head(self.encoder(x, mask=attention_mask(), is_causal=True)[:, -1]),
        encoder=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        head=nn.Linear(8, 5),
    ).double()


def in_place():
    def forward(self, x):
        y = self.first(x)
        y.mul_(2).add_(1)
        y[:, 0] = y[:, 1] * 3
        z = torch.empty_like(y)
        z.copy_(y)
        return self.second(z.clamp_(min=-1).t().contiguous().t())

    return Calls(forward, first=nn.Linear(6, 8), second=nn.Linear(8, 5)).double()


def checkpointed(reentrant: bool):
    def forward(self, x):
        y = torch.tanh(self.first(x))
        y = checkpoint(self.middle, y, use_reentrant=reentrant)
        return self.second(y)

    return Calls(
        forward,
        first=nn.Linear(6, 8),
        middle=nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)),
        second=nn.Linear(8, 5),
    ).double()


def custom_function():
    return Calls(
        lambda self, x: self.head(Square.apply(self.first(x))),
        first=nn.Linear(6, 8),
        head=nn.Linear(8, 5),
    ).double()


def experts():
    """Routing depends on the data: some experts see nothing of some micro-batches."""

    def forward(self, x):
        choice = self.router(x).argmax(1)
        y = torch.zeros(len(x), 5, dtype=x.dtype)
        for i, expert in enumerate(self.experts):
            rows = (choice == i).nonzero().flatten()
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]))
        return y + self.router(x).sum(1, keepdim=True)

    return Calls(
        forward, router=nn.Linear(6, 3), experts=nn.ModuleList(nn.Linear(6, 5) for _ in range(3))
    ).double()


def sets_requires_grad():
    """A model that differentiates by its own input (a physics-informed network)."""

    def forward(self, x):
        x.requires_grad_(True)
        y = self.net(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope.sum(1, keepdim=True)

    return Calls(forward, net=mlp()).double()


def unused():
    model = Calls(lambda self, x: self.used(x), used=mlp(), never=nn.Linear(3, 3))
    model.used[0].bias.requires_grad_(False)
    return model.double()


SEQUENCE = {
    "lstm": lstm,
    "gru": gru,
    "multihead": multihead,
    "encoder": encoder,
}


FLAT = {
    "mlp": mlp,
    "in_place": in_place,
    "checkpoint": lambda: checkpointed(False),
    "checkpoint_reentrant": lambda: checkpointed(True),
    "custom_function": custom_function,
    "experts": experts,
    "sets_requires_grad": sets_requires_grad,
    "unused_and_frozen": unused,
}
