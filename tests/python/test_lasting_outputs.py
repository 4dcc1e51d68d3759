"""Outputs that are the same for any samples (parameters, penalties, constants) stand once in the
outputs of the whole batch, as natively; those that mix the samples are refused."""

import copy
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
from coupled_support import Cube, assert_same_step, native_coupled, ours_coupled
from support import LOOKS, Calls, Tally, mlp
from torch import nn
from torch.nn import functional as F
from wrap_support import close, contrastive, grads

N = 12
X = torch.randn(N, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
WIDTH = 5
CLASSES = 4  # as many as a micro-batch has samples: by its size alone nothing can be told


def heads(normed: bool = False) -> nn.Module:
    """Embeddings beside everything that does not follow the samples."""

    def forward(self: Any, x: torch.Tensor) -> dict[str, Any]:
        z = self.net(x)
        if self.norm is not None:
            z = self.norm(z)
        penalty = sum(p.square().sum() for p in self.net.parameters())
        return {
            "z": z,
            "scale": self.log_scale.exp(),
            "penalty": x.new_zeros(()) + 0.3 * penalty,
            "prototypes": F.normalize(self.prototypes, dim=1),
            "itself": self.prototypes,
            "constant": torch.tensor(0.5, dtype=x.dtype),
            "buffer": self.steps,
            "places": self.places.expand(len(x), -1),
            "typed": self.prototypes.type_as(x),
        }

    return Calls(
        forward,
        net=mlp(),
        norm=nn.BatchNorm1d(WIDTH) if normed else None,
        log_scale=nn.Parameter(torch.tensor(0.7)),
        prototypes=nn.Parameter(torch.randn(CLASSES, WIDTH)),
        places=nn.Parameter(torch.randn(WIDTH)),
        steps=torch.tensor(3.0),
    ).double()


def all_heads(outputs: dict[str, Any], _: Any = None) -> torch.Tensor:
    """Uses every one of them, and none in the same way."""
    z = outputs["z"] + 0.1 * outputs["places"]
    assert outputs["scale"].dim() == 0 and outputs["prototypes"].shape == (CLASSES, WIDTH)
    near = (F.normalize(z, dim=1) @ outputs["prototypes"].T).logsumexp(1)
    spread = torch.pdist(outputs["itself"]).sum() + outputs["typed"].square().sum()
    own = contrastive(z) * outputs["scale"] + near.mean() * outputs["constant"]
    return own + outputs["penalty"] + 0.1 * spread * outputs["buffer"]


WAYS: dict[str, dict[str, Any]] = {
    "fours, replayed": {"micro_batch_size": 4},
    "fours, some kept": {"micro_batch_size": 4, "retained_micro_batches": 1},
    "fours, all kept": {"micro_batch_size": 4, "retained_micro_batches": 99},
    "fives": {"micro_batch_size": 5},
    "one by one": {"micro_batch_size": 1},
    "pairs": {"micro_batch_size": 2},
    "at once": {"micro_batch_size": 12},
    "budget": {"memory_budget": "64MiB"},
    "static": {"micro_batch_size": 4, "static_graph": True},
    "segments": {"micro_batch_size": 4, "checkpoint_segments": 3},
    "drawn as natively": {"micro_batch_size": 4, "match_native_rng": True},
}


# Cuts for memory are for models without ops of the whole batch.
CASES = [
    (way, normed) for way in WAYS for normed in (False, True) if not normed or way != "segments"
]


@pytest.mark.parametrize(("way", "normed"), CASES)
def test_they_stand_once_in_front_of_a_coupled_loss(way, normed):
    model = heads(normed)
    wanted = native_coupled(model, all_heads, X, None)
    assert_same_step(ours_coupled(model, all_heads, X, None, **WAYS[way]), wanted, way)


def test_they_do_so_in_every_step():
    """What the first step found out is not asked again, and holds for other sizes."""
    model, calls = heads(), Tally()
    native = copy.deepcopy(model)
    model.register_forward_hook(calls)
    step = ib.VirtualBatch(
        model, ib.losses.coupled(all_heads), micro_batch_size=4, keep_outputs=True
    )
    for rows, more in ((12, 1 + LOOKS), (12, LOOKS), (9, LOOKS), (3, 0), (11, LOOKS)):
        model.zero_grad()
        native.zero_grad()
        calls.count = 0
        outputs = native(X[:rows])
        all_heads(outputs).backward()
        report = step.backward(X[:rows])
        assert calls.count == -(-rows // 4) + more
        close(grads(model), grads(native))
        close(report.outputs, outputs)


def test_forwards_that_tell_how_outputs_lie_leave_no_trace():
    """The first step runs one more than the second: neither random numbers nor buffers show it."""

    def forward(self: Any, x: torch.Tensor) -> Any:
        self.count.add_(1)
        return F.dropout(self.net(x), 0.5) * self.count, self.scale.exp()

    scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
    inner = Calls(forward, net=mlp(), scale=scale, count=torch.zeros(()))
    loss = ib.losses.coupled(lambda outputs, _: contrastive(outputs[0]) * outputs[1])
    states = []
    for steps in (1, 2):
        model = copy.deepcopy(inner)
        step = ib.VirtualBatch(model, loss, micro_batch_size=4)
        for _ in range(steps):
            model.zero_grad()
            model.count.zero_()
            torch.manual_seed(2)
            step.backward(X)
        assert model.count == 1
        states.append((torch.get_rng_state(), grads(model)))
    assert torch.equal(states[0][0], states[1][0])
    assert all(torch.equal(states[0][1][name], g) for name, g in states[1][1].items())


def mixing(make: Callable[[Any, torch.Tensor, torch.Tensor], Any]) -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> Any:
        z = self.net(x)
        return z, make(self, x, z)

    scale = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))
    return Calls(forward, net=mlp(), scale=scale)


