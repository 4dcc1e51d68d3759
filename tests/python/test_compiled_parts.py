"""Modules that torch.compile has compiled, in part, met by micro-batches of several lengths: the
compiler then traces with sizes that are symbols, while forward is recorded."""

import copy
import shutil

import infinitybatch as ib
import pytest
import torch
from support import Calls
from torch import nn
from wrap_support import close, contrastive, grads


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()


def partly_compiled(**options):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.Linear(8, 4))
    native = copy.deepcopy(net).double()
    net = net.double()
    net[1] = torch.compile(net[1], backend="eager", **options)
    return net, native


def gradients(model):
    return {name.replace("_orig_mod.", ""): grad for name, grad in grads(model).items()}


@pytest.mark.parametrize("dynamic", [None, True, False])
@pytest.mark.parametrize("options", [dict(micro_batch_size=4), dict(memory_budget="64MiB")])
def test_wrapped_by_batches_of_several_lengths(options, dynamic):
    model, native = partly_compiled(dynamic=dynamic)
    wrapped = ib.wrap(model, **options)
    for n in (10, 9, 7):
        x = torch.randn(n, 6).double()
        model.zero_grad(set_to_none=True)
        native.zero_grad(set_to_none=True)
        contrastive(wrapped(x)).backward()
        contrastive(native(x)).backward()
        close(gradients(model), gradients(native))


@pytest.mark.parametrize(
    "options",
    [
        dict(micro_batch_size=4),
        dict(micro_batch_size=4, retained_micro_batches=2),
        dict(
            micro_batch_size=4,
            retained_micro_batches=2,
            offload=ib.Offload("always", host_budget="16MiB"),
        ),
        dict(memory_budget="64MiB"),
    ],
)
def test_coupled_losses(options):
    model, native = partly_compiled()
    step = ib.VirtualBatch(model, ib.losses.coupled(contrastive), **options)
    for n in (11, 10, 9):
        x = torch.randn(n, 6).double()
        model.zero_grad(set_to_none=True)
        native.zero_grad(set_to_none=True)
        step.backward(x)
        contrastive(native(x)).backward()
        close(gradients(model), gradients(native))


def plain():
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)).double()


def batch_norm():
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 4)).double()


def around(model):
    return torch.compile(ib.wrap(model, micro_batch_size=4), backend="aot_eager")


def in_place(model):
    wrapped = ib.wrap(model, micro_batch_size=4)
    wrapped.compile(backend="aot_eager")
    return wrapped


@pytest.mark.parametrize("compiled_around", [around, in_place])
@pytest.mark.parametrize("kind", [plain, batch_norm])
def test_all_of_it_around_a_wrapped_module(kind, compiled_around):
    torch.manual_seed(0)
    model = kind()
    native = copy.deepcopy(model)
    compiled = compiled_around(model)
    for n in (10, 9):
        x = torch.randn(n, 6).double()
        model.zero_grad(set_to_none=True)
        native.zero_grad(set_to_none=True)
        contrastive(compiled(x)).backward()
        contrastive(native(x)).backward()
        close(grads(model), grads(native))


@pytest.mark.filterwarnings("ignore:IB103")
@pytest.mark.parametrize("way", ["wrap", "coupled", "method"])
def test_batch_norm_inside_sees_the_whole_batch(way):
    """No op of a compiled region is seen: it runs as it was written."""
    torch.manual_seed(0)
    model = batch_norm()
    native = copy.deepcopy(model)
    if way == "method":
        model.compile(backend="aot_eager")
    compiled = model if way == "method" else torch.compile(model, backend="aot_eager")
    step = ib.VirtualBatch(compiled, ib.losses.coupled(contrastive), micro_batch_size=4)
    wrapped = ib.wrap(compiled, micro_batch_size=4)
    for n in (10, 9):
        x = torch.randn(n, 6).double()
        model.zero_grad(set_to_none=True)
        native.zero_grad(set_to_none=True)
        step.backward(x) if way == "coupled" else contrastive(wrapped(x)).backward()
        contrastive(native(x)).backward()
        close(gradients(model), gradients(native))
        close(list(model.buffers()), list(native.buffers()))


def without_statistics():
    return Calls(
        lambda self, x: nn.functional.batch_norm(self.net(x), None, None, training=True) ** 3,
        net=nn.Linear(6, 4).double(),
    )


def check_uncompiled(model, step, native_loss):
    """Nobody sees such an op in a compiled region, or can stand in for it: it runs as written."""
    native = copy.deepcopy(model)
    with pytest.warns(ib.UncompiledNotice, match="IB103: aten::.*batch_norm.* eager speed"):
        for n in (12, 9):
            x = torch.randn(n, 6).double()
            model.zero_grad(set_to_none=True)
            native.zero_grad(set_to_none=True)
            step(x)
            native_loss(native(x), x).backward()
            close(grads(model), grads(native))


@pytest.mark.parametrize("way", ["stream", "wrap"])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_batch_norm_without_statistics_in_a_compiled_region(backend, way):
    model = without_statistics()
    compiled = torch.compile(model, backend=backend)
    if way == "wrap":
        wrapped = ib.wrap(compiled, micro_batch_size=4)
        check_uncompiled(
            model, lambda x: contrastive(wrapped(x)).backward(), lambda z, _: contrastive(z)
        )
    else:
        batch = ib.VirtualBatch(compiled, nn.MSELoss(), micro_batch_size=4)
        check_uncompiled(
            model, lambda x: batch.backward(x, x[:, :4]), lambda z, x: nn.MSELoss()(z, x[:, :4])
        )


@pytest.mark.skipif(shutil.which("c++") is None, reason="Inductor needs a compiler")
@pytest.mark.parametrize("options", [{}, {"memory_budget": "64MiB"}])
def test_where_inductor_shows_no_op_at_all_too(options):
    """Forward over the whole batch sees the op; a recording of compiled code does not."""
    model = without_statistics()
    wrapped = ib.wrap(torch.compile(model), micro_batch_size=4, **options)
    check_uncompiled(
        model, lambda x: contrastive(wrapped(x)).backward(), lambda z, _: contrastive(z)
    )
