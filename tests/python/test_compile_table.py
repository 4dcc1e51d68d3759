"""docs/recipes/compile.md: its code runs, and each row of its table is as it says."""

import copy
import functools
import os
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import infinitybatch as ib
import pytest
import torch
from support import Calls, Log
from torch import nn
from torch.nn import functional as F
from wrap_support import close, contrastive

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs/recipes/compile.md").read_text()
ROWS = {
    cells[1].strip(): cells[2].strip()
    for line in DOCUMENT.splitlines()
    if line.startswith("| ") and not line.startswith("| what")
    for cells in [line.split("|")]
}
#: The whole table again with Inductor, whose every kernel takes a compiler seconds.
LONG = os.environ.get("INFINITYBATCH_LONG_TESTS") is not None


class Backend:
    """Runs what dynamo has traced, and counts how often in the step that was last."""

    ran = 0

    def __init__(self, inner: str) -> None:
        self.inner = torch._dynamo.lookup_backend(inner)

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        compiled = self.inner(graph, inputs)

        def run(*args: Any) -> Any:
            self.ran += 1
            return compiled(*args)

        return run


def plain() -> nn.Module:
    layers = nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4)
    return nn.Sequential(*layers).double()


def normed() -> nn.Module:
    layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.GELU(), nn.Linear(8, 4)
    return nn.Sequential(*layers).double()


def behind(function: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], nn.Module]:
    return lambda: Calls(lambda self, x: function(self.net(x)), net=plain())


centred = behind(lambda z: z - z.mean(0))
across = behind(lambda z: ib.across_batch(lambda t: t - t.mean(0), z))
dropping = behind(lambda z: F.dropout(z, 0.3))
batch_normed = behind(lambda z: F.batch_norm(z, None, None, training=True))


class Case:
    """One way to compile a model, and a step of it beside native."""

    def __init__(self, backend: Any, make: Callable[[], nn.Module] = plain) -> None:
        torch._dynamo.reset()
        torch.manual_seed(0)
        self.backend = backend
        self.model = make()
        self.native = copy.deepcopy(self.model)

    def compile(self, what: Any, **options: Any) -> Any:
        return torch.compile(what, backend=self.backend, **options)

    def part(self) -> nn.Module:
        if isinstance(self.model, nn.Sequential):
            self.model[0] = self.compile(self.model[0])
        else:
            self.model.net = self.compile(self.model.net)
        return self.model

    def wrapped(self, model: nn.Module, around: Any = None, **options: Any) -> Any:
        """Steps of a loss that couples all samples."""
        wrapped = ib.wrap(model, **(options or {"micro_batch_size": 4}))
        called = wrapped if around is None else around(wrapped)
        return lambda x, y: contrastive(called(x)).backward()

    def batch(self, model: Any, loss: Any, **options: Any) -> Any:
        batch = ib.VirtualBatch(model, loss, micro_batch_size=4, **options)
        return batch.backward

    def check(self, step: Any, loss: Any = lambda z, y: contrastive(z)) -> None:
        for n in (10, 9, 7):
            x, y = torch.randn(n, 6).double(), torch.arange(n) % 4
            self.model.zero_grad()
            self.native.zero_grad()
            state = torch.get_rng_state()
            loss(self.native(x), y).backward()
            torch.set_rng_state(state)
            self.backend.ran = 0
            step(x, y)
            found, wanted = self.model.parameters(), self.native.parameters()
            close([p.grad for p in found], [p.grad for p in wanted], 1e-11)


def steps(kind: Any, make: Callable[[], nn.Module], whole: bool, part: bool, **options: Any) -> Any:
    for use in [use for use, wanted in (("whole", whole), ("part", part)) if wanted]:
        case = Case(kind, make)
        model = case.part() if use == "part" else case.compile(case.model)
        case.check(case.wrapped(model, **options))


def in_place(case: Case, **options: Any) -> nn.Module:
    case.model.compile(backend=case.backend, **options)
    return case.model


def wrap_in_place(case: Case, wrapped: Any) -> Any:
    wrapped.compile(backend=case.backend)
    return wrapped


def no_grad(backend: Any) -> None:
    case = Case(backend)
    x = torch.randn(10, 6).double()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            close(ib.wrap(case.compile(case.model), micro_batch_size=4)(x), case.native(x))


def around(backend: Any) -> None:
    for make in (plain, normed):
        for how in (Case.compile, wrap_in_place, functools.partial(Case.compile, fullgraph=True)):
            case = Case(backend, make)
            case.check(case.wrapped(case.model, functools.partial(how, case)))


def whole_function(backend: Any, **options: Any) -> None:
    case = Case(backend)
    wrapped = ib.wrap(case.model, micro_batch_size=4)
    rows = Log()
    case.model[0].register_forward_pre_hook(lambda _, args: rows.append(len(args[0])))
    function = case.compile(lambda x: contrastive(wrapped(x)), **options)
    try:
        case.check(lambda x, y: function(x).backward())
    finally:
        assert rows == [] if options else 4 in rows


