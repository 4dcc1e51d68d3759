"""Tensors that forward of a wrapped model leaves behind, and a loss that goes back through them."""

import copy
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from support import Calls, classification
from torch import nn
from torch.utils.checkpoint import checkpoint
from wrap_support import close, grads

N, SIZE = 13, 4
pytestmark = pytest.mark.filterwarnings("ignore:IB102")

WAYS: dict[str, dict[str, Any]] = {
    "size": {"micro_batch_size": SIZE},
    "retained": {"micro_batch_size": SIZE, "retained_micro_batches": 9},
    "norm": {"micro_batch_size": SIZE},
}
RETAINED: dict[str, Any] = {"micro_batch_size": N, "retained_micro_batches": 1}


def features(kept: str, norm: bool) -> tuple[nn.Module, list[torch.Tensor]]:
    closure: list[torch.Tensor] = []

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.body(x)).tanh()
        if kept == "attribute":
            self.features = h
        if kept == "beside":  # no output depends on it
            self.features = self.aside(x).square().mean()
        return self.head(h)

    torch.manual_seed(0)
    model = Calls(
        forward,
        body=nn.Linear(6, 8),
        norm=nn.BatchNorm1d(8) if norm else nn.Identity(),
        head=nn.Linear(8, 5),
        aside=nn.Linear(6, 3),
    ).double()
    if kept == "hook":
        model.norm.register_forward_hook(lambda _m, _a, out: closure.append(out))
    return model, closure


BACK_WAYS = {
    **WAYS,
    "budget": {"memory_budget": "64MiB", "micro_batch_size": SIZE},
    "static": {"micro_batch_size": SIZE, "static_graph": True},
    "native numbers": {"micro_batch_size": SIZE, "match_native_rng": True},
}


def give_grads(model: nn.Module, value: float) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, value)


def untouched(model: nn.Module, value: float) -> bool:
    given = [p.grad for p in model.parameters()]
    return all(g is not None and bool((g == value).all()) for g in given)


@pytest.mark.parametrize("way", BACK_WAYS)
@pytest.mark.parametrize("kept", ["attribute", "hook", "beside"])
def test_going_back_through_them_is_an_error_before_any_gradient(kept: str, way: str) -> None:
    model, closure = features(kept, way == "norm")
    wrapped = ib.wrap(model, **BACK_WAYS[way])
    x, y = classification(N)
    for _ in range(2):
        give_grads(model, 2.0)
        closure.clear()
        out = wrapped(x)
        if not closure and kept == "hook":  # a static graph runs no hook
            return
        left = closure[-1] if kept == "hook" else model.features
        with pytest.raises(ib.Unsupported, match="graph was that of one micro-batch"):
            (F.cross_entropy(out, y) + left.square().mean()).backward()
        assert untouched(model, 2.0)
    gradients = [torch.ones_like(p) for p in model.parameters()]
    out = wrapped(x)
    if kept == "hook" and not closure:
        return
    left = closure[-1] if kept == "hook" else model.features
    with pytest.raises(ib.Unsupported, match="graph was that of one micro-batch"):
        gradients = torch.autograd.grad(
            F.cross_entropy(out, y) + left.square().mean(), list(model.parameters())
        )
    assert all(bool((g == 1).all()) for g in gradients)


def test_nothing_leaves_another_wrapped_model_of_the_same_loss() -> None:
    """Its node comes first: a discriminator behind a generator."""
    first, _ = features("attribute", False)
    second = nn.Linear(5, 3).double()
    wrapped, behind = (ib.wrap(m, micro_batch_size=SIZE) for m in (first, second))
    x, _ = classification(N)
    for model in (first, second):
        give_grads(model, 2.0)
    out = behind(wrapped(x))
    with pytest.raises(ib.Unsupported, match="graph was that of one micro-batch"):
        (out.square().mean() + first.features.mean()).backward()
    assert untouched(first, 2.0) and untouched(second, 2.0)


