"""What the first forward makes is made of the whole batch: buffers, parameters and flags that hold
nothing until then, those that forward replaces, and buffers that lie in each other's memory."""

import copy
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
from absent_slots_support import (
    ALIASED,
    ALIKE,
    FROM_THE_FIRST_BATCH,
    OF_EACH_CALL,
    Base,
    NoneAttribute,
    NoneBuffer,
    NoneMask,
    SharedStatistics,
    WrittenBase,
)
from torch import nn

CRITERION = nn.CrossEntropyLoss()
SIZE = 4
WAYS = ["streamed", "coupled", "wrapped"]
BUDGET = {"memory_budget": "64MiB"}
WHOLE: list[tuple[str, dict[str, Any]]] = [
    ("streamed", {}),
    ("streamed", BUDGET),
    ("coupled", {"micro_batch_size": 12}),
    ("wrapped", BUDGET),
]
FLAGS = ("ready", "mean", "view")


def name_of(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Three, whose samples are unlike each other."""
    generator = torch.Generator(torch.get_default_device()).manual_seed(1)
    found = []
    for i in range(3):
        rows = torch.randn(12, 6, generator=generator, dtype=torch.float64)
        rows += 0.3 * i + torch.linspace(0, 2, 12, dtype=torch.float64)[:, None]
        found.append((rows, torch.randint(0, 4, (12,), generator=generator)))
    return found


def make(kind: Callable[..., Base], **options: bool) -> Base:
    torch.manual_seed(0)
    return kind(**options)


def step_of(model: nn.Module, way: str, **options: Any) -> Callable[..., Any]:
    if way == "wrapped":
        wrapped = ib.wrap(model, **options)
        return lambda inputs, targets: CRITERION(wrapped(inputs), targets).backward()
    loss = CRITERION if way == "streamed" else ib.losses.coupled(CRITERION)
    return ib.VirtualBatch(model, loss, **options).backward


def native_step(model: nn.Module) -> Callable[..., Any]:
    return lambda inputs, targets: CRITERION(model(inputs), targets).backward()


def slots(model: nn.Module) -> dict[str, Any]:
    """All that any module holds under a name, absent or not, and the flags."""
    found: dict[str, Any] = {}
    for prefix, module in model.named_modules():
        for name, value in {**module._parameters, **module._buffers}.items():
            found[f"{prefix}.{name}"] = value
        for name in FLAGS:
            if name in vars(module):
                found[f"{prefix}.{name} of Python"] = vars(module)[name]
    return found


def values(model: nn.Module) -> dict[str, Any]:
    found = copy.deepcopy(slots(model))
    for name, parameter in model.named_parameters():
        found[f"gradient of {name}"] = copy.deepcopy(parameter.grad)
    return found


def assert_same(found: dict[str, Any], wanted: dict[str, Any], tolerance: float = 1e-12) -> None:
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if isinstance(value, torch.Tensor):
            assert isinstance(found[name], torch.Tensor), name
            torch.testing.assert_close(
                found[name],
                value,
                rtol=tolerance,
                atol=tolerance,
                msg=lambda m, n=name: f"{n}: {m}",
            )
        else:
            assert found[name] is value, name


def descend(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter -= 0.05 * parameter.grad
            parameter.grad = None


def assert_exact(model: nn.Module, step: Callable[..., Any], other: nn.Module) -> None:
    """Three steps, beside those of `other`, which takes them natively."""
    for inputs, targets in batches():
        step(inputs, targets)
        native_step(other)(inputs, targets)
        assert_same(values(model), values(other))
        descend(model)
        descend(other)


def assert_refused(model: nn.Module, step: Callable[..., Any]) -> None:
    """Twice alike, and everything is as it was."""
    inputs, targets = batches()[0]
    there, before = slots(model), values(model)
    for _ in range(2):
        with pytest.raises((ib.CouplingError, ib.Unsupported)):
            step(inputs, targets)
        now = slots(model)
        assert now.keys() == there.keys()
        for name, value in there.items():
            assert now[name] is value, name
        assert_same(values(model), before, tolerance=0)


@pytest.mark.parametrize("way, options", WHOLE, ids=str)
@pytest.mark.parametrize("kind", FROM_THE_FIRST_BATCH + OF_EACH_CALL + ALIKE, ids=name_of)
def test_where_the_whole_batch_fits_it_is_natives(kind, way, options):
    model = make(kind)
    assert_exact(model, step_of(model, way, **options), make(kind))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", FROM_THE_FIRST_BATCH + OF_EACH_CALL, ids=name_of)
def test_in_several_micro_batches_it_is_refused_and_undone(kind, way):
    model = make(kind)
    assert_refused(model, step_of(model, way, micro_batch_size=SIZE))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", FROM_THE_FIRST_BATCH, ids=name_of)
def test_the_way_out_is_a_forward_over_the_whole_batch(kind, way):
    model = make(kind)
    step = step_of(model, way, micro_batch_size=SIZE)
    with pytest.raises(ib.CouplingError):
        step(*batches()[0])
    with torch.no_grad():
        model(batches()[0][0])
    assert_exact(model, step, make(kind))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ALIKE, ids=name_of)
def test_what_does_not_depend_on_the_rows_is_exact(kind, way):
    model = make(kind)
    assert_exact(model, step_of(model, way, micro_batch_size=SIZE), make(kind))


@pytest.mark.parametrize("static_graph", [False, True])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", [NoneBuffer, NoneMask, NoneAttribute], ids=name_of)
def test_beside_batch_norm(kind, way, static_graph):
    more = {"static_graph": True} if static_graph else {}
    model = make(kind, norm=True)
    step = step_of(model, way, memory_budget="64MiB", **more)
    if static_graph and kind is NoneAttribute:  # another program in the second step
        return assert_exact_or_refused(model, step, kind, norm=True)
    assert_exact(model, step, make(kind, norm=True))
    model = make(kind, norm=True)
    step = step_of(model, way, micro_batch_size=SIZE, **more)
    if kind is NoneMask:
        assert_exact(model, step, make(kind, norm=True))
    else:
        assert_refused(model, step)


def test_a_budget_too_small_for_the_whole_batch_is_refused_and_undone():
    model = make(NoneBuffer)
    rows = torch.randn(4096, 6, dtype=torch.float64)
    targets = torch.randint(0, 4, (4096,))
    budget = ib.memory.stats().live + 400_000
    batch = ib.VirtualBatch(model, CRITERION, memory_budget=budget)
    for _ in range(2):
        with pytest.raises(ib.CouplingError):
            batch.backward(rows, targets)
        assert model.mean is None


def test_evaluation_leaves_nothing_behind():
    model = make(NoneBuffer).eval()
    loader = [batches()[0]]
    trainer = ib.Trainer(model, CRITERION, torch.optim.SGD(model.parameters(), 0.1), loader)
    trainer.evaluate(loader)
    assert model.mean is None


@pytest.mark.parametrize("kind", FROM_THE_FIRST_BATCH + OF_EACH_CALL + ALIKE, ids=name_of)
def test_verify_starts_each_way_from_nothing(kind):
    model = make(kind)
    there, before = slots(model), values(model)
    inputs, targets = batches()[0]
    report = ib.verify(model, CRITERION, inputs, targets, memory_budget="64MiB")
    assert report.in_fp64 is not None and report.in_fp64.exact
    if kind in ALIKE:
        assert ib.verify(model, CRITERION, inputs, targets, micro_batch_size=SIZE).exact
    else:
        with pytest.raises(ib.CouplingError):
            ib.verify(model, CRITERION, inputs, targets, micro_batch_size=SIZE)
    assert all(slots(model)[name] is value for name, value in there.items())
    assert_same(values(model), before, tolerance=0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("kind", [NoneBuffer, *OF_EACH_CALL[:2]], ids=name_of)
def test_verify_tells_of_slots_that_micro_batches_fill(kind, dtype):
    """The user's word that another value will do."""
    model = make(kind).to(dtype)
    inputs, targets = batches()[0]
    given = {"micro_batch_size": SIZE, "batch_coupling": "per_micro_batch"}
    report = ib.verify(model, CRITERION, inputs.to(dtype), targets, **given)
    assert not report.exact


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", ALIASED, ids=name_of)
def test_buffers_in_one_memory_are_one(kind, way):
    model = make(kind)
    assert_exact(model, step_of(model, way, micro_batch_size=SIZE), make(kind))


def assert_exact_or_refused(model: Base, step: Callable[..., Any], kind: Any, **made: bool) -> None:
    before = values(model)
    try:
        step(*batches()[0])
    except (ib.CouplingError, ib.Unsupported):
        assert_same(values(model), before, tolerance=0)
        return assert_refused(model, step)
    again = make(kind, **made)
    native_step(again)(*batches()[0])
    assert_same(values(model), values(again))


@pytest.mark.parametrize(
    "norm, options", [(True, {}), (True, {"static_graph": True}), (False, {"static_graph": True})]
)
@pytest.mark.parametrize("way", ["streamed", "wrapped"])
@pytest.mark.parametrize("kind", [*ALIASED, SharedStatistics], ids=name_of)
def test_beside_whole_batch_ops_and_static_graphs(kind, way, norm, options):
    """Exact, or refused by name; the whole batch at once is exact."""
    model = make(kind, norm=norm)
    step = step_of(model, way, micro_batch_size=SIZE, **options)
    assert_exact_or_refused(model, step, kind, norm=norm)
    model = make(kind, norm=norm)
    assert_exact(model, step_of(model, way, memory_budget="64MiB"), make(kind, norm=norm))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_verify_keeps_views_of_buffers_in_fp64(dtype):
    model = make(WrittenBase).to(dtype)
    model.view = model.base[:3]
    inputs, targets = batches()[0]
    report = ib.verify(model, CRITERION, inputs.to(dtype), targets, micro_batch_size=SIZE)
    assert report.exact
    assert model.view.data_ptr() == model.base.data_ptr()


@pytest.mark.parametrize("make_lazy", [nn.LazyLinear, nn.LazyBatchNorm1d])
def test_lazy_modules_say_what_to_do(make_lazy):
    layer = make_lazy(6) if make_lazy is nn.LazyLinear else make_lazy(affine=False)
    model = nn.Sequential(layer, nn.Linear(6, 4)).double()
    inputs, targets = batches()[0]
    for step in (step_of(model, "streamed"), step_of(model, "wrapped")):
        with pytest.raises(ib.StateError, match=r"model\(inputs\[:2\]\)"):
            step(inputs, targets)
    model(inputs[:2])
    step_of(model, "streamed", micro_batch_size=SIZE)(inputs, targets)
