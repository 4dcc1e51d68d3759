"""A step that fails behind a counter which forward keeps leaves it, and all else, as the step found
it; the next step is right."""

import copy
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from support import classification
from torch import nn
from wrap_support import close, grads

N = 12


class Boom(Exception):
    pass


class Switch:
    """Outside of what a step puts back: raises at the `at`th call from now."""

    __slots__ = ("at", "error")

    def __init__(self) -> None:
        self.at, self.error = 0, Boom

    def __call__(self, *_: Any) -> None:
        if self.at > 0:
            self.at -= 1
            if self.at == 0:
                raise self.error("boom")


class Counts(nn.Module):
    def __init__(self, norm: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8) if norm else nn.Identity()
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(8, 5)
        self.register_buffer("seen", torch.zeros(()))
        self.calls, self.log, self.d = 0, [], {}
        self.in_forward, self.in_hook, self.in_backward = Switch(), Switch(), Switch()
        self.head.register_forward_hook(self.in_hook)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.log.append(self.calls)
        self.d["n"] = self.d.get("n", 0) + 1
        self.seen += 1
        h = self.drop(self.norm(self.first(x)))
        self.in_forward()
        y = self.head(h * (0.5 + 0.1 * self.calls))
        if y.requires_grad and isinstance(self.norm, nn.Identity):  # else tapes are cut
            y.register_hook(self.in_backward)
        return y

    def state(self) -> Any:
        buffers = [b.clone() for b in self.buffers()]
        return self.calls, list(self.log), dict(self.d), buffers, torch.get_rng_state()


WAYS: dict[str, dict[str, Any]] = {
    "streamed": {"micro_batch_size": 5},
    "coupled": {"micro_batch_size": 5},
    "one": {"micro_batch_size": N},
    "budget": {"memory_budget": "64MiB"},
    "norm": {"micro_batch_size": 5},
    "wrap": {"micro_batch_size": 5},
    "wrap one": {"micro_batch_size": N},
    "wrap budget": {"memory_budget": "64MiB"},
    "wrap norm": {"micro_batch_size": 5},
}


def same(a: Any, b: Any) -> None:
    assert a[:3] == b[:3]
    for one, other in zip((*a[3], a[4]), (*b[3], b[4]), strict=True):
        assert torch.equal(one, other)


def runner(model: Counts, way: str, in_loss: Switch) -> Callable[..., None]:
    def loss(outputs: torch.Tensor, targets: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        in_loss()
        return F.cross_entropy(outputs, targets, reduction=reduction)

    if way.startswith("wrap"):
        wrapped = ib.wrap(model, **WAYS[way])
        return lambda x, y: loss(wrapped(x), y).backward()
    made = (
        ib.losses.coupled(loss)
        if way == "coupled"
        else ib.losses.separable(lambda o, t: loss(o, t, "sum"), lambda t, n: n)
    )
    batch = ib.VirtualBatch(model, made, **WAYS[way])
    return lambda x, y: batch.backward(x, y) and None


WHERE = ["in_forward", "in_hook", "in_backward", "in_loss"]
CASES = [(w, p) for w in WAYS for p in WHERE if not ("norm" in w and p == "in_backward")]


@pytest.mark.parametrize("at", [1, 2])
@pytest.mark.parametrize("way, where", CASES)
def test_a_failed_step_leaves_everything(way: str, where: str, at: int) -> None:
    model = Counts("norm" in way).eval() if "norm" not in way else Counts(True)
    model.drop.p = 0.0
    in_loss = Switch()
    switch = in_loss if where == "in_loss" else getattr(model, where)
    run = runner(model, way, in_loss)
    x, y = classification(N)
    for step, error in enumerate([Boom, KeyboardInterrupt, Boom]):
        before, given = model.state(), grads(model) if step else None
        theirs = copy.deepcopy(model)
        for each in (theirs.in_forward, theirs.in_hook, theirs.in_backward):
            each.at = 0
        switch.at, switch.error = at, error
        try:
            run(x, y)
        except error:
            # What failed behind `wrap`'s forward is the caller's: forward itself was done.
            if not (way.startswith("wrap") and where in ("in_loss", "in_backward")):
                same(model.state(), before)
            if given is not None:
                close(grads(model), given, 0)
        switch.at = 0
        theirs = copy.deepcopy(model)
        theirs.zero_grad()
        model.zero_grad()
        F.cross_entropy(theirs(x), y).backward()
        run(x, y)
        close(grads(model), grads(theirs), 1e-11)
        assert model.calls == theirs.calls and model.log == theirs.log and model.d == theirs.d
        close(list(model.buffers()), list(theirs.buffers()), 1e-12)
