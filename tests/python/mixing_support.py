"""What tests of ops that combine samples share: such ops, ways of running a step, and models that
only look as if they combined samples."""

import infinitybatch as ib
import torch
import torch.nn.functional as F
from support import Calls, call, classification
from torch import nn

N = 12


SIZE = 4


def capacity(h):
    """First come, first served: each expert takes half as many as there are samples."""
    expert = (h[:, 0] > 0).long()
    slot = F.one_hot(expert, 2).cumsum(0).gather(1, expert[:, None])
    return h * (slot <= len(h) // 2)


def whitened(h):
    root = torch.linalg.cholesky(h.T @ h + torch.eye(8, dtype=h.dtype))
    return torch.linalg.solve_triangular(root, h.T, upper=False).T


# What to do with hidden rows (n, 8), and the first op that does not keep them apart.
MIXERS = {
    "centred": (lambda h: h - h.mean(0), "aten::mean"),
    "standardised": (lambda h: (h - h.mean(0)) / (h.var(0) + 1e-5).sqrt(), "aten::mean"),
    "statistics without gradient": (lambda h: h / h.detach().std(0), "aten::std"),
    "softmax over the batch": (lambda h: h * h.softmax(0), "aten::softmax"),
    "cumsum": (lambda h: h.cumsum(0), "aten::cumsum"),
    "cumsum from the end": (lambda h: h.flip(0).cumsum(0).flip(0), "aten::flip"),
    "Gram matrix": (lambda h: h @ (h.T @ h), "aten::matmul"),
    "attention between samples": (lambda h: (h @ h.T).softmax(1) @ h, "aten::matmul"),
    "largest of all": (lambda h: h / (1 + h.abs().max()), "aten::div"),
    "adaptive step": (lambda h: h - 0.1 * h / (1 + h.norm()), "aten::linalg_vector_norm"),
    "capacity of experts": (capacity, "aten::cumsum"),
    "neighbours": (lambda h: h + 0.5 * h.roll(1, 0), "aten::roll"),
    "another sample's row": (lambda h: h.roll(1, 0), "aten::roll"),
    "ranks": (lambda h: h * h.argsort(0).argsort(0), "aten::argsort"),
    "medians": (lambda h: h - h.median(0).values, "aten::median"),
    "whitened": (whitened, "aten::matmul"),
}


def mixing(mix):
    return Calls(
        lambda self, x: self.head(mix(torch.tanh(self.body(x)))),
        body=nn.Linear(6, 8),
        head=nn.Linear(8, 5),
    ).double()


def spread(outputs, targets):
    return F.cross_entropy(outputs, targets) + outputs.std(0).sum()


def step(way, model, inputs, targets, **options):
    """One first step: a separable loss, a coupled one, or a wrapped model under the latter."""
    if way == "wrap":
        spread(call(ib.wrap(model, **options), inputs), targets).backward()
        return None
    loss = nn.CrossEntropyLoss() if way == "streaming" else ib.losses.coupled(spread)
    return ib.VirtualBatch(model, loss, **options).backward(inputs, targets)


def criterion(way):
    return nn.CrossEntropyLoss() if way == "streaming" else spread


WAYS = ("streaming", "coupled", "wrap")


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, ids, mask):
        y = self.layer(self.words(ids), src_key_padding_mask=mask)
        return self.head((y * ~mask[..., None]).sum(1) / (~mask).sum(1, keepdim=True))


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        return self.head(self.lstm(packed)[1][0][-1])


class Experts(nn.Module):
    """Each sample goes where its own numbers send it; without samples an expert is left out."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 5) for _ in range(3))

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(1).max(1)
        y = x.new_zeros(len(x), 5)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero()[:, 0]
            if len(rows):
                y[rows] = expert(x[rows]) * weight[rows, None]
        return y


class TimeFirst(nn.Module):
    """(time, n, 6) in, with as many time steps as a micro-batch has samples; (n, 5) out."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(6, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.gru(x)[0].cumsum(0).mean(0))


def tokens():
    ids = torch.randint(20, (N, 7))
    lengths = torch.randint(2, 8, (N,))
    lengths[0] = 7
    return ids, torch.arange(7) >= lengths[:, None]


def rows():
    return classification(N)[0]


def bags():
    ids = torch.randint(20, (N, 4))
    return ids, torch.rand(N, 4).double()


# Models that mix nothing, and their inputs.
LOOK_ALIKES = {
    "attention mask": (Attention, tokens),
    "packed sequences": (
        Packed,
        lambda: (torch.randn(N, 7, 6).double(), torch.randint(1, 8, (N,))),
    ),
    "experts by the sample": (Experts, rows),
    "cumsum over time": (
        lambda: Calls(
            lambda self, x: self.head(torch.tanh(x.cumsum(1)).mean(1)), head=nn.Linear(6, 5)
        ),
        lambda: torch.randn(N, 7, 6).double(),
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 5)),
        rows,
    ),
    "random slopes": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.RReLU(), nn.Linear(8, 5)),
        rows,
    ),
    "LayerNorm": (lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5)), rows),
    "InstanceNorm": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 4, 3), nn.InstanceNorm1d(4, affine=True), nn.Flatten(), nn.Linear(20, 5)
        ),
        lambda: torch.randn(N, 2, 7).double(),
    ),
    "EmbeddingBag": (
        lambda: Calls(
            lambda self, ids, weights: self.head(self.bag(ids, per_sample_weights=weights)),
            bag=nn.EmbeddingBag(20, 8, mode="sum"),
            head=nn.Linear(8, 5),
        ),
        bags,
    ),
    "shared leaf": (
        lambda: Calls(
            lambda self, x, table: self.head(torch.tanh(x @ table.softmax(0))),
            head=nn.Linear(6, 5),
        ),
        lambda: (rows(), ib.shared(torch.randn(6, 6).double())),
    ),
    "time first": (TimeFirst, lambda: ib.batch_dim(torch.randn(SIZE, N, 6).double(), 1)),
    "statistics of weights": (
        lambda: Calls(
            lambda self, x: F.linear(x, self.w - self.w.mean(0)), w=nn.Parameter(torch.randn(5, 6))
        ),
        rows,
    ),
    "stabilised by the whole batch": (
        lambda: Calls(
            lambda self, x: (h := self.head(x)) - h.max().detach() + h.max().detach(),
            head=nn.Linear(6, 5),
        ),
        rows,
    ),
    "sorted and put back": (
        lambda: Calls(
            lambda self, x: self.head(x[(order := x[:, 0].argsort())])[order.argsort()],
            head=nn.Linear(6, 5),
        ),
        rows,
    ),
    "integers": (
        lambda: Calls(
            lambda self, ids: self.head(self.words(ids).amax(1)),
            words=nn.Embedding(20, 8),
            head=nn.Linear(8, 5),
        ),
        lambda: torch.randint(20, (N, 4)),
    ),
    "a reader on the host": (
        lambda: Calls(
            lambda self, x: self.head(x * (2.0 if bool((x.abs().amax(1) < 1e6).all()) else 1.0)),
            head=nn.Linear(6, 5),
        ),
        rows,
    ),
    "written inputs": (
        lambda: Calls(lambda self, x: self.head(x.clone().clamp_(-1, 1)), head=nn.Linear(6, 5)),
        rows,
    ),
    "hidden units as many as samples": (
        lambda: nn.Sequential(nn.Linear(6, SIZE), nn.Softmax(1), nn.Linear(SIZE, 5)),
        rows,
    ),
}
