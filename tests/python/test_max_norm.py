"""`max_norm` and `scale_grad_by_freq`: weights that forward rewrites, gradients that counts divide."""

import copy
from typing import Any

import infinitybatch as ib
import pytest
import torch
from coupled_support import Cube
from fault_support import MyError, State
from support import Calls, Result, native, result_of, worst_error
from torch import nn
from torch.nn import functional as F

TOLERANCE = 1e-12
WORDS, LENGTH, SAMPLES = 40, 5, 12
CRITERION = nn.CrossEntropyLoss()


def tokens(n: int = SAMPLES) -> torch.Tensor:
    """Words occur in several micro-batches, and some in none."""
    return torch.randint(WORDS - 8, (n, LENGTH))


def labels(n: int = SAMPLES) -> torch.Tensor:
    return torch.randint(4, (n,))


def table(**options: Any) -> nn.Embedding:
    return nn.Embedding(WORDS, 6, **{"max_norm": 1.5, **options})


def reader(embedding: nn.Module, *rest: nn.Module) -> nn.Module:
    return Calls(
        lambda self, x: self.head(self.rest(self.embedding(x).tanh().mean(1))),
        embedding=embedding,
        rest=nn.Sequential(*rest),
        head=nn.Linear(6, 4),
    ).double()


def bag_of(**options: Any) -> nn.Module:
    bag = nn.EmbeddingBag(WORDS, 6, **options)
    return Calls(lambda self, x: self.head(self.bag(x)), bag=bag, head=nn.Linear(6, 4)).double()


def weighted(**options: Any) -> nn.Module:
    """The weights of the words in a bag are learned."""
    bag = nn.EmbeddingBag(WORDS, 6, mode="sum", **options)
    return Calls(
        lambda self, x: self.head(self.bag(x, per_sample_weights=self.importance[x].sigmoid())),
        bag=bag,
        importance=nn.Parameter(torch.randn(WORDS)),
        head=nn.Linear(6, 4),
    ).double()


def with_offsets(**options: Any) -> nn.Module:
    """Bags of several sizes, one of them empty for some samples, in one row of indices."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        counts = x[:, 0] % LENGTH
        kept = torch.arange(LENGTH)[None] < counts[:, None]
        offsets = F.pad(counts.cumsum(0), (1, 0))
        if not self.bag.include_last_offset:
            offsets = offsets[:-1]
        return self.head(self.bag(x[kept], offsets))

    bag = nn.EmbeddingBag(WORDS, 6, **options)
    return Calls(forward, bag=bag, head=nn.Linear(6, 4)).double()


def functional() -> nn.Module:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.embedding(x, self.words, max_norm=1.0).mean(1))

    return Calls(forward, words=nn.Parameter(torch.randn(WORDS, 6)), head=nn.Linear(6, 4)).double()


def by_hand() -> nn.Module:
    """Rewritten once, read twice."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        torch.embedding_renorm_(self.words.detach(), x, 1.0, 2.0)
        return self.head((F.embedding(x, self.words) * F.embedding(x, self.words).tanh()).mean(1))

    return Calls(forward, words=nn.Parameter(torch.randn(WORDS, 6)), head=nn.Linear(6, 4)).double()


def twice() -> nn.Module:
    """Two lookups of one table, and one of another."""
    return Calls(
        lambda self, x: self.head(
            self.words(x[:, :2]).mean(1) * self.words(x[:, 2:]).mean(1) + self.more(x).mean(1)
        ),
        words=table(),
        more=table(max_norm=0.3),
        head=nn.Linear(6, 4),
    ).double()


def frozen() -> nn.Module:
    model = reader(table())
    model.embedding.weight.requires_grad_(False)
    return model


def changed_in_place() -> nn.Module:
    return Calls(
        lambda self, x: self.head(self.embedding(x).tanh_().mean(1)),
        embedding=table(),
        head=nn.Linear(6, 4),
    ).double()


