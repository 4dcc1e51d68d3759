"""What a message says to do is done, on the case that provokes it, and succeeds. Every message of the
sources is followed here, or stands in messages_not_followed.txt with the reason."""

import importlib
import sys
from pathlib import Path

import pytest
from followed_support import MESSAGES, Case, follow

AREAS = [
    "batches",
    "options",
    "wrap",
    "losses",
    "trainer",
    "callbacks",
    "audit",
    "models",
    "outputs",
    "steps",
    "state",
    "made",
]
CASES: dict[str, list[Case]] = {
    area: importlib.import_module(f"followed_{area}").CASES for area in AREAS
}

sys.path.append(str(Path(__file__).with_name("command_line")))
COMMANDS = importlib.import_module("followed_commands")

#: Parts of the messages that test_obeyed_messages.py follows.
OBEYED = [
    "if the samples of",
    "give loss=",
]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=f"{area}-{i}: {case[0][:60]}")
        for area, cases in CASES.items()
        for i, case in enumerate(cases)
    ],
)
def test_a_message_that_is_obeyed(case: Case) -> None:
    follow(case)


NOT_FOLLOWED = Path(__file__).with_name("messages_not_followed.txt")


def not_followed() -> dict[str, str]:
    """Messages as the sources have them, with the heading that they stand under as the reason."""
    reason, found = "", {}
    for line in NOT_FOLLOWED.read_text().splitlines():
        if line.startswith("# "):
            reason = line[2:]
        elif line:
            assert reason, line
            found[line] = reason
    return found


def test_every_message_is_followed_or_says_why_not() -> None:
    parts = [case[0] for cases in CASES.values() for case in cases] + OBEYED
    parts += [case[0] for case in COMMANDS.PYTHON + COMMANDS.PROGRAM]
    followed = {str(m) for m in MESSAGES if any(part in m.text for part in parts)}
    listed, known = not_followed(), {str(message) for message in MESSAGES}
    missing = sorted(known - followed - listed.keys())
    assert not missing, "follow it in followed_*.py, or list it with the reason:\n" + "\n".join(
        missing
    )
    gone = sorted(listed.keys() - known)
    assert not gone, "no source says that any more:\n" + "\n".join(gone)
    twice = sorted(listed.keys() & followed)
    assert not twice, "is followed, and listed all the same:\n" + "\n".join(twice)
