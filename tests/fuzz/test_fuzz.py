"""Random programs are as natively, or refused for a reason; and the fuzzer finds what is broken.

200 of them, 20,000 with INFINITYBATCH_LONG_TESTS, and a twentieth for each kind of schedule;
`run.py` is for people.
"""

import os
import pathlib
import sys
from collections import Counter

import infinitybatch as ib
import pytest
import torch

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

from fuzz.case import Case, Way  # noqa: E402
from fuzz.known import KNOWN, known  # noqa: E402
from fuzz.minimise import minimised  # noqa: E402
from fuzz.runner import run  # noqa: E402
from fuzz.schedules import KINDS, tried  # noqa: E402
from fuzz.script import script_of  # noqa: E402
from fuzz.statements_batch import RANDOM  # noqa: E402
from fuzz.statements_layers import LAYERS  # noqa: E402
from fuzz.statements_state import HOOKS  # noqa: E402

LONG = os.environ.get("INFINITYBATCH_LONG_TESTS", "0") != "0"
SEEDS = 20_000 if LONG else 200
EACH = 500 if LONG else 20
PROGRAMS = {kind: SEEDS if kind == "any" else SEEDS // 20 for kind in KINDS}


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


BEGINS = [(kind, begin) for kind in KINDS for begin in range(0, PROGRAMS[kind], EACH)]


@pytest.mark.parametrize(("program", "begin"), BEGINS)
def test_random_programs(program: str, begin: int, capsys: pytest.CaptureFixture[str]) -> None:
    kinds: Counter[str] = Counter()
    schedules: Counter[str] = Counter()
    swallowed: Counter[str] = Counter()
    count = min(EACH, PROGRAMS[program] - begin)
    for seed in range(begin, begin + count):
        case, outcome = tried(program, seed)
        kinds[outcome.kind] += 1
        schedules.update(outcome.schedules)
        if outcome.kind != "finding":
            continue
        if (reason := known(case, outcome)) is not None:
            with capsys.disabled():
                print(f"\nfuzz: seed {seed} fails and is known: {reason.reason}")
            swallowed[reason.reason] += 1
            continue
        case, outcome = minimised(case, outcome)
        pytest.fail(script_of(case, f"seed {seed}: {outcome.signature}\n{outcome.text}"))
    # A fuzzer whose programs do not run, or are all refused, tells nothing.
    assert kinds["invalid"] <= count // 10
    assert kinds["exact"] >= count // 5
    # Nor one that seldom comes to the schedule that it is for.
    assert program in ("any", "nested") or schedules[program] >= count // 5, schedules
    # Nor does one whose findings are all known.
    for each in KNOWN:
        assert swallowed[each.reason] <= max(2, each.most * count / 100), each.reason


def broken(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Breaks every step in one way."""
    whole = ib.VirtualBatch.backward

    def backward(self: ib.VirtualBatch, inputs: object, targets: object) -> object:
        model = self._model
        if how == "the mean of micro-batches":
            x = inputs["x"]
            for rows in (slice(0, 3), slice(3, len(x))):
                report = whole(self, {"x": x[rows]}, targets[rows])
            for parameter in model.parameters():
                parameter.grad /= 2
            return report
        if how == "needlessly refused":
            raise ib.CouplingError("no reason")
        if how == "untyped":
            raise ValueError("from inside")
        if how == "changed by a failure":
            model.inlet.weight.grad = torch.zeros_like(model.inlet.weight)
            raise ib.BudgetExceeded("too small")
        report = whole(self, inputs, targets)
        if how == "not a number":
            model.out.bias.grad[-1] = torch.nan
        if how == "no gradient":
            model.out.bias.grad = None
        if how == "a generator that moves":
            torch.rand(())
        if how == "a buffer that is new":
            model.inlet.register_buffer("more", torch.zeros(1))
        if how == "in the tenth digit":
            model.inlet.weight.grad *= 1 + 1e-10
        if how == "a forward more":
            with torch.no_grad():
                model(inputs["x"])
        return report

    monkeypatch.setattr(ib.VirtualBatch, "backward", backward)


BREAKS = {
    "the mean of micro-batches": "wrong gradient",
    "needlessly refused": "needless CouplingError",
    "untyped": "untyped ValueError",
    "changed by a failure": "changed after BudgetExceeded",
    "not a number": "wrong gradient",
    "no gradient": "wrong gradient",
    "a generator that moves": "wrong generator",
    "a buffer that is new": "wrong buffer",
    "in the tenth digit": "wrong gradient",
    "a forward more": "wrong attribute",
}
#: What shows whatever numbers were drawn.
IN_RANDOM = ("needlessly refused", "untyped", "not a number", "no gradient", "a buffer that is new")


def some_case(budget: float | None = None, more: str = "counting forward hook") -> Case:
    names = ("linear", "GRU", "LayerNorm", more)
    statements = tuple(s for s in (*LAYERS, *HOOKS, *RANDOM) if s.name in names)
    way = Way("stream", 3, budget, criterion=True)
    return Case(1, statements, "tensor", "plain cross entropy", way, (7, 7, 4))


@pytest.mark.parametrize("how", BREAKS)
def test_the_fuzzer_finds_what_is_broken(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(some_case()).kind == "exact"
    broken(monkeypatch, how)
    outcome = run(some_case(budget=1.0 if how == "changed by a failure" else None))
    assert outcome.kind == "finding"
    assert outcome.signature.startswith(BREAKS[how])
    assert known(some_case(), outcome) is None


@pytest.mark.parametrize("how", IN_RANDOM)
def test_the_fuzzer_finds_what_is_broken_in_programs_that_draw(
    how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = some_case(more="dropout")
    assert "random" in case.tags and run(case).kind == "exact"
    broken(monkeypatch, how)
    outcome = run(case)
    assert outcome.kind == "finding" and outcome.signature.startswith(BREAKS[how])


def test_what_fails_is_made_small_and_is_a_script(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken(monkeypatch, "not a number")
    case, outcome = minimised(some_case(), run(some_case()))
    assert case.statements == ()
    assert len(case.rows) == 1
    exec(compile(script_of(case, outcome.text), "script", "exec"), {"__name__": "script"})
    assert "out.bias nan of" in capsys.readouterr().out


def test_a_step_whose_longest_rows_do_not_fit_in_twos_ends() -> None:
    """Two of them were tried again and again, before any profile."""
    _, outcome = tried("packed", 251)
    assert outcome.kind == "exact" and "packed" in outcome.schedules
