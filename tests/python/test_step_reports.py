"""What a step's report can be turned into, and what completion and type checkers see."""

import copy
import inspect
import json
import pickle
from types import ModuleType
from typing import Unpack, get_type_hints

import infinitybatch as ib
import pytest
import torch
from infinitybatch._trainer_options import TrainerOptions
from infinitybatch.virtual_batch import VirtualBatchOptions


def report(**options) -> ib.StepReport:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    step = ib.VirtualBatch(model, torch.nn.CrossEntropyLoss(), **options)
    return step.backward(torch.randn(10, 3), torch.arange(10) % 2)


PROPERTIES = [n for n in vars(ib.StepReport) if not n.startswith("_") and n != "as_dict"]


def test_a_dictionary_for_loggers():
    made = report(micro_batch_size=4, memory_budget="64MiB")
    values = made.as_dict()
    assert set(values) == set(PROPERTIES) - {"outputs"}
    assert json.loads(json.dumps(values)) == values
    assert values["loss"] == made.loss.item() and type(values["loss"]) is float
    assert values["micro_batch_sizes"] == [4, 4, 2] and values["memory_budget"] == 64 << 20
    for name in set(values) - {"loss"}:
        assert values[name] == getattr(made, name), name


def test_what_is_unknown_is_none():
    values = report(micro_batch_size=4).as_dict()
    assert values["memory_budget"] is None


@pytest.mark.parametrize("keep_outputs", [False, True])
@pytest.mark.parametrize("again", [lambda r: pickle.loads(pickle.dumps(r)), copy.deepcopy])
def test_a_pickled_report_is_the_same(again, keep_outputs):
    made = report(micro_batch_size=4, memory_budget="64MiB", keep_outputs=keep_outputs)
    read = again(made)
    assert type(read) is ib.StepReport and repr(read) == repr(made)
    assert read.as_dict() == made.as_dict()
    assert torch.equal(read.loss, made.loss) and read.loss.dtype == made.loss.dtype
    if keep_outputs:
        assert torch.equal(read.outputs, made.outputs)
        assert read.outputs.shape == (10, 2)
    else:
        assert read.outputs is None


def test_a_notebook_shows_it():
    shown = report(micro_batch_size=4, memory_budget="64MiB")._repr_html_()
    # A bar for the peak, and one for each micro-batch, as wide as its samples.
    widths = [float(part.split("px")[0]) for part in shown.split("width:")[1:]]
    assert len(widths) == 4 and widths[1:] == [96, 96, 48]
    assert 0 < widths[0] < 240
    assert "of 64 MiB" in shown and "[4 (2 times), 2]" in shown
    assert shown.count("<tr>") == shown.count("</tr>") and shown.endswith("</table>")


def test_many_micro_batches_are_one_bar():
    torch.manual_seed(0)
    step = ib.VirtualBatch(torch.nn.Linear(3, 2), torch.nn.CrossEntropyLoss(), micro_batch_size=1)
    shown = step.backward(torch.randn(64, 3), torch.arange(64) % 2)._repr_html_()
    assert shown.count("width:") == 1 and "[1 (64 times)]" in shown


@pytest.mark.parametrize("module", [ib.losses, ib.memory, ib.tape, ib.errors])
def test_completion_shows_public_names_alone(module: ModuleType):
    assert dir(module) == sorted(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


CALLABLES = [
    (f"{module.__name__}.{name}", getattr(module, name))
    for module in (ib, ib.losses, ib.memory)
    for name in module.__all__
    if inspect.isfunction(getattr(module, name)) or inspect.isclass(getattr(module, name))
]


@pytest.mark.parametrize(("name", "function"), CALLABLES, ids=[name for name, _ in CALLABLES])
def test_unknown_keywords_fail_in_type_checkers(name, function):
    """None takes any keyword, as far as its signature says."""
    if inspect.isclass(function) and issubclass(function, Exception | torch.nn.Module):
        pytest.skip("no options")
    try:
        signature = inspect.signature(function)
    except ValueError:
        pytest.skip("bound in C++; its stub is compared with it")
    if function.__module__.startswith("infinitybatch._C"):
        pytest.skip("bound in C++; its stub is compared with it")
    for parameter in signature.parameters.values():
        if parameter.kind is inspect.Parameter.VAR_KEYWORD:
            # Passed on to VirtualBatch or Trainer: a type checker knows these by name.
            passed_on = (Unpack[VirtualBatchOptions], Unpack[TrainerOptions])
            assert parameter.annotation in passed_on


@pytest.mark.parametrize(
    ("function", "options"), [(ib.VirtualBatch, VirtualBatchOptions), (ib.Trainer, TrainerOptions)]
)
def test_keywords_that_are_passed_on_are_those_of_the_function(function, options):
    parameters = inspect.signature(function).parameters.values()
    keywords = {p.name: p.annotation for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert get_type_hints(options) == keywords
