"""Samples of unequal length: which batches are probed, what fits, and that nothing of it is inexact."""

import copy

import infinitybatch as ib
import pytest
import torch
from measure import excess, gradients
from torch import nn

SAMPLES, WIDTH = 64, 24


class Reader(nn.Module):
    """Tokens of any number; 0 is padding, which adds nothing."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(50, WIDTH, padding_idx=0)
        self.hidden = nn.Linear(WIDTH, 4 * WIDTH, bias=False)
        self.out = nn.Linear(4 * WIDTH, 5)

    def forward(self, tokens):
        return self.out(torch.tanh(self.hidden(self.embedding(tokens))).sum(1))


def tokens(length, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, 50, (SAMPLES, length), generator=generator)


LABELS = torch.randint(5, (SAMPLES,), generator=torch.Generator().manual_seed(1))


def needs(model, inputs, size):
    """The peak of a step with a fixed size."""
    report = ib.VirtualBatch(copy.deepcopy(model), nn.CrossEntropyLoss(), micro_batch_size=size)
    return report.backward(inputs, LABELS).peak_bytes


def was_probed(report):
    return report.micro_batch_sizes[:2] == [2, 4]


def was_traced(report):
    """One micro-batch of two samples tells what another length takes."""
    return report.micro_batch_sizes[0] <= 2


def check_gradients(model, inputs):
    native = copy.deepcopy(model)
    native.zero_grad()
    nn.functional.cross_entropy(native(inputs), LABELS).backward()
    assert excess(gradients(model), gradients(native)) == {}


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Reader().double()


def test_shorter_batches_are_not_probed_and_longer_ones_are(model):
    budget = needs(model, tokens(40), SAMPLES)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), memory_budget=budget)

    def step(length):
        model.zero_grad()
        report = batch.backward(tokens(length, seed=length), LABELS)
        assert report.peak_bytes <= budget
        assert report.restarts == 0
        check_gradients(model, tokens(length, seed=length))
        return report

    assert was_probed(step(30))
    for length in (29, 20, 30, 11):
        assert not was_probed(step(length)), length
    plan = batch.plan(tokens(21), LABELS)
    assert "longer samples" in plan.reason
    assert was_traced(step(40))
    step(35)  # at most three lengths tell all others
    for length in (36, 30, 33, 39):
        assert not was_traced(step(length)), length


def test_a_length_that_comes_back_often_gets_its_own_plan(model):
    budget = needs(model, tokens(40), 8)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), memory_budget=budget)
    for _ in range(4):
        batch.backward(tokens(40), LABELS)
    probed = []
    for _ in range(8):
        model.zero_grad()
        report = batch.backward(tokens(20), LABELS)
        assert report.peak_bytes <= budget
        probed.append(was_traced(report))
    check_gradients(model, tokens(20))
    assert probed == [False] * 3 + [True] + [False] * 4


def test_a_stream_of_ever_new_lengths_is_predicted(model):
    """Steps beyond the first few run each sample once, but for looks at rows."""
    budget = needs(model, tokens(40), 24)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), memory_budget=budget)
    rows = []
    model.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    traced, restarts = [], []
    for i in range(40):
        length = 12 + (11 * i) % 29
        model.zero_grad()
        rows.clear()
        report = batch.backward(tokens(length, seed=i), LABELS)
        assert report.peak_bytes <= budget
        if report.predicted_peak_bytes is not None:
            off = report.predicted_peak_bytes - report.peak_bytes
            assert abs(off) <= 0.01 * report.peak_bytes
        traced.append(was_traced(report))
        restarts.append(report.restarts)
        if i > 16 and i + 1 != 32:
            assert sum(rows) == SAMPLES, i
    check_gradients(model, tokens(length, seed=i))
    assert sum(traced) <= 6 and not any(traced[20:]), traced
    assert sum(restarts[10:]) == 0
    assert report.predicted_peak_bytes is not None


def test_a_wrapped_model_is_not_probed_at_each_new_length(model):
    budget = needs(model, tokens(40), SAMPLES)
    wrapped = ib.wrap(model, memory_budget=budget)
    rows = []
    model.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))
    beyond = []
    for i in range(30):
        length = 12 + (11 * i) % 29
        model.zero_grad()
        rows.clear()
        loss = nn.functional.cross_entropy(wrapped(tokens(length, seed=i)), LABELS)
        loss.backward()
        check_gradients(model, tokens(length, seed=i))
        assert wrapped.last_report.peak_bytes <= budget
        beyond.append(sum(rows) - 2 * SAMPLES)  # native's, too
    assert all(n <= 0 for n in beyond[17:]), beyond


def padded_source(sizes_seen, last=60):
    """Each micro-batch is padded to its own longest sample; the longest of all comes last."""
    lengths = [6 + 5 * (i % 7) for i in range(SAMPLES - 1)] + [last]
    whole = tokens(last)
    for row, length in enumerate(lengths):
        whole[row, length:] = 0

    def rows(begin, end):
        sizes_seen.append(end - begin)
        return whole[begin:end, : max(lengths[begin:end])]

    return ib.BatchSource(SAMPLES, rows), whole


def test_a_ragged_batch_is_planned_by_its_longest_samples(model):
    source, whole = padded_source([])
    budget = needs(model, whole, 16)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), memory_budget=budget)
    for i in range(10):
        model.zero_grad()
        report = batch.backward(padded_source([])[0], LABELS)
        assert report.peak_bytes <= budget
        assert report.restarts == 0 or i == 0
        check_gradients(model, whole)
    plan = batch.plan(source, LABELS)
    assert "unequal length" in plan.reason
    assert plan.predicted_peak_bytes >= report.peak_bytes


def test_a_longer_sample_than_ever_seen_stays_inside_the_budget(model):
    budget = needs(model, tokens(60), 16)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), memory_budget=budget)
    for last in (41, 41, 60, 200, 200):
        source, whole = padded_source([], last)
        model.zero_grad()
        report = batch.backward(source, LABELS)
        assert report.peak_bytes <= budget
        check_gradients(model, whole)
    assert report.restarts == 0


@pytest.mark.parametrize("gradients_wanted", [True, False])
def test_shorter_calls_of_a_wrapped_model_are_not_probed(model, gradients_wanted):
    budget = needs(model, tokens(40), SAMPLES)
    wrapped = ib.wrap(model, memory_budget=budget)
    rows = []
    model.register_forward_pre_hook(lambda _, inputs: rows.append(len(inputs[0])))

    def rows_of_a_call(length):
        model.zero_grad()
        rows.clear()
        with torch.set_grad_enabled(gradients_wanted):
            loss = nn.functional.cross_entropy(wrapped(tokens(length, seed=length)), LABELS)
        seen = rows[:2], sum(rows)
        if gradients_wanted:
            loss.backward()
            check_gradients(model, tokens(length, seed=length))
        return seen

    for _ in range(20):  # until no size is timed any more
        if rows_of_a_call(40)[1] == SAMPLES:
            break
    for length in (36, 20, 40, 11):
        first, count = rows_of_a_call(length)
        assert first != [2, 4], length
        assert count == SAMPLES, length


def test_a_ragged_batch_with_a_coupled_loss_is_planned_by_its_longest_samples(model):
    source, whole = padded_source([])
    loss = ib.losses.coupled(nn.functional.cross_entropy)
    fixed = ib.VirtualBatch(copy.deepcopy(model), loss, micro_batch_size=16)
    budget = fixed.backward(whole, LABELS).peak_bytes
    batch = ib.VirtualBatch(model, loss, memory_budget=budget)
    for _ in range(4):
        model.zero_grad()
        report = batch.backward(padded_source([])[0], LABELS)
        assert report.peak_bytes <= budget
        check_gradients(model, whole)
    assert "unequal length" in batch.plan(source, LABELS).reason


class Normed(Reader):
    """Sees the whole batch, so that its forward is cut."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(4 * WIDTH)

    def forward(self, tokens):
        return self.out(self.norm(torch.tanh(self.hidden(self.embedding(tokens))).sum(1)))


@pytest.mark.parametrize("options", [{"micro_batch_size": 16}, {"memory_budget": "64MiB"}])
@pytest.mark.parametrize("coupled", [False, True])
def test_a_ragged_batch_is_cut(coupled, options):
    """Each micro-batch by its own length: the statistics are those of the whole batch."""
    torch.manual_seed(0)
    model = Normed().double()
    loss = ib.losses.coupled(nn.functional.cross_entropy) if coupled else nn.CrossEntropyLoss()
    batch = ib.VirtualBatch(model, loss, **options)
    for _ in range(3):
        native = copy.deepcopy(model)
        native.zero_grad()
        model.zero_grad()
        source, whole = padded_source([])
        nn.functional.cross_entropy(native(whole), LABELS).backward()
        report = batch.backward(source, LABELS)
        assert excess(gradients(model), gradients(native)) == {}
        for found, wanted in zip(model.buffers(), native.buffers(), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
    assert "micro_batch_size" not in options or report.strategy == "cut"
