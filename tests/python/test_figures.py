"""The documents' figures: made from results that can be trusted, and the same as they."""

import json
import re
import shutil
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def importable(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def run(ratio=1.0, **changes):
    figure = {"contestant": "ours", "CPU over native": {"median": ratio}}
    plain = {"setting": "one thread, tuned malloc", "others": 0.01, "quiet": True, "failed": False}
    return plain | {"findings": {"figures": [figure], "notes": []}} | changes


def put(folder, name, day, *runs, **changes):
    report = {"date": f"2026-01-{day:02}", "commit": "abc", "runs": list(runs)} | changes
    report = {key: value for key, value in report.items() if value is not None}
    (folder / f"2026-01-{day:02}-{name}-threads-1.json").write_text(json.dumps(report))


def test_documents_say_what_the_results_say():
    import figures

    assert figures.main([]) == 0


def test_what_was_typed_or_drawn_by_hand_is_found(tmp_path, capsys):
    import chart
    import figures

    names = [*figures.PARTS, *(str(path.relative_to(ROOT)) for path in chart.pictures())]
    assert len(names) == 6
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    assert figures.main([], tmp_path) == 0
    for name in names:
        file = tmp_path / name
        text = file.read_text()
        # In a document the first figure of a table, in a picture that of a path.
        mark = "made by benchmarks/figures.py" if name.endswith(".md") else "<path"
        before, behind = text.split(mark, 1)
        file.write_text(before + mark + re.sub(r"(\d)(\D)", r"\g<1>9\2", behind, count=1))
        assert file.read_text() != text
        assert figures.main([], tmp_path) == 1
        assert f"{name} says other figures" in capsys.readouterr().err
        assert figures.main(["--write"], tmp_path) == 0
        assert file.read_text() == text


DOUBTS = {
    "another's work": {"quiet": False, "others": 1.77},
    "an old mark": {"findings": {"figures": [], "notes": ["so: do not trust these times."]}},
    "nobody knows": {"others": None, "quiet": None},
    "no mark of quiet": {"quiet": None},
    "not finished": {"failed": True},
    "toy": {"setting": "one thread, tuned malloc, toy sizes"},
}


@pytest.mark.parametrize("doubt", DOUBTS)
def test_a_run_that_cannot_be_trusted_cannot_be_quoted(doubt, tmp_path):
    from quoted import NotToBeQuoted, latest

    put(tmp_path, "time", 2, run(0.5, **DOUBTS[doubt]))
    with pytest.raises(NotToBeQuoted, match="2026-01-02-time") as raised:
        latest("time", folder=tmp_path)
    assert "scripts/bench.sh time --threads 1" in str(raised.value)
    put(tmp_path, "time", 1, run(0.9))  # an older one can
    assert latest("time", folder=tmp_path).ratio(contestant="ours") == 0.9


def test_a_mark_of_quiet_that_is_not_there_is_none(tmp_path):
    from quoted import NotToBeQuoted, latest

    unmarked = run()
    del unmarked["quiet"]
    put(tmp_path, "time", 2, unmarked)
    with pytest.raises(NotToBeQuoted, match="nobody knows"):
        latest("time", folder=tmp_path)


@pytest.mark.parametrize("commit", ["abc-dirty", "unknown", "", None])
@pytest.mark.parametrize("timed", [True, False])
def test_results_of_code_that_nobody_has_cannot_be_quoted(commit, timed, tmp_path):
    from quoted import NotToBeQuoted, latest

    put(tmp_path, "time", 2, run(), commit=commit, timed=timed)
    with pytest.raises(NotToBeQuoted, match=r"abc-dirty|does not say of which commit"):
        latest("time", folder=tmp_path)


def test_the_latest_is_quoted_and_no_other_suite(tmp_path):
    from quoted import NotToBeQuoted, latest

    put(tmp_path, "time", 1, run(0.9))
    put(tmp_path, "time", 3, run(0.8))
    put(tmp_path, "coupled", 4, run(0.7))
    assert latest("time", folder=tmp_path).ratio(contestant="ours") == 0.8
    with pytest.raises(NotToBeQuoted, match="has no figure"):
        latest("time", folder=tmp_path).ratio(contestant="theirs")
    with pytest.raises(NotToBeQuoted, match="no run of tape"):
        latest("tape", folder=tmp_path)


def test_peaks_may_be_quoted_from_a_busy_machine_and_times_may_not(tmp_path):
    from quoted import NotToBeQuoted, latest

    busy = {"quiet": False, "others": 1.77}
    put(tmp_path, "reach", 2, run(0.5, **busy), timed=False)
    assert latest("reach", folder=tmp_path).ratio(contestant="ours") == 0.5
    put(tmp_path, "time", 2, run(0.5, **busy), timed=True)
    with pytest.raises(NotToBeQuoted, match="1.77 cores"):
        latest("time", folder=tmp_path)


def test_a_wrong_network_cannot_be_quoted_away(tmp_path, monkeypatch):
    import listed

    shutil.copytree(listed.FAMILIES, tmp_path / "families")
    monkeypatch.setattr(listed, "FAMILIES", tmp_path / "families")
    file = tmp_path / "families" / "foreign.json"
    networks = json.loads(file.read_text())
    networks["networks"]["vit"]["wrap"] = "WRONG: gradient of x is 1 off, 1e-12 allowed"
    file.write_text(json.dumps(networks))
    with pytest.raises(listed.NotToBeQuoted, match="vit"):
        listed.families()
