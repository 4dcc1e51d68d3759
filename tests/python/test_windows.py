"""`ib.windows`: logical batches out of the batches of a loader, whatever its shape."""

import itertools

import infinitybatch as ib
import pytest
import torch
from support import worst
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

X = torch.randn(22, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
Y = torch.randint(3, (22,), generator=torch.Generator().manual_seed(1))


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def loader(**options):
    return DataLoader(TensorDataset(X, Y), batch_size=4, **options)  # 4, 4, 4, 4, 4, 2


class Stream(IterableDataset):
    def __iter__(self):
        return iter(zip(X, Y, strict=True))


SHAPES = {
    "a DataLoader": loader,
    "a DataLoader with workers": lambda: loader(num_workers=1),
    "an iterable dataset": lambda: DataLoader(Stream(), batch_size=4),
    "a list": lambda: list(loader()),
    "a generator": lambda: (pair for pair in loader()),
    "an iterator": lambda: iter(loader()),
    "NumPy's arrays": lambda: [(x.numpy(), y.numpy()) for x, y in loader()],
    "lists": lambda: [list(pair) for pair in loader()],
}


def rows_of(window):
    inputs, targets = window
    assert len(inputs) == len(targets)
    return inputs.rows(0, len(inputs)), targets.rows(0, len(targets))


@pytest.mark.parametrize("size", [{"batches": 2}, {"samples": 7}, {"samples": 1}, {"samples": 99}])
@pytest.mark.parametrize("shape", SHAPES)
def test_each_sample_comes_once_and_in_order(shape, size):
    windows = [rows_of(window) for window in ib.windows(SHAPES[shape](), **size)]
    lengths = [len(x) for x, _ in windows]
    whole = size.get("samples") or 4 * size["batches"]
    assert lengths[:-1] == [whole] * (len(lengths) - 1)
    assert 0 < lengths[-1] <= whole
    assert torch.equal(torch.cat([x for x, _ in windows]), X)
    assert torch.equal(torch.cat([y for _, y in windows]), Y)


@pytest.mark.parametrize("size", [{"batches": 3}, {"samples": 9}])
def test_training_is_that_with_whole_batches(size):
    """Windows of 12 and 10 samples, or 9, 9 and 4, in micro-batches of 5 with momentum."""
    rows = 12 if "batches" in size else 9
    native = net()
    optimizer = torch.optim.SGD(native.parameters(), lr=0.1, momentum=0.9)
    for x, y in zip(X.split(rows), Y.split(rows), strict=True):
        optimizer.zero_grad()
        nn.functional.cross_entropy(native(x), y).backward()
        optimizer.step()
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=5)
    for window in ib.windows(loader(), **size):
        optimizer.zero_grad()
        batch.backward(*window)
        optimizer.step()
    assert worst(dict(model.named_parameters()), dict(native.named_parameters())) < 1e-12


def test_a_loader_without_an_end_is_read_no_further_than_asked():
    read = []

    def endless():
        for i in itertools.count():
            read.append(i)
            yield torch.full((3, 2), float(i)), torch.zeros(3)

    windows = iter(ib.windows(endless(), samples=7))
    x, _ = rows_of(next(windows))
    assert read == [0, 1, 2]
    assert x[:, 0].tolist() == [0, 0, 0, 1, 1, 1, 2]
    x, _ = rows_of(next(windows))
    assert read == [0, 1, 2, 3, 4]
    assert x[:, 0].tolist() == [2, 2, 3, 3, 3, 4, 4]


def test_no_window_is_joined_before_somebody_asks_for_its_rows():
    pieces = [(torch.randn(64, 1024), torch.zeros(64)) for _ in range(8)]
    (inputs, _), *others = ib.windows(pieces, batches=8)
    assert not others
    assert inputs.rows(64, 128).data_ptr() == pieces[1][0].data_ptr()


def test_windows_may_be_gone_through_again():
    windows = ib.windows(loader(shuffle=True), samples=5)
    first, second = ([rows_of(window)[1] for window in windows] for _ in range(2))
    assert len(first) == len(second) == len(windows) == 5
    assert torch.cat(first).sort().values.equal(torch.cat(second).sort().values)


def mappings():
    return [{"x": x, "more": {"y": x + 1}, "label": y} for x, y in loader()]


def test_mappings_with_and_without_targets():
    for (inputs,) in ib.windows(mappings(), batches=6):
        assert set(inputs.rows(3, 9)) == {"x", "more", "label"}
    ((inputs, targets),) = ib.windows(mappings(), batches=6, targets="label")
    assert torch.equal(inputs.rows(3, 9)["more"]["y"], X[3:9] + 1)
    assert torch.equal(targets.rows(3, 9), Y[3:9])


