"""Options of `VirtualBatch` and `wrap`: one definition, and what they do behind `wrap`."""

import copy
import inspect
import pickle
import re
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
from infinitybatch import _C, _options
from support import Calls, Log, mlp
from torch import nn
from wrap_support import X, close, contrastive

FUNCTIONS = {"VirtualBatch": ib.VirtualBatch, "wrap": ib.wrap}
#: What is an argument of one of them alone, and no option of C++'s `Options`.
OWN = {"wrap": {"reduce", "output_batch_dim", "methods", "process_group"}}
#: What means nothing for one of them.
NOT_FOR = {"wrap": {"checkpoint_segments", "keep_outputs", "grad_scaler"}}
#: Names of C++ that Python spells otherwise.
PYTHON_NAMES = {"loss_scale": "grad_scaler"}


def defaults_of_cpp() -> dict[str, Any]:
    return {PYTHON_NAMES.get(name, name): value for name, value in _C._options().items()}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_option_of_cpp_is_an_argument_with_the_same_default(name: str) -> None:
    parameters = inspect.signature(FUNCTIONS[name]).parameters.values()
    found = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    own = OWN.get(name, set())
    assert own <= found.keys()
    wanted = {n: d for n, d in defaults_of_cpp().items() if n not in NOT_FOR.get(name, set())}
    assert {n: d for n, d in found.items() if n not in own} == wanted
    for option, default in wanted.items():
        assert type(found[option]) is type(default), option  # 0 is not False


@pytest.mark.parametrize("name", FUNCTIONS)
def test_each_argument_has_its_words(name: str) -> None:
    parameters = set(inspect.signature(FUNCTIONS[name]).parameters)
    (text,) = re.findall(r"^Args:$(.*?)^\S", inspect.getdoc(FUNCTIONS[name]), re.M | re.S)
    assert set(re.findall(r"^    (\w+): ", text, re.M)) == parameters


def test_each_option_is_checked_in_one_place() -> None:
    with_checks = OWN["wrap"] - {"methods", "process_group"}
    assert _options.CHECKS.keys() == defaults_of_cpp().keys() | with_checks


def test_an_option_that_is_none_is_an_error() -> None:
    with pytest.raises(ib.InvalidType, match="micro_batches is no option"):
        _C.Wrap(None, None, None, reduce=None, output_batch_dim=None, micro_batches=3)


