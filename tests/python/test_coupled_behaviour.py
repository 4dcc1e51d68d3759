"""What a step with a coupled loss does besides its gradient: hooks, options, BatchNorm, errors."""

import copy
import warnings

import infinitybatch as ib
import pytest
import torch
from coupled_support import (
    assert_same_step,
    batch_hard,
    make_case,
    native_coupled,
    ours_coupled,
)
from coupled_ways import WAYS, ThroughPython
from measure import assert_within, worst
from support import LOOKS, Calls, Log, Tally, mlp
from torch import nn


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
