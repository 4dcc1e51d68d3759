"""Random numbers beside a coupled loss: its gradient belongs to the masks that the loss saw."""

import copy
import functools
import random

import infinitybatch as ib
import numpy as np
import pytest
import torch
from coupled_support import (
    Headed,
    InfoNCE,
    batch_hard,
    checkpoint_body,
    mlp_body,
    opaque_body,
    ours_coupled,
    same_bits,
)
from coupled_ways import WAYS, ThroughPython
from measure import excess, gradients
from support import LOOKS, Calls, Log, Tally, mlp
from torch import nn
from torch.nn import functional as F


class Dropout(nn.Module):
    """torch's dropout, which shows the masks it drew; or masks that are given."""

    def __init__(self):
        super().__init__()
        self.drawn = Log()
        self.given = None

    def forward(self, x):
        if self.given is not None:
            return x * self.given
        y = F.dropout(x, 0.4)
        self.drawn.append((y.detach() != 0).to(x.dtype) / 0.6)
        return y


def with_dropout(opaque):
    body = Calls(
        lambda self, x: self.drop(self.second(self.drop(self.first(x)))),
        first=nn.Sequential(nn.Linear(5, 7), nn.Tanh()),
        second=opaque_body() if opaque else mlp_body(),
        drop=Dropout(),
    )
    if opaque:
        body.second.net[0] = nn.Linear(7, 7)
    else:
        body.second[0] = nn.Linear(7, 7)
    return Headed(body, "towers")


@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_gradients_belong_to_the_masks_that_the_loss_saw(way, opaque):
    model, value = with_dropout(opaque), InfoNCE()
    inputs = torch.randn(11, 5, dtype=torch.float64)
    batch = ib.VirtualBatch(model, ib.losses.coupled(value), micro_batch_size=4, **WAYS[way])
    for _ in range(4):
        batch.backward(inputs)  # the next three look at no rows
    for seed in range(3):
        torch.manual_seed(seed)
        model.zero_grad()
        value.zero_grad()
        drop = model.body.drop
        drop.drawn, drop.given = Log(), None
        report = batch.backward(inputs)
        masks = drop.drawn[:6]  # two for each micro-batch of the first pass

        by_hand, by_hand_value = copy.deepcopy(model), copy.deepcopy(value)
        by_hand.zero_grad()
        by_hand_value.zero_grad()
        order = iter([torch.cat(masks[0::2]), torch.cat(masks[1::2])])
        hand = by_hand.body.drop
        by_hand.body.function = functools.partial(_masked, drop=hand, order=order)
        loss = by_hand_value(by_hand(inputs), None)
        loss.backward()
        torch.testing.assert_close(report.loss, loss.detach(), rtol=1e-13, atol=0)
        for ours, theirs in ((model, by_hand), (value, by_hand_value)):
            assert excess(gradients(ours), gradients(theirs)) == {}


def _masked(body, x, drop, order):
    drop.given = next(order)
    y = drop(body.first(x))
    y = body.second(y)
    drop.given = next(order)
    return drop(y)


def noisy_encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.3, activation="gelu", batch_first=True)
    return Calls(
        lambda self, x: self.down(self.layers(x).mean(1)),
        layers=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        down=nn.Linear(8, 6),
    )


def noisy_lstm():
    return Calls(
        lambda self, x: self.lstm(x)[0][:, -1],
        lstm=nn.LSTM(8, 6, 2, batch_first=True, dropout=0.3),
    )


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("body", [noisy_encoder, noisy_lstm])
def test_finite_differences_with_dropout_inside_fused_ops(body, way):
    """The loss at the same seed, a little to both sides of the parameters."""
    model, value = Headed(body(), "towers"), InfoNCE()
    inputs = torch.randn(9, 3, 8, dtype=torch.float64)

    def step(net):
        torch.manual_seed(3)
        return ours_coupled(net, value, inputs, None, micro_batch_size=4, **WAYS[way])

    at = step(model)
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        moved, slope = [], 0.0
        for sign in (1, -1):
            net = copy.deepcopy(model)
            generator.manual_seed(seed)
            with torch.no_grad():
                for parameter in net.parameters():
                    direction = torch.randn(
                        parameter.shape, dtype=torch.float64, generator=generator
                    )
                    parameter += sign * 1e-6 * direction
            moved.append(float(step(net).loss))
        generator.manual_seed(seed)
        for name, parameter in model.named_parameters():
            direction = torch.randn(parameter.shape, dtype=torch.float64, generator=generator)
            slope += float((direction * at.gradients[f"model.{name}"]).sum())
        assert (moved[0] - moved[1]) / 2e-6 == pytest.approx(slope, rel=2e-7)


