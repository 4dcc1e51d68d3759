"""docs/every-trainer.md says what its result says, and what measures it finds what is known."""

import dataclasses
import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "every-trainer.md"
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def known():
    """One weight whose gradient is the mean of the inputs: 4 of the whole batch, and 6.25 where the
    means of [1, 2, 3, 4] and [10] count the same."""
    from trainers.cases import Case

    def loss(outputs, targets, reduction="mean"):
        return outputs.sum() if reduction == "sum" else outputs.mean()

    inputs = torch.tensor([1.0, 2, 3, 4, 10], dtype=torch.double)[:, None]
    none = torch.zeros(5, dtype=torch.long)
    return Case("known", lambda: nn.Linear(1, 1, bias=False), inputs, none, loss)


def rows_of(module):
    import importlib

    return importlib.import_module(f"trainers.{module}").ROWS


OF_MEANS, OF_SUMS = 6.25, 4.0
ANSWERS = {
    "by_hand": [OF_MEANS, OF_SUMS],
    "loops": [OF_MEANS, OF_SUMS, OF_MEANS],  # accelerate, its guide for unequal samples, Lightning
    "hugging_face": [OF_MEANS, OF_SUMS, OF_MEANS, OF_SUMS],
}
NEEDS = {
    "by_hand": [],
    "loops": ["accelerate", "pytorch_lightning"],
    "hugging_face": ["transformers"],
}


@pytest.mark.parametrize("module", ANSWERS)
def test_a_trainer_gives_the_gradient_that_is_known_of_it(module):
    for name in NEEDS[module]:
        pytest.importorskip(name)
    case = known()
    assert float(case.native()["weight"]) == OF_SUMS
    rows = rows_of(module)
    for row, wanted in zip(rows, ANSWERS[module], strict=True):
        assert float(row.gradient(case)["weight"]) == pytest.approx(wanted, rel=1e-14), row.setting


@pytest.mark.parametrize("module", ANSWERS)
def test_what_is_found_beside_native_is_what_was_published(module):
    """The rows of peers that are installed here, with whatever versions: the same cells."""
    for name in NEEDS[module]:
        pytest.importorskip(name)
    from trainers.page import COLUMNS, cells

    for row in rows_of(module):
        found = cells([row.figure(column) for column in COLUMNS])
        (line,) = [line for line in PAGE.read_text().splitlines() if published(row, line)]
        assert line.split(" | ")[1:] == [*found[:-1], found[-1] + " |"], line


def published(row, line):
    return line.startswith(f"| [{row.peer}](") and f": {row.setting} |" in line


def test_ours_are_exact_but_for_random_numbers_of_their_own():
    from trainers.page import COLUMNS, cells

    for row in rows_of("ours"):
        dropout = "exact" if "match_native_rng" in row.setting else "another draw"
        found = cells([row.figure(column) for column in COLUMNS])
        assert found == ["exact"] * 5 + [dropout], row.setting


def row_with(step, **changes):
    return dataclasses.replace(rows_of("by_hand")[0], step=step, **changes)


def test_a_trainer_that_steps_never_or_twice_is_no_measurement():
    from trainers.row import OneStep

    def twice(case, model):
        optimizer = OneStep(model)
        for inputs, targets in case.parts():
            case.loss(model(inputs), targets).backward()
            optimizer.step()

    with pytest.raises(AssertionError, match="no optimizer step"):
        row_with(lambda case, model: None).figure("ragged mean")
    with pytest.raises(AssertionError, match="more than one"):
        row_with(twice).figure("ragged mean")


def test_only_the_refusal_that_is_expected_is_one():
    from trainers.page import cell

    def refuse(case, model):
        raise NotImplementedError("BatchNorm  is not\nsupported. Use another layer.")

    row = row_with(refuse, refuses={"BatchNorm": "NotImplementedError"})
    wanted = "refused: NotImplementedError: BatchNorm is not supported"
    assert cell(row.figure("BatchNorm")) == wanted
    with pytest.raises(NotImplementedError):
        row.figure("contrastive")


def test_other_numbers_are_another_draw_and_wrong_ones_are_not():
    from trainers.page import cell
    from trainers.row import OneStep

    def seeded(seed, factor=1.0):
        def step(case, model):
            optimizer = OneStep(model)
            for inputs, targets in case.parts():
                if seed is not None:
                    torch.manual_seed(seed)  # the same numbers for each micro-batch
                (factor * case.loss(model(inputs), targets) / case.steps).backward()
            optimizer.step()

        return step

    assert cell(row_with(seeded(None)).figure("dropout")) == "another draw"
    assert cell(row_with(seeded(7)).figure("dropout")) not in ("another draw", "exact")
    assert cell(row_with(seeded(None, 1.5)).figure("dropout")) not in ("another draw", "exact")
    assert cell(row_with(seeded(None, 1.5)).figure("equal parts")) == "0.5"


def test_a_table_without_a_cell_or_a_peer_is_refused():
    from quoted import NotToBeQuoted, Quoted
    from trainers import page
    from trainers.cases import CASES

    assert tuple(CASES) == page.COLUMNS
    row = rows_of("by_hand")[0]
    figures = [row.figure(column) for column in page.COLUMNS]
    assert len(page.by_row(figures)) == 1
    with pytest.raises(NotToBeQuoted, match="no figure of dropout"):
        page.by_row(figures[:-1])
    with pytest.raises(NotToBeQuoted, match="twice"):
        page.by_row([*figures, figures[0]])
    run = {"findings": {"figures": figures}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "latest", lambda *_, **__: Quoted("some.json", [run]))
        with pytest.raises(NotToBeQuoted, match="no figures of accelerate"):
            page.table()


def test_the_page_says_what_its_result_says_in_few_words():
    import figures
    from trainers import page

    text = PAGE.read_text()
    assert figures.replaced(text, figures.PARTS["docs/every-trainer.md"]) == text
    for peer in page.PEERS:
        assert f"| [{peer}](" in text
    before, rest = text.split("<!-- trainers")
    words = before + rest.split("<!-- end of trainers -->")[1]
    assert len(re.findall(r"\w[\w'.-]*", words)) <= 250
    for name in re.findall(r"`((?:benchmarks|tests)/[^`]+)`", text):
        assert (ROOT / name).exists(), name
