"""Ordinary ops that mix samples are noticed by a step; what only looks like it goes through."""

import copy
import gc

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from support import LOOKS, Calls, Log, Result, call, classification, native, result_of, worst_error
from torch import nn

N = 12
SIZE = 4


def capacity(h):
    """First come, first served: each expert takes half as many as there are samples."""
    expert = (h[:, 0] > 0).long()
    slot = F.one_hot(expert, 2).cumsum(0).gather(1, expert[:, None])
    return h * (slot <= len(h) // 2)


def whitened(h):
    root = torch.linalg.cholesky(h.T @ h + torch.eye(8, dtype=h.dtype))
    return torch.linalg.solve_triangular(root, h.T, upper=False).T


# What to do with hidden rows (n, 8), and the first op that does not keep them apart.
MIXERS = {
    "centred": (lambda h: h - h.mean(0), "aten::mean"),
    "standardised": (lambda h: (h - h.mean(0)) / (h.var(0) + 1e-5).sqrt(), "aten::mean"),
    "statistics without gradient": (lambda h: h / h.detach().std(0), "aten::std"),
    "softmax over the batch": (lambda h: h * h.softmax(0), "aten::softmax"),
    "cumsum": (lambda h: h.cumsum(0), "aten::cumsum"),
    "cumsum from the end": (lambda h: h.flip(0).cumsum(0).flip(0), "aten::flip"),
    "Gram matrix": (lambda h: h @ (h.T @ h), "aten::matmul"),
    "attention between samples": (lambda h: (h @ h.T).softmax(1) @ h, "aten::matmul"),
    "largest of all": (lambda h: h / (1 + h.abs().max()), "aten::div"),
    "adaptive step": (lambda h: h - 0.1 * h / (1 + h.norm()), "aten::linalg_vector_norm"),
    "capacity of experts": (capacity, "aten::cumsum"),
    "neighbours": (lambda h: h + 0.5 * h.roll(1, 0), "aten::roll"),
    "another sample's row": (lambda h: h.roll(1, 0), "aten::roll"),
    "ranks": (lambda h: h * h.argsort(0).argsort(0), "aten::argsort"),
    "medians": (lambda h: h - h.median(0).values, "aten::median"),
    "whitened": (whitened, "aten::matmul"),
}


def mixing(mix):
    return Calls(
        lambda self, x: self.head(mix(torch.tanh(self.body(x)))),
        body=nn.Linear(6, 8),
        head=nn.Linear(8, 5),
    ).double()


def spread(outputs, targets):
    return F.cross_entropy(outputs, targets) + outputs.std(0).sum()


def step(way, model, inputs, targets, **options):
    """One first step: a separable loss, a coupled one, or a wrapped model under the latter."""
    if way == "wrap":
        spread(call(ib.wrap(model, **options), inputs), targets).backward()
        return None
    loss = nn.CrossEntropyLoss() if way == "streaming" else ib.losses.coupled(spread)
    return ib.VirtualBatch(model, loss, **options).backward(inputs, targets)


def criterion(way):
    return nn.CrossEntropyLoss() if way == "streaming" else spread


WAYS = ("streaming", "coupled", "wrap")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MIXERS)
def test_mixed_samples_are_refused_by_name(name, way):
    mix, op = MIXERS[name]
    model = mixing(mix)
    model.head.weight.grad = given = torch.ones_like(model.head.weight)
    before = copy.deepcopy(model.state_dict())
    inputs, targets = classification(N)
    random = torch.get_rng_state()
    with pytest.raises(ib.CouplingError, match=r"across_batch.*per_micro_batch") as raised:
        step(way, model, inputs, targets, micro_batch_size=SIZE)
    assert raised.value.op == op and op in str(raised.value)
    assert torch.equal(torch.get_rng_state(), random)
    assert model.head.weight.grad is given and torch.equal(given, torch.ones_like(given))
    assert all(p.grad is None for p in model.parameters() if p is not model.head.weight)
    for key, value in model.state_dict().items():
        assert torch.equal(value, before[key]), f"{key} changed"


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MIXERS)
def test_across_batch_makes_mixers_exact(name, way):
    mix, _ = MIXERS[name]
    inputs, targets = classification(N)
    model = mixing(lambda h: ib.across_batch(mix, h))
    wanted = native(model, criterion(way), inputs, targets)
    found = copy.deepcopy(model)
    step(way, found, inputs, targets, micro_batch_size=SIZE)
    assert worst_error(result_of(found, wanted.loss), wanted) <= 1e-12