def segments(backend: Any) -> None:
    case = Case(backend)
    model = case.compile(case.model)
    step = case.batch(model, nn.CrossEntropyLoss(), checkpoint_segments=2)
    case.check(step, F.cross_entropy)


def part_alone(backend: Any) -> None:
    case = Case(backend, normed)
    case.model[3] = ib.wrap(case.compile(case.model[3]), micro_batch_size=4)
    case.check(lambda x, y: contrastive(case.model(x)).backward())


def programs(backend: Any) -> None:
    wrapped, x = ib.wrap(plain(), micro_batch_size=4), torch.randn(10, 6).double()
    with pytest.raises(ib.Unsupported, match="torch.jit.trace"):
        torch.jit.trace(wrapped, (x,))
    torch.export.export(wrapped, (x,))


def simple(prepare: Any, make: Callable[[], nn.Module] = plain, **options: Any) -> Any:
    def run(backend: Any) -> None:
        case = Case(backend, make)
        case.check(case.wrapped(prepare(case), **options))

    return run


def virtual(prepare: Any, loss: Any = None) -> Any:
    def run(backend: Any) -> None:
        case = Case(backend)
        case.check(case.batch(*prepare(case)), *([loss] if loss else []))

    return run


coupled = ib.losses.coupled
kept = {"micro_batch_size": 4, "retained_micro_batches": 2, "offload": "always"}
CODE: list[Callable[[Any], None]] = [  # in the order of the rows
    simple(lambda case: case.compile(case.model)),
    simple(lambda case: case.compile(case.model, fullgraph=True)),
    simple(lambda case: case.compile(case.model, dynamic=True)),
    simple(in_place, behind(torch.tanh)),  # torch compiles no forward of a class of its own
    simple(Case.part),
    simple(Case.part, **kept),
    simple(Case.part, memory_budget="64MiB"),
    no_grad,
    virtual(lambda case: (case.compile(case.model), nn.CrossEntropyLoss()), F.cross_entropy),
    virtual(lambda case: (case.compile(case.model), coupled(contrastive))),
    virtual(lambda case: (case.model, coupled(case.compile(contrastive)))),
    virtual(lambda case: (case.model, case.compile(nn.CrossEntropyLoss())), F.cross_entropy),
    lambda backend: compiled_loss(backend),
    around,
    whole_function,
    lambda backend: whole_function(backend, fullgraph=True),
    lambda backend: steps(backend, normed, True, True),
    lambda backend: steps(backend, across, True, True),
    lambda backend: steps(backend, dropping, True, True, micro_batch_size=4, match_native_rng=True),
    lambda backend: steps(backend, plain, True, True, micro_batch_size=4, static_graph=True),
    segments,
    part_alone,
    lambda backend: steps(backend, batch_normed, True, True),
    lambda backend: steps(backend, centred, True, False),
    programs,
]


def compiled_loss(backend: Any) -> None:
    case = Case(backend)
    wrapped, loss = ib.wrap(case.model, micro_batch_size=4), case.compile(contrastive)
    case.check(lambda x, y: loss(wrapped(x)).backward())


def test_each_row_has_its_code() -> None:
    assert len(ROWS) == len(CODE) == DOCUMENT.count("\n| ") - 1


BACKENDS = ["eager", *(["inductor"] if LONG else [])]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("row", range(len(CODE)), ids=list(ROWS))
def test_row(row: int, backend: str) -> None:
    result = list(ROWS.values())[row]
    counting = Backend(backend)
    refused = re.match(r"`(\S+)`", result)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            CODE[row](counting)
        except (ib.Error, torch._dynamo.exc.Unsupported) as error:
            kinds = {k.__name__: k for k in vars(ib.errors).values() if isinstance(k, type)}
            kinds["torch._dynamo.exc.Unsupported"] = torch._dynamo.exc.Unsupported
            assert refused and type(error) is kinds[refused[1]], error
            if type(error) is torch._dynamo.exc.Unsupported:
                assert "ib.wrap(torch.compile(model))" in str(error)
            return
    assert refused is None and result.startswith("exact, ")
    notices = {w.category for w in told if issubclass(w.category, UserWarning)}
    assert (ib.UncompiledNotice in notices) == ("IB103" in result)
    assert (counting.ran > 0) == ("compiled" in result), counting.ran


def test_the_code_runs() -> None:
    (block,) = re.findall(r"^```python\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    if not LONG:
        block = block.replace("torch.compile(model)", 'torch.compile(model, backend="eager")')
    names: dict[str, Any] = {}
    exec(compile(block, "docs/recipes/compile.md", "exec"), names)
    assert names["model"].last_report.micro_batch_sizes == [64, 64, 64, 8]
