"""A case for each seed."""

import random

from .case import Case, Way
from .losses import LOSSES
from .outputs import OUTPUTS
from .statements_batch import MIXING, RANDOM, WHOLE_BATCH
from .statements_layers import LAYERS
from .statements_rows import BRANCHES, IDS
from .statements_state import CODE, DIALS, HOOKS, IN_PLACE, SLOTS, STATE

#: Groups of statements, and how often one is taken where the group takes part.
GROUPS = [
    (LAYERS, 6),
    (IN_PLACE, 2),
    (STATE, 1),
    (HOOKS, 1),
    (CODE, 1),
    (WHOLE_BATCH, 1),
    (RANDOM, 1),
]


def statements_of(chance: random.Random) -> tuple:
    taking_part = [GROUPS[0], *(group for group in GROUPS[1:] if chance.random() < 0.35)]
    weights = [weight for _, weight in taking_part]
    count = chance.choice([1, 2, 3, 4, 5, 7])
    chosen = [chance.choice(group) for group, _ in chance.choices(taking_part, weights, k=count)]
    if chance.random() < 0.25:  # one that mixes, where it stands is left to chance
        chosen.insert(chance.randrange(len(chosen) + 1), chance.choice(MIXING))
    return tuple(chosen)


def with_rows(seed: int, statements: tuple) -> tuple:
    """A statement more for some seeds, which leaves the other ones' programs alone."""
    chance = random.Random(f"rows {seed}")
    if chance.random() >= 0.2:
        return statements
    place = chance.randrange(len(statements) + 1)
    return *statements[:place], chance.choice(chance.choice([IDS, BRANCHES])), *statements[place:]


def way_of(chance: random.Random, rows: int, loss: str, output: str, tags: frozenset) -> Way:
    separable = LOSSES[loss].separable
    api = chance.choice(["stream", "coupled", "wrap", "wrap"] if separable else ["coupled", "wrap"])
    size = chance.choice([1, 1, 2, 3, 5, rows, None])
    budget = None
    if size is None or chance.random() < 0.1:
        budget = chance.choice([0.1, 0.3, 0.5, 0.8, 1.5, 3.0, 200.0])
    options: dict[str, object] = {}
    if "random" in tags and chance.random() < 0.85 or chance.random() < 0.1:
        options["match_native_rng"] = True
    # What the host reads breaks that promise, and nobody could tell.
    if chance.random() < 0.2 and tags.isdisjoint({"host_read", "branches"}):
        options["static_graph"] = True
    if chance.random() < 0.25:
        options["offload"] = chance.choice(["always", "never"])
    if size is not None and (api != "stream" or "whole" in tags) and chance.random() < 0.3:
        options["retained_micro_batches"] = chance.choice([1, 2, 9])
    tapes = {"static_graph", "match_native_rng"}.isdisjoint(options)
    if api == "coupled" and tapes and chance.random() < 0.2:
        options["use_tapes"] = False
    alone = {"use_tapes", "retained_micro_batches", "static_graph"}.isdisjoint(options)
    if api != "wrap" and size is not None and chance.random() < 0.2 and alone:
        options["checkpoint_segments"] = chance.choice([2, 3, 9])
    if api != "wrap" and chance.random() < 0.15:
        options["keep_outputs"] = True
    loop = "once"
    if api == "wrap" and chance.random() < 0.6:
        loop = chance.choice(["two calls", "retain_graph", "no_grad between", "autograd.grad"])
    criterion = bool(LOSSES[loss].criterion) and output == "tensor" and chance.random() < 0.7
    return Way(api, size, budget, options, criterion, loop, chance.random() < 0.15)


def with_slots(seed: int, statements: tuple) -> tuple:
    """Some cases have one of these too; all others stay the programs that they were."""
    chance = random.Random(f"{seed} slots")
    if chance.random() >= 0.1:
        return statements
    place = chance.randrange(len(statements) + 1)
    return (*statements[:place], chance.choice(SLOTS), *statements[place:])


def layouts_of(chance: random.Random, steps: int) -> tuple[str, ...]:
    kinds = ["plain", "transposed", "transposed", "holes", "expanded"]
    return tuple(chance.choice(kinds) for _ in range(steps))


def further(seed: int, case: Case) -> Case:
    """What came to the programs of earlier seeds: other layouts of some steps' inputs, settings
    that change between steps."""
    chance = random.Random(f"further {seed}")
    numbers = case.way.options.get("match_native_rng")
    if chance.random() < (0.5 if numbers else 0.1):
        case = case.having(layouts=layouts_of(chance, len(case.rows)))
    if chance.random() < (0.5 if case.way.options.get("static_graph") else 0.05):
        statements = [*case.statements]
        statements.insert(chance.randrange(len(statements) + 1), chance.choice(DIALS))
        rows = case.rows if len(case.rows) > 2 else (*case.rows, case.rows[-1], case.rows[-1])
        case = case.having(statements=tuple(statements), rows=rows)
    return case


def case_of(seed: int) -> Case:
    chance = random.Random(seed)
    statements = with_slots(seed, with_rows(seed, statements_of(chance)))
    output = chance.choice(["tensor"] * 6 + list(OUTPUTS))
    loss = chance.choice(list(LOSSES))
    rows = chance.choice([4, 5, 6, 7, 8, 9, 11, 13])
    steps = chance.choice(
        [(rows,), (rows, rows), (rows, rows, max(3, rows // 2)), (rows, rows, rows + 3)]
    )
    tags = frozenset().union(*(s.tags for s in statements), OUTPUTS[output].tags)
    way = way_of(chance, rows, loss, output, tags)
    fault = None
    if chance.random() < 0.2:
        fault = chance.choice([("raise", chance.randint(1, 6)), ("memory", chance.randint(1, 200))])
    case = Case(
        seed,
        statements,
        output,
        loss,
        way,
        steps,
        momentum=chance.choice([0.0, 0.9]),
        evaluate=chance.random() < 0.3,
        accumulate=chance.random() < 0.15,
        fault=fault,
    )
    return further(seed, case)