def test_what_a_hook_has_kept_of_a_whole_batch_is_read_from_the_next_call_on() -> None:
    model, closure = features("hook", False)
    theirs, of_theirs = features("hook", False)
    wrapped = ib.wrap(model, memory_budget="64MiB")
    x, y = classification(N)
    failed = 0
    for _ in range(5):
        give_grads(model, 2.0)
        give_grads(theirs, 2.0)
        (F.cross_entropy(theirs(x), y) + of_theirs[-1].square().mean()).backward()
        loss = F.cross_entropy(wrapped(x), y) + closure[-1].square().mean()
        try:
            loss.backward()
        except ib.StateError as error:
            assert "no loss read before" in str(error) and untouched(model, 2.0)
            failed += 1
            continue
        close(grads(model), grads(theirs), 1e-11)
    assert failed <= 1


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kept", ["attribute", "hook", "beside"])
def test_keeping_them_is_none(kept: str, way: str) -> None:
    model, closure = features(kept, way == "norm")
    theirs = copy.deepcopy(model)
    wrapped = ib.wrap(model, **WAYS[way])
    x, y = classification(N)
    for _ in range(2):
        theirs.zero_grad()
        model.zero_grad()
        closure.clear()
        F.cross_entropy(theirs(x), y).backward()
        out = wrapped(x)
        seen = closure[-1] if kept == "hook" else model.features
        float(seen.detach().norm())  # a plot
        F.cross_entropy(out, y).backward()
        close(grads(model), grads(theirs), 1e-11)


class StraightThrough(torch.autograd.Function):
    """Hidden from tapes, as everything with a backward of its own."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.sign()

    @staticmethod
    def backward(_ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


@pytest.mark.parametrize("by", ["function", "checkpoint"])
def test_they_are_joined_where_a_tape_tells_nothing(by: str) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = self.body(x)
        if by == "function":
            h = StraightThrough.apply(h)
        else:
            h = checkpoint(self.middle, h, use_reentrant=False)
        self.features = h.detach()
        return self.head(h)

    torch.manual_seed(0)
    layers = {"body": nn.Linear(6, 8), "middle": nn.Linear(8, 8), "head": nn.Linear(8, 5)}
    model = Calls(forward, **layers).double()
    theirs = copy.deepcopy(model)
    x, y = classification(N)
    F.cross_entropy(theirs(x), y).backward()
    F.cross_entropy(ib.wrap(model, micro_batch_size=SIZE)(x), y).backward()
    close(grads(model), grads(theirs), 1e-12)
    close([model.features], [theirs.features], 1e-12)


def test_one_micro_batch_leaves_that_of_all() -> None:
    model, _ = features("attribute", False)
    theirs = copy.deepcopy(model)
    wrapped = ib.wrap(model, micro_batch_size=N)
    x, y = classification(N)
    (F.cross_entropy(theirs(x), y) + theirs.features.square().mean()).backward()
    (F.cross_entropy(wrapped(x), y) + model.features.square().mean()).backward()
    close(grads(model), grads(theirs), 1e-12)


@pytest.mark.parametrize("by", ["streamed", "wrap"])
def test_a_recurrent_net_that_keeps_its_state(by: str) -> None:
    """Hidden states of a batch follow its rows: the whole batch at once where it fits."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.GRU(6, 8, batch_first=True).double()
            self.head = nn.Linear(8, 5).double()
            self.hidden: torch.Tensor | None = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out, hidden = self.net(x, self.hidden)
            self.hidden = hidden.detach()
            return self.head(out[:, -1])

    model = Recurrent()
    theirs = copy.deepcopy(model)
    budget = ib.VirtualBatch(model, nn.CrossEntropyLoss(), memory_budget="64MiB")
    wrapped = ib.wrap(model, memory_budget="64MiB")
    x = torch.randn(N, 3, 6, dtype=torch.float64)
    y = torch.arange(N) % 5
    for step in range(3):
        theirs.zero_grad()
        model.zero_grad()
        F.cross_entropy(theirs(x + step), y).backward()
        if by == "wrap":
            F.cross_entropy(wrapped(x + step), y).backward()
        else:
            budget.backward(x + step, y)
        close(grads(model), grads(theirs), 1e-11)
        assert torch.equal(model.hidden, theirs.hidden)
    before = model.hidden
    fixed = (
        ib.wrap(model, micro_batch_size=SIZE)
        if by == "wrap"
        else ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=SIZE)
    )
    with pytest.raises(ib.CouplingError, match="'hidden'"):
        fixed(x) if by == "wrap" else fixed.backward(x, y)
    assert model.hidden is before


