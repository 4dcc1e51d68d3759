"""Ways out of errors of audits, tools, benchmarks and InfinityBatch: what provokes one, and what its
message says."""

import infinitybatch as ib
import torch
from audit_support import CRITERION, X, Y, loader, loss, net, sgd, watched
from followed_support import Case
from infinitybatch import tools
from test_audit_misuse import MISUSE as AUDITS
from test_audit_misuse import MODEL, OPTIMIZER, PAIRS, frozen, run, triples
from torch import nn
from torch.nn import functional as F


def right(watch):
    assert watch.ok, print(watch)


def loop(**options):
    right(watched(run, **options))


def summed(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1], reduction="sum") / 12


def after(step):
    """A step that does all that a loop does between two steps."""
    model = net()
    optimizer = sgd(model)

    def whole(model, batch):
        step(model, batch)
        optimizer.step()
        optimizer.zero_grad()

    return ib.audit(whole, model, (X, Y))


def over(watched_model, trained):
    with ib.audit.watch(watched_model, loss=loss, loader=(batches := loader())) as watch:
        run(trained, sgd(trained), batches)
    right(watch)


def pairs(watch):
    MODEL.zero_grad()  # of other cases
    with watch:
        run(MODEL, OPTIMIZER, watch.loader)
    right(watch)


def twice(model, optimizer, batches):
    for x, y in batches:
        (CRITERION(model(x), y) + CRITERION(model(-x), y)).backward()
        optimizer.step()
        optimizer.zero_grad()


def bench(**options):
    ib.bench(net(), CRITERION, X, Y, **{"micro_batch_size": 8, "rounds": 1} | options)


def infinity(*, data=True):
    model = net()
    return ib.InfinityBatch(model, sgd(model), CRITERION, loader() if data else None)


def of_infinity(*, outputs=True, gradient=True):
    """A loop of one's own, a step of which leaves something out."""
    batch = infinity()
    found = batch.batch_(X) if outputs else None
    if gradient:
        value = batch.loss(Y) if found is None else batch.criterion(found, Y)
        value.backward()
    batch.step()


def padded(x):
    return F.pad(x, (0, 6 - x.shape[1]))


NARROW = [(X[:4, :5], Y[:4]), (X[:4], Y[:4])]


def of_widths(model, optimizer, batches):
    for x, y in batches:
        (CRITERION(model(padded(x)), y) / 2).backward()
    optimizer.step()


def wide(**options):
    return watched(of_widths, batches=NARROW, **options)


def by_width(model, batch):
    return CRITERION(model(padded(batch[0])), batch[1])


def joining(batches):
    return torch.cat([padded(x) for x, _ in batches]), torch.cat([y for _, y in batches])