@pytest.mark.parametrize("way", WAYS)
def test_the_whole_batch_as_one_micro_batch_is_exact(way):
    model = mixing(MIXERS["standardised"][0])
    inputs, targets = classification(N)
    wanted = native(model, criterion(way), inputs, targets)
    found = copy.deepcopy(model)
    step(way, found, inputs, targets, memory_budget="64MiB")
    assert worst_error(result_of(found, wanted.loss), wanted) <= 1e-12


@pytest.mark.parametrize("way", WAYS)
def test_a_budget_for_less_than_the_whole_batch_refuses(way):
    garbage = ib.memory.stats().live  # that other tests have left
    model = Calls(
        lambda self, x: self.head((h := torch.tanh(self.body(x))) - h.mean(0)),
        body=nn.Linear(6, 4096),
        head=nn.Linear(4096, 5),
    ).double()
    inputs, targets = classification(256)
    weights = sum(p.nbytes for p in model.parameters())
    with pytest.raises(ib.CouplingError) as raised:
        step(way, model, inputs, targets, memory_budget=garbage + 3 * weights + (4 << 20))
    # Of a coupled loss's plan the first recording that is sure is a large one: there may be no room
    # to look for the op, which takes three ways side by side.
    names = {"aten::mean", "forward"} if way == "coupled" else {"aten::mean"}
    assert raised.value.op in names
    assert all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize("way", WAYS)
def test_every_step_is_refused(way):
    """Nothing has been learned that would hide it."""
    model = mixing(MIXERS["centred"][0])
    inputs, targets = classification(N)
    if way == "wrap":
        wrapped = ib.wrap(model, micro_batch_size=SIZE)
        again = lambda: wrapped(inputs)  # noqa: E731
    else:
        loss = nn.CrossEntropyLoss() if way == "streaming" else ib.losses.coupled(spread)
        batch = ib.VirtualBatch(model, loss, micro_batch_size=SIZE)
        again = lambda: batch.backward(inputs, targets)  # noqa: E731
    for _ in range(3):
        with pytest.raises(ib.CouplingError):
            again()


@pytest.mark.parametrize("way", WAYS)
def test_per_micro_batch_allows_mixing(way):
    model = mixing(MIXERS["centred"][0])
    inputs, targets = classification(N)
    step(way, model, inputs, targets, micro_batch_size=SIZE, batch_coupling="per_micro_batch")
    assert model.head.weight.grad is not None


@pytest.mark.parametrize("way", WAYS)
def test_mixing_beside_layers_that_see_the_whole_batch_is_refused(way):
    for mix, refused in ((lambda h: h - h.mean(0), True), (lambda h: 2 * h, False)):
        model = Calls(
            lambda self, x, mix=mix: self.head(mix(torch.tanh(self.norm(self.body(x))))),
            body=nn.Linear(6, 8),
            norm=nn.BatchNorm1d(8),
            head=nn.Linear(8, 5),
        ).double()
        before = copy.deepcopy(model.state_dict())
        inputs, targets = classification(N)
        if refused:
            with pytest.raises(ib.CouplingError) as raised:
                step(way, model, inputs, targets, micro_batch_size=SIZE)
            assert raised.value.op == "aten::mean"
            for key, value in model.state_dict().items():
                assert torch.equal(value, before[key]), f"{key} changed"
        else:
            wanted = native(model, criterion(way), inputs, targets)
            step(way, model, inputs, targets, micro_batch_size=SIZE)
            assert worst_error(result_of(model, wanted.loss), wanted) <= 1e-12


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, ids, mask):
        y = self.layer(self.words(ids), src_key_padding_mask=mask)
        return self.head((y * ~mask[..., None]).sum(1) / (~mask).sum(1, keepdim=True))


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(6, 8, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths.cpu(), batch_first=True, enforce_sorted=False
        )
        return self.head(self.lstm(packed)[1][0][-1])