MODELS = {
    "Embedding": lambda: reader(table()),
    "of norm 1": lambda: reader(table(norm_type=1.0, max_norm=3.0)),
    "of the largest": lambda: reader(table(norm_type=float("inf"), max_norm=1.0)),
    "padding": lambda: reader(table(padding_idx=3)),
    "sparse": lambda: reader(table(sparse=True)),
    "frozen": frozen,
    "bag, sum": lambda: bag_of(max_norm=1.0, mode="sum"),
    "bag, mean": lambda: bag_of(max_norm=1.0, mode="mean", padding_idx=2),
    "bag, max": lambda: bag_of(max_norm=1.0, mode="max"),
    "bag, sparse": lambda: bag_of(max_norm=1.0, mode="sum", sparse=True),
    "bag, offsets": lambda: with_offsets(max_norm=1.0),
    "bag, weighted": lambda: weighted(max_norm=1.0),
    "a function": functional,
    "by hand": by_hand,
    "twice": twice,
    "changed in place": changed_in_place,
    "scaled by frequency too": lambda: reader(table(scale_grad_by_freq=True)),
    "bag, scaled by frequency too": lambda: bag_of(max_norm=1.0, scale_grad_by_freq=True),
}
#: Backward divides by counts; `max_norm` is not the point.
SCALED = {
    "sum": lambda: bag_of(mode="sum", scale_grad_by_freq=True),
    "mean": lambda: bag_of(mode="mean", scale_grad_by_freq=True),
    "padding": lambda: bag_of(mode="sum", padding_idx=2, scale_grad_by_freq=True),
    "mean, padding": lambda: bag_of(mode="mean", padding_idx=2, scale_grad_by_freq=True),
    "offsets": lambda: with_offsets(mode="sum", scale_grad_by_freq=True),
    "mean, offsets": lambda: with_offsets(mode="mean", scale_grad_by_freq=True),
    "last offset": lambda: with_offsets(
        mode="mean", include_last_offset=True, scale_grad_by_freq=True
    ),
    "weighted": lambda: weighted(scale_grad_by_freq=True),
    "weighted, padding": lambda: weighted(scale_grad_by_freq=True, padding_idx=2),
}


def coupling(outputs: torch.Tensor, _: Any = None) -> torch.Tensor:
    """Couples every sample with every other."""
    z = F.normalize(outputs, dim=1)
    return F.cross_entropy(z @ z.T / 0.3, torch.arange(len(z)).roll(1))


def assert_as_native(
    model: nn.Module,
    x: torch.Tensor,
    y: torch.Tensor | None,
    loss: Any,
    ways: list[dict[str, Any]],
    **options: Any,
) -> list[Result]:
    """Gradients within 1e-12, and every weight as the whole batch leaves it, bit for bit."""
    plain = loss if y is not None else coupling
    wanted = native(model, lambda o, t: plain(o) if y is None else plain(o, t), x, y)
    results = []
    for way in ways:
        own = copy.deepcopy(model)
        batch = ib.VirtualBatch(own, loss, **way, **options)
        report = batch.backward(x) if y is None else batch.backward(x, y)
        found = result_of(own, report.loss)
        found.report = report
        assert worst_error(found, wanted) <= TOLERANCE, way
        torch.testing.assert_close(found.loss, wanted.loss, rtol=TOLERANCE, atol=0)
        assert_same_weights(own, wanted.model)
        for name, b in wanted.buffers.items():
            torch.testing.assert_close(found.buffers[name], b, rtol=TOLERANCE, atol=1e-15)
        results.append(found)
    return results


SIZES = [{"micro_batch_size": size} for size in (1, 5, 12)] + [{"memory_budget": "64MiB"}]


def rewrites(model: nn.Module, x: torch.Tensor) -> bool:
    other = copy.deepcopy(model)
    other(x)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    return not all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", MODELS)
def test_streamed(name):
    model, x = MODELS[name](), tokens()
    assert rewrites(model, x)
    for found in assert_as_native(model, x, labels(), CRITERION, SIZES):
        assert found.report.restarts == 0


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("retained", [0, 2, 4])
def test_coupled_loss(name, retained):
    ways = [{"micro_batch_size": 3, "retained_micro_batches": retained}]
    (found,) = assert_as_native(MODELS[name](), tokens(), None, ib.losses.coupled(coupling), ways)
    assert found.report.strategy != "rerun"


