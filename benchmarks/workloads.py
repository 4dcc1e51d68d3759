"""Models and data to measure with. The data is random: no figure here depends on its values."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint


@dataclass(frozen=True)
class Workload:
    name: str
    make_model: Callable[[], nn.Module]
    sample_shape: tuple[int, ...]
    classes: int = 10
    batch_size: int = 0  #: of the suite `time`

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.make_model().train()

    def tensors(self, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Inputs of shape (batch_size, *sample_shape), labels of shape (batch_size,)."""
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(batch_size, *self.sample_shape, generator=generator)
        return inputs, torch.randint(self.classes, (batch_size,), generator=generator)

    def on_host(self, batch_size: int) -> tuple[np.ndarray, np.ndarray]:
        """The same shapes as NumPy's bytes, which no tensor holds until rows are asked for."""
        generator = np.random.default_rng(1)
        inputs = generator.integers(256, size=(batch_size, *self.sample_shape), dtype=np.uint8)
        return inputs, generator.integers(self.classes, size=batch_size)


class Encoder(nn.Module):
    """A transformer encoder with a linear head on the mean over positions."""

    def __init__(
        self, width: int, heads: int, layers: int, classes: int = 10, activation: str = "relu"
    ) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, activation, batch_first=True, norm_first=True
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(positions).mean(dim=1))


