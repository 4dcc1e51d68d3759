"""docs/histories.md: its code runs as it is printed, one block after the other."""

import json
import re
from pathlib import Path

DOCUMENT = (Path(__file__).resolve().parents[2] / "docs/histories.md").read_text()


def test_the_code_runs(capsys):
    blocks = re.findall(r"^```python\n(.*?)^```", DOCUMENT, re.MULTILINE | re.DOTALL)
    assert len(blocks) == 4
    names = {}
    for block in blocks:
        exec(compile(block, "docs/histories.md", "exec"), names)
    assert names["samples"] == 300 and names["outputs"].shape == (300, 10)
    lines = (Path(names["folder"]) / "run.jsonl").read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines].count("batch") == 6
    shown = capsys.readouterr()
    assert "epoch 3/3 · batch 2/2 · loss" in shown.err and "5/5 loss" in shown.err
    assert "MemoryHistory (bytes):" in shown.out and "equal (largest error 0)" in shown.out


def test_every_name_in_it_is_there():
    import infinitybatch as ib

    text = re.sub(r"^```.*?^```$", "", DOCUMENT, flags=re.MULTILINE | re.DOTALL)
    names = re.findall(r"`(\w{2,})(?:\([^`]*\))?`", text)
    assert len(names) > 5
    for name in names:
        places = (ib, ib.histories, ib.statistics, ib.tools)
        assert any(hasattr(place, name) for place in places), name
