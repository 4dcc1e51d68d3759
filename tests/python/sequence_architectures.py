"""Networks that go along a sequence: recurrence, scans, attention, words picked by values."""

from typing import Any

import torch
from architecture_kinds import Made, Makers, N, architecture
from support import Calls
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

SEQUENCES: Makers = {}


@architecture(SEQUENCES)
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


@architecture(SEQUENCES)
def packed_lstm() -> Made:
    def forward(self: Any, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        found, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=6)
        return self.head(found.sum(1))

    lengths = torch.tensor([6, 2, 5, 3, 6, 1, 4])
    lstm = nn.LSTM(4, 6, batch_first=True)
    return Calls(forward, lstm=lstm, head=nn.Linear(6, 5)), (torch.randn(N, 6, 4), lengths)


@architecture(SEQUENCES)
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


@architecture(SEQUENCES)
def linear_attention() -> Made:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).chunk(3, -1)
        q, k = F.elu(q) + 1, F.elu(k) + 1
        summed = torch.cumsum(torch.einsum("nti,ntj->ntij", k, v), 1)
        return self.head(torch.einsum("nti,ntij->ntj", q, summed) / (q * k.cumsum(1)).sum(-1, True))

    return Calls(forward, qkv=nn.Linear(4, 12), head=nn.Linear(4, 5)), torch.randn(N, 5, 4)


@architecture(SEQUENCES)
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


@architecture(SEQUENCES)
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


@architecture(SEQUENCES)
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


@architecture(SEQUENCES)
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


@architecture(SEQUENCES)
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


@architecture(SEQUENCES)
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


@architecture(SEQUENCES)
def pointer_network() -> Made:
    """Sorts by score: what follows is picked by order."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        score = self.score(x).squeeze(-1)
        best, order = score.sort(descending=True)
        picked = x.gather(1, order[..., None].expand_as(x))[:, :3]
        return self.head((picked * best[:, :3, None].sigmoid()).flatten(1))

    return Calls(forward, score=nn.Linear(4, 1), head=nn.Linear(12, 5)), torch.randn(N, 6, 4)
