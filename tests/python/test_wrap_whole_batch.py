"""Wrapped modules with ops that see the whole batch (BatchNorm in training, across_batch, words that
are counted), against the modules themselves."""

import copy
from typing import Any

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from batch_norm_models import MODELS, Residual, images, make
from support import Calls, mlp
from test_across_batch import contrastive_head, discriminator, experts, words
from torch import nn
from wrap_support import X, close, contrastive, grads
from wrap_whole_batch_support import across_beside_batch_norm, buffers, small


def check(native: nn.Module, x: torch.Tensor, sizes: tuple[int, ...], loss: Any, **options: Any):
    """Outputs, gradients (of the inputs too) and buffers, step by step: the second one knows that
    the model has to be cut."""
    for size in sizes:
        inner, same = copy.deepcopy(native), copy.deepcopy(native)
        wrapped = ib.wrap(inner, micro_batch_size=size, **options)
        for _ in range(2):
            inputs = [x.clone().requires_grad_(x.is_floating_point()) for _ in range(2)]
            found, wanted = wrapped(inputs[0]), same(inputs[1])
            close(found, wanted)
            close(buffers(inner), buffers(same))
            loss(found).backward()
            loss(wanted).backward()
            close(grads(inner), grads(same))
            close(inputs[0].grad, inputs[1].grad)
            close(buffers(inner), buffers(same))
        assert wrapped.last_report.strategy == ("cut" if size < len(x) else "native")


@pytest.mark.parametrize("name", MODELS)
def test_networks_with_batch_norm(name):
    torch.manual_seed(1)
    # A single sample without weight and statistics: it is not known which dimension holds channels.
    alone = name in ("neither", "computed weight")
    check(
        make(name), images(7)[0], (4, 5) if alone or "0 layers" in name else (1, 3, 7), contrastive
    )


@pytest.mark.parametrize("depth", range(10))
def test_one_to_ten_layers(depth):
    """Ragged, and under a loss that looks at some rows only."""
    torch.manual_seed(depth)
    native = Residual(depth).double()
    check(native, images(8)[0], (3,), lambda z: z[1:4].square().sum() + z[-1].exp().sum())


@pytest.mark.parametrize(
    "make_model", [discriminator, experts, contrastive_head, across_beside_batch_norm, words]
)
def test_ops_of_the_user_s_own(make_model):
    torch.manual_seed(2)
    check(make_model(), X, (1, 4, 13), contrastive)


def test_two_calls_before_backward():
    """Siamese: the second call finds the statistics that the first one left."""
    torch.manual_seed(3)
    inner = small()
    native = copy.deepcopy(inner)
    wrapped = ib.wrap(inner, micro_batch_size=4)
    other = torch.randn(9, 6, dtype=torch.float64)
    for _ in range(2):
        for module in (wrapped, native):
            a, b = module(X), module(other)
            (a.T @ a).sub(b.T @ b).square().mean().backward()
        close(grads(inner), grads(native))
        close(buffers(inner), buffers(native))
    assert int(inner[1].num_batches_tracked) == 4


def test_adversaries():
    """The discriminator sees real and made samples; its gradient goes on into the generator."""
    torch.manual_seed(4)
    modules = {"generator": small(), "discriminator": discriminator()}
    native = copy.deepcopy(modules)
    modules["generator"][3] = nn.Linear(8, 6).double()
    modules["generator"][4] = nn.BatchNorm1d(6).double()
    native["generator"] = copy.deepcopy(modules["generator"])
    wrapped = {name: ib.wrap(module, micro_batch_size=5) for name, module in modules.items()}
    results = []
    for g, d in ((m["generator"], m["discriminator"]) for m in (wrapped, native)):
        made = g(X)
        F.softplus(-d(X)).mean().add(F.softplus(d(made.detach())).mean()).backward()
        g.zero_grad()
        F.softplus(-d(made)).mean().backward()
        results.append([[p.grad for p in m.parameters()] for m in (g, d)])
    close(*results)
    close(*[{n: buffers(m) for n, m in ms.items()} for ms in (modules, native)])


@pytest.mark.parametrize(
    "make_model", [small, across_beside_batch_norm, contrastive_head, words, lambda: Residual(2)]
)
def test_backward_twice(make_model):
    torch.manual_seed(5)
    inner = make_model().double()
    x = images(7)[0] if isinstance(inner, Residual) else X
    native = copy.deepcopy(inner)
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    outputs = ib.wrap(inner, micro_batch_size=3)(inputs[0]), native(inputs[1])
    of = [[i, *m.parameters()] for i, m in zip(inputs, (inner, native), strict=True)]
    for keep, loss in ((True, contrastive), (True, torch.sum), (False, contrastive)):
        weights = torch.linspace(1, 2, outputs[0].shape[1], dtype=torch.float64)
        found, wanted = (
            torch.autograd.grad(loss(o * weights), p, retain_graph=keep, allow_unused=True)
            for o, p in zip(outputs, of, strict=True)
        )
        close(found, wanted)
    with pytest.raises(RuntimeError, match="second time"):
        contrastive(outputs[0]).backward()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_in_training_mode(mode):
    torch.manual_seed(6)
    inner = small()
    native = copy.deepcopy(inner)
    wrapped = ib.wrap(inner, micro_batch_size=4)
    for _ in range(2):
        with mode():
            found = wrapped(X)
            close(found, native(X))
        assert not found.requires_grad and found.is_inference() == (mode is torch.inference_mode)
        close(buffers(inner), buffers(native))
    contrastive(wrapped(X)).backward()
    contrastive(native(X)).backward()
    close(grads(inner), grads(native))


