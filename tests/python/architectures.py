"""Small networks in the manner of well-known architectures, written as their users write them.

Each function gives (model, inputs) in fp64; nothing is random in their forwards. They are made for
what they do with tensors rather than for what they learn: rolls and windows, scans, scatters, Fourier
transforms, routing by values, loops, gradients inside of forward."""

import math
from collections.abc import Callable
from typing import Any

import torch
from support import Calls
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

Made = tuple[nn.Module, Any]
ARCHITECTURES: dict[str, Callable[[], Made]] = {}
N = 7


def architecture(make: Callable[[], Made]) -> Callable[[], Made]:
    ARCHITECTURES[make.__name__] = make
    return make


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


@architecture
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


@architecture
def swin() -> Made:
    body = nn.Sequential(ShiftedWindows(8, 4, 0), ShiftedWindows(8, 4, 1))

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.patches(x).permute(0, 2, 3, 1)).mean((1, 2)))

    patches = nn.Conv2d(3, 8, 2, stride=2)
    return Calls(forward, patches=patches, body=body, head=nn.Linear(8, 5)), images()


@architecture
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


@architecture
def efficientnet_with_group_norm() -> Made:
    return mobile(lambda width: nn.GroupNorm(2, width)), images()


@architecture
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


@architecture
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


@architecture
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


@architecture
def seq2seq_with_attention() -> Made:
    def forward(self: Any, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        seen, (h, _) = self.encoder(self.words(source))
        h, given = h.mean(0), self.words(target)
        steps = []
        for t in range(given.shape[1]):
            weights = (seen @ self.key(h)[:, :, None]).softmax(1)
            h = self.decoder(torch.cat([given[:, t], (weights * seen).sum(1)], 1), h)
            steps.append(self.head(h))
        return torch.stack(steps, 1)

    return Calls(
        forward,
        words=nn.Embedding(11, 6, padding_idx=0),
        encoder=nn.LSTM(6, 8, batch_first=True, bidirectional=True),
        key=nn.Linear(8, 16),
        decoder=nn.GRUCell(22, 8),
        head=nn.Linear(8, 11),
    ), (torch.randint(11, (N, 6)), torch.randint(11, (N, 4)))


@architecture
def packed_lstm() -> Made:
    def forward(self: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        found, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=6)
        return self.head(found.sum(1))

    lengths = torch.tensor([6, 2, 5, 3, 6, 1, 4])
    lstm = nn.LSTM(4, 6, batch_first=True)
    return Calls(forward, lstm=lstm, head=nn.Linear(6, 5)), (torch.randn(N, 6, 4), lengths)


@architecture
def graph_network() -> Made:
    """Messages along one graph's edges, summed at their ends by index_add."""

    def forward(self: Any, nodes: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            sent = layer(torch.cat([nodes[:, self.start], nodes[:, self.end]], -1)).relu()
            nodes = torch.zeros_like(nodes).index_add(1, self.end, sent) / 2 + nodes
        return self.head(nodes.amax(1))

    layers = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))
    start, end = torch.tensor([[0, 1, 2, 3, 4, 0], [1, 2, 3, 4, 0, 2]])
    model = Calls(forward, layers=layers, head=nn.Linear(4, 5), start=start, end=end)
    return model, torch.randn(N, 5, 4)


