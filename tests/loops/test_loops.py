"""Training loops give what the table of verdicts says of them, in every way."""

import os
import pathlib
import sys

import pytest

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))

import infinitybatch as ib  # noqa: E402
import torch  # noqa: E402

from loops import table  # noqa: E402
from loops.loop import LOOPS, Loop, Training, classify, linear  # noqa: E402
from loops.themes import THEMES, every_loop  # noqa: E402
from loops.training import train, verdict, verdicts  # noqa: E402
from loops.ways import NATIVE, WAYS  # noqa: E402

LISTED = table.read()
TIGHT = [way.name for way in WAYS if way.rooms]
#: A third of the loops; all of them in make test-long.
LONG = os.environ.get("INFINITYBATCH_LONG_TESTS") == "1"


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", list(every_loop())[:: 1 if LONG else 3])
def test_a_loop_is_as_listed(name: str) -> None:
    found = verdicts(every_loop()[name])
    changed = [
        f"{way}: {verdict}, but listed as {LISTED[name][way]}"
        for way, verdict in found.items()
        if not table.same(LISTED[name][way], verdict)
        # Kernels of another machine take other bytes: under tight budgets the table is a bound.
        and not (way in TIGHT and not table.needs_limit(verdict))
    ]
    assert not changed, (
        f"{name}: {'; '.join(changed)}. See it by itself: `python tests/loops/run.py {name}`. If it "
        f"is meant, `python tests/loops/run.py --write {name}` puts it into tests/loops/verdicts.md; "
        f"what became silent is a defect, or needs a row in docs/limits.md that the table names."
    )


def test_the_table_lists_every_loop_and_no_other() -> None:
    assert list(LISTED) == [name for t in THEMES for name, x in LOOPS.items() if x.theme == t]


def test_the_table_is_as_the_command_writes_it() -> None:
    assert table.TABLE.read_text() == table.text_of(LISTED)


@pytest.mark.parametrize("name", LISTED)
def test_what_is_silent_or_untyped_names_its_limit(name: str) -> None:
    verdicts = [LISTED[name][way.name] for way in WAYS]
    named = table.named_limits(LISTED[name]["limit"])
    assert bool(named) == any(map(table.needs_limit, verdicts)), (
        f"{name}: the last column of tests/loops/verdicts.md names a row of docs/limits.md by its "
        f"first words exactly where a verdict is silent or untyped"
    )
    for words in named:
        rows = [row for row in table.limits() if row.startswith(words)]
        assert len(rows) == 1, f"{name}: {len(rows)} rows of docs/limits.md begin with {words!r}"


def break_one_value(model: torch.nn.Module, how: str) -> None:
    if how == "gradients":
        model.weight.grad[0, 0] = torch.nan
    if how == "parameters":
        model.weight.data[0, 0] += 1e-3
    if how == "buffers":
        model.steps += 1
    if how == "state":
        model.calls = 7
    if how == "generators":
        torch.rand(())


@pytest.mark.parametrize(
    "how", ["nothing", "gradients", "parameters", "buffers", "loss", "state", "generators"]
)
def test_whatever_differs_is_noticed(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def some_loop() -> Training:
        model = linear()
        model.register_buffer("steps", torch.tensor(0))
        model.calls = 0
        return classify(model)

    one = Loop("some_loop", "none", some_loop)
    wanted = train(one, NATIVE)
    whole = ib.VirtualBatch.backward

    def backward(self: ib.VirtualBatch, inputs: object, targets: object) -> object:
        report = whole(self, inputs, targets)
        break_one_value(self._model, how)
        if how == "loss":
            report.loss.mul_(2)
        return report

    monkeypatch.setattr(ib.VirtualBatch, "backward", backward)
    found = verdict(one, WAYS[0], wanted)
    assert found == "exact" if how == "nothing" else found.startswith("silent"), found
    # Another parameter has other gradients in the next turn.
    assert how in ("nothing", "gradients", "parameters") or found.endswith(f"in {how}")