@pytest.mark.parametrize("name", ["Embedding", "twice", "bag, weighted"])
def test_forward_runs_twice(name):
    """Behind an autograd function no tape can be believed."""
    model = MODELS[name]()
    head = model.head
    model.head = nn.Sequential(Calls(lambda self, x: Cube.apply(x)), head)
    ways = [{"micro_batch_size": 3}, {"memory_budget": "64MiB"}]
    loss = ib.losses.coupled(coupling)
    found = assert_as_native(model, tokens(), None, loss, ways)
    assert found[0].report.strategy == "rerun"
    (found,) = assert_as_native(MODELS[name](), tokens(), None, loss, ways[:1], use_tapes=False)
    assert found.report.strategy == "rerun"


@pytest.mark.parametrize("name", ["Embedding", "twice", "sparse"])
def test_scaled_rows_are_not_scaled_again(name):
    """In fp32 a row's norm may pass max_norm by a rounding after it was scaled."""
    model, x = MODELS[name]().float(), tokens(64)
    again = copy.deepcopy(model)
    again(x)
    assert rewrites(again, x)
    wanted = native(model, lambda o, _: coupling(o), x, None)
    for retained in (0, 8, 16):
        own = copy.deepcopy(model)
        loss = ib.losses.coupled(coupling)
        batch = ib.VirtualBatch(own, loss, micro_batch_size=4, retained_micro_batches=retained)
        report = batch.backward(x)
        assert report.strategy != "rerun"
        assert worst_error(result_of(own, report.loss), wanted) <= 1e-5
        if name == "twice":
            continue  # natively a row that two lookups read is scaled twice
        assert_same_weights(own, wanted.model)


@pytest.mark.parametrize("kind", ["stream", "coupled"])
def test_beside_batch_norm(kind):
    model = reader(table(), nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU())
    y = labels() if kind == "stream" else None
    loss = CRITERION if kind == "stream" else ib.losses.coupled(coupling)
    ways = [{"micro_batch_size": 1}, {"micro_batch_size": 5}, {"memory_budget": "64MiB"}]
    for found in assert_as_native(model, tokens(), y, loss, ways):
        assert found.report.strategy == "cut"


def test_beside_a_batch_norm_that_chooses_the_words():
    """Which rows are looked up is not known before the whole batch was there."""

    def forward(self, x):
        chosen = self.norm(x.double()).argmax(1)
        return self.head(self.embedding(chosen))

    model = Calls(
        forward, norm=nn.BatchNorm1d(LENGTH), embedding=table(), head=nn.Linear(6, 4)
    ).double()
    x, y = tokens(), labels()
    before = State(model)
    with pytest.raises(ib.CouplingError, match="embedding_renorm_"):
        ib.VirtualBatch(model, CRITERION, micro_batch_size=4).backward(x, y)
    before.check()
    assert_as_native(model, x, y, CRITERION, [{"memory_budget": "64MiB"}])


def test_static_graph():
    """User code stays in the loop: a recording would not scale the rows of other samples."""
    model = reader(table())
    batch = ib.VirtualBatch(model, CRITERION, micro_batch_size=4, static_graph=True)
    for _ in range(3):
        x, y = tokens(), labels()
        wanted = native(model, CRITERION, x, y)
        model.zero_grad()
        report = batch.backward(x, y)
        assert worst_error(result_of(model, report.loss), wanted) <= TOLERANCE
        assert torch.equal(model.embedding.weight, wanted.model.embedding.weight)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.3)


def test_numbers_of_the_whole_batch():
    model, x, y = reader(table(), nn.Dropout(0.3)), tokens(), labels()
    torch.manual_seed(3)
    wanted = native(model, CRITERION, x, y)
    for size in (1, 5):
        own = copy.deepcopy(model)
        torch.manual_seed(3)
        batch = ib.VirtualBatch(own, CRITERION, micro_batch_size=size, match_native_rng=True)
        report = batch.backward(x, y)
        assert worst_error(result_of(own, report.loss), wanted) <= TOLERANCE
        assert torch.equal(own.embedding.weight, wanted.model.embedding.weight)


