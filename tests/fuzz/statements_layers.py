"""Layers of torch.nn, functional calls and views; nothing random, nothing that mixes samples."""

from .statement import of

LAYERS = [
    of("linear", "h = torch.tanh(self.m$(h))", "self.m$ = nn.Linear(W, W)"),
    of("residual", "h = h + F.gelu(self.m$(h))", "self.m$ = nn.Linear(W, W)"),
    of(
        "shared linear",
        "h = self.m$(torch.tanh(self.m$(h)))",
        "self.m$ = nn.Linear(W, W)",
    ),
    of(
        "tied weight",
        "h = F.linear(torch.sigmoid(self.m$(h)), self.m$.weight.t())",
        "self.m$ = nn.Linear(W, W)",
    ),
    of(
        "shared module under two names",
        "h = self.n$(F.relu(self.m$(h)))",
        "self.m$ = nn.Linear(W, W)\nself.n$ = self.m$",
    ),
    of(
        "unused and frozen",
        "h = h + self.m$(h)",
        """
self.m$ = nn.Linear(W, W).requires_grad_(False)
self.unused$ = nn.Linear(2, 2)""",
    ),
    of("LayerNorm", "h = self.m$(h)", "self.m$ = nn.LayerNorm(W)"),
    of("GroupNorm", "h = self.m$(h)", "self.m$ = nn.GroupNorm(2, W)"),
    of(
        "InstanceNorm",
        "h = self.m$(h.unflatten(1, (2, 3))).flatten(1)",
        "self.m$ = nn.InstanceNorm1d(2, affine=True)",
    ),
    of("RMSNorm", "h = self.m$(h)", "self.m$ = nn.RMSNorm(W)"),
    of(
        "Conv1d",
        "h = h + self.m$(h.unflatten(1, (2, 3))).flatten(1)",
        "self.m$ = nn.Conv1d(2, 2, 3, padding=1)",
    ),
    of(
        "Conv2d",
        "h = F.relu(self.m$(h.unflatten(1, (1, 2, 3)))).mean(1).flatten(1) + h",
        "self.m$ = nn.Conv2d(1, 3, 3, padding=1)",
    ),
    of(
        "ConvTranspose1d and pool",
        "h = F.avg_pool1d(self.m$(h.unsqueeze(1)), 2).squeeze(1)",
        "self.m$ = nn.ConvTranspose1d(1, 1, 2, stride=2)",
    ),
    of(
        "GRU",
        "h = h + self.m$(h.unflatten(1, (3, 2)))[0].flatten(1)",
        "self.m$ = nn.GRU(2, 2, batch_first=True)",
    ),
    of(
        "LSTM, time first",
        "h = self.m$(h.unflatten(1, (3, 2)).transpose(0, 1))[0].transpose(0, 1).flatten(1) + h",
        "self.m$ = nn.LSTM(2, 2)",
    ),
    of(
        "attention",
        """
t$ = h.unflatten(1, (3, 2))
h = h + self.m$(t$, t$, t$, need_weights=False)[0].flatten(1)""",
        "self.m$ = nn.MultiheadAttention(2, 1, batch_first=True)",
    ),
    of(
        "attention by hand",
        """
q$, k$, v$ = self.m$(h).unflatten(1, (3, 3, 2)).unbind(1)
h = h + F.scaled_dot_product_attention(q$, k$, v$).flatten(1)""",
        "self.m$ = nn.Linear(W, 3 * W)",
    ),
    of(
        "encoder layer",
        "h = self.m$(torch.stack([h, h.flip(1), h * 0.5], 1)).mean(1)",
        "self.m$ = nn.TransformerEncoderLayer(W, 2, 8, dropout=0.0, batch_first=True)",
    ),
    of(
        "spectral norm",
        "h = self.m$(h)",
        "self.m$ = nn.utils.parametrizations.spectral_norm(nn.Linear(W, W))",
    ),
    of(
        "weight norm",
        "h = self.m$(h)",
        "self.m$ = nn.utils.parametrizations.weight_norm(nn.Linear(W, W))",
    ),
    of(
        "embedding",
        "h = h + self.m$(tokens).mean(1)",
        "self.m$ = nn.Embedding(7, W)",
        inputs="tokens",
    ),
    of(
        "embedding with padding, tied",
        "h = h + F.linear(self.m$(tokens).sum(1), self.m$.weight).sum(1, keepdim=True)",
        "self.m$ = nn.Embedding(7, W, padding_idx=0)",
        inputs="tokens",
    ),
    of(
        "embedding bag",
        "h = h + self.m$(tokens)",
        "self.m$ = nn.EmbeddingBag(7, W, mode='mean')",
        inputs="tokens",
    ),
    of(
        "sparse embedding",
        "h = h + self.m$(tokens).sum(1)",
        "self.m$ = nn.Embedding(7, W, sparse=True)",
        inputs="tokens",
    ),
    of(
        "max_norm",
        "h = h + self.m$(tokens).sum(1)",
        "self.m$ = nn.Embedding(7, W, max_norm=0.5)",
        tags="weight_written",
        inputs="tokens",
    ),
    of("second input", "h = h + F.silu(self.m$(z))", "self.m$ = nn.Linear(4, W)", inputs="z"),
    of(
        "time-first input",
        "h = h + torch.tanh(self.m$(seq)).mean(0)",
        "self.m$ = nn.Linear(W, W)",
        inputs="seq",
    ),
    of("shared input", "h = h + (h @ table.t()).softmax(1) @ table", inputs="table"),
    of("number and flag", "h = h * scale if flag else h - scale", inputs="scale flag"),
    of(
        "prototypes",
        "h = h + torch.cdist(h, self.p$).neg().softmax(1) @ self.p$",
        "self.p$ = nn.Parameter(torch.randn(4, W))",
    ),
    of(
        "bilinear and einsum",
        "h = torch.einsum('bi,ijk,bj->bk', h, self.p$, torch.tanh(h))",
        "self.p$ = nn.Parameter(torch.randn(W, W, W) * 0.2)",
    ),
    of("gates", "h = F.glu(self.m$(h), 1)", "self.m$ = nn.Linear(W, 2 * W)"),
    of(
        "Fourier",
        "h = h + torch.fft.irfft(torch.fft.rfft(h, dim=1) * self.p$, n=W, dim=1)",
        "self.p$ = nn.Parameter(torch.randn(W // 2 + 1))",
    ),
    of(
        "complex",
        """
h = torch.view_as_real(torch.view_as_complex(h.unflatten(1, (3, 2)).contiguous()) * self.p$).flatten(1)""",
        "self.p$ = nn.Parameter(torch.randn(3, dtype=torch.complex128))",
    ),
    of(
        "layers in a list",
        """
for layer$ in self.m$:
    h = h + torch.tanh(layer$(h))""",
        "self.m$ = nn.ModuleList(nn.Linear(W, W) for _ in range(2))",
    ),
    of(
        "parameters in a dictionary",
        "h = h * self.m$['a'] + self.m$['b']",
        "self.m$ = nn.ParameterDict({'a': torch.ones(W), 'b': torch.zeros(W)})",
    ),
    # Views.
    of("chunks", "h = torch.cat(h.chunk(2, 1)[::-1], 1)"),
    of("transpose", "h = h.t().contiguous().t() * 1.1"),
    of(
        "flatten tokens",
        "h = torch.tanh(self.m$(h.reshape(-1, 2))).reshape(-1, W)",
        "self.m$ = nn.Linear(2, 2)",
    ),
    of(
        "flatten tokens, time first",
        """
h = self.m$(h.unflatten(1, (3, 2)).transpose(0, 1).reshape(-1, 2)).unflatten(0, (3, -1))
h = h.transpose(0, 1).flatten(1)""",
        "self.m$ = nn.Linear(2, 2)",
    ),
    of("unfold", "h = h + h.unfold(1, 3, 1).mean(2).mean(1, keepdim=True)"),
    of(
        "expand",
        "h = (h.unsqueeze(1).expand(-1, 3, -1) * self.p$).sum(1)",
        "self.p$ = nn.Parameter(torch.randn(3, W))",
    ),
    of("keep", "kept.append(h)"),
    of("skip connection", "h = h + kept[-1]"),
    of("first value", "h = h * torch.sigmoid(kept[0])"),
    of("gather", "h = h.gather(1, h.argsort(1))"),
    of("top features", "h = h + h.topk(2, 1).values.sum(1, keepdim=True)"),
    of("cumulative", "h = h.cumsum(1) / self.w$", "self.w$ = 3.0"),
    of("rows by value", "h = torch.where(h[:, :1] > 0, h * 1.5, torch.sin(h))"),
    of("log-sum-exp", "h = h - h.logsumexp(1, keepdim=True)"),
    of(
        "shape decides",
        """
for j$ in range(h.shape[1] // 3):
    h = h + torch.tanh(self.m$[j$](h))
if h.dim() == 2 and h.shape[1] > 4:
    h = h * 0.9""",
        "self.m$ = nn.ModuleList(nn.Linear(W, W) for _ in range(3))",
    ),
    of(
        "experts by sample",
        """
on$ = h[:, 0] > 0
made$ = torch.zeros_like(h)
made$[on$] = self.m$(h[on$])
made$[~on$] = self.n$(h[~on$])
h = h + made$""",
        "self.m$ = nn.Linear(W, W)\nself.n$ = nn.Linear(W, W)",
        tags="dynamic",
    ),
]