@pytest.mark.parametrize(
    ("option", "way_out"),
    [
        ({"checkpoint_segments": 4}, "use VirtualBatch"),
        ({"keep_outputs": True}, "leave it out"),
        ({"grad_scaler": torch.amp.GradScaler("cpu")}, r"scaler.scale\(loss\)"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_means_nothing_for_wrap_names_the_way_out(
    option: dict[str, Any], way_out: str
) -> None:
    (name,) = option
    assert {name} <= NOT_FOR["wrap"]
    with pytest.raises(ib.InvalidArgument, match=f"^{name} means nothing for wrap.*{way_out}"):
        ib.wrap(mlp(), micro_batch_size=4, **option)


CONTRADICTIONS: dict[str, tuple[dict[str, Any], str]] = {
    "static_graph": ({"static_graph": True, "use_tapes": False}, "use_tapes=False forbids"),
    "match_native_rng": ({"match_native_rng": True, "use_tapes": False}, "needs the recording"),
    "coupling": (
        {"match_native_rng": True, "batch_coupling": "per_micro_batch"},
        'batch_coupling="exact"',
    ),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
@pytest.mark.parametrize("way", FUNCTIONS)
def test_contradictions_are_the_same_errors(way: str, name: str) -> None:
    options, message = CONTRADICTIONS[name]
    loss = () if way == "wrap" else (nn.CrossEntropyLoss(),)
    with pytest.raises(ib.InvalidArgument, match=message):
        FUNCTIONS[way](mlp(), *loss, micro_batch_size=4, **options)


# ---- use_tapes behind wrap -----------------------------------------------------------------------


def counted(inner: nn.Module) -> tuple[nn.Module, list[int]]:
    rows = Log()

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        rows.append(len(x))
        return self.net(x)

    return Calls(forward, net=inner), rows


def gradients(module: nn.Module) -> tuple[torch.Tensor, ...]:
    loss = contrastive(module(X))
    return torch.autograd.grad(loss, list(module.parameters()))


@pytest.mark.parametrize(
    "given", [{"micro_batch_size": 4}, {"micro_batch_size": 4, "memory_budget": "1GiB"}, {}]
)
def test_without_tapes_forward_runs_again(given: dict[str, Any]) -> None:
    inner = mlp()
    wanted = gradients(inner)
    module, rows = counted(inner)
    wrapped = ib.wrap(module, use_tapes=False, **given)
    for _ in range(3):
        rows.clear()
        close(gradients(wrapped), wanted)
        report = wrapped.last_report
        if len(report.micro_batch_sizes) > report.retained and report.strategy != "native":
            assert report.strategy == "rerun"
            assert report.strategy_reason == "use_tapes=false was given"
    if given:  # the third call looks at no rows
        assert rows == [4, 4, 4, 1, 1, 4, 4, 4]


def test_without_tapes_numbers_that_are_the_same_stand_once() -> None:
    """What comes from the samples is looked for all the same."""

    def forward(self: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.net(x), self.scale.exp()

    inner = Calls(forward, net=mlp())
    inner.scale = nn.Parameter(torch.full((4,), 0.3, dtype=torch.float64))

    def loss(outputs: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return contrastive(outputs[0] * outputs[1].prod()) + outputs[1].square().sum()

    parameters = list(inner.parameters())
    wanted = torch.autograd.grad(loss(inner(X)), parameters)
    wrapped = ib.wrap(inner, micro_batch_size=4, use_tapes=False)
    for _ in range(2):
        outputs = wrapped(X)
        assert outputs[1].shape == (4,)
        close(torch.autograd.grad(loss(outputs), parameters), wanted)


@pytest.mark.parametrize("options", [{}, {"retained_micro_batches": 2}])
def test_without_tapes_random_numbers_come_back(options: dict[str, Any]) -> None:
    inner = nn.Sequential(mlp(), nn.Dropout(0.4)).double()
    found = []
    for use_tapes in (True, False):
        wrapped = ib.wrap(inner, micro_batch_size=4, use_tapes=use_tapes, **options)
        torch.manual_seed(3)
        found.append([gradients(wrapped), torch.rand(2)])
    close(found[1], found[0])


def test_without_tapes_layers_of_the_whole_batch_are_exact() -> None:
    inner = nn.Sequential(mlp(), nn.BatchNorm1d(5)).double()
    wrapped = ib.wrap(copy.deepcopy(inner), micro_batch_size=4, use_tapes=False)
    wanted = gradients(inner)
    close(gradients(wrapped), wanted)
    assert wrapped.last_report.strategy == "cut"
    close(dict(wrapped.named_buffers()), dict(inner.named_buffers()))


def test_without_tapes_mixing_is_found() -> None:
    inner = Calls(lambda self, x: self.net(x - x.mean(0)), net=mlp())
    with pytest.raises(ib.CouplingError):
        ib.wrap(inner, micro_batch_size=4, use_tapes=False)(X)


# ---- on_micro_batch behind wrap ------------------------------------------------------------------


class Seen(list[ib.MicroBatch]):
    """The micro-batches that were shown."""

    def joined(self) -> torch.Tensor:
        assert all(each.targets is None for each in self)
        assert all(len(each.outputs) == each.end - each.begin for each in self)
        assert [each.begin for each in self] == [0, *(each.end for each in self[:-1])]
        return torch.cat([each.outputs for each in self])


WAYS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "pieces": (mlp, {"micro_batch_size": 4}),
    "kept graphs": (mlp, {"micro_batch_size": 4, "retained_micro_batches": 2}),
    "natively": (mlp, {"micro_batch_size": 13}),
    "budget": (mlp, {"memory_budget": "1GiB"}),
    "both": (mlp, {"memory_budget": "1GiB", "micro_batch_size": 4}),
    "static": (mlp, {"micro_batch_size": 4, "static_graph": True}),
    "no tapes": (mlp, {"micro_batch_size": 4, "use_tapes": False}),
    "cut": (lambda: nn.Sequential(mlp(), nn.BatchNorm1d(5)).double(), {"micro_batch_size": 4}),
    "cut, budget": (
        lambda: nn.Sequential(mlp(), nn.BatchNorm1d(5)).double(),
        {"memory_budget": "1GiB"},
    ),
}


@pytest.mark.parametrize("name", WAYS)
def test_each_micro_batch_is_shown_once(name: str) -> None:
    make, options = WAYS[name]
    seen = Seen()
    wrapped = ib.wrap(make(), on_micro_batch=seen.append, **options)
    for _ in range(3):
        for recording in (True, False):
            seen.clear()
            with torch.set_grad_enabled(recording):
                outputs = wrapped(X)
            assert torch.equal(seen.joined(), outputs)
            assert not any(each.outputs.requires_grad for each in seen)
            if recording:
                outputs.sum().backward()
    assert [each.end - each.begin for each in seen] == wrapped.last_report.micro_batch_sizes


def test_a_callback_changes_no_gradient() -> None:
    inner = nn.Sequential(mlp(), nn.Dropout(0.3)).double()
    found = []
    for callback in (None, lambda seen: seen.outputs.clone().zero_()):
        wrapped = ib.wrap(inner, micro_batch_size=4, on_micro_batch=callback)
        torch.manual_seed(1)
        found.append(gradients(wrapped))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_a_callback_that_raises_leaves_buffers_and_the_next_call_works() -> None:
    inner = nn.Sequential(mlp(), nn.BatchNorm1d(5)).double()
    before = copy.deepcopy(dict(inner.named_buffers()))
    error = [ValueError("the metric")]

    def callback(_: ib.MicroBatch) -> None:
        if error:
            raise error.pop()

    wrapped = ib.wrap(inner, micro_batch_size=4, on_micro_batch=callback)
    with pytest.raises(ValueError, match="the metric"):
        wrapped(X)
    close(dict(inner.named_buffers()), before)
    close(gradients(wrapped), gradients(copy.deepcopy(inner)))


def test_methods_show_their_micro_batches_too() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = mlp()

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x).tanh()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

    seen = Seen()
    wrapped = ib.wrap(Model(), micro_batch_size=4, methods=("encode",), on_micro_batch=seen.append)
    outputs = wrapped.encode(X)
    assert torch.equal(seen.joined(), outputs)


def note(_: ib.MicroBatch) -> None:
    """A callback that can be pickled."""


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda module: pickle.loads(pickle.dumps(module))]
)
def test_copies_have_the_same_options(copied: Callable[[Any], Any]) -> None:
    options = {"micro_batch_size": 4, "use_tapes": False, "on_micro_batch": note}
    wrapped = copied(ib.wrap(mlp(), **options))
    gradients(wrapped)
    assert wrapped.last_report.strategy == "rerun"
    batch = copied(ib.VirtualBatch(mlp(), contrastive, **options, offload="never"))
    assert batch.backward(X).strategy == "rerun"