@architecture
def graph_attention_of_each_sample() -> Made:
    """Each sample has a graph of its own, given by its edges."""

    def forward(self: Any, nodes: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        a, b = edges[:, 0], edges[:, 1]
        wide = lambda index: index[..., None].expand(-1, -1, nodes.shape[-1])  # noqa: E731
        x = self.layer(nodes)
        sender, taker = x.gather(1, wide(a)), x.gather(1, wide(b))
        score = F.leaky_relu(self.score(torch.cat([sender, taker], -1))).exp()
        total = torch.zeros(*x.shape[:2], 1, dtype=x.dtype).scatter_add(1, b[..., None], score)
        mixed = torch.zeros_like(x).scatter_add(1, wide(b), score * sender)
        return self.head((mixed / (total + 1e-3)).mean(1))

    model = Calls(forward, layer=nn.Linear(4, 4), score=nn.Linear(8, 1), head=nn.Linear(4, 5))
    return model, (torch.randn(N, 5, 4), torch.randint(5, (N, 2, 9)))


@architecture
def selective_scan() -> Made:
    """Mamba's recurrence, step by step, between gates."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y, gate = self.enter(x).chunk(2, -1)
        y = F.silu(self.conv(F.pad(y.mT, (2, 0))).mT)
        step, into, out = self.select(y).split([6, 3, 3], -1)
        step = F.softplus(step)
        decay = torch.exp(step[..., None] * -torch.exp(self.rates))
        given = (step * y)[..., None] * into[:, :, None]
        state, found = torch.zeros_like(given[:, 0]), []
        for t in range(x.shape[1]):
            state = decay[:, t] * state + given[:, t]
            found.append((state * out[:, t, None]).sum(-1))
        return self.leave((torch.stack(found, 1) + self.skip * y) * F.silu(gate))

    return Calls(
        forward,
        enter=nn.Linear(4, 12),
        conv=nn.Conv1d(6, 6, 3, groups=6),
        select=nn.Linear(6, 12),
        rates=nn.Parameter(torch.rand(6, 3)),
        skip=nn.Parameter(torch.ones(6)),
        leave=nn.Linear(6, 4),
    ), torch.randn(N, 5, 4)


@architecture
def linear_attention() -> Made:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        summed = torch.cumsum(torch.einsum("nti,ntj->ntij", k, v), 1)
        return self.head(torch.einsum("nti,ntij->ntj", q, summed) / (q * k.cumsum(1)).sum(-1, True))

    return Calls(forward, qkv=nn.Linear(4, 12), head=nn.Linear(4, 5)), torch.randn(N, 5, 4)


@architecture
def rotary_decoder() -> Made:
    """A language model: rotary places, a causal mask, grouped heads, RMS norms, tied words."""

    def forward(self: Any, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        n, t, _ = x.shape
        y = self.norm(x)
        q = self.q(y).view(n, t, 4, 2).transpose(1, 2)
        k, v = (m(y).view(n, t, 2, 2).transpose(1, 2) for m in (self.k, self.v))
        angle = torch.arange(t, dtype=x.dtype)[:, None]
        turn = lambda z: z * angle.cos() + z.flip(-1) * torch.tensor([-1.0, 1.0]) * angle.sin()  # noqa: E731
        y = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True, enable_gqa=True)
        x = x + self.out(y.transpose(1, 2).reshape(n, t, 8))
        a, b = self.up(self.last(x)).chunk(2, -1)
        return F.linear(x + self.down(F.silu(a) * b), self.words.weight)

    return Calls(
        forward,
        words=nn.Embedding(11, 8),
        norm=nn.RMSNorm(8),
        last=nn.RMSNorm(8),
        q=nn.Linear(8, 8, bias=False),
        k=nn.Linear(8, 4, bias=False),
        v=nn.Linear(8, 4, bias=False),
        out=nn.Linear(8, 8),
        up=nn.Linear(8, 24),
        down=nn.Linear(12, 8),
    ), torch.randint(11, (N, 6))


@architecture
def perceiver() -> Made:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        latent = self.latents.expand(len(x), -1, -1)
        latent = latent + self.cross(latent, x, x, need_weights=False)[0]
        latent = latent + self.own(latent, latent, latent)[0]
        return self.head(latent.flatten(1))

    attention = lambda: nn.MultiheadAttention(8, 2, batch_first=True)  # noqa: E731
    latents = nn.Parameter(torch.randn(1, 3, 8))
    model = Calls(
        forward, cross=attention(), own=attention(), latents=latents, head=nn.Linear(24, 5)
    )
    return model, torch.randn(N, 9, 8)


@architecture
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


@architecture
def experts_by_value() -> Made:
    """Each token goes to its two best experts, whose rows are picked by masks."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, 1)
        weights, chosen = self.router(tokens).softmax(-1).topk(2)
        mixed = torch.zeros_like(tokens)
        for i, expert in enumerate(self.experts):
            row, which = torch.where(chosen == i)
            if len(row):
                mixed.index_add_(0, row, expert(tokens[row]) * weights[row, which, None])
        return self.head(mixed.view_as(x).mean(1))

    experts = nn.ModuleList(
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)) for _ in "123"
    )
    model = Calls(forward, router=nn.Linear(4, 3), experts=experts, head=nn.Linear(4, 5))
    return model, torch.randn(N, 6, 4)


@architecture
def temporal_convolutions_with_weight_norm() -> Made:
    def conv(a: int, b: int, d: int) -> nn.Module:
        return parametrizations.weight_norm(nn.Conv1d(a, b, 2, dilation=d))

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for d, layer in zip((1, 2, 4), self.layers, strict=True):
            y = F.relu(layer(F.pad(x, (d, 0))))
            x = y + (x if x.shape == y.shape else 0)
        return self.head(x[..., -1])

    layers = nn.ModuleList([conv(3, 6, 1), conv(6, 6, 2), conv(6, 6, 4)])
    return Calls(forward, layers=layers, head=nn.Linear(6, 5)), torch.randn(N, 3, 10)


