"""Networks with BatchNorm, of the kinds that people train."""

from collections import OrderedDict

import torch
import torch.nn.functional as F
from support import Calls
from torch import nn


class Residual(nn.Module):
    """A residual net with in-place activations; `depth` + 1 BatchNorm layers."""

    def __init__(self, depth: int, width: int = 6, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.first = nn.BatchNorm2d(width)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(width, width, 3, padding=1) for _ in range(depth)
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(depth))
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = F.relu(self.first(self.stem(x)), inplace=True)
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.relu(norm(convolution(x)).add_(x), inplace=True)
        return self.head(x.mean((2, 3)))


class PreActivation(nn.Module):
    """BatchNorm in front of the convolution: its input is the skip connection too."""

    def __init__(self, depth: int = 3, width: int = 6, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1))
            for _ in range(depth)
        )
        self.head = nn.Linear(width, classes)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Dense(nn.Module):
    def __init__(self, layers: int = 4, growth: int = 4, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, growth, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(growth * (i + 1)) for i in range(layers))
        self.convolutions = nn.ModuleList(
            nn.Conv2d(growth * (i + 1), growth, 3, padding=1) for i in range(layers)
        )
        self.head = nn.Linear(growth * (layers + 1), classes)

    def forward(self, x):
        features = [self.stem(x)]
        for norm, convolution in zip(self.norms, self.convolutions, strict=True):
            features.append(convolution(F.relu(norm(torch.cat(features, 1)))))
        return self.head(torch.cat(features, 1).mean((2, 3)))


def depthwise(width: int = 6) -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, stride=2, padding=1)]
    for _ in range(2):
        layers += [
            nn.BatchNorm2d(width),
            nn.Hardswish(inplace=True),
            nn.Conv2d(width, width, 3, padding=1, groups=width),
            nn.BatchNorm2d(width),
            nn.ReLU6(inplace=True),
            nn.Conv2d(width, width, 1, bias=False),
        ]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5))


def recurrent() -> nn.Module:
    def forward(self, x):
        out, _ = self.lstm(
            self.norm(x.flatten(2).transpose(0, 1).permute(1, 2, 0)).permute(0, 2, 1)
        )
        return self.head(self.last(out[:, -1]))

    return Calls(
        forward,
        norm=nn.BatchNorm1d(64),
        lstm=nn.LSTM(64, 7, batch_first=True, bidirectional=True),
        last=nn.BatchNorm1d(14),
        head=nn.Linear(14, 5),
    )


def attention() -> nn.Module:
    def forward(self, x):
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        tokens = self.norm(tokens.transpose(1, 2)).transpose(1, 2)
        mixed, _ = self.attention(tokens, tokens, tokens, need_weights=False)
        tokens = self.after((tokens + mixed).transpose(1, 2))
        return self.head(tokens.mean(2))

    return Calls(
        forward,
        embed=nn.Conv2d(3, 8, 4, stride=4),
        norm=nn.BatchNorm1d(8),
        attention=nn.MultiheadAttention(8, 2, batch_first=True),
        after=nn.BatchNorm1d(8),
        head=nn.Linear(8, 5),
    )


def used_twice() -> nn.Module:
    def forward(self, x):
        x = self.norm(self.first(x))
        x = self.norm(self.second(F.gelu(x)))
        return self.head(x.mean((2, 3)))

    return Calls(
        forward,
        first=nn.Conv2d(3, 6, 3),
        norm=nn.BatchNorm2d(6),
        second=nn.Conv2d(6, 6, 3),
        head=nn.Linear(6, 5),
    )


def unused_output() -> nn.Module:
    def forward(self, x):
        x = self.first(x)
        self.norm(x)
        return self.head(x.mean((2, 3)))

    return Calls(forward, first=nn.Conv2d(3, 6, 3), norm=nn.BatchNorm2d(6), head=nn.Linear(6, 5))


def on_the_input() -> nn.Module:
    """Nothing in front of it requires grad."""
    return nn.Sequential(
        nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)
    )


def computed_weight() -> nn.Module:
    """Scale and shift of the layer are made by ops themselves."""

    def forward(self, x):
        x = self.first(x)
        x = F.batch_norm(x, None, None, self.gain.exp(), self.shift.tanh() * 2, training=True)
        return self.head(F.relu(x).mean((2, 3)))

    return Calls(
        forward,
        first=nn.Conv2d(3, 6, 3),
        gain=nn.Parameter(torch.randn(6)),
        shift=nn.Parameter(torch.randn(6)),
        head=nn.Linear(6, 5),
    )


