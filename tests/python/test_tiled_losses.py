"""Losses that walk their scores in tiles: exact, through VirtualBatch and alone, and small."""

import itertools

import infinitybatch as ib
import pytest
import torch
from measure import excess, numbered
from support import Calls, assert_exact, mlp
from torch import nn
from torch.nn import functional as F

N = 13


def double(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def towers(**parameters):
    """Inputs (a, b) of shape (N, 6) to embeddings of shape (N, 5) each."""
    return Calls(
        lambda self, a, b: (self.left(a), self.right(b)), left=mlp(), right=mlp(), **parameters
    )


def plain_info_nce(a, b, temperature, symmetric=True):
    a, b = F.normalize(a, dim=-1), F.normalize(b, dim=-1)
    scores, own = a @ b.T / temperature, torch.arange(len(a))
    loss = F.cross_entropy(scores, own)
    return (loss + F.cross_entropy(scores.T, own)) / 2 if symmetric else loss


def plain_siglip(a, b, temperature, bias):
    a, b = F.normalize(a, dim=-1), F.normalize(b, dim=-1)
    signs = 2 * torch.eye(len(a), dtype=a.dtype) - 1
    return -F.logsigmoid(signs * (a @ b.T / temperature + bias)).sum() / len(a)


def plain_sup_con(x, labels, temperature):
    x = F.normalize(x, dim=-1)
    own = torch.eye(len(x), dtype=torch.bool)
    scores = x @ x.T / temperature
    logarithms = scores - scores.masked_fill(own, -torch.inf).logsumexp(1, keepdim=True)
    same = (labels[:, None] == labels) & ~own
    loss = -(logarithms * same).sum(1) / same.sum(1).clamp(min=1)
    return torch.where(same.any(1), loss, 0).mean()


@pytest.mark.parametrize("tile", [1, 5, None])
@pytest.mark.parametrize("symmetric", [True, False])
def test_info_nce_of_a_virtual_batch(symmetric, tile):
    loss = ib.losses.info_nce(temperature=0.2, symmetric=symmetric, tile=tile)
    assert loss.name == "info_nce"
    plain = lambda a, b: plain_info_nce(a, b, 0.2, symmetric)  # noqa: E731
    assert_exact(towers(), plain, (double(N, 6), double(N, 6)), (), wrap=lambda _: loss)


def test_siglip_of_one_tensor_of_pairs():
    model = Calls(lambda self, x: self.net(x), net=mlp())
    plain = lambda y: plain_siglip(*y.unbind(1), 0.2, -1.0)  # noqa: E731
    loss = ib.losses.siglip(temperature=0.2, bias=-1, tile=4)
    assert_exact(model, plain, double(N, 2, 6), (), wrap=lambda _: loss)


def test_sup_con_of_labels():
    labels = torch.randint(4, (N,))
    labels[3] = 9  # alone
    loss = ib.losses.sup_con(temperature=0.3, tile=4)
    plain = lambda x, y: plain_sup_con(x, y, 0.3)  # noqa: E731
    assert_exact(mlp(), plain, double(N, 6), labels, wrap=lambda _: loss)


@pytest.mark.parametrize("targets", [True, False])
def test_pairwise_of_a_function(targets):
    labels = torch.randint(3, (N,))

    def hardest(rows, columns, positions, y):
        distance = torch.cdist(rows, columns)
        same = (y[positions])[:, None] == y
        far = distance.masked_fill(~same, 0).amax(1)
        near = distance.masked_fill(same, torch.inf).amin(1)
        return (far - near + 2).relu().sum()

    function = hardest if targets else lambda r, c, p: hardest(r, c, p, labels)
    plain = lambda x, y=labels: hardest(x, x, torch.arange(len(x)), y) / len(x)  # noqa: E731
    loss = ib.losses.pairwise(function, tile=4)
    inputs = double(N, 6)
    assert_exact(mlp(), plain, inputs, labels if targets else (), wrap=lambda _: loss)
    x = mlp()(inputs).detach().requires_grad_()
    value = ib.losses.pairwise(function, x, x, targets=labels, tile=4)
    torch.testing.assert_close(value, plain(x), rtol=1e-12, atol=0)


PARAMETERS = {
    "of the model": lambda model: model.log_temperature,
    "of the loss": lambda model: nn.Parameter(torch.tensor(-1.2, dtype=torch.float64)),
}


@pytest.mark.parametrize("owner", PARAMETERS)
@pytest.mark.parametrize("way", [{"micro_batch_size": 4}, {"memory_budget": "64MiB"}], ids=str)
@pytest.mark.parametrize("kind", ["tensor", "function", "pairwise"])
def test_learned_temperatures(owner, way, kind):
    model = towers(log_temperature=nn.Parameter(torch.tensor(-1.2, dtype=torch.float64)))
    learned = PARAMETERS[owner](model)
    inputs = (double(N, 6), double(N, 6))
    temperature = (lambda: learned.square()) if kind == "tensor" else (lambda: learned.exp())
    if kind == "pairwise":

        def function(rows, columns, positions):
            scores = F.normalize(rows, dim=-1) @ F.normalize(columns, dim=-1).T
            return F.cross_entropy(scores / temperature(), positions, reduction="sum")

        loss = ib.losses.pairwise(function, tile=5)
    else:
        loss = ib.losses.info_nce(temperature=temperature, tile=5)
    wanted = [p for p in model.parameters() if p is not learned] + [learned]
    plain = plain_info_nce(*model(*inputs), temperature(), symmetric=kind != "pairwise")
    native = torch.autograd.grad(plain, wanted, allow_unused=True)
    report = ib.VirtualBatch(model, loss, **way).backward(inputs)
    torch.testing.assert_close(report.loss, plain.detach(), rtol=1e-12, atol=0)
    for parameter, gradient in zip(wanted, native, strict=True):
        if gradient is None:
            assert parameter.grad is None
        else:
            torch.testing.assert_close(parameter.grad, gradient, rtol=1e-11, atol=1e-13)
            parameter.grad = None


def test_a_parameter_itself_is_a_temperature():
    temperature = nn.Parameter(torch.tensor([0.4], dtype=torch.float64))
    bias = nn.Parameter(torch.tensor(-2.0, dtype=torch.float64))
    a, b = double(N, 4), double(N, 4)
    batch = ib.VirtualBatch(
        Calls(lambda self, a, b: (a * self.scale, b), scale=nn.Parameter(torch.ones(4).double())),
        ib.losses.siglip(temperature=temperature, bias=bias, tile=3),
        micro_batch_size=4,
    )
    batch.backward((a, b))
    wanted = torch.autograd.grad(plain_siglip(a, b, temperature, bias), [temperature, bias])
    torch.testing.assert_close(temperature.grad, wanted[0], rtol=1e-12, atol=0)
    torch.testing.assert_close(bias.grad, wanted[1], rtol=1e-12, atol=0)


def test_losses_go_where_they_are_told_and_into_wrap():
    inputs = (double(N, 6), double(N, 6))
    model = towers()
    plain = plain_info_nce(*model(*inputs), 0.07)
    wanted = torch.autograd.grad(plain, list(model.parameters()))
    there = ib.losses.info_nce(loss_device="cpu")
    ib.VirtualBatch(model, there, micro_batch_size=5).backward(inputs)
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    ib.losses.info_nce(*ib.wrap(model, micro_batch_size=5)(*inputs)).backward()
    for first, second, native in zip(
        found, (p.grad for p in model.parameters()), wanted, strict=True
    ):
        torch.testing.assert_close(first, native, rtol=1e-11, atol=1e-14)
        torch.testing.assert_close(second, native, rtol=1e-11, atol=1e-14)


def test_float32_is_at_least_as_exact_as_native():
    torch.manual_seed(0)
    for dimension, temperature in itertools.product((8, 64), (0.01, 0.07, 1.0)):
        a, b = torch.randn(512, dimension), torch.randn(512, dimension)
        b = a + 0.3 * b

        def gradients(loss, dtype, a=a, b=b):
            leaves = [x.to(dtype).requires_grad_() for x in (a, b)]
            return [g.double() for g in torch.autograd.grad(loss(*leaves), leaves)]

        plain = lambda a, b, t=temperature: plain_info_nce(a, b, t)  # noqa: E731
        tiled = lambda a, b, t=temperature: ib.losses.info_nce(a, b, temperature=t)  # noqa: E731
        truth = gradients(plain, torch.float64)
        ours, native = (numbered(gradients(way, torch.float32)) for way in (tiled, plain))
        eps = torch.finfo(torch.float32).eps
        assert excess(ours, numbered(truth), [native], least=8 * eps, times=2) == {}


# ---- the head of a language model ---------------------------------------------------------------

WORDS, WIDTH, LENGTH = 31, 6, 5


class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH).double()
        self.body = nn.GRU(WIDTH, WIDTH, batch_first=True).double()

    def forward(self, words):
        return self.body(self.embedding(words))[0]