CASES: list[Case] = [
    (
        "model is the class {} itself; give an instance: {}(...)",
        AUDITS["model is a class"][0],
        lambda: ib.audit.watch(nn.Linear(6, 5)),
    ),
    (
        "{} has no parameter that requires a gradient: model.requires_grad_(True)",
        AUDITS["frozen"][0],
        lambda: ib.audit.watch(frozen().requires_grad_(True)),
    ),
    (
        "optimizer must be a torch.optim.Optimizer, not {}: watch(model, optimizer, loader)",
        AUDITS["loader as optimizer"][0],
        lambda: pairs(ib.audit.watch(MODEL, OPTIMIZER, loader())),
    ),
    (
        "the {} holds no parameter of this {}: give the model that it trains",
        AUDITS["another's optimizer"][0],
        lambda: pairs(ib.audit.watch(MODEL, OPTIMIZER, loader())),
    ),
    (
        "loader must be an iterable of batches, not {}: watch(model, optimizer, loader)",
        AUDITS["loader"][0],
        lambda: pairs(ib.audit.watch(MODEL, OPTIMIZER, loader())),
    ),
    (
        "loss must be a criterion of torch.nn or a function of model and batch, not {}",
        AUDITS["loss"][0],
        lambda: (loop(loss=loss), loop(loss=CRITERION)),
    ),
    (
        "loss is the class {} itself; give an instance: {}()",
        AUDITS["loss is a class"][0],
        lambda: loop(loss=nn.CrossEntropyLoss()),
    ),
    (
        "join must be a function of a list of batches, not {}",
        AUDITS["join"][0],
        lambda: right(wide(loss=by_width, join=joining)),
    ),
    ("steps must be at least 1, not {}", AUDITS["steps"][0], lambda: loop(steps=1)),
    (
        "{} is {}; it is True or False",
        AUDITS["same_random_numbers"][0],
        lambda: loop(same_random_numbers=True),
    ),
    (
        "run the loop inside `with ib.audit.watch(...):` and read the report after it",
        AUDITS["report before the loop"][0],
        lambda: watched(run).report,
    ),
    (
        "this watch was entered before: make another one for another loop",
        AUDITS["entered twice"][0],
        lambda: [pairs(ib.audit.watch(MODEL, OPTIMIZER, loader())) for _ in range(2)],
    ),
    (
        "watch the very model that is trained",
        AUDITS["another model"][0],
        lambda: over(m := net(), m),
    ),
    (
        "for batch in watched.loader",
        AUDITS["a list"][0],
        lambda: pairs(ib.audit.watch(MODEL, OPTIMIZER, PAIRS, loss=loss)),
    ),
    ("watch the loader that it iterates", AUDITS["another loader"][0], lambda: over(m := net(), m)),
    (
        "cannot tell what the loss of your loop is: {}; {}",
        AUDITS["two calls"][0],
        lambda: right(
            watched(twice, loss=lambda m, b: CRITERION(m(b[0]), b[1]) + CRITERION(m(-b[0]), b[1]))
        ),
    ),
    (
        "batch{} has shapes {} in the micro-batches of a step, which cannot be joined: pad them to one size, or {}",
        lambda: wide(loss=by_width),
        lambda: (
            right(wide(loss=by_width, join=joining)),
            right(watched(of_widths, batches=[(padded(x), y) for x, y in NARROW], loss=by_width)),
        ),
    ),
    (
        "the batches of a step differ in their structure; {}",
        AUDITS["structure"][0],
        lambda: right(
            watched(of_structures, batches=STRUCTURES, loss=first_of, join=without_structure)
        ),
    ),
    (
        "batch{} differs between the micro-batches of a step and has no row for each sample; {}",
        AUDITS["numbers"][0],
        lambda: right(
            watched(
                of_structures,
                batches=[(X[:4], Y[:4], 1), (X[4:8], Y[4:8], 2)],
                loss=first_of,
                join=lambda batches: (
                    torch.cat([b[0] for b in batches]),
                    torch.cat([b[1] for b in batches]),
                ),
            )
        ),
    ),
    (
        "with a criterion as loss= each batch is a pair (inputs, targets), not {}; {}",
        AUDITS["criterion for triples"][0],
        lambda: right(
            watched(triples, batches=[(*PAIRS[0], 3)], loss=lambda m, b: CRITERION(m(b[0]), b[1]))
        ),
    ),
    (
        "loss must return a scalar tensor, not {}: remove .item()",
        AUDITS["loss returns a number"][0],
        lambda: loop(loss=loss),
    ),
    (
        "loss must return a scalar, not a tensor of shape {}: reduce it with .mean() or .sum()",
        AUDITS["loss returns many"][0],
        lambda: right(watched(of_sums(torch.mean), loss=lambda m, b: m(b[0]).mean())),
    ),
    (
        "loss returned a tensor without a gradient: it has to be computed by the model that it is given",
        AUDITS["loss without a gradient"][0],
        lambda: loop(loss=loss),
    ),
    (
        "step must be a function of model and batch, not {}: audit(step, model, batch)",
        AUDITS["step"][0],
        lambda: after(lambda model, batch: loss(model, batch).backward()),
    ),
    (
        "it must do all that your loop does between two steps",
        AUDITS["step without a step"][0],
        lambda: after(lambda model, batch: loss(model, batch).backward()),
    ),
    (
        "clip must be a Python function that clips gradients, or a list of them, not {}: clip=my_clip",
        lambda: ib.audit.watch(MODEL, clip=3),
        lambda: (ib.audit.watch(MODEL, clip=clip), ib.audit.watch(MODEL, clip=[clip])),
    ),
    # Benchmarks.
    ("rounds is {}; it is 1 or more", lambda: bench(rounds=0), lambda: bench(rounds=1)),
    (
        "seconds is {}; it is a time above 0, after which no further round begins",
        lambda: bench(seconds=0),
        lambda: bench(seconds=0.1),
    ),
    (
        "seconds must be a number of seconds, not {}",
        lambda: bench(seconds="1 min"),
        lambda: bench(seconds=1),
    ),
    (
        "leave retained_micro_batches and use_tapes out",
        lambda: bench(retained_micro_batches=2),
        lambda: bench(),
    ),
    # Tools.
    (
        "seed is {}; it is 0 to 2^63 - 1",
        lambda: tools.determinize(-1),
        lambda: tools.determinize(1).undo(),
    ),
    (
        "tolerance is {}; it is 0 or more, and finite",
        lambda: tools.compare_tensors(X, X, tolerance=-1),
        lambda: tools.compare_tensors(X, X, tolerance=0),
    ),
    (
        "tolerance must be a number, not {}",
        lambda: tools.compare_tensors(X, X, tolerance="1"),
        lambda: tools.compare_tensors(X, X, tolerance=1),
    ),
    (
        "load or run the model before it is compared",
        lambda: tools.is_equal_network(*[nn.LazyLinear(1)] * 2),
        lambda: compared(),
    ),
    (
        'For the CPU\'s memory: infinitybatch.tools.MemorySnapShot("cpu")',
        lambda: tools.CudaMemorySnapShot(),
        lambda: tools.MemorySnapShot("cpu"),
    ),
    (
        "name must be a string, not {}: append(",
        lambda: tools.MemoryHistory().append(3),
        lambda: tools.MemoryHistory().append("after forward"),
    ),
    # InfinityBatch.
    (
        "this InfinityBatch has no {} yet: ib.{} = {}",
        lambda: infinity(data=False).epoch(),
        lambda: infinity().epoch(),
    ),
    (
        "{}= is no option of InfinityBatch nor of Trainer",
        lambda: ib.InfinityBatch(criterion=CRITERION, budget=3),
        lambda: ib.InfinityBatch(criterion=CRITERION, memory_budget="1GiB"),
    ),
    (
        "there are no outputs to compare yet: outputs = ib.batch_(inputs)",
        lambda: of_infinity(outputs=False),
        lambda: of_infinity(),
    ),
    (
        "there is no gradient to step with: ib.criterion(outputs, targets).backward() first",
        lambda: of_infinity(gradient=False),
        lambda: of_infinity(),
    ),
    (
        "model must be a torch.nn.Module, not the class {}: {}()",
        lambda: setattr(ib.InfinityBatch(criterion=CRITERION), "model", nn.Identity),
        lambda: setattr(ib.InfinityBatch(criterion=CRITERION), "model", nn.Identity()),
    ),
    (
        "what can be kept are losses, metrics, outputs, inputs and targets, and where=",
        lambda: ib.InfinityBatch(criterion=CRITERION, keep={"gradients": 3}),
        lambda: ib.InfinityBatch(criterion=CRITERION, keep={"losses": ib.histories.last(3)}),
    ),
    # Wrapped modules in what makes a program of them.
    (
        "give it the inner module, ib.unwrap(model)",
        lambda: torch.jit.trace(ib.wrap(net(), micro_batch_size=4), X),
        lambda: torch.jit.trace(ib.unwrap(ib.wrap(net(), micro_batch_size=4)), X),
    ),
]

STRUCTURES = [((X[:4],), Y[:4], 0), (X[4:8], Y[4:8], 0)]


def tensor_of(x):
    return x[0] if isinstance(x, tuple) else x


def of_structures(model, optimizer, batches):
    for x, y, _ in batches:
        (CRITERION(model(tensor_of(x)), y) / 2).backward()
    optimizer.step()


def first_of(model, batch):
    return CRITERION(model(tensor_of(batch[0])), batch[1])


def without_structure(batches):
    return torch.cat([tensor_of(x) for x, _, _ in batches]), torch.cat([y for _, y, _ in batches])


def of_sums(reduce):
    def train(model, optimizer, batches):
        for x, _ in batches:
            reduce(model(x)).backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def clip(parameters):
    for p in parameters:
        p.grad.clamp_(-1, 1)


def compared():
    lazy = nn.LazyLinear(1)
    lazy(torch.ones(2, 3))
    tools.is_equal_network(lazy, lazy)
