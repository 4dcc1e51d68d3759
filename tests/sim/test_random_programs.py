"""Random programs on the simulated device are as natively there, or refused for a reason."""

import gc
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from fuzz.known import known  # noqa: E402
from fuzz.schedules import KINDS, tried  # noqa: E402
from fuzz.script import script_of  # noqa: E402

#: Of a batch's ops that see all of it there are many, and each is rehearsed.
EACH = {"any": 20, "packed": 10, "kept": 2, "nested": 10}


@pytest.fixture(autouse=True)
def nothing_is_left():
    """Modules in cycles, whose memory others would find to be free in the middle of a test."""
    yield
    gc.collect()
    torch.accelerator.empty_cache()


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("kind", KINDS)
def test_random_programs(kind: str, part: int) -> None:
    outcomes: Counter[str] = Counter()
    schedules: Counter[str] = Counter()
    count = EACH[kind]
    for seed in range(part * count, (part + 1) * count):
        case, outcome = tried(kind, seed)
        outcomes[outcome.kind] += 1
        schedules.update(outcome.schedules)
        if outcome.kind == "finding" and known(case, outcome) is None:
            pytest.fail(script_of(case, f"seed {seed}: {outcome.signature}\n{outcome.text}"))
    # Programs that do not run, or are all refused, tell nothing.
    assert outcomes["invalid"] <= count // 5
    assert outcomes["exact"] >= count // 5
    assert kind != "packed" or schedules[kind]


def test_a_look_that_takes_too_much_takes_less_the_next_time() -> None:
    """What an attempt had learned of it was forgotten by the next one, which never ended."""
    case, outcome = tried("any", 346)
    assert case.way.api == "wrap"
    assert outcome.kind != "finding" or known(case, outcome) is not None