def convnet(width: int, size: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, padding=1, stride=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * (size // 4) ** 2, 10),
    )


def mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in zip(widths[:-1], widths[1:], strict=True):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def for_time(toy: bool) -> list[Workload]:
    """Large enough that the native whole batch is what people would want to avoid."""
    if toy:
        return [
            Workload("encoder", lambda: Encoder(8, 2, 1), (4, 8), batch_size=256),
            Workload("MLP", lambda: mlp(16, 32, 10), (16,), batch_size=256),
        ]
    return [
        Workload("convnet", lambda: convnet(32, 32), (3, 32, 32), batch_size=512),
        Workload("encoder", lambda: Encoder(128, 4, 2), (128, 128), batch_size=256),
        Workload("wide MLP", lambda: mlp(1024, 1024, 1024, 1024, 10), (1024,), batch_size=1024),
    ]


def for_budget(toy: bool) -> list[Workload]:
    """Small enough a sample that 65,536 of them take seconds."""
    if toy:
        return [Workload("MLP", lambda: mlp(16, 64, 10), (16,))]
    return [
        Workload("convnet", lambda: convnet(8, 16), (3, 16, 16)),
        Workload("encoder", lambda: Encoder(32, 4, 2), (16, 32)),
        Workload("MLP", lambda: mlp(64, 256, 256, 10), (64,)),
    ]


def for_coupled(toy: bool) -> list[tuple[Workload, int]]:
    """Encoders in front of a contrastive loss, and the micro-batch size of each."""
    if toy:
        return [(Workload("MLP", lambda: mlp(16, 256, 10), (16,), batch_size=64), 16)]
    return [
        (Workload("convnet", lambda: convnet(32, 32), (3, 32, 32), batch_size=256), 32),
        (Workload("encoder", lambda: Encoder(128, 4, 2, 64), (64, 128), batch_size=256), 32),
        (Workload("wide MLP", lambda: mlp(1024, 1024, 1024, 64), (1024,), batch_size=1024), 128),
    ]


def normed_convnet(width: int) -> nn.Module:
    """Convolutions with GroupNorm and GELU, and a linear layer on the mean over all places."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for stride in (1, 2, 1):
        layers += [nn.GroupNorm(8, width), nn.GELU(), nn.Conv2d(width, width, 3, stride, padding=1)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 64))


def for_selective(toy: bool) -> list[Workload]:
    """Encoders in front of a contrastive loss, whose graphs keep what is cheap and what is dear."""
    if toy:
        return [Workload("encoder", lambda: Encoder(16, 2, 1, 10, "gelu"), (8, 16), batch_size=64)]
    return [
        Workload("encoder", lambda: Encoder(128, 4, 2, 64, "gelu"), (64, 128), batch_size=128),
        Workload("convnet", lambda: normed_convnet(32), (3, 32, 32), batch_size=128),
    ]


class Residual(nn.Module):
    """Basic blocks with BatchNorm (He et al., 2016): a stem, then two of a stage's width each."""

    def __init__(self, width: int, stages: int = 2, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.ModuleList()
        for stage in range(stages):
            for stride in (1 if stage == 0 else 2, 1):
                out = width * 2**stage
                self.blocks.append(Block(out // 2 if stride == 2 else out, out, stride))
        self.head = nn.Linear(width * 2 ** (stages - 1), classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = functional.relu(self.norm(self.stem(images)), inplace=True)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    def __init__(self, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(width, out, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(out) for _ in range(2))
        self.skip = nn.Conv2d(width, out, 1, stride, bias=False) if stride != 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norms[0](self.first(x)), inplace=True)
        return functional.relu(self.norms[1](self.second(y)) + self.skip(x), inplace=True)


def normalised_mlp(*widths: int) -> nn.Module:
    layers: list[nn.Module] = []
    for inputs, outputs in zip(widths[:-1], widths[1:], strict=True):
        layers += [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU()]
    return nn.Sequential(*layers[:-2])


def for_whole_batch(toy: bool) -> list[tuple[Workload, int]]:
    """Networks with BatchNorm, and the micro-batch size of each."""
    if toy:
        return [(Workload("MLP", lambda: normalised_mlp(16, 64, 10), (16,), batch_size=64), 16)]
    return [
        (Workload("residual net", lambda: Residual(32), (3, 32, 32), batch_size=256), 32),
        (
            Workload("MLP", lambda: normalised_mlp(512, 1024, 1024, 10), (512,), batch_size=1024),
            128,
        ),
    ]


class Layers(nn.Module):
    """Layers that each have a BatchNorm, and a linear layer on the mean over all places.

    `again`: each layer is computed again for its backward, by torch.utils.checkpoint."""

    convolutions: nn.ModuleList
    norms: nn.ModuleList
    head: nn.Module
    again = False

    @abstractmethod
    def layer(self, index: int, x: torch.Tensor) -> torch.Tensor:
        """What is behind it, of what is in front of it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index in range(len(self.norms)):
            if self.again:
                x = checkpoint(self.layer, index, x, use_reentrant=False)
            else:
                x = self.layer(index, x)
        return self.head(x.mean((2, 3)))


class ResidualLayers(Layers):
    """Equal layers around which the input goes past."""

    def __init__(self, layers: int, width: int, classes: int = 10) -> None:
        super().__init__()
        inputs = [3] + [width] * (layers - 1)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(each, width, 3, padding=1, bias=False) for each in inputs
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in inputs)
        self.head = nn.Linear(width, classes)

    def layer(self, index: int, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[index](self.convolutions[index](x))
        return functional.relu(y if index == 0 else y + x, inplace=True)


class DenseLayers(Layers):
    """Each layer sees what all before it gave (Huang et al., 2017)."""

    def __init__(self, layers: int, growth: int, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, growth, 3, padding=1, bias=False)
        widths = [growth * (index + 1) for index in range(layers)]
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(width, growth, 3, padding=1, bias=False) for width in widths
        )
        self.head = nn.Linear(growth * (layers + 1), classes)

    def layer(self, index: int, x: torch.Tensor) -> torch.Tensor:
        y = functional.relu(self.norms[index](x), inplace=True)
        return torch.cat([x, self.convolutions[index](y)], 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.stem(x))


def for_kept_boundaries(toy: bool) -> list[tuple[Workload, int]]:
    """Networks with BatchNorm, and the micro-batch size of each."""
    # Layers, width, height of images, images, micro-batch
    residual = [(5, 4, 8, 16, 4)]
    dense = [(3, 4, 8, 16, 4)]
    if not toy:
        residual = [(1, 32, 32, 256, 32), (9, 16, 32, 256, 32), (17, 16, 16, 256, 32)]
        residual += [(53, 16, 16, 256, 32), (17, 8, 16, 1024, 64)]
        dense = [(8, 8, 16, 256, 32)]
    found = []
    for name, make, sizes in (
        ("residual", ResidualLayers, residual),
        ("dense", DenseLayers, dense),
    ):
        for layers, width, side, samples, size in sizes:
            workload = Workload(
                f"{name}, {layers} BatchNorm, {samples:,} images",
                partial(make, layers, width),
                (3, side, side),
                batch_size=samples,
            )
            found.append((workload, size))
    return found


class Deep(nn.Module):
    """A stem, equal blocks, and a linear layer on their mean over all places."""

    def __init__(self, stem: nn.Module, blocks: list[nn.Module], width: int, places: int) -> None:
        super().__init__()
        self.stem = stem
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(width, 10)
        self.places = tuple(range(-places, 0)) if places > 1 else (1,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(self.places))


class GroupBlock(nn.Module):
    """A basic block with GroupNorm."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.GroupNorm(8, width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False),
            nn.GroupNorm(8, width),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(x + self.body(x))


def deep_transformer(width: int, heads: int, layers: int) -> nn.Module:
    def layer() -> nn.Module:
        return nn.TransformerEncoderLayer(
            width, heads, 4 * width, dropout=0.0, batch_first=True, norm_first=True
        )

    return Deep(nn.Linear(32, width), [layer() for _ in range(layers)], width, places=1)


def deep_residual(width: int, blocks: int) -> nn.Module:
    stem = nn.Conv2d(3, width, 3, padding=1)
    return Deep(stem, [GroupBlock(width) for _ in range(blocks)], width, places=2)


def for_one_sample(toy: bool) -> list[Workload]:
    """Networks of many equal blocks, and one sample large enough that its activations count."""
    if toy:
        return [
            Workload("transformer", lambda: deep_transformer(16, 2, 6), (24, 32), batch_size=1),
        ]
    return [
        Workload("transformer", lambda: deep_transformer(128, 4, 12), (512, 32), batch_size=1),
        Workload("residual net", lambda: deep_residual(32, 12), (3, 96, 96), batch_size=1),
    ]


def tiny_mlp() -> nn.Module:
    """So little work that what a loop costs shows."""
    return mlp(64, 128, 10)
