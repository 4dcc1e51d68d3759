"""What sees more than one sample: layers of the whole batch, mixing by ordinary ops, draws."""

from .statement import of

WHOLE_BATCH = [
    of("BatchNorm1d", "h = self.m$(h)", "self.m$ = nn.BatchNorm1d(W)", tags="whole"),
    of(
        "BatchNorm1d, no affine",
        "h = self.m$(h)",
        "self.m$ = nn.BatchNorm1d(W, affine=False)",
        tags="whole",
    ),
    of(
        "BatchNorm1d, cumulative",
        "h = self.m$(h)",
        "self.m$ = nn.BatchNorm1d(W, momentum=None)",
        tags="whole",
    ),
    of(
        "BatchNorm1d, nothing tracked",
        "h = self.m$(h)",
        "self.m$ = nn.BatchNorm1d(W, track_running_stats=False)",
        tags="whole",
    ),
    of(
        "BatchNorm2d",
        "h = self.m$(h.unflatten(1, (2, 3, 1))).flatten(1)",
        "self.m$ = nn.BatchNorm2d(2)",
        tags="whole",
    ),
    of(
        "BatchNorm of tokens",
        "h = self.m$(h.reshape(-1, 2)).reshape(-1, W)",
        "self.m$ = nn.BatchNorm1d(2)",
        tags="whole",
    ),
    of(
        "shared BatchNorm",
        "h = self.m$(torch.tanh(self.m$(h)))",
        "self.m$ = nn.BatchNorm1d(W)",
        tags="whole",
    ),
    of("functional batch_norm", "h = F.batch_norm(h, None, None, training=True)", tags="whole"),
    of("frozen BatchNorm", "h = self.m$.eval()(h)", "self.m$ = nn.BatchNorm1d(W)"),
    of("across_batch", "h = ib.across_batch(lambda t: t - t.mean(0), h)", tags="whole"),
    of(
        "across_batch, softmax",
        "h = h + ib.across_batch(lambda t: t.softmax(0) * len(t), h)",
        tags="whole",
    ),
    of(
        "scale_grad_by_freq",
        "h = h + self.m$(tokens).sum(1)",
        "self.m$ = nn.Embedding(7, W, scale_grad_by_freq=True)",
        tags="whole",
        inputs="tokens",
    ),
]

MIXING = [
    of("centre", "h = h - h.mean(0)", tags="mixes"),
    of("centre, detached", "h = h - h.detach().mean(0)", tags="mixes"),
    of("standardise", "h = (h - h.mean(0)) / (h.std(0) + 1)", tags="mixes"),
    of("softmax over the batch", "h = h * h.softmax(0)", tags="mixes"),
    of("largest", "h = h / (1 + h.abs().max())", tags="mixes"),
    of("norm", "h = h / (1 + h.norm())", tags="mixes"),
    of("norm of columns", "h = F.normalize(h, dim=0)", tags="mixes"),
    of("sorted over the batch", "h = h + h.sort(0).values", tags="mixes"),
    of("rank", "h = h * (1 + 0.1 * h.argsort(0).argsort(0))", tags="mixes"),
    of("median", "h = torch.where(h > h.median(0).values, h, h * 0.5)", tags="mixes"),
    of(
        "capacity",
        """
on$ = torch.zeros(len(h), 1, dtype=h.dtype)
on$[h[:, 0].topk((len(h) + 1) // 2).indices] = 1.0
h = h * (0.5 + on$)""",
        tags="mixes",
    ),
    of(
        "expert capacity",
        """
on$ = (h[:, 0] > 0).to(h.dtype)
h = h + self.m$(h) * (on$ * (on$.cumsum(0) <= 2)).unsqueeze(1)""",
        "self.m$ = nn.Linear(W, W)",
        tags="mixes",
    ),
    of("cumulative over the batch", "h = h + 0.1 * h.cumsum(0)", tags="mixes"),
    of("neighbour", "h = h + 0.3 * h.roll(1, 0)", tags="mixes"),
    of("mirror", "h = h + h.flip(0)", tags="mixes"),
    of("attention over samples", "h = h + (h @ h.t()).softmax(1) @ h", tags="mixes"),
    of("second moments", "h = h @ (h.t() @ h) * 0.1", tags="mixes"),
    of(
        "graph",
        """
h = h + torch.zeros(3, W, dtype=h.dtype).index_add(0, tokens[:, 0] % 3, h)[tokens[:, 0] % 3]""",
        tags="mixes",
        inputs="tokens",
    ),
    of(
        "scatter mean",
        """
s$ = torch.zeros(3, W, dtype=h.dtype).scatter_reduce(
    0, (tokens[:, :1] % 3).expand(-1, W), h, 'mean')
h = h + s$[tokens[:, 0] % 3]""",
        tags="mixes",
        inputs="tokens",
    ),
    of(
        "branch on the mean",
        "h = torch.tanh(h) if float(h.detach().mean()) > 0 else h * 0.5",
        tags="mixes host_read",
    ),
    of(
        "branch on the largest",
        "h = h * 0.5 if bool((h > 1.5).any()) else h",
        tags="mixes host_read",
    ),
    of(
        "scaled by a host number",
        "h = h / (1 + h.detach().abs().max().item())",
        tags="mixes host_read",
    ),
    of("first sample", "h = h - 0.5 * h[:1]", tags="mixes"),
    of("mean of others", "h = h - (h.sum(0) - h) / max(len(h) - 1, 1)", tags="mixes counts"),
    of("number of samples", "h = h / len(h)", tags="mixes counts"),
    of("numel", "h = h * (10 / h.numel())", tags="mixes counts"),
    of(
        "positions",
        "h = h + torch.arange(len(h), dtype=h.dtype).unsqueeze(1) * 0.1",
        tags="mixes counts",
    ),
    of("weak mean", "h = h + 1e-5 * h.mean(0)", tags="mixes"),
    of(
        "mean in a no_grad stretch",
        "with torch.no_grad():\n    c$ = h.mean(0)\nh = h - c$",
        tags="mixes",
    ),
    of("mixing in place", "h = h * 1.0\nh -= h.mean(0)", tags="mixes"),
    of(
        "mixed columns",
        "h = h + self.m$(h.t().reshape(2, -1).mean(1).repeat(3)).unsqueeze(0)",
        "self.m$ = nn.Linear(W, W)",
        tags="mixes",
    ),
    of("minibatch deviation", "h = h + h.std(0).mean()", tags="mixes"),
    of(
        "unique values",
        "h = h * (1 + 0.1 * tokens[:, 0].unique().numel())",
        tags="mixes dynamic",
        inputs="tokens",
    ),
    of(
        "bin counts",
        "h = h / tokens[:, 0].bincount(minlength=7)[tokens[:, 0]].unsqueeze(1)",
        tags="mixes",
        inputs="tokens",
    ),
    of(
        "mixed checkpoint",
        "h = checkpoint(lambda t: t - t.mean(0), h, use_reentrant=False)",
        tags="mixes opaque",
    ),
]