@architecture
def capsules() -> Made:
    def squash(x: torch.Tensor) -> torch.Tensor:
        square = x.square().sum(-1, keepdim=True)
        return x * square / (1 + square) / (square + 1e-8).sqrt()

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        votes = torch.einsum("nif,icfd->nicd", squash(x), self.weight)
        fixed, agree = votes.detach(), torch.zeros(votes.shape[:3], dtype=x.dtype)
        for turn in range(3):
            of = votes if turn == 2 else fixed
            found = squash((agree.softmax(2)[..., None] * of).sum(1))
            agree = agree + (fixed * found.detach()[:, None]).sum(-1)
        return found.norm(dim=-1)

    return Calls(forward, weight=nn.Parameter(torch.randn(6, 5, 4, 3))), torch.randn(N, 6, 4)


@architecture
def neural_ode() -> Made:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        step = 0.25
        for _ in range(4):
            a = self.field(x)
            b = self.field(x + step / 2 * a)
            c = self.field(x + step / 2 * b)
            x = x + step / 6 * (a + 2 * b + 2 * c + self.field(x + step * c))
        return self.head(x)

    field = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    return Calls(forward, field=field, head=nn.Linear(4, 5)), torch.randn(N, 4)


@architecture
def fourier_operator() -> Made:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.lift(x[..., None])
        modes = torch.fft.rfft(y, dim=1)
        kept = torch.einsum("nkc,kcd->nkd", modes[:, :3], torch.view_as_complex(self.weight))
        rest = torch.zeros_like(modes[:, 3:])
        y = F.gelu(torch.fft.irfft(torch.cat([kept, rest], 1), n=x.shape[1], dim=1) + self.local(y))
        return self.head(y).squeeze(-1)

    return Calls(
        forward,
        lift=nn.Linear(1, 4),
        weight=nn.Parameter(torch.randn(3, 4, 4, 2)),
        local=nn.Linear(4, 4),
        head=nn.Linear(4, 1),
    ), torch.randn(N, 8)


