import torch
from support import Calls
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import rnn

from .loop import N, Training, by_head, classify, features, lengths, linear, loop, minimise_rows


@loop
def packed_inside_of_the_model() -> Training:
    def forward(self: Calls, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        packed = rnn.pack_padded_sequence(x, length, batch_first=True, enforce_sorted=False)
        return self.head(self.lstm(packed)[1][0][-1])

    model = by_head(forward, lstm=nn.LSTM(6, 6, batch_first=True))
    return classify(model, features(5, 6), lengths())


@loop
def packed_in_falling_order() -> Training:
    """Sorted by the collate function; outputs are padded to the longest of the batch."""

    def forward(self: Calls, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        packed = rnn.pack_padded_sequence(x, length, batch_first=True)
        padded, length = rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True)
        return self.head(padded.sum(1) / length[:, None])

    length = lengths().sort(descending=True).values
    model = by_head(forward, gru=nn.GRU(6, 6, batch_first=True))
    return classify(model, features(5, 6), length)


@loop
def outputs_as_long_as_the_longest() -> Training:
    """Logits of every step, trimmed to the batch; the loss masks by length."""

    def forward(self: Calls, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return self.head(x[:, : int(length.max())])

    length = torch.tensor([2, 3, 1, 4, 5, 2, 3, 3, 1])

    def loss(logits: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        mask = torch.arange(logits.shape[1]) < length[:, None]
        return (logits.pow(2).sum(-1) * mask).sum() / mask.sum()

    return Training(by_head(forward), loss, (features(5, 6), length), (length,))


@loop
def trimmed_to_the_longest() -> Training:
    def forward(self: Calls, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        longest = int(length.max())
        keep = (torch.arange(longest)[None] < length[:, None]).double()
        return self.head((x[:, :longest] * keep[..., None]).sum(1) / length[:, None])

    return classify(by_head(forward), features(5, 6), lengths())


@loop
def divided_by_the_longest() -> Training:
    def forward(self: Calls, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        longest = int(length.max())
        return self.head(x[:, :longest].sum(1) / longest)

    return classify(by_head(forward), features(5, 6), lengths())


@loop
def mean_over_padding_of_the_batch() -> Training:
    """Padding is trimmed and then averaged over: an ordinary bug, natively there as well."""

    def forward(self: Calls, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        x = x[:, : int(length.max())]
        return self.head(torch.tanh(x).mean(1))

    return classify(by_head(forward), features(5, 6), lengths())


@loop
def attention_masked_by_lengths() -> Training:
    def forward(self: Calls, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        padding = torch.arange(x.shape[1]) >= length[:, None]
        seen = self.attention(x, x, x, key_padding_mask=padding, need_weights=False)[0]
        return self.head(seen.masked_fill(padding[..., None], 0.0).sum(1) / length[:, None])

    attention = nn.MultiheadAttention(6, 2, batch_first=True)
    return classify(by_head(forward, attention=attention), features(5, 6), lengths())


@loop
def sorted_by_length_and_back() -> Training:
    def forward(self: Calls, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        order = length.argsort(descending=True, stable=True)
        packed = rnn.pack_padded_sequence(x[order], length[order], batch_first=True)
        last = self.lstm(packed)[1][0][-1]
        return self.head(last[order.argsort()])

    model = by_head(forward, lstm=nn.LSTM(6, 6, batch_first=True))
    return classify(model, features(5, 6), lengths())


@loop
def connectionist_temporal_classification() -> Training:
    """The loss wants time first, and lengths of inputs and of labels."""

    def loss(logits: torch.Tensor, targets: tuple[torch.Tensor, ...]) -> torch.Tensor:
        labels, of_inputs, of_labels = targets
        steps = logits.log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(steps, labels, of_inputs, of_labels)

    labels = torch.randint(1, 4, (N, 2))
    targets = (labels, torch.arange(N) % 3 + 4, torch.arange(N) % 2 + 1)
    return Training(linear(), loss, (features(6, 6),), targets)


@loop
def conditional_random_field() -> Training:
    """The forward algorithm over time; each sample stops at its length."""

    def forward(
        self: Calls, x: torch.Tensor, length: torch.Tensor, tags: torch.Tensor
    ) -> torch.Tensor:
        emitted = self.head(x)
        total, score = emitted[:, 0], emitted[:, 0].gather(1, tags[:, :1]).squeeze(1)
        for step in range(1, int(length.max())):
            goes_on = step < length
            after = (total[:, :, None] + self.moves).logsumexp(1) + emitted[:, step]
            total = torch.where(goes_on[:, None], after, total)
            move = self.moves[tags[:, step - 1], tags[:, step]]
            score = score + (move + emitted[:, step].gather(1, tags[:, step, None]).squeeze(1)) * (
                goes_on
            )
        return total.logsumexp(1) - score

    model = by_head(forward)
    model.moves = nn.Parameter(torch.randn(4, 4))
    return minimise_rows(model, features(5, 6), lengths(), torch.randint(0, 4, (N, 5)))


@loop
def cells_unrolled_until_the_longest_ends() -> Training:
    def forward(self: Calls, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        hidden = torch.zeros(len(x), 6)
        for step in range(int(length.max())):
            active = (step < length).double()[:, None]
            hidden = active * self.cell(x[:, step], hidden) + (1 - active) * hidden
        return self.head(hidden)

    return classify(by_head(forward, cell=nn.GRUCell(6, 6)), features(5, 6), lengths())


@loop
def teacher_forcing_by_the_call() -> Training:
    """Scheduled sampling: which steps see the true input is decided by a counter of calls."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        hidden, seen = torch.zeros(len(x), 6), x[:, 0]
        for step in range(x.shape[1]):
            hidden = self.cell(seen, hidden)
            seen = x[:, step] if (step + self.calls) % 2 else hidden
        return self.head(hidden)

    model = by_head(forward, cell=nn.GRUCell(6, 6))
    model.calls = 0
    return classify(model, features(5, 6))