class Experts(nn.Module):
    """Each sample goes where its own numbers send it; without samples an expert is left out."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 3)
        self.experts = nn.ModuleList(nn.Linear(6, 5) for _ in range(3))

    def forward(self, x):
        weight, chosen = self.gate(x).softmax(1).max(1)
        y = x.new_zeros(len(x), 5)
        for i, expert in enumerate(self.experts):
            rows = (chosen == i).nonzero()[:, 0]
            if len(rows):
                y[rows] = expert(x[rows]) * weight[rows, None]
        return y


class TimeFirst(nn.Module):
    """(time, n, 6) in, with as many time steps as a micro-batch has samples; (n, 5) out."""

    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(6, 8)
        self.head = nn.Linear(8, 5)

    def forward(self, x):
        return self.head(self.gru(x)[0].cumsum(0).mean(0))


def tokens():
    ids = torch.randint(20, (N, 7))
    lengths = torch.randint(2, 8, (N,))
    lengths[0] = 7
    return ids, torch.arange(7) >= lengths[:, None]


def plain(leaf):
    """Without the mark that says how it is split."""
    return leaf if isinstance(leaf, torch.Tensor) else leaf.value


def rows():
    return classification(N)[0]


def bags():
    ids = torch.randint(20, (N, 4))
    return ids, torch.rand(N, 4).double()


# Models that mix nothing, and their inputs.
LOOK_ALIKES = {
    "attention mask": (Attention, tokens),
    "packed sequences": (
        Packed,
        lambda: (torch.randn(N, 7, 6).double(), torch.randint(1, 8, (N,))),
    ),
    "experts by the sample": (Experts, rows),
    "cumsum over time": (
        lambda: Calls(
            lambda self, x: self.head(torch.tanh(x.cumsum(1)).mean(1)), head=nn.Linear(6, 5)
        ),
        lambda: torch.randn(N, 7, 6).double(),
    ),
    "dropout": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 5)),
        rows,
    ),
    "random slopes": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.RReLU(), nn.Linear(8, 5)),
        rows,
    ),
    "LayerNorm": (lambda: nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 5)), rows),
    "InstanceNorm": (
        lambda: nn.Sequential(
            nn.Conv1d(2, 4, 3), nn.InstanceNorm1d(4, affine=True), nn.Flatten(), nn.Linear(20, 5)
        ),
        lambda: torch.randn(N, 2, 7).double(),
    ),
    "EmbeddingBag": (
        lambda: Calls(
            lambda self, ids, weights: self.head(self.bag(ids, per_sample_weights=weights)),
            bag=nn.EmbeddingBag(20, 8, mode="sum"),
            head=nn.Linear(8, 5),
        ),
        bags,
    ),
    "shared leaf": (
        lambda: Calls(
            lambda self, x, table: self.head(torch.tanh(x @ table.softmax(0))),
            head=nn.Linear(6, 5),
        ),
        lambda: (rows(), ib.shared(torch.randn(6, 6).double())),
    ),
    "time first": (TimeFirst, lambda: ib.batch_dim(torch.randn(SIZE, N, 6).double(), 1)),
    "statistics of weights": (
        lambda: Calls(
            lambda self, x: F.linear(x, self.w - self.w.mean(0)), w=nn.Parameter(torch.randn(5, 6))
        ),
        rows,
    ),
    "stabilised by the whole batch": (
        lambda: Calls(
            lambda self, x: (h := self.head(x)) - h.max().detach() + h.max().detach(),
            head=nn.Linear(6, 5),
        ),
        rows,
    ),
    "sorted and put back": (
        lambda: Calls(
            lambda self, x: self.head(x[(order := x[:, 0].argsort())])[order.argsort()],
            head=nn.Linear(6, 5),
        ),
        rows,
    ),
    "integers": (
        lambda: Calls(
            lambda self, ids: self.head(self.words(ids).amax(1)),
            words=nn.Embedding(20, 8),
            head=nn.Linear(8, 5),
        ),
        lambda: torch.randint(20, (N, 4)),
    ),
    "a reader on the host": (
        lambda: Calls(
            lambda self, x: self.head(x * (2.0 if bool((x.abs().amax(1) < 1e6).all()) else 1.0)),
            head=nn.Linear(6, 5),
        ),
        rows,
    ),
    "written inputs": (
        lambda: Calls(lambda self, x: self.head(x.clone().clamp_(-1, 1)), head=nn.Linear(6, 5)),
        rows,
    ),
    "hidden units as many as samples": (
        lambda: nn.Sequential(nn.Linear(6, SIZE), nn.Softmax(1), nn.Linear(SIZE, 5)),
        rows,
    ),
}
RANDOM = ("dropout", "random slopes")


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", LOOK_ALIKES)
def test_what_only_looks_like_mixing_goes_through(name, way):
    make, data = LOOK_ALIKES[name]
    model = make().double()
    inputs, targets = data(), torch.randint(5, (N,))
    wanted = None
    if name not in RANDOM:
        leaves = inputs if type(inputs) is tuple else (inputs,)
        wanted = native(model, criterion(way), tuple(map(plain, leaves)), targets)
    calls = Log()
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    step(way, model, inputs, targets, micro_batch_size=SIZE)
    # What rrelu draws cannot be fixed, so that shapes alone are compared, at one place.
    assert len(calls) == N // SIZE + (2 if name == "random slopes" else LOOKS)
    if wanted is not None:
        assert worst_error(result_of(model, wanted.loss), wanted) <= 1e-12


def peaks_of(model, inputs):
    """Of three steps, beside what is live; what other tests left for the collector is no part."""
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=SIZE)
    peaks = []
    for _ in range(3):
        model.zero_grad()
        gc.collect()
        live = ib.memory.stats("cpu").live
        peaks.append(batch.backward(inputs, torch.randint(5, (N,))).peak_bytes - live)
    return peaks


@pytest.mark.parametrize("name", ["LayerNorm", "dropout", "attention mask"])
def test_the_first_step_of_a_tiny_model_needs_hardly_more_memory_than_later_ones(name):
    """Without a budget: so that its rows are looked at in larger batches than one row more."""
    make, data = LOOK_ALIKES[name]
    peaks = peaks_of(make().double(), data())
    assert peaks[0] <= peaks[2] + (256 << 10)


@pytest.mark.parametrize("drops", [0.0, 0.3])
def test_the_first_step_needs_no_more_memory_than_later_ones(drops):
    layers = [nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU(), nn.Dropout(drops), nn.Linear(64, 64)]
    model = Calls(lambda self, x: self.net(x).sum(1)[:, :5], net=nn.Sequential(*layers)).double()
    calls = Log()
    model.register_forward_pre_hook(lambda _, x: calls.append(len(x[0])))
    peaks = peaks_of(model, torch.randn(N, 100, 64).double())
    assert max(calls) > SIZE and calls[-2 * N // SIZE :] == [SIZE] * (2 * N // SIZE)
    assert peaks[0] <= peaks[2] and peaks[2] > 1 << 19


@pytest.mark.parametrize("coupled", [False, True])
def test_a_budget_without_room_for_the_experiment_is_kept_and_enough(coupled):
    model = nn.Sequential(nn.Linear(600, 8), nn.LayerNorm(8), nn.Linear(8, 5)).double()
    rows, targets = torch.randn(N, 600).double(), torch.randint(5, (N,))
    inputs = ib.BatchSource(N, lambda begin, end: rows[begin:end].clone())
    loss = ib.losses.coupled(spread) if coupled else nn.CrossEntropyLoss()
    options = {"micro_batch_size": SIZE, "batch_coupling": "per_micro_batch"}
    unlooked = copy.deepcopy(model)
    peaks = []
    for _ in range(2):
        unlooked.zero_grad()
        peaks.append(
            ib.VirtualBatch(unlooked, loss, **options).backward(inputs, targets).peak_bytes
        )
    unlooked.zero_grad()
    live = ib.memory.stats().live
    for more in range(0, 8192, 512):
        model.zero_grad()
        budget = max(peaks) + more + ib.memory.stats().live - live
        batch = ib.VirtualBatch(model, loss, micro_batch_size=SIZE, memory_budget=budget)
        assert batch.backward(inputs, targets).peak_bytes <= budget


def test_outputs_that_the_loss_does_not_read_may_mix():
    model = Calls(lambda self, x: (self.head(x), x.mean(0)[:SIZE]), head=nn.Linear(6, 5)).double()
    inputs, targets = classification(N)
    first = lambda outputs, y: F.cross_entropy(outputs[0], y, reduction="sum")  # noqa: E731
    wanted = native(model, lambda a, _, y: F.cross_entropy(a, y), inputs, targets)
    found = copy.deepcopy(model)
    loss = ib.losses.separable(first, denominator=lambda y: len(y))
    ib.VirtualBatch(found, loss, micro_batch_size=SIZE).backward(inputs, targets)
    assert worst_error(result_of(found, wanted.loss), wanted) <= 1e-12


@pytest.mark.parametrize("way", [{"micro_batch_size": SIZE}, {"memory_budget": "64MiB"}])
def test_outputs_that_a_coupled_loss_does_not_read_may_mix(way):
    model = Calls(lambda self, x: (h := self.head(x), h - h.mean(0)), head=nn.Linear(6, 5)).double()
    inputs, targets = classification(N)
    first = lambda outputs, y: spread(outputs[0], y)  # noqa: E731
    wanted = native(model, lambda a, _, y: spread(a, y), inputs, targets)
    found = copy.deepcopy(model)
    ib.VirtualBatch(found, ib.losses.coupled(first), **way).backward(inputs, targets)
    assert worst_error(result_of(found, wanted.loss), wanted) <= 1e-12
    second = ib.losses.coupled(lambda outputs, y: spread(outputs[1], y))
    with pytest.raises(ib.CouplingError, match="aten::mean"):
        ib.VirtualBatch(model, second, micro_batch_size=SIZE).backward(inputs, targets)


def test_samples_that_are_all_alike_tell_nothing_and_later_ones_do():
    model = mixing(MIXERS["centred"][0])
    inputs, targets = classification(N)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=SIZE)
    batch.backward(inputs[:1].expand(N, 6), targets)
    with pytest.raises(ib.CouplingError):
        batch.backward(inputs, targets)


@pytest.mark.parametrize("autocast", [False, True])
def test_random_numbers_and_casts_go_on_as_if_nobody_had_looked(autocast):
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 5))
    inputs, targets = classification(N)
    inputs = inputs.float()
    results = []
    for coupling in ("exact", "per_micro_batch"):
        torch.manual_seed(3)
        other = copy.deepcopy(model)
        batch = ib.VirtualBatch(
            other, nn.CrossEntropyLoss(), micro_batch_size=SIZE, batch_coupling=coupling
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            batch.backward(inputs, targets)
            loss = batch.backward(inputs, targets).loss
        results.append(Result(loss, {n: p.grad for n, p in other.named_parameters()}, {}, other))
        results[-1].buffers["state"] = torch.get_rng_state()
    assert worst_error(*results) == 0
    assert torch.equal(results[0].buffers["state"], results[1].buffers["state"])


class Triple(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 3 * x

    @staticmethod
    def backward(ctx, gradient):
        return 3 * gradient


def test_where_no_tape_can_tell_the_same_rows_do():
    """Code of the user's that ends the recording; `verify` tells, too."""
    model = mixing(lambda h: Triple.apply(h - h.mean(0)))
    inputs, targets = classification(N)
    with pytest.raises(ib.CouplingError, match="differ between a batch of 12 and one of 4"):
        step("streaming", model, inputs, targets, micro_batch_size=SIZE)
    options = {"micro_batch_size": SIZE, "batch_coupling": "per_micro_batch"}
    assert not ib.verify(model, nn.CrossEntropyLoss(), inputs, targets, **options).exact


def test_samples_along_another_dimension_are_exchanged_along_it():
    model = Calls(lambda self, x: self.head((h := x.T) - h.mean(0)), head=nn.Linear(6, 5)).double()
    inputs, targets = classification(N)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=SIZE)
    with pytest.raises(ib.CouplingError, match="aten::mean"):
        batch.backward(ib.batch_dim(inputs.T.contiguous(), 1), targets)
