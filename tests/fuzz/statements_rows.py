"""Whole numbers held as floats, and rows for which Python decides."""

from .statement import of

#: `ids` is a column of small whole numbers; `boxes` a table that all samples share, whose first
#: column says which sample a box is of.
IDS = [
    of(
        "mean of an id",
        """
s$ = (ids[:, None] == ids).to(h.dtype)
h = h + s$ @ h / s$.sum(1, keepdim=True)""",
        tags="mixes",
        inputs="ids",
    ),
    of(
        "sum of a flag",
        "h = h + 0.5 * h[ids == 0].sum(0)",
        tags="mixes dynamic",
        inputs="ids",
    ),
    of(
        "flag of a buffer",
        "h = h + 0.5 * ((ids == self.b$).to(h.dtype) @ h)",
        "self.register_buffer('b$', torch.ones(1))",
        tags="mixes",
        inputs="ids",
    ),
    of(
        "ids cut from real numbers",
        """
k$ = (ids + 0.25).floor()
h = h * (1 + 0.3 * (k$[:, None] == k$).sum(1, keepdim=True))""",
        tags="mixes",
        inputs="ids",
    ),
    of(
        "one hot ids",
        """
o$ = F.one_hot(ids.long(), 3).to(h.dtype)
h = h + o$ @ (o$.t() @ h) * 0.2""",
        tags="mixes",
        inputs="ids",
    ),
    of(
        "boxes by number",
        """
h = h + self.m$(torch.stack(
    [boxes[boxes[:, 0] == i$, 1:].sum(0) for i$ in range(len(h))]))""",
        "self.m$ = nn.Linear(2, W)",
        tags="mixes counts dynamic",
        inputs="boxes",
    ),
    of(
        "ids looked up",
        "h = h + self.m$(ids.long())",
        "self.m$ = nn.Embedding(3, W)",
        inputs="ids",
    ),
    of(
        "where of an id",
        "h = torch.where(ids[:, None] == 1, torch.sin(h), h * 0.7)",
        inputs="ids",
    ),
    of(
        "padding of zeros",
        """
k$ = h * (torch.arange(W, dtype=h.dtype) <= ids[:, None])
h = h + k$ / (k$ != 0).sum(1, keepdim=True).clamp_min(1)""",
        inputs="ids",
    ),
]

# Not at 0: what a norm has centred has sums that are rounding alone.
BRANCHES = [
    of(
        "rows that branch",
        "h = torch.stack([self.m$(v$) if v$.sum() > 0.1 else v$ for v$ in h])",
        "self.m$ = nn.Linear(W, W)",
        tags="branches",
    ),
    of(
        "rows that branch, one side detached",
        "h = torch.stack([self.m$(v$) if v$.sum() > 0.1 else v$.detach() for v$ in h])",
        "self.m$ = nn.Linear(W, W)",
        tags="branches",
    ),
    of(
        "rows that branch, one side without a gradient",
        """
r$ = []
for v$ in h:
    if v$[0] > 0:
        v$ = torch.tanh(self.m$(v$))
    else:
        with torch.no_grad():
            v$ = self.n$(v$)
    r$.append(v$)
h = torch.stack(r$)""",
        "self.m$ = nn.Linear(W, W)\nself.n$ = nn.Linear(W, W)",
        tags="branches",
    ),
    of(
        "branches in front of BatchNorm",
        """
h = torch.stack([self.m$(v$) if v$.sum() > 0.1 else v$.detach() for v$ in h])
h = self.n$(h)""",
        "self.m$ = nn.Linear(W, W)\nself.n$ = nn.BatchNorm1d(W)",
        tags="branches whole",
    ),
    of(
        "branches in front of BatchNorm, no affine",
        """
h = torch.stack([v$ * self.p$ if v$.sum() > 0.1 else torch.sin(v$.detach()) for v$ in h])
h = self.n$(h)""",
        "self.p$ = nn.Parameter(torch.ones(W))\nself.n$ = nn.BatchNorm1d(W, affine=False)",
        tags="branches whole",
    ),
    of(
        "branches in front of across_batch",
        """
h = torch.stack([self.m$(v$) if v$.sum() > 0.1 else v$.detach() for v$ in h])
h = ib.across_batch(lambda t: t - t.mean(0), h)""",
        "self.m$ = nn.Linear(W, W)",
        tags="branches whole",
    ),
]