RANDOM = [
    of("dropout", "h = self.m$(h)", "self.m$ = nn.Dropout(0.3)", tags="random"),
    of(
        "dropout in place",
        "h = F.dropout(h * 1.0, 0.3, self.training, inplace=True)",
        tags="random",
    ),
    of("alpha dropout", "h = F.alpha_dropout(h, 0.2, self.training)", tags="random"),
    of(
        "channel dropout",
        "h = self.m$(h.unflatten(1, (3, 2))).flatten(1)",
        "self.m$ = nn.Dropout1d(0.4)",
        tags="random",
    ),
    of("noise", "h = h + 0.1 * torch.randn_like(h)", tags="random"),
    of("uniform noise", "h = h * (0.5 + torch.rand(h.shape, dtype=h.dtype))", tags="random"),
    of("noise for all", "h = h + torch.rand(W, dtype=h.dtype)", tags="random"),
    of(
        "bernoulli in place",
        "k$ = torch.ones_like(h)\nk$.bernoulli_(0.7)\nh = h * k$",
        tags="random",
    ),
    of("normal in place", "h = h + torch.zeros_like(h).normal_(0, 0.1)", tags="random"),
    of(
        "transposed noise",
        "h = h + 0.1 * torch.randn(W, len(h), dtype=h.dtype).t()",
        tags="random odd_draw",
    ),
    of(
        "stochastic depth",
        "h = h + torch.tanh(h) * (torch.rand(len(h), 1) < 0.5).to(h.dtype)",
        tags="random",
    ),
    of("gumbel", "h = h + F.gumbel_softmax(h, dim=1)", tags="random"),
    of("rrelu", "h = F.rrelu(h, training=self.training)", tags="random odd_draw"),
    of("poisson", "h = h + 0.1 * torch.poisson(h.detach().abs())", tags="random odd_draw"),
    of(
        "multinomial",
        """
h = h + h.gather(1, torch.multinomial(h.detach().softmax(1), 2)).sum(1, keepdim=True)""",
        tags="random odd_draw",
    ),
    of("randint", "h = h.gather(1, torch.randint(0, W, h.shape))", tags="random"),
    of("Python's random", "h = h * (0.5 + random.random())", tags="random python_random"),
    of(
        "layer drop",
        "if not self.training or random.random() < 0.5:\n    h = torch.tanh(self.m$(h))",
        "self.m$ = nn.Linear(W, W)",
        tags="random python_random",
    ),
    of("NumPy's random", "h = h * (0.5 + np.random.rand())", tags="random python_random"),
    of(
        "own generator",
        "h = h + 0.1 * torch.rand(h.shape, generator=self.g$, dtype=h.dtype)",
        "self.g$ = torch.Generator(torch.get_default_device()).manual_seed(5)",
        tags="random own_generator",
    ),
    of(
        "rsample",
        "h = torch.distributions.Normal(h, 0.1, validate_args=False).rsample()",
        tags="random",
    ),
    of(
        "attention with dropout",
        """
q$, k$, v$ = self.m$(h).unflatten(1, (3, 3, 2)).unbind(1)
h = h + F.scaled_dot_product_attention(q$, k$, v$, dropout_p=0.2).flatten(1)""",
        "self.m$ = nn.Linear(W, 3 * W)",
        tags="random",
    ),
    of("permuted batch", "h = h + 0.1 * h[torch.randperm(len(h))]", tags="random mixes odd_draw"),
    of(
        "Dropout of tokens, time first",
        """
h = F.dropout(h.unflatten(1, (3, 2)).transpose(0, 1).contiguous(), 0.3, self.training)
h = h.transpose(0, 1).flatten(1)""",
        tags="random odd_draw",
    ),
]
