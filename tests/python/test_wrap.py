"""A wrapped module against the module itself: outputs and gradients under losses and loops that know
nothing of it."""

import collections
import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
from support import Calls, mlp
from torch import nn
from torch.utils import _pytree
from wrap_support import X, close, contrastive, grads, opaque


@dataclasses.dataclass
class Outputs:
    logits: torch.Tensor
    hidden: torch.Tensor


_pytree.register_dataclass(Outputs)


class ModelOutput(collections.OrderedDict):
    """As Hugging Face's: a dict by name and by attribute, registered as a pytree."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


_pytree.register_pytree_node(
    ModelOutput,
    lambda output: (list(output.values()), list(output)),
    lambda values, keys: ModelOutput(zip(keys, values, strict=True)),
)


def two_headed(make: Callable[..., Any]) -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> Any:
        hidden = self.net[1](self.net[0](x))
        return make(self.net[2](hidden), hidden)

    return Calls(forward, net=mlp())


def tied() -> nn.Module:
    module = Calls(
        lambda self, x: self.b(torch.tanh(self.a(x))), a=nn.Linear(6, 6), b=nn.Linear(6, 6)
    )
    module.b.weight = module.a.weight
    return module.double()


def frozen() -> nn.Module:
    module = mlp()
    module[0].requires_grad_(False)
    return module


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": mlp,
    "opaque": opaque,
    "tied weights": tied,
    "frozen layer": frozen,
    "convolution": lambda: nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 3, 3), nn.GroupNorm(1, 3), nn.Flatten(), nn.ReLU()
    ).double(),
    "recurrent": lambda: Calls(
        lambda self, x: self.gru(x.reshape(len(x), 3, 2))[0][:, -1],
        gru=nn.GRU(2, 4, batch_first=True),
    ).double(),
    "checkpoint": lambda: Calls(
        lambda self, x: torch.utils.checkpoint.checkpoint(self.net, x, use_reentrant=False),
        net=mlp(),
    ),
    "checkpoint, re-entrant": lambda: Calls(
        lambda self, x: torch.utils.checkpoint.checkpoint(
            self.net, x.detach().requires_grad_(), use_reentrant=True
        ),
        net=mlp(),
    ),
    "embedding": lambda: Calls(
        lambda self, x: self.net(self.table((x.abs() * 9).long() % 20).mean(1)),
        table=nn.Embedding(20, 6, sparse=True),
        net=mlp(),
    ).double(),
}
LOSSES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "contrastive": contrastive,
    "separable": lambda z: (z[:, :3] ** 2).mean(),
    # Sums of squares: a sum near zero would make the gradient a difference of large numbers.
    "some rows": lambda z: (z[2:5] ** 2).sum() * (z[-1] ** 2).sum(),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("model", MODELS)
def test_gradients_are_native(model, loss):
    native = MODELS[model]()
    wanted = LOSSES[loss](native(X))
    wanted.backward()
    for size in (1, 3, 5, 13, 64):
        inner = copy.deepcopy(native)
        inner.zero_grad(set_to_none=True)
        found = LOSSES[loss](ib.wrap(inner, micro_batch_size=size)(X))
        found.backward()
        close(found, wanted)
        close(grads(inner), grads(native))


STRUCTURES: dict[str, Callable[..., Any]] = {
    "tuple": lambda a, b: (a, b),
    "nested": lambda a, b: {"logits": a, "more": [b, None, 3]},
    "dataclass": Outputs,
    "model output": lambda a, b: ModelOutput(logits=a, hidden=b),
}


@pytest.mark.parametrize("structure", STRUCTURES)
def test_outputs_keep_their_structure(structure):
    inner = two_headed(STRUCTURES[structure])
    wanted = inner(X)
    found = ib.wrap(inner, micro_batch_size=4)(X)
    assert type(found) is type(wanted)
    assert _pytree.tree_structure(found) == _pytree.tree_structure(wanted)
    tensors = [t for t in _pytree.tree_leaves(found) if isinstance(t, torch.Tensor)]
    assert len({t.grad_fn for t in tensors}) == 1
    assert tensors[0].grad_fn.name() == "infinitybatch::Wrap"
    close(tensors, [t for t in _pytree.tree_leaves(wanted) if isinstance(t, torch.Tensor)])
    # The second output alone, and both.
    parameters = list(inner.parameters())
    for pick in (lambda ts: ts[1].sum(), lambda ts: contrastive(ts[0]) + ts[1].pow(2).sum()):
        losses = []
        for module in (inner, ib.wrap(inner, micro_batch_size=4)):
            leaves = _pytree.tree_leaves(module(X))
            losses.append(pick([t for t in leaves if isinstance(t, torch.Tensor)]))
        wanted, found = (
            torch.autograd.grad(loss, parameters, allow_unused=True, materialize_grads=True)
            for loss in losses
        )
        close(found, wanted)


def test_arguments_of_every_kind():
    def forward(self, x, *, scale, mask, table, options, count=1):
        assert options == {"name": "y"} and count == 2
        return self.net(x * scale) * mask.unsqueeze(1) + table.sum()

    inner = Calls(forward, net=mlp())
    table = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    scale = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    mask = torch.rand(13, dtype=torch.float64)
    kwargs = {"scale": scale, "mask": mask, "options": {"name": "y"}, "count": 2}
    wanted = contrastive(inner(X, table=table, **kwargs))
    found = contrastive(ib.wrap(inner, micro_batch_size=5)(X, table=ib.shared(table), **kwargs))
    leaves = [*inner.parameters(), table, scale]
    close(torch.autograd.grad(found, leaves), torch.autograd.grad(wanted, leaves))
    with pytest.raises(ib.BatchError, match=r"\['table'\] has 4 samples"):
        ib.wrap(inner, micro_batch_size=5)(X, table=table, **kwargs)


def test_batch_dimensions_of_outputs_follow_the_micro_batch():
    inner = Calls(lambda self, x: self.lstm(x), lstm=nn.LSTM(3, 4, num_layers=2)).double()
    x = torch.randn(2, 6, 3, dtype=torch.float64)  # (time, batch, features)
    wanted = inner(x)
    # Two rows at once: 2 layers and 2 steps look like 2 samples.
    found = ib.wrap(inner, micro_batch_size=2)(ib.batch_dim(x, 1))
    close(found, wanted)
    one = ib.wrap(inner, micro_batch_size=1)
    close(one(ib.batch_dim(x, 1)), wanted)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("shape", ["first", "second", "last", "both"])
def test_in_micro_batches_of_one_two_samples_tell_where_they_lie(shape, norm):
    """Of [1, 1, 1, 4] nobody can tell by itself."""

    def forward(self, x):
        h = self.net(x)
        first = h[:, None, None]
        return {"first": first, "second": h[None, :, None], "last": h.T[None, None]}.get(
            shape, (first, h[None, :, None])
        )

    net = nn.Sequential(mlp(), nn.BatchNorm1d(5)) if norm else mlp()
    inner = Calls(forward, net=net).double()
    wanted = copy.deepcopy(inner)(X)
    wrapped = ib.wrap(inner, micro_batch_size=1)
    for _ in range(2):
        close(wrapped(X), wanted)
    if norm:
        return

    # Where no two samples go through at once nobody can tell.
    def one(self, x):
        assert len(x) == 1
        return forward(self, x)

    with pytest.raises(ib.BatchError, match="output_batch_dim"):
        ib.wrap(Calls(one, net=mlp()), micro_batch_size=1)(X)
    if shape == "second":
        given = ib.wrap(Calls(one, net=inner.net), micro_batch_size=1, output_batch_dim=1)
        close(given(X), wanted)


@pytest.mark.parametrize("reduce", ["sum", "mean"])
def test_numbers_are_reduced(reduce):
    inner = Calls(lambda self, x: (self.net(x), getattr(self.net(x).exp(), reduce)()), net=mlp())
    wanted = inner(X)
    found = ib.wrap(inner, micro_batch_size=4, reduce=reduce)(X)
    close(found, wanted)
    losses = (contrastive(z) * number + number**2 for z, number in (found, wanted))
    parameters = list(inner.parameters())
    close(*(torch.autograd.grad(loss, parameters) for loss in losses))


def test_numbers_need_a_reduction():
    inner = Calls(lambda self, x: self.net(x).sum(), net=mlp())
    with pytest.raises(ib.BatchError, match="reduce="):
        ib.wrap(inner, micro_batch_size=4)(X)
    whole = Calls(lambda self, x: self.net(x).sum() + self.net(x).argmax(), net=mlp())
    ib.wrap(whole, micro_batch_size=13)(X)
    counting = Calls(lambda self, x: (x > 0).sum(), net=mlp())
    assert ib.wrap(counting, micro_batch_size=4, reduce="sum")(X) == counting(X)
    with pytest.raises(ib.BatchError, match="whole number"):
        ib.wrap(counting, micro_batch_size=4, reduce="mean")(X)


def test_several_calls_in_one_loss():
    inner = mlp()
    other = torch.randn(7, 6, dtype=torch.float64)
    wrapped = ib.wrap(inner, micro_batch_size=3)
    losses = [(m(X)[:7] - m(other)).pow(2).sum() * contrastive(m(X)) for m in (inner, wrapped)]
    parameters = list(inner.parameters())
    wanted, found = (torch.autograd.grad(loss, parameters) for loss in losses)
    close(found, wanted)


def gan_steps(wrap: Callable[[nn.Module], nn.Module]) -> list[torch.Tensor]:
    torch.manual_seed(5)
    generator, critic = mlp(classes=6), mlp(classes=1)
    generators, critics = wrap(generator), wrap(critic)
    steps = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (generators, critics)]
    for i in range(3):
        real, noise = (
            torch.randn(13, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(i + k))
            for k in (10, 20)
        )
        fake = generators(noise)
        steps[1].zero_grad()
        real_score, fake_score = critics(real), critics(fake.detach())
        (real_score - fake_score).pow(2).mean().backward()
        steps[1].step()
        steps[0].zero_grad()
        critics.requires_grad_(False)
        score = critics(fake)
        critics.requires_grad_(True)  # changed before backward: what counts is what forward saw
        (-score.mean() + contrastive(fake)).backward()
        steps[0].step()
    return [*generator.parameters(), *critic.parameters()]


def test_a_gan_trains_as_natively():
    # Adam divides by roots of small numbers: differences grow a little from step to step.
    close(gan_steps(lambda m: ib.wrap(m, micro_batch_size=4)), gan_steps(lambda m: m), 1e-9)


def test_gradients_of_inputs_and_of_what_made_them():
    inner, encoder = mlp(), nn.Linear(6, 6).double()
    x = X.clone().requires_grad_()
    for make in (lambda: x, lambda: encoder(x), lambda: x[:, :1].expand(-1, 6)):
        losses = [contrastive(m(make())) for m in (inner, ib.wrap(inner, micro_batch_size=4))]
        leaves = [x, *encoder.parameters(), *inner.parameters()]
        wanted, found = (torch.autograd.grad(loss, leaves, allow_unused=True) for loss in losses)
        close(found, wanted)


def test_only_gradients_of_inputs_are_asked_for():
    inner = mlp()
    x = X.clone().requires_grad_()
    wanted = torch.autograd.grad(contrastive(inner(x)), x)
    found = torch.autograd.grad(contrastive(ib.wrap(inner, micro_batch_size=4)(x)), x)
    close(found, wanted)
    assert all(p.grad is None for p in inner.parameters()) and x.grad is None


def test_other_leaves_get_their_gradient():
    temperature = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)
    inner = Calls(lambda self, x: self.net(x) * temperature.exp(), net=mlp())
    contrastive(inner(X) * 3).backward()
    wanted = [temperature.grad, *grads(inner).values()]
    temperature.grad = None
    inner.zero_grad()
    (inner_loss := contrastive(ib.wrap(inner, micro_batch_size=4)(X) * 3)).backward()
    assert inner_loss.grad_fn is not None
    close([temperature.grad, *grads(inner).values()], wanted)


def test_a_graph_from_outside_is_refused():
    leaf = torch.ones(6, dtype=torch.float64, requires_grad=True)
    computed = leaf * 2
    inner = Calls(lambda self, x: self.net(x * computed), net=mlp())
    with pytest.raises(ib.Unsupported, match="computed before"):
        ib.wrap(inner, micro_batch_size=4)(X)
