"""`batch_dim=`: each mistake with its error and what the message says."""

from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from support import Calls
from time_first import WORDS, LanguageModel
from torch import Tensor, nn

N, T = 7, 5
NET = nn.Linear(4, WORDS)


def wrapped(given: Any, *arguments: Any) -> None:
    """A model that reads the first of its arguments."""
    model = Calls(lambda self, *x: self.net(x[0]), net=NET)
    ib.wrap(model, batch_dim=given, micro_batch_size=3)(*arguments)


def stepped(given: Any, inputs: Any, targets: Any, forward: Any = None, loss: Any = None) -> None:
    model = Calls(forward or (lambda self, x: self.net(x).view(-1, WORDS)), net=NET)
    batch = ib.VirtualBatch(
        model, loss or nn.CrossEntropyLoss(), batch_dim=given, micro_batch_size=3
    )
    batch.backward(inputs, targets)


def x(*sizes: int) -> Tensor:
    return torch.randn(*sizes, 4)


def labels(*sizes: int) -> Tensor:
    return torch.randint(WORDS, sizes)


MISUSE: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "negative": (lambda: wrapped(-1, x(T, N)), ib.InvalidArgument, "batch_dim is -1; count"),
    "a truth value": (
        lambda: wrapped(True, x(T, N)),
        ib.InvalidType,
        "batch_dim must be a dimension",
    ),
    "text": (
        lambda: wrapped("time", x(T, N)),
        ib.InvalidType,
        r"batch_dim=1, batch_dim=\{'source'",
    ),
    "a list": (lambda: wrapped([1, 1], x(T, N)), ib.InvalidType, "dict of dimensions by argument"),
    "a fraction": (lambda: wrapped(1.0, x(T, N)), ib.InvalidType, "not float"),
    "a fraction by name": (lambda: wrapped({0: 1.5}, x(T, N)), ib.InvalidType, r"batch_dim\[0\]"),
    "negative by name": (
        lambda: wrapped({0: -2}, x(T, N)),
        ib.InvalidArgument,
        r"batch_dim\[0\] is -2",
    ),
    "a negative position": (
        lambda: wrapped({-1: 1}, x(T, N)),
        ib.InvalidArgument,
        "count arguments",
    ),
    "a key of another type": (lambda: wrapped({None: 1}, x(T, N)), ib.InvalidType, "the key None"),
    "an unknown name": (
        lambda: ib.wrap(LanguageModel(), batch_dim={"word": 1}),
        ib.InvalidArgument,
        "names 'word', which is no argument of the model's forward; it has 'words', 'hidden'",
    ),
    "an unknown position": (
        lambda: ib.wrap(LanguageModel(), batch_dim={2: 1}),
        ib.InvalidArgument,
        "names 2, which is no argument",
    ),
    "targets of wrap": (
        lambda: ib.wrap(LanguageModel(), batch_dim={"targets": 1}),
        ib.InvalidArgument,
        "names 'targets'",
    ),
    "two dimensions": (
        lambda: ib.wrap(LanguageModel(), batch_dim={"words": 1, 0: 0}),
        ib.InvalidArgument,
        "gives 'words' two dimensions",
    ),
    "a dimension that is not there": (
        lambda: wrapped({0: 3}, x(T, N)),
        ib.BatchError,
        r"shape \[5, 7, 4\], which has no dimension 3",
    ),
    "a dimension that no tensor has": (
        lambda: wrapped(3, x(T, N)),
        ib.BatchError,
        r"batch_dim is 3, but no tensor in inputs has a dimension 3: inputs.* has shape "
        r"\[5, 7, 4\], dimensions 0 to 2; .*ib.batch_dim\(x, 0\)",
    ),
    "a dimension that no tensor of a step has": (
        lambda: stepped(3, (x(N), torch.tensor(1.0)), labels(N)),
        ib.BatchError,
        r"batch_dim is 3, but no tensor in inputs has .*inputs\[0\] has shape \[7, 4\]",
    ),
    "samples of one dimension": (
        lambda: wrapped(1, labels(N)),
        ib.BatchError,
        r"has shape \[7\], dimension 0 alone; ",
    ),
    "a dimension that no row of a source has": (
        lambda: stepped(3, ib.BatchSource(N, lambda begin, end: x(T, end - begin)), labels(N)),
        ib.BatchError,
        r"batch_dim is 3, but no tensor in inputs has a dimension 3.*\[5, \d, 4\]",
    ),
    "a mask of as many steps as samples": (
        lambda: wrapped(1, x(N, N), torch.zeros(N, N)),
        ib.BatchError,
        r"\[7, 7\] in a batch of 7 with batch_dim=1, and may be split, or .*ib.shared\(x\)"
        r".*batch_dim=\{1: ...\}",
    ),
    "batch first among time first": (
        lambda: wrapped(1, x(T, N), torch.zeros(N, T)),
        ib.BatchError,
        r"along another dimension: mark it with ib.batch_dim\(x, 0\)",
    ),
    "flattened inputs": (
        lambda: wrapped(1, x(T, N), labels(T * N)),
        ib.BatchError,
        r"\[35\] .*may be \[time, batch\] flattened",
    ),
    "labels of CTC": (
        lambda: stepped(
            1,
            x(T, N),
            (labels(N, 3), torch.full((N,), T), torch.full((N,), 3)),
            lambda self, x: self.net(x).log_softmax(2),
            nn.CTCLoss(),
        ),
        ib.BatchError,
        r"targets\[0\] has shape \[7, 3\] .*batch_dim=\{'targets': ...\}",
    ),
    "time first without the option": (
        lambda: wrapped(None, x(T, N), torch.zeros(2, N)),
        ib.BatchError,
        "every leaf needs the same number: .* say batch_dim=1",
    ),
    "targets of another number": (
        lambda: stepped(1, x(T, N), labels(T, N + 1)),
        ib.BatchError,
        "inputs have 7 samples, targets 8",
    ),
    "flattened targets without their mark": (
        lambda: stepped({0: 1}, x(T, N), labels(T * N)),
        ib.BatchError,
        r"inputs have 7 samples, targets 35; .*batch_dim=\{\"targets\": 1\}",
    ),
    "targets in another order than outputs": (
        lambda: stepped(
            1,
            x(T, N),
            labels(T * N),
            lambda self, x: self.net(x).transpose(0, 1).reshape(-1, WORDS),
        ),
        ib.BatchError,
        r"outputs are \[batch, time\] flattened",
    ),
    "outputs whose rows nobody can tell": (
        lambda: stepped(
            1,
            x(T, N),
            labels(T * N),
            lambda self, x: (self.net(x) * 0).view(-1, WORDS),
            lambda z, t: F.cross_entropy(z, t),
        ),
        ib.BatchError,
        "whose order nobody can tell",
    ),
    "samples are first": (
        lambda: stepped(1, torch.randn(N, 4), labels(N)),
        ib.BatchError,
        "inputs have 4 samples, targets 7.*along dimension 0 of inputs, leave out batch_dim",
    ),
    "time first, and nobody says so": (
        lambda: stepped(None, x(T, N), labels(N)),
        ib.BatchError,
        "inputs have 5 samples, targets 7.*along dimension 1 of inputs.* say batch_dim=1",
    ),
    "rows of time in a source": (
        lambda: stepped(
            1, ib.BatchSource(N, lambda begin, end: x(end - begin, N + 1)), labels(T * N)
        ),
        ib.BatchError,
        "asked for rows 0 to 1 and gave 8",
    ),
}