def sentences():
    targets = torch.randint(WORDS, (N, LENGTH))
    targets[::3] = -100
    targets[1, 2:] = -100
    return torch.randint(WORDS, (N, LENGTH)), targets


HEADS = {
    "plain": {},
    "weighted": {"weight": torch.rand(WORDS).double() + 0.1},
    "smoothed": {"label_smoothing": 0.1},
    "sum": {"reduction": "sum"},
    "capped": {"softcap": 1.5, "label_smoothing": 0.1},
    "tile 1": {"tile": 1},
    "tile 3": {"tile": 3},
}


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("name", HEADS)
def test_head_of_a_virtual_batch(name, tied):
    """Micro-batches with other numbers of targets, some with none: the denominator is global."""
    options = dict(HEADS[name])
    words, targets = sentences()
    for way in ({"micro_batch_size": 1}, {"micro_batch_size": 4}, {"memory_budget": "64MiB"}):
        model = Language()
        weight = model.embedding.weight if tied else nn.Parameter(double(WORDS, WIDTH))
        bias = nn.Parameter(double(WORDS))
        logits = F.linear(model(words), weight, bias)
        if cap := options.get("softcap"):
            logits = cap * torch.tanh(logits / cap)
        native = {k: v for k, v in options.items() if k not in ("softcap", "tile")}
        plain = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), **native)
        wanted = torch.autograd.grad(plain, [*model.parameters(), bias])
        loss = ib.losses.linear_cross_entropy(weight, bias, **options)
        report = ib.VirtualBatch(model, loss, **way).backward(words, targets)
        assert report.strategy == "stream"
        torch.testing.assert_close(report.loss, plain.detach(), rtol=1e-12, atol=0)
        found = [parameter.grad for parameter in [*model.parameters(), bias]]
        assert excess(numbered(found), numbered(wanted)) == {}, way