@pytest.mark.parametrize("segments", [2, 4])
@pytest.mark.parametrize("kind", ["stream", "coupled"])
def test_one_sample_in_segments(kind, segments):
    layers = [layer for _ in range(4) for layer in (nn.Linear(6, 6), nn.Tanh())]
    model = reader(table(), *layers)
    y = labels() if kind == "stream" else None
    loss = CRITERION if kind == "stream" else ib.losses.coupled(coupling)
    ways = [
        {"micro_batch_size": size, "checkpoint_segments": segments, "offload": offload}
        for size in (1, 5)
        for offload in ("auto", "always")
    ]
    assert_as_native(model, tokens(), y, loss, ways)


def assert_same_weights(own: nn.Module, wanted: nn.Module) -> None:
    """Bit for bit."""
    for (name, a), b in zip(own.named_parameters(), wanted.parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("options", [{"micro_batch_size": 5}, {"memory_budget": "64MiB"}])
@pytest.mark.parametrize("name", MODELS)
def test_wrapped(name, options):
    model, x, y = MODELS[name](), tokens(), labels()
    wanted = native(model, CRITERION, x, y)
    own = copy.deepcopy(model)
    wrapped = ib.wrap(own, **options)
    for _ in range(2):  # a row that is short enough stays as it is
        own.zero_grad()
        loss = CRITERION(wrapped(x), y)
        loss.backward()
        assert worst_error(result_of(own, loss), wanted) <= TOLERANCE
        assert_same_weights(own, wanted.model)


def test_wrapped_where_backward_runs_forward_again():
    """Behind an autograd function."""
    model = reader(table(), Calls(lambda self, x: Cube.apply(x))).float()
    x, y = tokens(48), labels(48)
    wanted = native(model, CRITERION, x, y)
    own = copy.deepcopy(model)
    loss = CRITERION(ib.wrap(own, micro_batch_size=4)(x), y)
    assert_same_weights(own, wanted.model)
    loss.backward()
    assert worst_error(result_of(own, loss), wanted) <= 1e-5
    assert_same_weights(own, wanted.model)


def test_wrapped_without_gradients():
    model, x = reader(table()), tokens(48)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin(x)
        ib.wrap(model, micro_batch_size=4)(x)
    assert_same_weights(model, twin)


def test_two_wrapped_calls_before_one_backward():
    model, x, other = reader(table()), tokens(48), tokens(48)
    twin = copy.deepcopy(model)
    wrapped = ib.wrap(model, micro_batch_size=5)
    for module in (wrapped, twin):
        F.mse_loss(module(x), module(other)).backward()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=TOLERANCE, atol=1e-15)
    assert_same_weights(model, twin)


def tied() -> nn.Module:
    return Calls(
        lambda self, x: F.linear(self.words(x).tanh().mean(1), self.words.weight[:4]), words=table()
    ).double()


def read_before() -> nn.Module:
    return Calls(
        lambda self, x: self.words.weight.sum() * self.words(x).mean(1)[:, :4], words=table()
    ).double()


def read_plainly() -> nn.Module:
    return Calls(
        lambda self, x: (
            self.words(x[:, 1:]).mean(1)[:, :4] + F.embedding(x[:, 0], self.words.weight)[:, :4]
        ),
        words=table(),
    ).double()


def two_norms() -> nn.Module:
    return Calls(
        lambda self, x: (
            self.words(x).mean(1)[:, :4]
            + F.embedding(x, self.words.weight, max_norm=0.5).mean(1)[:, :4]
        ),
        words=table(),
    ).double()


def of_a_buffer() -> nn.Module:
    return Calls(
        lambda self, x: self.head(F.embedding(x, self.words, max_norm=1.0).mean(1)),
        words=torch.randn(WORDS, 6).double(),
        head=nn.Linear(6, 4),
    ).double()