@pytest.mark.parametrize("mistake", MISUSE)
def test_each_mistake_says_what_it_is(mistake: str) -> None:
    call, kind, message = MISUSE[mistake]
    with pytest.raises(kind, match=message):
        call()


def test_a_refused_batch_leaves_everything_as_it_was() -> None:
    model = Calls(
        lambda self, x: self.net(x).transpose(0, 1).reshape(-1, WORDS), net=nn.Linear(4, WORDS)
    )
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), batch_dim=1, micro_batch_size=3)
    state = torch.get_rng_state()
    given = x(T, N), labels(T * N)
    torch.set_rng_state(state)
    for _ in range(2):  # and is refused again
        with pytest.raises(ib.BatchError, match="flattened"):
            batch.backward(*given)
        assert all(p.grad is None for p in model.parameters())
        assert torch.equal(torch.get_rng_state(), state)


LAYERS = {
    "aten::lstm": lambda: nn.LSTM(4, 8),
    "aten::gru": lambda: nn.GRU(4, 8),
    "aten::rnn_tanh": lambda: nn.RNN(4, 8),
    "aten::bmm": lambda: nn.MultiheadAttention(4, 2),
}


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("op", LAYERS)
def test_layers_over_time_ask_where_samples_lie(op: str, wraps: bool) -> None:
    layer = LAYERS[op]()
    attends = isinstance(layer, nn.MultiheadAttention)
    model = Calls(lambda self, x: (layer(x, x, x) if attends else layer(x))[0], layer=layer)
    inputs = x(2 * T, N)

    def run(given: int | None) -> None:
        options: dict[str, Any] = {"batch_dim": given, "micro_batch_size": 3}
        if wraps:
            ib.wrap(model, **options)(inputs).sum().backward()
        else:
            loss = ib.losses.coupled(lambda outputs: outputs.sum())
            ib.VirtualBatch(model, loss, **options).backward(inputs)

    with pytest.raises(ib.CouplingError) as raised:
        run(None)
    said = str(raised.value)
    assert said.startswith(f"{op} combines samples: outputs of one sample depend on others")
    assert f"for a batch of {N} samples along dimension 1 of all inputs (time first), say " in said
    assert "say batch_dim=1; else compute what needs all samples by across_batch" in said
    run(1)


def test_rows_of_features_are_not_called_time() -> None:
    model = Calls(lambda self, x: self.net(x - x.mean(0)), net=NET)
    with pytest.raises(ib.CouplingError) as raised:
        ib.wrap(model, micro_batch_size=3)(torch.randn(N, 4))
    assert "batch_dim" not in str(raised.value)
