"""Networks that see images: convolutions, windows and patches of attention."""

import math
from collections.abc import Callable
from typing import Any

import torch
from architecture_kinds import Made, Makers, N, architecture
from support import Calls
from torch import nn
from torch.nn import functional as F

IMAGES: Makers = {}


def images(channels: int = 3, size: int = 8) -> torch.Tensor:
    return torch.randn(N, channels, size, size)


class ConvNeXtBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.scale = nn.Parameter(0.1 * torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.depthwise(x).permute(0, 2, 3, 1)
        y = self.scale * self.down(F.gelu(self.up(self.norm(y))))
        return x + y.permute(0, 3, 1, 2)


@architecture(IMAGES)
def convnext() -> Made:
    stem = nn.Conv2d(3, 8, 2, stride=2)
    model = nn.Sequential(stem, ConvNeXtBlock(8), ConvNeXtBlock(8), nn.AdaptiveAvgPool2d(1))
    return nn.Sequential(model, nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 5)), images()


class ShiftedWindows(nn.Module):
    """Swin's attention: windows of 2 x 2 on a rolled map, a bias by relative position, a mask."""

    def __init__(self, width: int, size: int, shift: int) -> None:
        super().__init__()
        self.shift, self.size, self.heads = shift, size, 2
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.bias = nn.Parameter(torch.randn(9, self.heads))
        at = torch.stack(torch.meshgrid(*[torch.arange(2)] * 2, indexing="ij")).flatten(1)
        offset = at[:, :, None] - at[:, None, :] + 1
        self.register_buffer("index", offset[0] * 3 + offset[1])
        zones = torch.zeros(1, size, size, 1)
        zones[:, -1:], zones[:, :, -1:] = 1, 2
        windows = self.split(zones).squeeze(-1)
        apart = (windows[:, None] != windows[:, :, None]).double()
        self.register_buffer("mask", -100.0 * apart if shift else torch.zeros_like(apart))

    def split(self, x: torch.Tensor) -> torch.Tensor:
        n, h, w, c = x.shape
        x = x.view(n, h // 2, 2, w // 2, 2, c).permute(0, 1, 3, 2, 4, 5)
        return x.reshape(-1, 4, c)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, h, w, c = x.shape
        y = torch.roll(self.norm(x), (-self.shift, -self.shift), (1, 2))
        y = self.split(y)
        q, k, v = self.qkv(y).view(-1, 4, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        scores = q @ k.mT / math.sqrt(c // self.heads)
        scores = scores + self.bias[self.index].permute(2, 0, 1)
        scores = scores.view(n, -1, self.heads, 4, 4) + self.mask[None, :, None]
        y = (scores.view(-1, self.heads, 4, 4).softmax(-1) @ v).transpose(1, 2).reshape(-1, 4, c)
        y = self.out(y).view(n, h // 2, w // 2, 2, 2, c).permute(0, 1, 3, 2, 4, 5)
        return x + torch.roll(y.reshape(n, h, w, c), (self.shift, self.shift), (1, 2))


@architecture(IMAGES)
def swin() -> Made:
    body = nn.Sequential(ShiftedWindows(8, 4, 0), ShiftedWindows(8, 4, 1))

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.patches(x).permute(0, 2, 3, 1)).mean((1, 2)))

    patches = nn.Conv2d(3, 8, 2, stride=2)
    return Calls(forward, patches=patches, body=body, head=nn.Linear(8, 5)), images()


@architecture(IMAGES)
def vit() -> Made:
    layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True, norm_first=True)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.patches(x).flatten(2).mT
        y = torch.cat([self.token.expand(len(y), -1, -1), y], 1) + self.places
        return self.head(self.layers(y)[:, 0])

    return Calls(
        forward,
        patches=nn.Conv2d(3, 8, 4, stride=4),
        token=nn.Parameter(torch.randn(1, 1, 8)),
        places=nn.Parameter(torch.randn(1, 5, 8)),
        layers=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        head=nn.Linear(8, 5),
    ), images()


def inverted_residual(norm: Callable[[int], nn.Module]) -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.body(x)
        y = y * torch.sigmoid(self.excite(F.silu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        return x + self.project(y)

    return Calls(
        forward,
        body=nn.Sequential(
            nn.Conv2d(8, 16, 1, bias=False),
            norm(16),
            nn.ReLU6(inplace=True),
            nn.Conv2d(16, 16, 3, padding=1, groups=16, bias=False),
            norm(16),
            nn.Hardswish(inplace=True),
        ),
        squeeze=nn.Conv2d(16, 4, 1),
        excite=nn.Conv2d(4, 16, 1),
        project=nn.Sequential(nn.Conv2d(16, 8, 1, bias=False), norm(8)),
    )


def mobile(norm: Callable[[int], nn.Module]) -> nn.Module:
    blocks = [inverted_residual(norm), inverted_residual(norm)]
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2, 1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
    )


@architecture(IMAGES)
def efficientnet_with_group_norm() -> Made:
    return mobile(lambda width: nn.GroupNorm(2, width)), images()


@architecture(IMAGES)
def densenet_with_layer_norm() -> Made:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        found = [x]
        for layer in self.layers:
            found.append(layer(torch.cat(found, 1)))
        return self.head(torch.cat(found, 1).amax((2, 3)))

    layers = nn.ModuleList(
        nn.Sequential(nn.GroupNorm(1, 3 + 4 * i), nn.ReLU(), nn.Conv2d(3 + 4 * i, 4, 3, padding=1))
        for i in range(3)
    )
    return Calls(forward, layers=layers, head=nn.Linear(15, 5)), images()


@architecture(IMAGES)
def unet() -> Made:
    def conv(a: int, b: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.InstanceNorm2d(b), nn.ReLU(True))

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        fine = self.fine(x)
        middle = self.middle(F.max_pool2d(fine, 2))
        coarse = self.coarse(F.avg_pool2d(middle, 2))
        y = self.join(torch.cat([self.up(coarse), middle], 1))
        y = F.interpolate(y, scale_factor=2, mode="bilinear", align_corners=False)
        return self.head(torch.cat([y, fine], 1))

    return Calls(
        forward,
        fine=conv(3, 4),
        middle=conv(4, 6),
        coarse=conv(6, 8),
        up=nn.ConvTranspose2d(8, 6, 2, stride=2),
        join=conv(12, 4),
        head=nn.Conv2d(8, 2, 1),
    ), images()


@architecture(IMAGES)
def mixer() -> Made:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = x + self.tokens(self.first(x).mT).mT
        return self.head((y + self.channels(self.second(y))).mean(1))

    return Calls(
        forward,
        first=nn.LayerNorm(6),
        second=nn.LayerNorm(6),
        tokens=nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)),
        channels=nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 6)),
        head=nn.Linear(6, 5),
    ), torch.randn(N, 4, 6)


@architecture(IMAGES)
def detection_transformer() -> Made:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        seen = self.backbone(x).flatten(2).mT
        found = self.transformer(seen, self.queries.expand(len(x), -1, -1))
        return torch.cat([self.classes(found), self.boxes(found).sigmoid()], -1)

    return Calls(
        forward,
        backbone=nn.Conv2d(3, 8, 4, 4),
        transformer=nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True),
        queries=nn.Parameter(torch.randn(3, 8)),
        classes=nn.Linear(8, 4),
        boxes=nn.Linear(8, 4),
    ), images()


@architecture(IMAGES)
def deformed_grid() -> Made:
    """A spatial transformer: an affine grid from the image, which samples it."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        identity = torch.tensor([1.0, 0, 0, 0, 1, 0], dtype=x.dtype)
        theta = (self.locate(x) / 4 + identity).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return self.head(F.grid_sample(x, grid, align_corners=False).flatten(1))

    locate = nn.Sequential(nn.Flatten(), nn.Linear(48, 6), nn.Tanh())
    return Calls(forward, locate=locate, head=nn.Linear(48, 5)), images(size=4)