class Counting(nn.Module):
    """Draws random numbers of three kinds, counts its forwards here and in a buffer."""

    def __init__(self, body):
        super().__init__()
        self.body = Headed(body, "towers")
        self.register_buffer("forwards", torch.zeros((), dtype=torch.int64))
        self.calls = []
        self.draws = []

    def forward(self, x):
        self.calls.append(len(x))
        self.forwards += 1
        self.draws.append((random.random(), np.random.rand(), float(torch.rand(()))))
        a, b = self.body(F.dropout(x, 0.2))
        return a + sum(self.draws[-1]), b * self.draws[-1][0]


def seeded_step(model, inputs, **options):
    torch.manual_seed(11)
    random.seed(11)
    np.random.seed(11)
    both = copy.deepcopy(model)
    value = InfoNCE()
    report = ib.VirtualBatch(
        both, ib.losses.coupled(value), micro_batch_size=4, **options
    ).backward(inputs)
    state = (torch.get_rng_state(), random.getstate(), np.random.get_state()[1:3])
    bits = [report.loss, *(p.grad for p in (*both.parameters(), *value.parameters()))]
    return both, report, bits, state


@pytest.mark.parametrize("body", [mlp_body, opaque_body, checkpoint_body])
def test_forward_runs_once_and_draws_the_same_numbers(body):
    model = Counting(body())
    inputs = torch.randn(11, 5, dtype=torch.float64)
    found = {way: seeded_step(model, inputs, **options) for way, options in WAYS.items()}
    reference = found["all retained"]
    for way, (both, report, bits, state) in found.items():
        # The buffer is written in forward, so that no graph can be kept.
        second = [] if body is mlp_body else [3, 4, 4]
        assert both.calls == [11] and len(both.draws) == 1, way  # as one forward fills them
        assert report.strategy == ("rerun" if second else "replay")
        assert both.forwards == 1, "as after one native forward"
        assert all(torch.equal(a, b) for a, b in zip(bits, reference[2], strict=True)), way
        assert torch.equal(state[0], reference[3][0]) and state[1] == reference[3][1]
        assert (state[2][0] == reference[3][2][0]).all() and state[2][1] == reference[3][2][1]


def test_replay_rerun_and_kept_graphs_give_the_same_bits():
    class Net(nn.Module):
        def __init__(self, opaque):
            super().__init__()
            self.body, self.opaque = Headed(noisy_encoder(), "towers"), opaque
            self.calls = Tally()

        def forward(self, x):
            self.calls()
            x = x + 0.1 * random.random() + 0.1 * np.random.rand()
            return self.body(ThroughPython.apply(x) if self.opaque else x.clone())

    found = {}
    plain = Net(False)
    inputs = torch.randn(11, 3, 8, dtype=torch.float64)
    for opaque in (False, True):
        net = Net(opaque)
        net.load_state_dict(plain.state_dict())
        for way, options in WAYS.items():
            both, report, bits, state = seeded_step(net, inputs, **options)
            found[opaque, way] = bits
            again = {"replay": 3, "some retained": 2, "all retained": 0}[way]
            assert both.calls.count == 3 + LOOKS + (again if opaque else 0)
            assert report.strategy == ("rerun" if opaque and again else "replay")
    for key, bits in found.items():
        for a, b in zip(bits, found[False, "replay"], strict=True):
            assert torch.equal(a, b), key


@pytest.mark.parametrize("opaque", [False, True])
def test_generators_of_the_users_own_are_put_back_for_a_second_forward(opaque):
    def step(way):
        torch.manual_seed(0)
        generator = torch.Generator().manual_seed(3)

        def forward(self, x):
            x = ThroughPython.apply(x) if opaque else x.clone()
            return self.net(x + torch.randn(x.shape, dtype=x.dtype, generator=generator))

        model = Calls(forward, net=mlp())
        inputs, labels = torch.randn(11, 6, dtype=torch.float64), torch.arange(11) % 3
        if way == "wrap":
            batch_hard(ib.wrap(model, micro_batch_size=4)(inputs), labels).backward()
        else:
            loss = ib.losses.coupled(batch_hard)
            ib.VirtualBatch(model, loss, micro_batch_size=4, **WAYS[way]).backward(inputs, labels)
        return [generator.get_state(), *(p.grad for p in model.parameters())]

    wanted = step("all retained")
    for way in ("replay", "some retained", "wrap"):
        for a, b in zip(step(way), wanted, strict=True):
            assert torch.equal(a, b), way


def test_same_seed_gives_the_same_bits():
    model, value = with_dropout(False), InfoNCE()
    inputs = torch.randn(11, 5, dtype=torch.float64)
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        found.append(ours_coupled(model, value, inputs, None, micro_batch_size=4))
    assert same_bits(*found)