def test_inputs_alone_train_a_model_that_computes_its_own_loss():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x, label):
            return nn.functional.cross_entropy(self.net(x), label, reduction="sum") / 22

    native = Own()
    native(X, Y).backward()
    model = Own()
    loss = ib.losses.separable(lambda share, _: share.sum(), None)
    batch = ib.VirtualBatch(model, loss, micro_batch_size=5)
    pieces = [{"x": x, "label": y} for x, y in loader()]
    for (inputs,) in ib.windows(pieces, batches=99):
        batch.backward(inputs)
    gradients = [{n: p.grad for n, p in each.named_parameters()} for each in (model, native)]
    assert worst(*gradients) < 1e-12


@pytest.mark.parametrize("parts", [[X], (X,), X])
def test_a_loader_of_inputs(parts):
    ((inputs,),) = ib.windows([parts], samples=30)
    assert torch.equal(inputs.rows(0, 22), X)


LENGTHS = {
    "by batches": (lambda: ib.windows(loader(), batches=4), 2),
    "by samples": (lambda: ib.windows(loader(), samples=8), 3),
    "without the ragged last batch": (lambda: ib.windows(loader(drop_last=True), samples=20), 1),
    "a list": (lambda: ib.windows(list(loader()), samples=21), 2),
    "a list of mappings": (lambda: ib.windows(mappings(), samples=21), 2),
}


@pytest.mark.parametrize("case", LENGTHS)
def test_lengths(case):
    make, length = LENGTHS[case]
    assert len(make()) == length == len(list(make()))


@pytest.mark.parametrize("size", [{"batches": 2}, {"samples": 8}])
def test_the_length_of_a_generator_is_not_known(size):
    with pytest.raises(TypeError):
        len(ib.windows((pair for pair in loader()), **size))


MISUSE = {
    "no iterable": (
        lambda: ib.windows(3, batches=1),
        ib.InvalidType,
        "iterable of batches, not int",
    ),
    "no size": (lambda: ib.windows(loader()), ib.InvalidArgument, "got none"),
    "both sizes": (
        lambda: ib.windows(loader(), batches=1, samples=1),
        ib.InvalidArgument,
        "got both",
    ),
    "no batches": (lambda: ib.windows(loader(), batches=0), ib.InvalidArgument, "at least 1"),
    "a fraction": (lambda: ib.windows(loader(), samples=1.5), ib.InvalidType, "not float"),
    "True": (lambda: ib.windows(loader(), batches=True), ib.InvalidType, "not bool"),
    "triples": (lambda: list(ib.windows([(X, X, Y)], batches=1)), ib.InvalidType, "tuple of 3"),
    "text": (lambda: list(ib.windows(["abc"], batches=1)), ib.InvalidType, "not str"),
    "an entry that is not there": (
        lambda: list(ib.windows(mappings(), batches=1, targets="labels")),
        ib.InvalidType,
        "'labels' is no entry .* 'x', 'more', 'label'",
    ),
    "an entry of pairs": (
        lambda: list(ib.windows(loader(), batches=1, targets="y")),
        ib.InvalidType,
        "names an entry of mappings, and the loader gives list",
    ),
    "inputs and targets of other lengths": (
        lambda: list(ib.windows([(X, Y[:3])], samples=4)),
        ib.BatchError,
        r"has \[3, 22\]",
    ),
    "numbers": (lambda: list(ib.windows([(1.0, 2.0)], samples=4)), ib.BatchError, "has none"),
    "pairs and inputs alone": (
        lambda: list(ib.windows([(X, Y), X], batches=2)),
        ib.BatchError,
        "pairs .* and inputs alone",
    ),
    "another structure": (
        lambda: list(ib.windows([(X, Y), ([X], Y)], batches=2)),
        ib.BatchError,
        "structure",
    ),
    "rows of other lengths": (
        lambda: next(iter(ib.windows([(X, Y), (X[:, :3], Y)], batches=2)))[0].rows(20, 25),
        ib.BatchError,
        r"shapes \[22, 6\] and \[22, 3\] cannot be joined",
    ),
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse(case):
    call, error, text = MISUSE[case]
    with pytest.raises(error, match=text):
        call()


def test_what_it_says_of_itself():
    assert repr(ib.windows(loader(), batches=3)) == "windows(DataLoader, batches=3)"