def test_head_as_a_function_and_under_autocast():
    hidden, weight = (
        torch.randn(4, 9, 8, requires_grad=True),
        torch.randn(20, 8, requires_grad=True),
    )
    targets = torch.randint(20, (4, 9))
    with torch.autocast("cpu", torch.bfloat16):
        value = ib.losses.linear_cross_entropy(hidden, weight, targets, tile=7)
        plain = F.cross_entropy(F.linear(hidden, weight).flatten(0, 1), targets.flatten())
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, plain, rtol=2e-2, atol=0)
    exact = ib.losses.linear_cross_entropy(hidden, weight, targets)
    assert value.item() != exact.item()  # products were rounded, as natively
    for found, wanted in zip(
        torch.autograd.grad(value, [hidden, weight]),
        torch.autograd.grad(exact, [hidden, weight]),
        strict=True,
    ):
        torch.testing.assert_close(found, wanted, rtol=0.1, atol=1e-2)


def peak(function):
    function()  # first use of a kernel allocates
    before = ib.memory.stats().live
    with ib.memory.peak() as scope:
        function()
    return scope.peak - before


def test_memory_is_that_of_a_tile():
    """Gradients of both sides, a copy of one at length 1, a tile of scores; not N x N."""
    a, b = (torch.randn(2048, 32, requires_grad=True) for _ in range(2))
    side, tile = 2048 * 32 * 4, 2048 * 128 * 4  # 1 MiB of scores
    assert peak(lambda: ib.losses.info_nce(a, b, symmetric=False)) <= 3.5 * side + tile
    assert peak(lambda: ib.losses.info_nce(a, b)) <= 3.5 * side + 2 * tile + side
    assert peak(lambda: ib.losses.siglip(a, b, tile=16)) <= 3.5 * side + 2 * tile // 8
    labels = torch.randint(100, (2048,))
    assert peak(lambda: ib.losses.sup_con(a, labels, tile=16)) <= 3 * side + 3 * tile // 8
    hidden = torch.randn(512, 16, requires_grad=True)
    weight = torch.randn(5000, 16, requires_grad=True)
    targets = torch.randint(5000, (512,))
    head = peak(lambda: ib.losses.linear_cross_entropy(hidden, weight, targets))
    assert head <= 1.1 * (weight.nbytes + hidden.nbytes) + (1 << 20)
    assert 8 * head < peak(lambda: F.cross_entropy(hidden @ weight.T, targets).backward())


def test_as_many_allocations_for_any_number_of_tiles():
    """So that two traces of other sizes tell the planner one story."""
    hidden, weight = torch.randn(64, 8, requires_grad=True), torch.randn(9, 8, requires_grad=True)
    targets = torch.randint(9, (64,))
    seen = set()
    for tile in (1, 7, 64):
        with ib.memory.fail_allocation() as counter:
            ib.losses.linear_cross_entropy(
                hidden, weight, targets, tile=tile, label_smoothing=0.1, softcap=2.0
            )
        seen.add(counter.seen)
    assert len(seen) == 1, seen


