import torch
from support import Calls
from torch import nn
from torch.nn import functional as F

from .loop import (
    N,
    Training,
    Turn,
    by_head,
    classify,
    features,
    labels,
    linear,
    loop,
    one_backward,
    regress,
)


def centred(z: torch.Tensor) -> torch.Tensor:
    return z - z.mean(0)


@loop
def context_behind_a_gate_of_zero() -> Training:
    """ReZero: the batch's context counts nothing at first, but the gate's gradient needs it."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        return self.head(x + self.gate * self.encoder(x).mean(0))

    model = by_head(forward, encoder=linear(6, 6))
    model.gate = nn.Parameter(torch.zeros(()))
    return regress(model)


@loop
def attention_over_the_batch_begins_at_zero() -> Training:
    """Its last projection is zero at first, as in networks made from trained ones."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        seen = F.scaled_dot_product_attention(x[None], x[None], x[None])[0]
        return self.head(x) + self.out(seen)

    model = by_head(forward, out=linear())
    nn.init.zeros_(model.out.weight)
    nn.init.zeros_(model.out.bias)
    return classify(model)


@loop
def context_behind_a_dead_unit() -> Training:
    """A rectifier lets nothing of the batch's context through before the first steps."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        context = F.relu(self.encoder(x).mean(0) + self.shift)
        return self.head(x * (1 + context))

    model = by_head(forward, encoder=linear(6, 6))
    model.shift = nn.Parameter(torch.full((6,), -5.0))
    return regress(model, lambda turn: torch.full((N, 6), 1.0) + torch.arange(N)[:, None] * 0.1)


@loop
def centred_from_the_second_call_on() -> Training:
    """A warm-up that is counted in a number of Python."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return centred(self.head(x)) if self.calls > 1 else self.head(x)

    model = by_head(forward)
    model.calls = 0
    return regress(model)


@loop
def centred_by_a_weight_in_a_buffer() -> Training:
    """A warm-up that is counted in a buffer: the share of the batch's mean grows from nothing."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        share = self.share.clone()
        self.share += 0.1
        return z - share * z.mean(0)

    return regress(by_head(forward, share=torch.zeros(())))


@loop
def centred_once_the_loop_says_so() -> Training:
    """A coefficient in a dictionary of settings, nothing in the first turn."""
    model = by_head(lambda self, x: self.head(x) - self.settings["share"] * self.head(x).mean(0))

    def turn(turn: Turn) -> None:
        one_backward(turn)
        turn.model.settings["share"] += 0.5

    model.settings = {"share": 0.0}
    training = regress(model)
    training.turn = turn
    return training


@loop
def centred_by_a_module_that_is_put_in() -> Training:
    """After a turn a layer is replaced by one that combines samples."""
    model = nn.Sequential(linear(6, 6), nn.Identity(), linear())

    def turn(turn: Turn) -> None:
        one_backward(turn)
        turn.model[1] = Calls(lambda self, z: centred(z))

    training = regress(model)
    training.turn = turn
    return training


@loop
def second_output_read_from_the_second_turn_on() -> Training:
    """The loss leaves out at first what combines samples."""
    model = by_head(lambda self, x: (self.head(x), centred(self.other(x))), other=linear())
    model.turns = 0

    def loss(outputs: tuple[torch.Tensor, torch.Tensor], y: torch.Tensor) -> torch.Tensor:
        value = F.cross_entropy(outputs[0], y)
        return value + outputs[1].pow(2).mean() if model.turns else value

    def turn(turn: Turn) -> None:
        one_backward(turn)
        turn.model.turns += 1

    return Training(model, loss, (features(),), (labels(),), turn=turn)


@loop
def equal_samples_at_first() -> Training:
    """Centred by the batch's median; the first batch has nine samples alike."""

    def data(turn: int) -> torch.Tensor:
        rows = torch.linspace(-1, 1, 6) + torch.arange(N)[:, None] * (0.3 if turn else 0.0)
        return rows.sin()

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        return z - z.detach().median(0).values

    return regress(by_head(forward), data)


@loop
def equal_lengths_at_first() -> Training:
    """Divided by the longest of the batch; in the first batch all are of one length."""
    length = torch.tensor([2, 3, 1, 4, 5, 2, 3, 3, 1])

    def forward(self: Calls, x: torch.Tensor, length: torch.Tensor) -> torch.Tensor:
        return self.head(x.sum(1) / length.max())

    return classify(
        by_head(forward), features(5, 6), lambda turn: length if turn else torch.full((N,), 5)
    )


@loop
def empty_masks_at_first() -> Training:
    """Means over masked samples only; the first batch masks none."""
    mask = torch.arange(N) % 2 == 0

    def forward(self: Calls, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        mean = (z * mask[:, None]).sum(0) / mask.sum().clamp(min=1)
        return torch.where(mask[:, None], mean, z)

    return regress(
        by_head(forward), features(), lambda turn: mask if turn else torch.zeros_like(mask)
    )


@loop
def batch_of_another_size_at_last() -> Training:
    """The last turn has fewer samples, and only so few are centred."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        return (centred(z) if 1 < len(x) < 8 else z).pow(2).sum(1)

    x = features()
    return Training(by_head(forward), torch.mean, (lambda turn: x[: 9 if turn < 2 else 7],))


@loop
def eval_mode_at_first() -> Training:
    """Samples are combined in training mode only; the first turn trains in eval mode."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        return centred(self.head(x)) if self.training else self.head(x)

    def turn(turn: Turn) -> None:
        one_backward(turn)
        turn.model.train()

    training = regress(by_head(forward).eval())
    training.turn = turn
    return training


@loop
def prompt_that_the_loop_adds() -> Training:
    """Inputs have a graph: a learned prompt is added in front of the model."""
    model = linear()
    x, model.prompt = features(), nn.Parameter(torch.zeros(6))
    return classify(model, lambda turn: x + 0.1 * turn + model.prompt)


@loop
def gradient_of_the_inputs() -> Training:
    """Adversarial training asks for it."""
    return classify(nn.Sequential(linear(6, 8), nn.Tanh(), linear(8)), features().requires_grad_())


@loop
def batch_norm_by_its_function() -> Training:
    """torch.nn.functional's, with buffers of the model's own."""

    def forward(self: Calls, x: torch.Tensor) -> torch.Tensor:
        z = self.head(x)
        return F.batch_norm(z, self.mean, self.variance, training=self.training, momentum=0.2)

    return classify(by_head(forward, mean=torch.zeros(4), variance=torch.ones(4)))
