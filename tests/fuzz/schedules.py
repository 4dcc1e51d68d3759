"""Random programs for schedules that the others seldom meet: boundary activations kept in part, rows
packed by their lengths, models that are wrapped already. Each has seeds of its own."""

import random
from collections.abc import Callable
from dataclasses import replace

from .case import Case, Way
from .found import Outcome
from .generate import case_of
from .losses import LOSSES, LOSSES_OF_OBJECTS
from .outputs import OUTPUTS
from .refusals import TIGHT
from .runner import run
from .statements_batch import RANDOM, WHOLE_BATCH
from .statements_layers import LAYERS
from .statements_state import HOOKS, IN_PLACE, STATE
from .statements_words import LOSSES_OF_WORDS, NUMBERS, OUTPUTS_OF_WORDS, WORDS

#: Outputs that mix no samples.
PLAIN = [name for name, output in OUTPUTS.items() if "mixes" not in output.tags]
LOOPS = ["once", "once", "two calls", "retain_graph", "no_grad between", "autograd.grad"]
#: Whose scores of all pairs would be most of a peak.
PAIRS = ("contrastive", "batch-hard triplets", "ranking", "information")
#: What no recording holds is refused in front of any plan.
OPAQUE = {"opaque", "host_read", "dynamic", "dispatch_only", "weight_written", "input_write"}


def _some(chance: random.Random, *groups: tuple[list, int]) -> list:
    """Statements of these groups, each so many at most."""
    fit = [[s for s in group if OPAQUE.isdisjoint(s.tags)] for group, _ in groups]
    counts = [chance.randint(0, most) for _, most in groups]
    return [chance.choice(g) for g, count in zip(fit, counts, strict=True) for _ in range(count)]


def _api(chance: random.Random, loss: str) -> tuple[str, str]:
    separable = (LOSSES | LOSSES_OF_WORDS)[loss].separable
    api = chance.choice(["stream", "coupled", "wrap", "wrap"] if separable else ["coupled", "wrap"])
    return api, chance.choice(LOOPS) if api == "wrap" else "once"


def _fault(chance: random.Random) -> tuple[str, int] | None:
    if chance.random() > 0.15:
        return None
    return chance.choice([("raise", chance.randint(1, 6)), ("memory", chance.randint(1, 400))])


#: Statements that came later are drawn by `any` alone: these seeds stay the programs that they were.
OF_EARLIER_SEEDS = STATE[:16]


def kept_case_of(seed: int) -> Case:
    """Many ops of the whole batch, of whose boundary activations a budget holds some."""
    chance = random.Random(f"kept {seed}")
    norms = [chance.choice(WHOLE_BATCH) for _ in range(chance.randint(3, 7))]
    others = _some(
        chance, (LAYERS, 4), (IN_PLACE, 1), (OF_EARLIER_SEEDS, 1), (HOOKS, 1), (RANDOM, 1)
    )
    statements = norms + others
    chance.shuffle(statements)
    tags = frozenset().union(*(s.tags for s in statements))
    loss = chance.choice([name for name in LOSSES if name not in PAIRS])
    api, loop = _api(chance, loss)
    options: dict[str, object] = {"offload": "never" if chance.random() < 0.9 else "auto"}
    if "random" in tags and chance.random() < 0.5:
        options["match_native_rng"] = True
    elif chance.random() < 0.15:
        options["static_graph"] = True
    size = chance.choice([8, 16, 16, 25, None])
    budget = chance.uniform(0.4, 0.8)
    way = Way(api, size, budget, options, loop=loop, input_gradient=chance.random() < 0.15)
    rows = chance.choice([128, 160, 201])
    return Case(
        seed, tuple(statements), chance.choice(["tensor"] * 4 + PLAIN), loss, way,
        (rows,) * chance.choice([2, 3, 4]), momentum=chance.choice([0.0, 0.9]),
        evaluate=chance.random() < 0.2, accumulate=chance.random() < 0.15, fault=_fault(chance),
    )  # fmt: skip