def test_a_budget_that_logits_would_not_fit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(2000, 32), nn.Linear(32, 32))
    words, targets = torch.randint(2000, (64, 32)), torch.randint(2000, (64, 32))
    loss = ib.losses.linear_cross_entropy(model[0].weight)
    budget = ib.memory.stats().live + (6 << 20)  # the logits alone are 16 MiB
    batch = ib.VirtualBatch(model, loss, memory_budget=budget)
    for _ in range(12):
        model.zero_grad()
        report = batch.backward(words, targets)
        assert report.peak_bytes <= budget
    assert report.restarts == 0
    found = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    F.cross_entropy((model(words) @ model[0].weight.T).flatten(0, 1), targets.flatten()).backward()
    for gradient, parameter in zip(found, model.parameters(), strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-4, atol=1e-7)


# ---- misuse -------------------------------------------------------------------------------------

A, B = torch.randn(4, 3), torch.randn(4, 3)
MISUSES = {
    "shapes": (lambda: ib.losses.info_nce(A, torch.randn(4, 2)), ib.InvalidArgument, "4, 2"),
    "one tensor": (lambda: ib.losses.info_nce(A), ib.InvalidArgument, "2 tensors"),
    "a list": (lambda: ib.losses.info_nce(A, [1]), ib.InvalidType, "list"),
    "tile": (lambda: ib.losses.siglip(tile=0), ib.InvalidArgument, "1 or more"),
    "half a row": (lambda: ib.losses.info_nce(A, B, tile=2.5), ib.InvalidType, "tile .*float"),
    "tile of a head": (
        lambda: ib.losses.linear_cross_entropy(A, tile="9"),
        ib.InvalidType,
        "tile .*str",
    ),
    "normalize": (lambda: ib.losses.info_nce(A, B, normalize="x"), ib.InvalidType, "normalize"),
    "symmetric": (lambda: ib.losses.info_nce(symmetric=2), ib.InvalidType, "symmetric"),
    "label above": (
        lambda: ib.losses.linear_cross_entropy(A, B, torch.tensor([0, 3, 4, 1])),
        IndexError,
        r"^Target 4 is out of bounds\.$",
    ),
    "label below": (
        lambda: ib.VirtualBatch(nn.Linear(3, 3), ib.losses.linear_cross_entropy(B)).backward(
            A, torch.tensor([0, -100, -1, 1])
        ),
        IndexError,
        r"^Target -1 is out of bounds\.$",
    ),
    "temperature": (lambda: ib.losses.info_nce(temperature=-1), ib.InvalidArgument, "above 0"),
    "text": (lambda: ib.losses.info_nce(temperature="a"), ib.InvalidType, "a number"),
    "truth": (lambda: ib.losses.siglip(A, B, bias=True), ib.InvalidType, "bias"),
    "returns": (lambda: ib.losses.info_nce(A, B, temperature=lambda: 1), ib.InvalidType, "int"),
    "labels": (lambda: ib.losses.sup_con(A, B[:, 0]), ib.InvalidArgument, "integer label"),
    "reduction": (lambda: ib.losses.sup_con(reduction="none"), ib.InvalidArgument, "none"),
    "device": (lambda: ib.losses.siglip(A, B, loss_device="cpu"), ib.InvalidArgument, "device"),
    "function": (lambda: ib.losses.pairwise(3), ib.InvalidType, "int"),
    "arguments": (lambda: ib.losses.pairwise(lambda r: r), ib.InvalidArgument, "1 arguments"),
    "not one": (
        lambda: ib.losses.pairwise(lambda r, c, p: r, A, B),
        ib.InvalidArgument,
        "must return a scalar",
    ),
    "softcap": (
        lambda: ib.losses.linear_cross_entropy(A, softcap=0),
        ib.InvalidArgument,
        "softcap",
    ),
    "bias": (
        lambda: ib.losses.linear_cross_entropy(A, B[:, 0], linear_bias=B),
        ib.InvalidArgument,
        "twice",
    ),
    "targets": (
        lambda: ib.losses.linear_cross_entropy(A, torch.randn(7, 3), torch.zeros(3).long()),
        ib.InvalidArgument,
        "3",
    ),
    "second derivative": (
        lambda: torch.autograd.grad(
            ib.losses.info_nce(a := A.clone().requires_grad_(), B), a, create_graph=True
        ),
        ib.Unsupported,
        "create_graph",
    ),
}


@pytest.mark.parametrize("name", MISUSES)
def test_misuse(name):
    call, kind, message = MISUSES[name]
    with pytest.raises(kind, match=message):
        call()


def test_backward_goes_through_once():
    a = A.clone().requires_grad_()
    loss = ib.losses.info_nce(a, B)
    loss.backward()
    with pytest.raises(ib.StateError, match="second time"):
        loss.backward()


def test_an_error_of_the_function_comes_back_as_it_is():
    def wrong(rows, columns, positions):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        ib.losses.pairwise(wrong, A, B)
    batch = ib.VirtualBatch(nn.Linear(3, 3), ib.losses.pairwise(wrong), micro_batch_size=2)
    with pytest.raises(KeyError, match="mine"):
        batch.backward(A)
