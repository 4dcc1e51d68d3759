"""What a step with a coupled loss does besides its gradient: random numbers, counts, options."""

import copy
import functools
import random
import warnings

import infinitybatch as ib
import numpy as np
import pytest
import torch
from coupled_support import (
    Headed,
    InfoNCE,
    assert_same_step,
    batch_hard,
    checkpoint_body,
    make_case,
    mlp_body,
    native_coupled,
    opaque_body,
    ours_coupled,
    same_bits,
)
from measure import assert_within, excess, gradients, worst
from support import LOOKS, Calls, Log, Tally, mlp
from torch import nn
from torch.nn import functional as F

WAYS = {  # micro-batches of 4 of 11 samples
    "replay": {"retained_micro_batches": 0},
    "some retained": {"retained_micro_batches": 1},
    "all retained": {"retained_micro_batches": 99},
}


class Dropout(nn.Module):
    """torch's dropout, which shows the masks it drew; or masks that are given."""

    def __init__(self):
        super().__init__()
        self.drawn = []
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
    for seed in range(3):
        torch.manual_seed(seed)
        model.zero_grad()
        value.zero_grad()
        drop = model.body.drop
        drop.drawn, drop.given = [], None
        report = ib.VirtualBatch(
            model, ib.losses.coupled(value), micro_batch_size=4, **WAYS[way]
        ).backward(inputs)
        masks = drop.drawn[:6]  # two for each micro-batch of the first pass
        assert len(drop.drawn) == 6  # a second forward leaves nothing

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
        assert both.calls == [4, 4, 3], way  # a second forward leaves nothing
        assert report.strategy == ("rerun" if second else "replay")
        assert both.forwards == 1, "as after one native forward"
        assert all(torch.equal(a, b) for a, b in zip(bits, reference[2], strict=True)), way
        assert torch.equal(state[0], reference[3][0]) and state[1] == reference[3][1]
        assert (state[2][0] == reference[3][2][0]).all() and state[2][1] == reference[3][2][1]


