"""PackedSequence among inputs and outputs: split into sequences and packed again."""

import copy

import infinitybatch as ib
import pytest
import torch
from support import Square
from torch import nn
from torch.nn.utils.rnn import (
    pack_padded_sequence,
    pack_sequence,
    pad_packed_sequence,
)
from wrap_support import close, contrastive, grads

LENGTHS = (3, 5, 2, 4, 4, 1, 5)


class Recurrent(nn.Module):
    def __init__(self, last=None, keep=False):
        super().__init__()
        self.layer = nn.GRU(3, 4, batch_first=True)
        self.last = last or nn.Identity()
        self.keep = keep
        self.double()

    def forward(self, sequences):
        outputs, hidden = self.layer(sequences)
        hidden = self.last(hidden[-1])
        return (outputs, hidden) if self.keep else hidden


class Opaque(nn.Module):
    def forward(self, x):
        return Square.apply(x)


def sequences(lengths=LENGTHS):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(n, 3, dtype=torch.float64, generator=generator) for n in lengths]


OPTIONS = {
    "one at a time": {"micro_batch_size": 1},
    "two": {"micro_batch_size": 2},
    "a budget": {"memory_budget": "64MiB", "micro_batch_size": 2},
    "static": {"micro_batch_size": 2, "static_graph": True},
}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("last", [None, Opaque, lambda: nn.BatchNorm1d(4)])
def test_wrapped_models_take_packed_sequences(last, options):
    if options in ("one at a time", "static") and last is not None:
        pytest.skip("what is opaque cannot be static, one row is no batch for the layer")
    native = Recurrent(last and last())
    inner = copy.deepcopy(native)
    results = []
    for model in (native, ib.wrap(inner, **OPTIONS[options])):
        rows = [row.clone().requires_grad_() for row in sequences()]
        output = model(pack_sequence(rows, enforce_sorted=False))
        contrastive(output).backward()
        results.append((output, [row.grad for row in rows], grads(ib.unwrap(model))))
    close(results[1], results[0])
    assert len(model.last_report.micro_batch_sizes) > 1


def test_sorted_ones_keep_their_order():
    inner = Recurrent()
    packed = pack_sequence(sorted(sequences(), key=len, reverse=True))
    close(ib.wrap(inner, micro_batch_size=2)(packed), inner(packed))


@pytest.mark.parametrize("lengths", [(4, 4, 4, 4, 4), (3, 5, 2, 4, 4), LENGTHS])
def test_packed_outputs_are_joined(lengths):
    inner = Recurrent(keep=True)
    packed = pack_sequence(sequences(lengths), enforce_sorted=False)
    (found, hidden), (wanted, native) = (
        model(packed) for model in (ib.wrap(inner, micro_batch_size=2), inner)
    )
    assert type(found) is type(wanted)
    found, wanted = (pad_packed_sequence(given, batch_first=True) for given in (found, wanted))
    close((found, hidden), (wanted, native))
    parameters = list(inner.parameters())
    close(
        torch.autograd.grad(contrastive(found[0].flatten(1)) + hidden.sum(), parameters),
        torch.autograd.grad(contrastive(wanted[0].flatten(1)) + native.sum(), parameters),
    )


def test_packed_outputs_of_padded_inputs():
    """Nobody knows the longest sequence of the whole batch there, unless it is the padding's."""

    class Packing(Recurrent):
        def forward(self, padded, lengths):
            packed = pack_padded_sequence(padded, lengths, batch_first=True, enforce_sorted=False)
            return super().forward(packed)

    wrapped = ib.wrap(Packing(keep=True), micro_batch_size=2)
    lengths = torch.tensor([3, 5, 2, 4, 4])
    with pytest.raises(ib.BatchError, match="total_length="):
        wrapped(torch.randn(5, 5, 3, dtype=torch.float64), lengths)


def test_streamed_steps_take_them():
    native, model = Recurrent(), Recurrent()
    model.load_state_dict(native.state_dict())
    packed, targets = pack_sequence(sequences(), enforce_sorted=False), torch.arange(7) % 4
    ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=2).backward(packed, targets)
    nn.functional.cross_entropy(native(packed), targets).backward()
    close(grads(model), grads(native))