COUPLED = {
    "tied": (tied, "aten::linear reads too"),
    "read before": (read_before, "aten::sum"),
    "read plainly": (read_plainly, "aten::embedding reads too"),
    "two norms": (two_norms, "different norms"),
    "a buffer": (of_a_buffer, "no parameter"),
}


@pytest.mark.parametrize("name", COUPLED)
def test_what_else_reads_the_weight_is_named(name):
    make, match = COUPLED[name]
    model, x, y = make(), tokens(), labels()
    before = State(model)
    versions = [p._version for p in model.parameters()]
    for loss, targets in ((CRITERION, (y,)), (ib.losses.coupled(coupling), ())):
        batch = ib.VirtualBatch(model, loss, micro_batch_size=4)
        with pytest.raises(ib.CouplingError, match=match) as raised:
            batch.backward(x, *targets)
        assert raised.value.op == "aten::embedding_renorm_"
        before.check()
    with pytest.raises(ib.CouplingError, match=match):
        ib.wrap(model, micro_batch_size=4)(x)
    before.check()
    assert versions == [p._version for p in model.parameters()]
    ways = [{"micro_batch_size": 12}, {"memory_budget": "64MiB"}]
    for found in assert_as_native(model, x, y, CRITERION, ways):
        assert found.report.micro_batch_sizes == [12]


@pytest.mark.parametrize("kind", ["stream", "coupled", "cut"])
def test_a_step_that_fails_leaves_the_weight_alone(kind):
    norm = [nn.BatchNorm1d(6)] if kind == "cut" else []
    model = reader(table(), *norm)
    calls = []

    def fail(module, inputs):
        calls.append(0)
        if len(calls) == 3:
            raise MyError

    hook = model.head.register_forward_pre_hook(fail)
    x, y = tokens(), labels()
    before = State(model)
    version = model.embedding.weight._version
    loss, targets = (ib.losses.coupled(coupling), ()) if kind == "coupled" else (CRITERION, (y,))
    batch = ib.VirtualBatch(model, loss, micro_batch_size=3)
    with pytest.raises(MyError):
        batch.backward(x, *targets)
    before.check()
    assert model.embedding.weight._version == version
    hook.remove()
    calls.clear()
    wanted = native(model, (lambda o, _: coupling(o)) if kind == "coupled" else CRITERION, x, y)
    report = batch.backward(x, *targets)
    assert worst_error(result_of(model, report.loss), wanted) <= TOLERANCE
    assert torch.equal(model.embedding.weight, wanted.model.embedding.weight)