def packed_case_of(seed: int) -> Case:
    """Padded sequences of other lengths, trimmed, in micro-batches of so many positions or bytes."""
    chance = random.Random(f"packed {seed}")
    words = [chance.choice(WORDS) for _ in range(chance.randint(1, 3))]
    others = _some(
        chance, (LAYERS, 3), (IN_PLACE, 1), (OF_EARLIER_SEEDS, 1), (HOOKS, 1), (RANDOM, 1)
    )
    statements = words + others
    chance.shuffle(statements)
    beside = random.Random(f"numbers {seed}")
    if beside.random() < 0.3:
        statements.insert(beside.randrange(len(statements) + 1), beside.choice(NUMBERS))
    output = chance.choice(["tensor", "tensor", *OUTPUTS_OF_WORDS, *PLAIN])
    loss = chance.choice(list(LOSSES_OF_WORDS if output == "classes of words" else LOSSES))
    api, loop = _api(chance, loss)
    options: dict[str, object] = {}
    size = budget = None
    by = chance.choice(["tokens", "rows", "both", "bytes", "bytes", "bytes"])
    if by in ("tokens", "both"):
        options["micro_batch_tokens"] = chance.choice([15, 30, 60])
    if by in ("rows", "both"):
        size = chance.choice([1, 2, 3, 5])
    if by == "bytes" or chance.random() < 0.1:
        budget = chance.choice([0.4, 0.6, 0.8, 1.5, 200.0])
    if api != "wrap" and chance.random() < 0.2 and loss not in LOSSES_OF_WORDS:
        options["keep_outputs"] = True
    trim = 'ib.trim_padding(mask="mask")'
    if api == "stream" and loss in LOSSES_OF_WORDS and chance.random() < 0.7:
        trim = 'ib.trim_padding(mask="mask", targets=True)'
    criterion = bool((LOSSES | LOSSES_OF_WORDS)[loss].criterion) and "tensor" in (output,)
    rows = chance.choice([7, 12, 16, 24])
    return Case(
        seed, tuple(statements), output, loss, Way(api, size, budget, options, criterion, loop, trim=trim),
        (rows,) * chance.choice([2, 3, 5]), momentum=chance.choice([0.0, 0.9]),
        evaluate=chance.random() < 0.2, accumulate=chance.random() < 0.15, fault=_fault(chance),
        words=chance.choice([8, 11, 19]), left=chance.random() < 0.3,
    )  # fmt: skip


def nested_case_of(seed: int) -> Case:
    """Any program, wrapped in part or as a whole before it is given to the library; or with targets
    that have no rows; or both."""
    chance = random.Random(f"nested {seed}")
    case = case_of(seed)
    where = chance.choice(["itself", "the outlet", "each child", ""])
    way = replace(case.way, nested=where)
    if not where or chance.random() < 0.3:
        loss = chance.choice(list(LOSSES_OF_OBJECTS))
        api = "coupled" if way.api == "stream" else way.api
        way = replace(way, api=api, criterion=False)
        case = case.having(loss=loss)
    return case.having(way=way)


#: By name, which is also what outcomes call its schedule.
KINDS: dict[str, Callable[[int], Case]] = {
    "any": case_of,
    "kept": kept_case_of,
    "packed": packed_case_of,
    "nested": nested_case_of,
}


def tried(kind: str, seed: int) -> tuple[Case, Outcome]:
    """A case as it went. Of boundary activations only a narrow range of budgets keeps some and not
    all: where one is too tight, larger ones are tried."""
    case = KINDS[kind](seed)
    outcome = run(case)
    budget = case.way.budget or 0
    while kind == "kept" and outcome.signature == TIGHT and budget < 1.5:
        budget *= 1.2
        case = case.having(way=replace(case.way, budget=budget))
        outcome = run(case)
    return case, outcome