@architecture
def hypernetwork() -> Made:
    def forward(self: Any, x: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
        weight = self.makes(z).view(len(z), 6, 4)
        scale, shift = self.film(z).chunk(2, -1)
        return self.head(F.relu(torch.bmm(weight, x[..., None]).squeeze(-1) * scale + shift))

    model = Calls(forward, makes=nn.Linear(3, 24), film=nn.Linear(3, 12), head=nn.Linear(6, 5))
    return model, (torch.randn(N, 4), torch.randn(N, 3))


@architecture
def memory_machine() -> Made:
    """Reads and writes a memory of its own for each sample, in place."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        memory = self.start.repeat(len(x), 1, 1)
        read = torch.zeros(len(x), 4, dtype=x.dtype)
        for t in range(x.shape[1]):
            hidden = torch.tanh(self.control(torch.cat([x[:, t], read], 1)))
            where = (memory @ self.key(hidden)[..., None]).softmax(1)
            read = (where * memory).sum(1)
            memory = memory * (1 - where * torch.sigmoid(self.erase(hidden))[:, None])
            memory += where * self.write(hidden)[:, None]
        return self.head(torch.cat([hidden, read], 1))

    return Calls(
        forward,
        start=nn.Parameter(torch.randn(1, 5, 4)),
        control=nn.Linear(7, 6),
        key=nn.Linear(6, 4),
        erase=nn.Linear(6, 4),
        write=nn.Linear(6, 4),
        head=nn.Linear(10, 5),
    ), torch.randn(N, 4, 3)


@architecture
def splines() -> Made:
    """A KAN's layer: piecewise linear functions whose pieces are found by their arguments."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = x.clamp(-1.9, 1.9)
        piece = torch.bucketize(y.detach(), self.knots) - 1
        along = y - self.knots[piece]
        inputs = torch.arange(x.shape[1])
        left, right = self.values[inputs, piece], self.values[inputs, piece + 1]
        return (left + (right - left) * along[..., None]).sum(1)

    knots = torch.linspace(-2, 2, 5)
    return Calls(forward, values=nn.Parameter(torch.randn(4, 5, 3)), knots=knots), torch.randn(N, 4)


@architecture
def random_field() -> Made:
    """A linear-chain CRF: the negative log-likelihood of tags, by the forward algorithm."""

    def forward(self: Any, x: torch.Tensor, tags: torch.Tensor) -> torch.Tensor:
        emitted = self.emit(x)
        total = emitted[:, 0]
        for t in range(1, x.shape[1]):
            total = torch.logsumexp(total[:, :, None] + self.change, 1) + emitted[:, t]
        path = emitted.gather(2, tags[..., None]).sum((1, 2))
        path = path + self.change[tags[:, :-1], tags[:, 1:]].sum(1)
        return (torch.logsumexp(total, 1) - path)[:, None]

    model = Calls(forward, emit=nn.Linear(4, 3), change=nn.Parameter(torch.randn(3, 3)))
    return model, (torch.randn(N, 5, 4), torch.randint(3, (N, 5)))


@architecture
def critic_with_gradient_penalty() -> Made:
    """WGAN-GP: the penalty's gradient is taken inside of forward."""

    def forward(self: Any, real: torch.Tensor, fake: torch.Tensor, mix: torch.Tensor) -> Any:
        between = (mix * real + (1 - mix) * fake).requires_grad_()
        slope = torch.autograd.grad(self.net(between).sum(), between, create_graph=True)[0]
        score = self.net(fake) - self.net(real)
        return score + 10 * (slope.norm(dim=1, keepdim=True) - 1).square()

    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    return Calls(forward, net=net), (torch.randn(N, 4), torch.randn(N, 4), torch.rand(N, 1))


class StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@architecture
def vector_quantizer() -> Made:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        z = StraightThrough.apply(4 * self.encode(x)) / 4
        nearest = torch.cdist(z.detach(), self.codes.detach()).argmin(1)
        code = self.codes[nearest]
        out = self.decode(z + (code - z).detach() + (code - code.detach()))
        return torch.cat([out, (code - z).square()], 1)

    codes = nn.Parameter(torch.randn(6, 3))
    return Calls(forward, encode=nn.Linear(4, 3), codes=codes, decode=nn.Linear(3, 4)), torch.randn(
        N, 4
    )


@architecture
def equilibrium() -> Made:
    """Iterates without gradients to a fixed point, and differentiates the last step."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        step = lambda z: torch.tanh(self.cell(z) / 4 + self.enter(x))  # noqa: E731
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(20):
                z = step(z)
        return self.head(step(z))

    cell, enter = nn.Linear(4, 4), nn.Linear(4, 4)
    return Calls(forward, cell=cell, enter=enter, head=nn.Linear(4, 5)), torch.randn(N, 4)


@architecture
def per_sample_jacobian() -> Made:
    """An energy model whose forces are its gradient, by torch.func."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        energy = lambda r: self.net((r[self.a] - r[self.b]).norm(dim=1)).sum()  # noqa: E731
        return torch.stack([torch.func.grad(energy)(r) for r in x])

    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    a, b = torch.tensor([0, 0, 1]), torch.tensor([1, 2, 2])
    return Calls(forward, net=net, a=a, b=b), torch.randn(N, 3, 2)


@architecture
def siamese_in_place() -> Made:
    def forward(self: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        u, v = self.net(a), self.net(b)
        u -= v
        u.abs_().add_(1e-3).sqrt_()
        return self.head(u)

    net = nn.Sequential(nn.Linear(4, 8), nn.Softplus(), nn.Linear(8, 6))
    return Calls(forward, net=net, head=nn.Linear(6, 5)), (torch.randn(N, 4), torch.randn(N, 4))


@architecture
def deformed_grid() -> Made:
    """A spatial transformer: an affine grid from the image, which samples it."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        identity = torch.tensor([1.0, 0, 0, 0, 1, 0], dtype=x.dtype)
        theta = (self.locate(x) / 4 + identity).view(-1, 2, 3)
        grid = F.affine_grid(theta, list(x.shape), align_corners=False)
        return self.head(F.grid_sample(x, grid, align_corners=False).flatten(1))

    locate = nn.Sequential(nn.Flatten(), nn.Linear(48, 6), nn.Tanh())
    return Calls(forward, locate=locate, head=nn.Linear(48, 5)), images(size=4)


@architecture
def pointer_network() -> Made:
    """Sorts by score: what follows is picked by order."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        score = self.score(x).squeeze(-1)
        best, order = score.sort(descending=True)
        picked = x.gather(1, order[..., None].expand_as(x))[:, :3]
        return self.head((picked * best[:, :3, None].sigmoid()).flatten(1))

    return Calls(forward, score=nn.Linear(4, 1), head=nn.Linear(12, 5)), torch.randn(N, 6, 4)