@pytest.mark.parametrize("kind", ["stream", "coupled"])
def test_memory_that_runs_out_anywhere_leaves_the_weight_alone(kind):
    """Even where there is no room for the copy that undoes it."""
    model, x, y = reader(table()), tokens(6), labels(6)
    loss, targets = (ib.losses.coupled(coupling), ()) if kind == "coupled" else (CRITERION, (y,))
    before = State(model)
    batch = ib.VirtualBatch(model, loss, micro_batch_size=3)
    with ib.memory.fail_allocation() as counter:
        batch.backward(x, *targets)
    model.load_state_dict(before.values)
    model.zero_grad()
    step = max(1, counter.seen // 60)
    for place in range(1, counter.seen, step):
        with ib.memory.fail_allocation(place) as failure:
            try:
                batch.backward(x, *targets)
            except Exception:
                assert failure.failed
                before.check()
                continue
        model.load_state_dict(before.values)
        model.zero_grad()


def test_budget_holds_the_copy():
    model = reader(nn.Embedding(20000, 6, max_norm=1.5))
    x, y = torch.randint(20000, (64, LENGTH)), labels(64)
    size = model.embedding.weight.nbytes
    wanted = native(model, CRITERION, x, y)
    live = ib.memory.stats().live
    budget = live + int(3.3 * size)  # the copy, the gradient and a micro-batch's
    batch = ib.VirtualBatch(model, CRITERION, memory_budget=budget)
    report = batch.backward(x, y)
    assert live + 2 * size < report.peak_bytes <= budget
    assert worst_error(result_of(model, report.loss), wanted) <= TOLERANCE
    model.zero_grad()
    with torch.no_grad():
        model.embedding.weight.mul_(2)
    weight = model.embedding.weight.detach().clone()
    live = ib.memory.stats().live
    with pytest.raises(ib.BudgetExceeded):
        ib.VirtualBatch(model, CRITERION, memory_budget=live + size // 2).backward(x, y)
    assert torch.equal(model.embedding.weight, weight)


def test_verify_and_bench_leave_the_weight_alone():
    model, x, y = reader(table()), tokens(), labels()
    before = State(model)
    report = ib.verify(model, CRITERION, x, y, micro_batch_size=4)
    assert report.exact
    before.check()
    ib.bench(model, CRITERION, x, y, micro_batch_size=4, rounds=3)
    before.check()
    model = reader(table()).float()
    before = State(model)
    assert ib.verify(model, CRITERION, x, y, micro_batch_size=4).exact
    before.check()


@pytest.mark.parametrize("name", SCALED)
def test_bags_scaled_by_frequency(name):
    model = SCALED[name]()
    for found in assert_as_native(model, tokens(), labels(), CRITERION, SIZES):
        sizes = found.report.micro_batch_sizes
        assert found.report.strategy == "cut" or sizes == [SAMPLES]
    ways = [
        {"micro_batch_size": 5, "retained_micro_batches": 1},
        {"micro_batch_size": 5, "static_graph": True},
    ]
    assert_as_native(model, tokens(), None, ib.losses.coupled(coupling), ways)


@pytest.mark.parametrize("options", [{"micro_batch_size": 5}, {"memory_budget": "64MiB"}])
@pytest.mark.parametrize("name", SCALED)
def test_wrapped_bags_scaled_by_frequency(name, options):
    model, x, y = SCALED[name](), tokens(), labels()
    wanted = native(model, CRITERION, x, y)
    own = copy.deepcopy(model)
    loss = CRITERION(ib.wrap(own, **options)(x), y)
    loss.backward(retain_graph=True)
    assert worst_error(result_of(own, loss), wanted) <= TOLERANCE
    own.zero_grad()
    loss.backward()
    assert worst_error(result_of(own, loss), wanted) <= TOLERANCE


def test_a_bag_whose_other_results_are_used():
    def forward(self, x):
        offsets = torch.arange(0, x.numel(), LENGTH)
        sums, _, sizes, _ = torch.embedding_bag(
            self.words, x.reshape(-1), offsets, True, 0, False, None, False, None
        )
        return self.head(sums + sizes[:, None])

    model = Calls(forward, words=nn.Parameter(torch.randn(WORDS, 6)), head=nn.Linear(6, 4)).double()
    with pytest.raises(ib.CouplingError, match="more of its results"):
        ib.VirtualBatch(model, CRITERION, micro_batch_size=4).backward(tokens(), labels())


@pytest.mark.parametrize("way", ["streamed", "coupled", "wrapped"])
def test_where_the_same_rows_split_otherwise_find_no_room(way):
    """What a callback was refused there belongs to that forward, and not to the one that follows."""
    model = Calls(
        lambda self, x: self.head(self.embedding(x).mean(1)),
        embedding=nn.Embedding(WORDS, 64, max_norm=1.0),
        head=nn.Linear(64, 4),
    ).double()
    x, y = torch.randint(WORDS, (512, 16)), labels(512)
    wanted = native(model, CRITERION, x, y)
    own = copy.deepcopy(model)
    if way == "wrapped":
        loss = CRITERION(ib.wrap(own, micro_batch_size=3)(x), y)
        loss.backward()
    else:
        kind = CRITERION if way == "streamed" else ib.losses.coupled(CRITERION)
        loss = ib.VirtualBatch(own, kind, micro_batch_size=3).backward(x, y).loss
    assert worst_error(result_of(own, loss), wanted) <= TOLERANCE
