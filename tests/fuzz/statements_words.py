"""Statements that read padded sequences: `words` [N, time], real where `mask` [N, time] is 1, on the
right or on the left; and outputs and losses that have time."""

from .losses import Loss
from .outputs import Output
from .statement import of

_WORDS = "words mask"
_REAL = "self.out(h.unsqueeze(1) + self.words(words)) * mask.unsqueeze(2)"
_MASK = "r$ = mask.unsqueeze(2).to(h.dtype)\n"

WORDS = [
    of(
        "mean of words",
        f"{_MASK}h = h + (self.m$(words) * r$).sum(1) / r$.sum(1)",
        "self.m$ = nn.Embedding(7, W)",
        inputs=_WORDS,
    ),
    of(
        "attention over words",
        """
e$ = self.m$(words)
s$ = (e$ @ h.unsqueeze(2)).squeeze(2).masked_fill(mask == 0, -1e30).softmax(1)
h = h + (s$.unsqueeze(1) @ e$).squeeze(1)""",
        "self.m$ = nn.Embedding(7, W)",
        inputs=_WORDS,
    ),
    of(
        "attention between words",
        f"""
{_MASK}q$, k$, v$ = self.n$(self.m$(words)).chunk(3, 2)
s$ = (q$ @ k$.transpose(1, 2)).masked_fill(mask[:, None] == 0, -1e30).softmax(2)
h = h + torch.tanh((s$ @ v$ * r$).sum(1))""",
        "self.m$ = nn.Embedding(7, W)\nself.n$ = nn.Linear(W, 3 * W)",
        inputs=_WORDS,
    ),
    of(
        "largest of words",
        "h = h + self.m$(words).masked_fill(mask.unsqueeze(2) == 0, -1e30).amax(1)",
        "self.m$ = nn.Embedding(7, W)",
        inputs=_WORDS,
    ),
    of(
        "convolution over words",
        f"""
{_MASK}c$ = F.gelu(self.n$((self.m$(words) * r$).transpose(1, 2))).transpose(1, 2)
h = h + (c$ * r$).sum(1)""",
        "self.m$ = nn.Embedding(7, W)\nself.n$ = nn.Conv1d(W, W, 3, padding=1)",
        inputs=_WORDS,
    ),
    of(
        "encoder layer over words",
        f"{_MASK}h = h + (self.n$(self.m$(words), src_key_padding_mask=mask == 0) * r$).mean(2)"
        ".sum(1, keepdim=True)",
        "self.m$ = nn.Embedding(7, W)\n"
        "self.n$ = nn.TransformerEncoderLayer(W, 2, 8, dropout=0.0, batch_first=True)",
        inputs=_WORDS,
    ),
    of(
        "words dropped out",
        f"{_MASK}h = h + (F.dropout(self.m$(words), 0.3, self.training) * r$).sum(1)",
        "self.m$ = nn.Embedding(7, W)",
        tags="random",
        inputs=_WORDS,
    ),
]

#: Numbers of each sample, as many as its words have places.
NUMBERS = [
    of(
        "numbers beside words",
        "h = h + self.p$ * numbers.sin().sum(1, keepdim=True)",
        "self.p$ = nn.Parameter(torch.randn(W))",
        inputs="numbers",
    ),
    of(
        "last of the numbers beside words",
        "h = h + self.p$ * numbers[:, -1:]",
        "self.p$ = nn.Parameter(torch.randn(W))",
        inputs="numbers",
    ),
]

#: They need a statement that reads words. Padding is zero there, as what is padded back is.
OUTPUTS_OF_WORDS = {
    # The loss knows what is padded.
    "words and mask": Output(
        f"{_REAL}, mask.to(h.dtype)",
        "(outputs[0] * outputs[1].unsqueeze(2)).sum(1) / outputs[1].sum(1, keepdim=True)",
        "self.words = nn.Embedding(7, W)",
    ),
    "classes of words": Output(
        f"({_REAL}).transpose(1, 2)",
        "outputs",
        "self.words = nn.Embedding(7, W)",
    ),
}

LOSSES_OF_WORDS = {
    "cross entropy of words": Loss(
        "F.cross_entropy(z, y)",
        "words",
        "nn.CrossEntropyLoss()",
        "F.cross_entropy(z, y, reduction='sum')",
        "(y >= 0).sum()",
    ),
}