class ThroughPython(torch.autograd.Function):
    """The identity, of which no tape can tell what it does."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


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


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("opaque", [False, True])
def test_hooks_of_parameters_see_the_full_gradient_once(opaque, way):
    model, value, inputs, _ = make_case("opaque" if opaque else "mlp", "info_nce", 11)
    wanted = native_coupled(model, value, inputs, None).gradients
    seen = []
    net = model.body.net if opaque else model.body
    for name, parameter in (("model.left.weight", model.left.weight), ("loss", value.log_scale)):
        parameter.register_hook(lambda g, n=name: seen.append(("tensor", n, g.clone())))
        parameter.register_post_accumulate_grad_hook(
            lambda p, n=name: seen.append(("after", n, p.grad.clone()))
        )
    forwards = Tally()
    net[0].register_forward_hook(forwards)
    step = ib.VirtualBatch(model, ib.losses.coupled(value), micro_batch_size=4, **WAYS[way])
    step.backward(inputs)
    assert sorted((kind, name) for kind, name, _ in seen) == sorted(
        (kind, name) for kind in ("tensor", "after") for name in ("model.left.weight", "loss")
    )
    for _, name, gradient in seen:
        expected = wanted[name if name != "loss" else "loss.log_scale"]
        torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-16)
    again = {"replay": 3, "some retained": 2, "all retained": 0}[way]
    # Of a function of the user's own gradients are looked at, too: of a micro-batch and its halves.
    assert forwards.count == 3 + LOOKS + (3 + again if opaque else 0)


@pytest.mark.parametrize("way", WAYS)
def test_gradients_are_added_to_those_that_are_there(way):
    model, value, inputs, _ = make_case("lstm", "info_nce", 11)
    wanted = native_coupled(model, value, inputs, None).gradients
    kept = {}
    for prefix, owner in (("model", model), ("loss", value)):
        for name, parameter in owner.named_parameters():
            parameter.grad = torch.ones_like(parameter)
            kept[f"{prefix}.{name}"] = parameter, parameter.grad
    step = ib.VirtualBatch(model, ib.losses.coupled(value), micro_batch_size=4, **WAYS[way])
    step.backward(inputs)
    for name, (parameter, gradient) in kept.items():
        assert parameter.grad is gradient  # in place, as natively
        torch.testing.assert_close(parameter.grad, 1 + wanted[name], rtol=1e-13, atol=0)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("body", ["mlp", "opaque"])
def test_grad_scaler(body, way):
    model, value, inputs, _ = make_case(body, "info_nce", 11)
    wanted = native_coupled(model, value, inputs, None)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    found = ours_coupled(
        model, value, inputs, None, micro_batch_size=4, grad_scaler=scaler, **WAYS[way]
    )
    for gradient in found.gradients.values():
        gradient /= 1024
    assert_same_step(found, wanted, way)  # the loss as reported is not scaled


@pytest.mark.parametrize("way", WAYS)
def test_autocast(way):
    """One micro-batch under autocast is native under autocast; several agree to bfloat16."""
    model, value, inputs, _ = make_case("encoder", "info_nce", 11)
    model, value, inputs = model.float(), value.float(), inputs.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = native_coupled(model, value, inputs, None)
        at_once = ours_coupled(model, value, inputs, None, micro_batch_size=11, **WAYS[way])
        parts = ours_coupled(model, value, inputs, None, micro_batch_size=4, **WAYS[way])
    plain = native_coupled(model, value, inputs, None)

    def error(a, b):  # of all gradients as one vector
        together = [{"all": torch.cat([g.flatten() for g in r.gradients.values()])} for r in (a, b)]
        assert a.gradients.keys() == b.gradients.keys()
        return worst(*together)

    assert error(plain, wanted) > 1e-4  # autocast did something
    assert error(at_once, wanted) < 1e-6
    assert error(parts, wanted) < 0.03
    assert at_once.loss.dtype == wanted.loss.dtype


def test_the_loss_may_be_computed_on_a_device_that_is_named():
    model, value, inputs, _ = make_case("mlp", "info_nce", 11)
    wanted = native_coupled(model, value, inputs, None)
    for device in ("cpu", torch.device("cpu")):
        found = ours_coupled(model, value, inputs, None, micro_batch_size=4, loss_device=device)
        assert_same_step(found, wanted, device)


@pytest.mark.parametrize("way", WAYS)
def test_kept_outputs_and_the_callback(way):
    model, value, inputs, targets = make_case("mlp", "several", 11)
    wanted = copy.deepcopy(model)(inputs)
    seen = []
    step = ib.VirtualBatch(
        model,
        ib.losses.coupled(value),
        micro_batch_size=4,
        keep_outputs=True,
        on_micro_batch=seen.append,
        **WAYS[way],
    )
    report = step.backward(inputs, targets)
    assert report.outputs["kind"] == "several" and report.outputs["nothing"] is None
    assert [(m.begin, m.end) for m in seen] == [(0, 4), (4, 8), (8, 11)]
    for name in ("logits", "ignored", "chosen", "auxiliary"):
        assert not report.outputs[name].requires_grad
        assert_within({name: report.outputs[name]}, {name: wanted[name]})
        parts = torch.cat([m.outputs[name] for m in seen])
        assert torch.equal(parts, report.outputs[name])
        assert not any(m.outputs[name].requires_grad for m in seen)
    assert torch.equal(torch.cat([m.targets for m in seen]), targets)


@pytest.mark.parametrize("way", WAYS)
def test_batch_norm_in_training(way):
    model = nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)).double()
    inputs, labels = torch.randn(11, 5, dtype=torch.float64), torch.arange(11) % 3
    for options in ({"micro_batch_size": 4, **WAYS[way]}, {"micro_batch_size": 11}):
        found = ours_coupled(model, batch_hard, inputs, labels, **options)
        assert_same_step(found, native_coupled(model, batch_hard, inputs, labels), str(options))


@pytest.mark.parametrize("opaque", [False, True])
@pytest.mark.parametrize("way", WAYS)
def test_batch_norm_per_micro_batch(way, opaque):
    """Every micro-batch is a batch of its own for the layer; the loss sees them all."""
    middle = [Calls(lambda self, x: ThroughPython.apply(x))] if opaque else []
    model = nn.Sequential(nn.Linear(5, 6), *middle, nn.BatchNorm1d(6)).double()
    inputs, labels = torch.randn(11, 5, dtype=torch.float64), torch.arange(11) % 3
    native = copy.deepcopy(model)
    batch_hard(torch.cat([native(part) for part in inputs.split(4)]), labels).backward()
    for planned in (False, True):
        ours = copy.deepcopy(model)
        if planned:
            inputs, labels = inputs[:8], labels[:8]  # it has no room for one of a single row
        options = {"memory_budget": "64MiB"} if planned else {"micro_batch_size": 4, **WAYS[way]}
        report = ib.VirtualBatch(
            ours, ib.losses.coupled(batch_hard), batch_coupling="per_micro_batch", **options
        ).backward(inputs, labels)
        count = len(report.micro_batch_sizes)
        assert ours[-1].num_batches_tracked == count, "once for each micro-batch, as natively"
        if planned:
            continue
        for a, b in zip(ours.parameters(), native.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-11, atol=1e-14)
        for (name, a), b in zip(ours.named_buffers(), native.buffers(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-13, atol=0, msg=lambda m, n=name: f"{n}: {m}")


def detached(outputs, _):
    return outputs[0].detach().sum() + outputs[1].detach().mean()


MISUSE = {
    "a loss that nothing reaches": (detached, ib.InvalidArgument, "does not depend on anything"),
    "a vector": (lambda o, _: o[0].sum(1), ib.InvalidArgument, "scalar tensor|11"),
    "a number": (lambda o, _: 3.0, (ib.InvalidType, TypeError), "float"),
    "nothing": (lambda o, _: None, (ib.InvalidType, TypeError), "None"),
}


@pytest.mark.parametrize("name", MISUSE)
def test_losses_that_give_no_gradient(name):
    loss, kind, message = MISUSE[name]
    model, _, inputs, _ = make_case("mlp", "info_nce", 11)
    for way in (*WAYS.values(), None):
        options = {"memory_budget": "64MiB"} if way is None else {"micro_batch_size": 4, **way}
        with pytest.raises(kind, match=message):
            ib.VirtualBatch(model, ib.losses.coupled(loss), **options).backward(inputs)
        assert all(p.grad is None for p in model.parameters())


def test_outputs_without_rows_are_refused():
    model = Calls(lambda self, x: self.net(x).sum(), net=mlp())
    inputs = torch.randn(11, 6, dtype=torch.float64)
    loss = ib.losses.coupled(lambda output: output.square())
    with pytest.raises(ib.BatchError, match="output.*a mean over samples is then for the loss"):
        ib.VirtualBatch(model, loss, micro_batch_size=4).backward(inputs)
    ib.VirtualBatch(model, loss, micro_batch_size=11).backward(inputs)  # nothing to put together
    assert model.net[0].weight.grad is not None


def test_a_forward_that_depends_on_hidden_state_is_refused_and_not_wrong():
    """Its second run gives other outputs than those that the loss saw."""
    state = Log()  # hidden: plain lists are put back

    def forward(self, x):
        state.append(1)
        return self.net(ThroughPython.apply(x)) * len(state)

    model = Calls(forward, net=mlp())
    inputs, labels = torch.randn(9, 6, dtype=torch.float64), torch.arange(9) % 3
    step = ib.VirtualBatch(model, ib.losses.coupled(batch_hard), micro_batch_size=3)
    with pytest.raises(ib.Unsupported, match="other outputs when it ran again"):
        step.backward(inputs, labels)
    assert all(p.grad is None for p in model.parameters())
    # Replays do not ask the model again, so that its state does not matter.
    model.function = lambda self, x: state.append(1) or self.net(x) * len(state)
    step.backward(inputs, labels)
    assert model.net[0].weight.grad is not None


def test_undeclared_losses_are_told_of_once():
    def my_own_loss(outputs, labels):
        return batch_hard(outputs, labels)

    model = mlp()
    inputs, labels = torch.randn(9, 6, dtype=torch.float64), torch.arange(9) % 3
    wanted = native_coupled(model, batch_hard, inputs, labels)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            step = ib.VirtualBatch(model, my_own_loss, micro_batch_size=4)
            model.zero_grad()
            step.backward(inputs, labels)
    (notice,) = caught
    assert notice.category is ib.CoupledLossNotice
    assert "IB101" in str(notice.message) and "my_own_loss" in str(notice.message)
    assert notice.filename == __file__, "it points at the line that made the step"
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            parameter.grad, wanted.gradients[f"model.{name}"], rtol=1e-12, atol=1e-15
        )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ib.VirtualBatch(model, ib.losses.coupled(lambda o, t: batch_hard(o, t)))
        ib.VirtualBatch(model, nn.CrossEntropyLoss())


def test_same_seed_gives_the_same_bits():
    model, value = with_dropout(False), InfoNCE()
    inputs = torch.randn(11, 5, dtype=torch.float64)
    found = []
    for _ in range(2):
        torch.manual_seed(1)
        found.append(ours_coupled(model, value, inputs, None, micro_batch_size=4))
    assert same_bits(*found)


@pytest.mark.parametrize("options", [dict(micro_batch_size=4), dict(memory_budget="64MiB")])
def test_sparse_outputs_are_named(options):
    x = torch.randn(11, 6).double()

    def model():
        return Calls(lambda self, x: (self.net(x), self.net(x).to_sparse()), net=nn.Linear(6, 8))

    loss = ib.losses.coupled(lambda outputs: outputs[0].sum() + outputs[1].to_dense().sum())
    with pytest.raises(ib.Unsupported, match=r"outputs\[1\] is sparse.*to_dense"):
        ib.VirtualBatch(model().double(), loss, **options).backward(x)
    with pytest.raises(ib.Unsupported, match=r"outputs\[1\] is sparse"):
        ib.wrap(model().double(), **options)(x)