def beside_views() -> nn.Module:
    """Parts of a tensor wait at a cut, and a copy of it is changed in place later."""

    def forward(self, x):
        x = self.first(x)
        left, right = x.chunk(2, 1)
        right = self.norm(right)
        left = left.clone()
        left[:, 0] = right[:, 0]
        return self.head(torch.cat([left.mul_(2), right], 1).mean((2, 3)))

    return Calls(forward, first=nn.Conv2d(3, 8, 3), norm=nn.BatchNorm2d(4), head=nn.Linear(8, 5))


def two_streams() -> nn.Module:
    """Two tensors wait at two cuts, and views of both are added behind the second: both get one
    gradient, to which only the first one's layer adds."""

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        y = self.last(self.c(self.norm(a)))
        return self.head((y.flatten(2) + (a.flatten(2) + b.flatten(2))).mean(2))

    return Calls(
        forward,
        a=nn.Conv2d(3, 4, 3),
        b=nn.Conv2d(3, 4, 3),
        c=nn.Conv2d(4, 4, 1),
        norm=nn.BatchNorm2d(4),
        last=nn.BatchNorm2d(4),
        head=nn.Linear(4, 5),
    )


def shortcut() -> nn.Module:
    """As ResNet's first block of a stage: what waits at the shortcut's cut is changed behind it."""

    def forward(self, x):
        main, short = self.norm(self.main(x)), self.after(self.short(x))
        main += short
        return self.head(F.relu(main).mean((2, 3)))

    return Calls(
        forward,
        main=nn.Conv2d(3, 4, 3),
        norm=nn.BatchNorm2d(4),
        short=nn.Conv2d(3, 4, 3),
        after=nn.BatchNorm2d(4),
        head=nn.Linear(4, 5),
    )


def one_dimension() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(192, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 5)
    )


def three_dimensions() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 3)),
        nn.Conv3d(1, 4, 3, padding=1),
        nn.BatchNorm3d(4),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(768, 5),
    )


def single_layer(**options: object) -> nn.Module:
    return nn.Sequential(
        OrderedDict(
            convolution=nn.Conv2d(3, 6, 3),
            norm=nn.BatchNorm2d(6, **options),  # type: ignore[arg-type]
            activation=nn.ReLU(),
            flat=nn.Flatten(),
            head=nn.Linear(216, 5),
        )
    )


MODELS = {
    "residual, 2 layers": lambda: Residual(1),
    "residual, 6 layers": lambda: Residual(5),
    "residual, 20 layers": lambda: Residual(19),
    "residual, 50 layers": lambda: Residual(49),
    "pre-activation": PreActivation,
    "DenseNet": Dense,
    "depthwise": depthwise,
    "LSTM": recurrent,
    "attention": attention,
    "1d": one_dimension,
    "3d": three_dimensions,
    "not affine": lambda: single_layer(affine=False),
    "not tracking": lambda: single_layer(track_running_stats=False),
    "neither": lambda: single_layer(affine=False, track_running_stats=False),
    "momentum 0.3": lambda: single_layer(momentum=0.3),
    "momentum None": lambda: single_layer(momentum=None),
    "momentum 0": lambda: single_layer(momentum=0.0),
    "eps 0.1": lambda: single_layer(eps=0.1),
    "frozen scale": lambda: single_layer().requires_grad_(True),
    "used twice": used_twice,
    "unused output": unused_output,
    "on the input": on_the_input,
    "computed weight": computed_weight,
    "beside views": beside_views,
    "two streams": two_streams,
    "shortcut": shortcut,
    "SyncBatchNorm on one process": lambda: nn.SyncBatchNorm.convert_sync_batchnorm(Residual(2)),
}


def make(name: str) -> nn.Module:
    model = MODELS[name]().double().train()
    if name == "frozen scale":
        model.norm.weight.requires_grad_(False)
    # Statistics that are not where a fresh layer starts, scales that are not one.
    for module in model.modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue
        if module.affine:
            nn.init.normal_(module.weight, 1.0, 0.3)
            nn.init.normal_(module.bias, 0.0, 0.3)
        if module.track_running_stats:
            nn.init.normal_(module.running_mean)
    return model


def images(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 3, 8, 8, dtype=torch.float64), torch.randint(5, (n,))