def test_eval_and_train_in_turn():
    torch.manual_seed(7)
    inner = small()
    native = copy.deepcopy(inner)
    wrapped = ib.wrap(inner, micro_batch_size=4)
    for training in (True, False, True, False):
        wrapped.train(training)
        native.train(training)
        contrastive(wrapped(X)).backward()
        contrastive(native(X)).backward()
        assert wrapped.last_report.strategy == ("cut" if training else "replay")
        close(grads(inner), grads(native))
        close(buffers(inner), buffers(native))
    # In training mode, with layers that are not: nothing is left to cut.
    for module in (inner, native):
        module.train()
        module[1].eval()
        module[4].eval()
    contrastive(wrapped(X)).backward()
    contrastive(native(X)).backward()
    assert wrapped.last_report.strategy == "replay"
    close(grads(inner), grads(native))


def test_random_layers_draw_once():
    """The mask that forward drew is the one that backward sees, and the same seed gives it again."""

    def forward(self, x):
        mask = F.dropout(torch.ones(len(x), 8, dtype=x.dtype), 0.4, self.training)
        x = torch.tanh(self.norm(self.first(x))) * mask
        after = F.dropout(torch.ones(len(x), 8, dtype=x.dtype), 0.4, self.training)
        return self.last(self.norm2(x) * after), mask, after

    def with_masks(self, x, mask, after):
        return self.last(self.norm2(torch.tanh(self.norm(self.first(x))) * mask) * after)

    torch.manual_seed(8)
    inner = Calls(
        forward,
        first=nn.Linear(6, 8),
        norm=nn.BatchNorm1d(8),
        norm2=nn.BatchNorm1d(8),
        last=nn.Linear(8, 5),
    ).double()
    native = copy.deepcopy(inner)
    wrapped = ib.wrap(inner, micro_batch_size=4)
    for _ in range(2):  # the first call checks its recordings
        drawn = []
        for _ in range(2):
            torch.manual_seed(9)
            drawn.append(wrapped(X))
        after_forward = torch.get_rng_state()
        assert all(torch.equal(a, b) for a, b in zip(*drawn, strict=True))
        outputs, mask, after = drawn[0]
        assert 0 < int((mask == 0).sum()) < mask.numel()
        assert not torch.equal(mask[:4], mask[4:8])
        contrastive(outputs).backward()
        contrastive(with_masks(native, X, mask, after)).backward()
        close(grads(inner), grads(native))
        assert torch.equal(torch.get_rng_state(), after_forward)


def test_structures_and_numbers():
    def forward(self, x):
        h = self.norm(self.first(x))
        return {"images": h.reshape(len(x), 2, 4), "energy": h.exp().sum(), "none": None, "n": 3}

    torch.manual_seed(10)
    inner = Calls(forward, first=nn.Linear(6, 8), norm=nn.BatchNorm1d(8)).double()
    native = copy.deepcopy(inner)
    # Micro-batches of 2 and 4 leave open along which dimension the samples lie.
    for size in (2, 4, 5):
        found = ib.wrap(inner, micro_batch_size=size, reduce="sum")(X)
        wanted = native(X)
        assert found["none"] is None and found["n"] == 3
        close([found["images"], found["energy"]], [wanted["images"], wanted["energy"]])
        for outputs in (found, wanted):
            (contrastive(outputs["images"].flatten(1)) * outputs["energy"].log()).backward()
        close(grads(inner), grads(native))


def test_leaves_that_are_no_parameters():
    """A tensor that forward reads, one that a function of `across_batch` reads, tied weights."""
    torch.manual_seed(11)
    free, inside = (torch.rand(5, dtype=torch.float64, requires_grad=True) for _ in range(2))

    def forward(self, x):
        h = self.norm(self.net(x) * free)
        return h + ib.across_batch(lambda h: (h.mean(0) * inside).expand(len(h), 5), h)

    inner = Calls(forward, net=mlp(), norm=nn.BatchNorm1d(5)).double()
    inner.net[2].weight.requires_grad_(False)
    native = copy.deepcopy(inner)
    results = []
    for module in (ib.wrap(inner, micro_batch_size=4), native):
        contrastive(module(X)).backward()
        results.append([free.grad, inside.grad])
        free.grad = inside.grad = None
    close(*results, tolerance=4e-12)  # sums that nearly cancel
    close(grads(inner), grads(native))


def test_autocast():
    torch.manual_seed(12)
    inner = Residual(2).train()
    native, exact = copy.deepcopy(inner), copy.deepcopy(inner)
    x = images(8)[0].float()
    for module in (ib.wrap(inner, micro_batch_size=3), native):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            outputs = module(x)
        outputs.float().square().mean().backward()
    exact(x).square().mean().backward()

    def off(module: nn.Module) -> float:
        pairs = zip(module.parameters(), exact.parameters(), strict=True)
        return float(sum((a.grad - b.grad).square().sum() for a, b in pairs)) ** 0.5

    assert off(inner) <= 2 * off(native)


def test_copies_and_hooks():
    torch.manual_seed(18)
    inner = small()
    wrapped = ib.wrap(inner, micro_batch_size=4)
    wrapped(X)
    twin = copy.deepcopy(wrapped)
    fired = []
    inner[0].weight.register_hook(lambda g: fired.append(g.clone()))
    contrastive(wrapped(X)).backward()
    contrastive(twin(X)).backward()
    assert len(fired) == 1 and torch.equal(fired[0], inner[0].weight.grad)
    close([p.grad for p in twin.parameters()], [p.grad for p in inner.parameters()])
    close(buffers(ib.unwrap(twin)), buffers(inner))