REFUSED: dict[str, tuple[Callable[..., Any], str]] = {
    "mean": (lambda self, x, z: z.mean(), "comes from the samples.*a mean over samples"),
    "vector": (lambda self, x, z: z.mean(0), "comes from the samples.*across_batch"),
    "all zero": (lambda self, x, z: z.clamp(min=1e3).sub(1e3).sum(), "comes from the samples"),
    "written": (lambda self, x, z: torch.zeros(()).double().add_(z.sum()), "comes from the samp"),
    "through a view": (
        lambda self, x, z: (
            torch.zeros(7)
            .double()
            .index_fill_(0, torch.tensor([1]), 0.0)[2:]
            .copy_(z.new_zeros(5) + z.mean())
        ),
        "comes from the samples",
    ),
    "number of samples": (lambda self, x, z: self.scale / len(x), "not the same for 3 rows"),
    "host": (lambda self, x, z: self.scale * float(x[0, 0]), "not the same for 3 rows"),
    "random": (lambda self, x, z: self.scale * torch.rand(()), "random numbers"),
    "opaque": (
        lambda self, x, z: Cube.apply(self.scale),
        "nobody knows whether it is the same for any samples \\(",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_the_samples_is_refused_by_name(name):
    make, message = REFUSED[name]
    model = mixing(make)
    loss = ib.losses.coupled(lambda outputs, _: contrastive(outputs[0]) + outputs[1].sum())
    for way in ("fours, replayed", "fours, all kept"):
        with pytest.raises(ib.BatchError, match=r"(?s)outputs\[1\].*" + message):
            ib.VirtualBatch(model, loss, **WAYS[way]).backward(X)
        assert all(p.grad is None for p in model.parameters())


def test_comparisons_of_one_micro_batch_may_be_ignored_but_not_used():
    model = mixing(lambda self, x, z: z @ z.T)
    for micro_batch_size in (4, 5):
        options = {"micro_batch_size": micro_batch_size}
        loss = ib.losses.coupled(lambda outputs, _: outputs[1].square().mean())
        with pytest.raises(ib.BatchError, match=r"outputs\[1\] has several dimensions"):
            ib.VirtualBatch(model, loss, **options).backward(X)
        with pytest.raises(ib.BatchError, match=r"outputs\[1\] has several dimensions"):
            ib.wrap(model, **options)(X)
    wanted = native_coupled(model, lambda outputs, _: contrastive(outputs[0]), X, None)
    found = ours_coupled(
        model, lambda outputs, _: contrastive(outputs[0]), X, None, micro_batch_size=4
    )
    assert_same_step(found, wanted, "ignored")


def test_a_dimension_that_is_as_long_as_a_micro_batch_is_not_taken_for_it():
    model = Calls(lambda self, x: self.lstm(x.transpose(0, 1))[0], lstm=nn.LSTM(3, 4)).double()
    x = torch.randn(N, 4, 3, dtype=torch.float64)  # outputs are (time, batch, features)
    loss = lambda outputs, _: contrastive(outputs.sum(0))  # noqa: E731
    wanted = native_coupled(model, loss, x, None)
    assert_same_step(ours_coupled(model, loss, x, None, micro_batch_size=4), wanted, "time first")


WRAPPED: dict[str, dict[str, Any]] = {
    "fours": {"micro_batch_size": 4},
    "fives": {"micro_batch_size": 5},
    "at once": {"micro_batch_size": 12},
    "budget": {"memory_budget": "64MiB"},
    "summed, on the user's word": {"micro_batch_size": 4, "reduce": "sum"},
}


@pytest.mark.parametrize("way", WRAPPED)
@pytest.mark.parametrize("normed", [False, True])
def test_they_stand_once_in_what_a_wrapped_model_returns(way, normed):
    inner = heads(normed)
    native = copy.deepcopy(inner)
    wrapped = ib.wrap(inner, **WRAPPED[way])
    for _ in range(2):
        for model in (native, inner):
            model.zero_grad()
        found, wanted = wrapped(X), native(X)
        close(found, wanted)
        all_heads(found).backward(retain_graph=True)
        all_heads(wanted).backward(retain_graph=True)
        close(grads(inner), grads(native))
    all_heads(found).backward()
    all_heads(wanted).backward()
    close(grads(inner), grads(native))
    with torch.no_grad():
        close(wrapped.eval()(X), native.eval()(X))


@pytest.mark.parametrize("name", REFUSED)
def test_wrapped_models_refuse_what_mixes_the_samples(name):
    make, _ = REFUSED[name]
    wrapped = ib.wrap(mixing(make), micro_batch_size=4)
    for grad in (True, False):
        with pytest.raises(ib.BatchError, match=r"outputs\[1\].*cannot be joined"):
            with torch.set_grad_enabled(grad):
                wrapped(X)


def test_other_numbers_of_samples_tell_it_of_single_ones():
    inner = mixing(lambda self, x, z: self.scale.exp())
    wrapped = ib.wrap(inner, micro_batch_size=1)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            close(wrapped(X), inner(X))


def test_single_samples_cannot_tell_without_a_look():
    wrapped = ib.wrap(
        mixing(lambda self, x, z: self.scale.exp()),
        micro_batch_size=1,
        batch_coupling="per_micro_batch",
    )
    for grad in (True, False):
        with pytest.raises(
            ib.BatchError, match=r"outputs\[1\] could be .* larger micro_batch_size"
        ):
            with torch.set_grad_enabled(grad):
                wrapped(X)