@pytest.mark.parametrize("offload", ["never", "auto"])
def test_a_forward_that_does_not_fit_leaves_buffers_as_they_were(offload: str) -> None:
    torch.manual_seed(0)
    layer = nn.utils.spectral_norm(nn.Linear(32, 32))
    model = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), layer, nn.Linear(32, 8)).double()
    x = torch.randn(64, 16, dtype=torch.float64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    refused = 0
    for kib in range(24, 160, 8):
        wrapped = ib.wrap(model, memory_budget=kib << 10, offload=offload)
        try:
            wrapped(x)
            break
        except ib.BudgetExceeded:
            refused += 1
        for name, value in model.state_dict().items():
            assert torch.equal(value, before[name]), (kib, name)
    assert refused > 3


def of_balance(model: nn.Module, out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, y) + 0.5 * model.balance


def with_balance() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        weights = self.gate(x).softmax(-1)
        self.balance = weights.mean(0).square().sum()
        return (weights[:, :, None] * self.experts(x).view(len(x), 3, 5)).sum(1)

    torch.manual_seed(0)
    return Calls(forward, gate=nn.Linear(6, 3), experts=nn.Linear(6, 15)).double()


def train(
    model: nn.Module, run: Callable[[torch.Tensor, torch.Tensor], object], steps: int
) -> list[Any]:
    found = []
    for step in range(steps):
        model.zero_grad()
        x, y = classification(N)
        run(x + step, y)
        found.append({name: grad.clone() for name, grad in grads(model).items()})
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.05 * parameter.grad
    return found


@pytest.mark.parametrize("options", [{"memory_budget": "64MiB"}, {"micro_batch_size": N}, RETAINED])
@pytest.mark.parametrize("by", ["wrap", "coupled"])
def test_an_auxiliary_loss_of_one_micro_batch_is_exact(by: str, options: dict[str, Any]) -> None:
    theirs, model = with_balance(), with_balance()

    def native(x: torch.Tensor, y: torch.Tensor) -> None:
        of_balance(theirs, theirs(x), y).backward()

    if by == "wrap":
        wrapped = ib.wrap(model, **options)

        def ours(x: torch.Tensor, y: torch.Tensor) -> None:
            of_balance(model, wrapped(x), y).backward()

    else:
        loss = ib.losses.coupled(lambda out, y: of_balance(model, out, y))
        batch = ib.VirtualBatch(model, loss, **options)

        def ours(x: torch.Tensor, y: torch.Tensor) -> None:
            batch.backward(x, y)

    torch.manual_seed(1)
    wanted = train(theirs, native, 4)
    torch.manual_seed(1)
    close(train(model, ours, 4), wanted, 1e-11)


def test_a_loss_that_reads_it_only_later_is_told() -> None:
    theirs, model = with_balance(), with_balance()
    wrapped = ib.wrap(model, memory_budget="64MiB")
    x, y = classification(N)
    for _ in range(3):  # a plot
        F.cross_entropy(wrapped(x), y).backward()
    assert wrapped.last_report.retained == 1
    model.zero_grad()
    with pytest.raises(ib.StateError, match="that no loss read before"):
        of_balance(model, wrapped(x), y).backward()
    of_balance(theirs, theirs(x), y).backward()
    for _ in range(2):
        model.zero_grad()
        of_balance(model, wrapped(x), y).backward()
        close(grads(model), grads(theirs), 1e-11)


def test_a_part_that_keeps_its_graph_is_refused_by_type() -> None:
    model = with_balance()
    wrapped = ib.wrap(model, micro_batch_size=SIZE, retained_micro_batches=9)
    x, y = classification(N)
    out = wrapped(x)
    with pytest.raises(ib.Unsupported, match="graph was that of one micro-batch"):
        of_balance(model, out, y).backward()


@pytest.mark.parametrize("options", [*WAYS.values(), {"memory_budget": "64MiB"}])
@pytest.mark.parametrize("reads", ["input", "aside", "features"])
@pytest.mark.parametrize("kept", ["attribute", "closure"])
@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("first", [False, True])
def test_no_gradient_of_inputs_is_lost_on_the_way(
    kept: str, reads: str, options: dict[str, Any], norm: bool, first: bool
) -> None:
    """A wrapped head on a trunk: what it leaves behind leads to the trunk, too."""
    closure: list[torch.Tensor] = []

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(self.body(x)).tanh()
        left = {"input": x, "aside": self.aside(x), "features": h}[reads].square().mean()
        closure.append(left)
        if kept == "attribute":
            self.left = left
        return self.head(h)

    torch.manual_seed(0)
    norms = nn.BatchNorm1d(8) if norm else nn.Identity()
    layers = {"body": nn.Linear(6, 8), "norm": norms, "head": nn.Linear(8, 5)}
    model = Calls(forward, **layers, aside=nn.Linear(6, 3)).double()
    wrapped = ib.wrap(model, **options)
    trunk = nn.Linear(6, 6).double()
    x, y = classification(N)
    for _ in range(3):
        trunk.zero_grad()
        out = wrapped(trunk(x))
        # Torch's own errors say that a graph is used up.
        with pytest.raises((ib.Unsupported, ib.StateError, RuntimeError)):
            if first:
                closure[-1].backward(retain_graph=True)
                F.cross_entropy(out, y).backward()
            else:
                (F.cross_entropy(out, y) + closure[-1]).backward()


@pytest.mark.parametrize(
    "options", [WAYS["size"], WAYS["retained"], RETAINED, {"memory_budget": "64MiB"}]
)
@pytest.mark.parametrize("of", ["input", "parameter"])
def test_forward_may_differentiate_itself(of: str, options: dict[str, Any]) -> None:
    """An energy whose forces are its gradient: no backward of somebody else's."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        energy = self.second(self.first(x).tanh()).square()
        if of == "input":
            (forces,) = torch.autograd.grad(energy.sum(), x, retain_graph=True)
            return torch.cat([energy, forces], 1)
        # For each sample by itself: times its features.
        weight = torch.autograd.grad(energy.sum(), self.second.weight, retain_graph=True)[0]
        return energy + 0 * weight.sum().detach()

    torch.manual_seed(0)
    model = Calls(forward, first=nn.Linear(6, 8), second=nn.Linear(8, 1)).double()
    theirs = copy.deepcopy(model)
    wrapped = ib.wrap(model, **options)
    for step in range(3):
        torch.manual_seed(step)
        x = torch.randn(N, 6, dtype=torch.float64)
        found = []
        for each in (theirs, wrapped):
            each.zero_grad()
            own = x.clone().requires_grad_()
            each(own * 1.0).square().sum().backward()
            assert own.grad is not None
            found.append({**grads(each), "input": own.grad})
        close(*found, 1e-11)


def test_a_backward_of_its_own_through_what_a_closure_keeps_is_not_noticed() -> None:
    closure: list[torch.Tensor] = []

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        closure.append(self.aside(x).square().mean())
        return self.head(x)

    torch.manual_seed(0)
    model = Calls(forward, aside=nn.Linear(6, 3), head=nn.Linear(6, 5)).double()
    theirs = copy.deepcopy(model)
    x, y = classification(N)
    for each in (theirs, ib.wrap(model, **WAYS["size"])):
        loss = F.cross_entropy(each(x), y)
        closure[-1].backward()
        loss.backward()
    difference = model.aside.weight.grad - theirs.aside.weight.grad
    assert float(difference.abs().max()) > 0.01
