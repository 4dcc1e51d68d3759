"""Ops of the user's own that see the whole batch, and embeddings that count words in it."""

import copy
import gc
import weakref

import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from support import Calls, classification, native, ours, worst_error
from torch import nn
from wrap_support import close, grads


def minibatch_deviation(x):
    """Karras et al. (2018): one more feature, how much the samples of a batch differ."""
    return x.std(0, unbiased=False).mean().expand(len(x), 1)


def discriminator():
    def forward(self, x):
        x = F.leaky_relu(self.first(x), 0.2)
        return self.last(torch.cat([x, ib.across_batch(minibatch_deviation, x)], 1))

    return Calls(forward, first=nn.Linear(6, 8), last=nn.Linear(9, 5)).double()


def experts():
    """Fedus et al. (2021): the product of routed shares and mean probabilities, for each sample."""

    def balance(probabilities):
        chosen = F.one_hot(probabilities.argmax(1), probabilities.shape[1]).double().mean(0)
        return (chosen * probabilities.mean(0)).sum().expand(len(probabilities), 1)

    def forward(self, x):
        probabilities = self.gate(x).softmax(1)
        mixed = torch.einsum("ne,neo->no", probabilities, self.up(x).unflatten(1, (3, 5)))
        return mixed + ib.across_batch(balance, probabilities)

    return Calls(forward, gate=nn.Linear(6, 3), up=nn.Linear(6, 15)).double()


def contrastive_head():
    """Two inputs, and a parameter inside of the function."""

    def forward(self, x):
        a, b = self.a(x), self.b(x)
        scores = ib.across_batch(
            lambda a, b: ((a @ b.T) * self.temperature).log_softmax(1).diagonal().unsqueeze(1), a, b
        )
        return self.head(torch.cat([a, scores], 1)).relu_()

    return Calls(
        forward,
        a=nn.Linear(6, 4),
        b=nn.Linear(6, 4),
        temperature=nn.Parameter(torch.tensor(0.7, dtype=torch.float64)),
        head=nn.Linear(5, 5),
    ).double()


def beside_batch_norm():
    def forward(self, x):
        x = self.norm(self.first(x))
        # Not the same for all samples: a layer behind it would divide by its variance of zero.
        spread = ib.across_batch(minibatch_deviation, x) * x[:, :1]
        return self.last(self.after(torch.cat([x, spread], 1)))

    return Calls(
        forward,
        first=nn.Linear(6, 8),
        norm=nn.BatchNorm1d(8),
        after=nn.BatchNorm1d(9),
        last=nn.Linear(9, 5),
    ).double()


def on_the_inputs():
    def forward(self, x):
        return self.last(torch.cat([x, ib.across_batch(minibatch_deviation, x)], 1))

    return Calls(forward, last=nn.Linear(7, 5)).double()


def words(**options):
    return Calls(
        lambda self, x: self.head(self.embedding((x.abs() * 9).long() % 20).mean(1)),
        embedding=nn.Embedding(20, 6, scale_grad_by_freq=True, **options),
        head=nn.Linear(6, 5),
    ).double()


MODELS = {
    "minibatch deviation": discriminator,
    "experts": experts,
    "contrastive head": contrastive_head,
    "beside BatchNorm": beside_batch_norm,
    "on the inputs": on_the_inputs,
    "scale_grad_by_freq": words,
    "scale_grad_by_freq, padding": lambda: words(padding_idx=3),
    "scale_grad_by_freq, sparse": lambda: words(sparse=True),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("n, size", [(11, 4), (7, 1), (8, 8)])
def test_exact(name, n, size):
    model = MODELS[name]()
    inputs, targets = classification(n)
    if name.endswith("sparse"):
        with pytest.raises(RuntimeError):  # natively: sparse gradients cannot be scaled
            native(model, nn.CrossEntropyLoss(), inputs, targets)
        return
    for loss in (nn.CrossEntropyLoss(), ib.losses.coupled(F.cross_entropy)):
        wanted = native(model, nn.CrossEntropyLoss(), inputs, targets)
        reversed_ = native(model, nn.CrossEntropyLoss(), inputs.flip(0), targets.flip(0))
        tolerance = max(1e-12, 10 * worst_error(reversed_, wanted))
        for options in ({"micro_batch_size": size}, {"memory_budget": "64MiB"}):
            found = ours(model, loss, inputs, targets, **options)
            assert worst_error(found, wanted) <= tolerance, options
            torch.testing.assert_close(found.loss, wanted.loss, rtol=1e-12, atol=0)
        if size < n:
            assert (
                ours(model, loss, inputs, targets, micro_batch_size=size).report.strategy == "cut"
            )


def test_alone_it_is_the_function():
    x = torch.randn(5, 3, requires_grad=True)
    y = ib.across_batch(minibatch_deviation, x)
    assert torch.equal(y, minibatch_deviation(x))
    y.sum().backward()
    assert x.grad is not None


def test_inputs_that_require_grad():
    model = on_the_inputs()
    inputs, targets = classification(9)
    a, b = (inputs.clone().requires_grad_() for _ in range(2))
    F.cross_entropy(model(a), targets).backward()
    model.zero_grad()
    ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4).backward(b, targets)
    torch.testing.assert_close(b.grad, a.grad, rtol=1e-11, atol=1e-14)


SEEN = []  # no closure: runs that are undone stay here


def test_the_function_runs_once_on_the_whole_batch():
    def deviation(x):
        SEEN.append(len(x))
        return minibatch_deviation(x)

    model = Calls(
        lambda self, x: self.last(torch.cat([x, ib.across_batch(deviation, x)], 1)),
        last=nn.Linear(7, 5),
    ).double()
    inputs, targets = classification(11)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4)
    for _ in range(2):  # both look at rows
        batch.backward(inputs, targets)
    SEEN.clear()
    batch.backward(inputs, targets)
    assert SEEN == [4, 4, 3, 11], "once for each recording, once for all"


def counted(where):
    """A centred layer whose function counts its calls in its closure, or on its object."""
    calls = [0]

    class Centre:
        count = 0

        def __call__(self, x):
            self.count += 1
            return x - x.mean(0)

    def centre(x):
        calls[0] += 1
        return x - x.mean(0)

    function = centre if where == "closure" else Centre()
    model = Calls(
        lambda self, x: self.last(ib.across_batch(function, self.first(x))),
        first=nn.Linear(6, 7),
        last=nn.Linear(7, 5),
    ).double()
    return model, (lambda: calls[0]) if where == "closure" else (lambda: function.count)


@pytest.mark.parametrize(
    "options",
    [
        {"micro_batch_size": 4},
        {"micro_batch_size": 1},
        {"memory_budget": "64MiB"},
        {"micro_batch_size": 4, "static_graph": True},
    ],
)
@pytest.mark.parametrize("by", ["streamed", "coupled", "wrap"])
@pytest.mark.parametrize("where", ["closure", "object"])
def test_a_function_that_counts_its_calls(where, by, options):
    model, count = counted(where)
    inputs, targets = classification(11)
    twin, wanted_count = counted(where)
    twin.load_state_dict(model.state_dict())
    F.cross_entropy(twin(inputs), targets).backward()
    loss = F.cross_entropy if by == "streamed" else ib.losses.coupled(F.cross_entropy)
    step = ib.wrap(model, **options) if by == "wrap" else ib.VirtualBatch(model, loss, **options)
    for steps in range(1, 4):
        model.zero_grad()
        if by == "wrap":
            F.cross_entropy(step(inputs), targets).backward()
        else:
            step.backward(inputs, targets)
        close(grads(model), grads(twin), 1e-11)
        assert count() == steps
    assert wanted_count() == 1


def test_functions_are_let_go():
    class Function:
        def __call__(self, x):
            return minibatch_deviation(x)

    function = Function()
    alive = weakref.ref(function)
    model = Calls(
        lambda self, x: self.last(torch.cat([x, ib.across_batch(self.act, x)], 1)),
        last=nn.Linear(7, 5),
    ).double()
    model.act = lambda x, function=function: function(x)
    inputs, targets = classification(8)
    ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=3).backward(inputs, targets)
    del model, function
    gc.collect()
    assert alive() is None


def groups_of_four(x):
    """Minibatch standard deviation as StyleGAN2 writes it (Karras et al. 2020)."""
    y = x.reshape(4, -1, x.shape[1])
    y = y - y.mean(0)
    y = (y.square().mean(0) + 1e-8).sqrt().mean(1, keepdim=True)
    return x + y.repeat(4, 1)


def whitened(x):
    """Rows that repeat each other have no such factor."""
    x = x - x.mean(0)
    return torch.linalg.solve_triangular(
        torch.linalg.cholesky(x.T @ x / (len(x) - 1)), x.T, upper=False
    ).T


def several(x):
    assert len(x) > 2
    return x - x.mean(0)


NOT_OF_FEW = {
    "groups": groups_of_four,
    "whitening": whitened,
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "deviation": lambda x: x / (x.std(0) + 0.1),
    "an assertion": several,
}


def around(function):
    return Calls(
        lambda self, x: self.last(ib.across_batch(function, self.first(x))),
        first=nn.Linear(6, 4),
        last=nn.Linear(4, 5),
    ).double()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("name", NOT_OF_FEW)
def test_functions_that_few_rows_do_not_suit(name, size):
    model = around(NOT_OF_FEW[name])
    inputs, targets = classification(8)
    wanted = native(model, nn.CrossEntropyLoss(), inputs, targets)
    for options in ({"micro_batch_size": size}, {"memory_budget": "64MiB"}):
        found = ours(model, nn.CrossEntropyLoss(), inputs, targets, **options)
        assert worst_error(found, wanted) <= 1e-11, options
    wrapped = copy.deepcopy(model)
    F.cross_entropy(ib.wrap(wrapped, micro_batch_size=size)(inputs), targets).backward()
    for parameter, name in zip(wrapped.parameters(), wanted.gradients, strict=True):
        torch.testing.assert_close(parameter.grad, wanted.gradients[name], rtol=1e-10, atol=1e-13)


def test_a_function_that_wants_the_samples_themselves():
    inputs, targets = classification(8)

    def picky(x):
        if len(x) != 8 or not torch.equal(x[:, 0], inputs[:, 0]):
            raise ValueError("other samples than mine")
        return x - x.mean(0)

    model = Calls(lambda self, x: self.last(ib.across_batch(picky, x)), last=nn.Linear(6, 5))
    model.double()
    with pytest.raises(ib.CouplingError, match=r"other samples than mine.*4 samples of one.*8"):
        ours(model, nn.CrossEntropyLoss(), inputs, targets, micro_batch_size=4)
    wanted = native(model, nn.CrossEntropyLoss(), inputs, targets)
    found = ours(model, nn.CrossEntropyLoss(), inputs, targets, memory_budget="64MiB")
    assert worst_error(found, wanted) <= 1e-12
    F.cross_entropy(ib.wrap(model, memory_budget="64MiB")(inputs), targets).backward()
    torch.testing.assert_close(
        model.last.weight.grad, wanted.gradients["last.weight"], rtol=1e-12, atol=0
    )


class Own(Exception):
    pass


@pytest.mark.parametrize("kind", [KeyboardInterrupt, Own])
def test_other_errors_come_back_at_once(kind):
    def stop(x):
        raise kind(len(x))

    inputs, targets = classification(8)
    with pytest.raises(kind) as raised:
        ours(around(stop), nn.CrossEntropyLoss(), inputs, targets, micro_batch_size=3)
    assert raised.value.args == (3,)


@pytest.mark.parametrize("coupled", [False, True])
def test_a_function_that_draws(coupled):
    masks = []

    def noisy(x):
        masks.append(F.dropout(torch.ones_like(x)))
        return (x - x.mean(0)) * masks[-1]

    model = around(noisy)
    inputs, targets = classification(11)
    loss = ib.losses.coupled(F.cross_entropy) if coupled else nn.CrossEntropyLoss()
    torch.manual_seed(4)
    found = ours(model, loss, inputs, targets, micro_batch_size=4)
    (mask,) = (mask for mask in masks if len(mask) == 11)
    masked = around(lambda x: (x - x.mean(0)) * mask)
    masked.load_state_dict(model.state_dict())
    wanted = native(masked, nn.CrossEntropyLoss(), inputs, targets)
    assert worst_error(found, wanted) <= 1e-12
    torch.manual_seed(4)
    again = ours(model, loss, inputs, targets, micro_batch_size=4)
    assert torch.equal(again.loss, found.loss)
    for options in ({"micro_batch_size": 4}, {"micro_batch_size": 1}):
        with pytest.raises(ib.CouplingError, match="draws random numbers.*as an input"):
            ours(model, loss, inputs, targets, match_native_rng=True, **options)


def test_a_function_that_works_in_place():
    model = around(lambda x: x.sub_(x.mean(0)).mul_(x.detach().abs().mean()))
    inputs, targets = classification(11)
    wanted = native(model, nn.CrossEntropyLoss(), inputs, targets)
    for size in (1, 4):
        found = ours(model, nn.CrossEntropyLoss(), inputs, targets, micro_batch_size=size)
        assert worst_error(found, wanted) <= 1e-12
    # Natively what is used afterwards has changed as well.
    twice = Calls(
        lambda self, x: (lambda h: self.last(ib.across_batch(lambda x: x.sub_(x.mean(0)), h) * h))(
            self.first(x)
        ),
        first=nn.Linear(6, 4),
        last=nn.Linear(4, 5),
    ).double()
    with pytest.raises(ib.CouplingError, match="cannot be cut"):
        ours(twice, nn.CrossEntropyLoss(), inputs, targets, micro_batch_size=4)


def test_misuse():
    x = torch.randn(4, 3)
    with pytest.raises(ib.InvalidArgument, match="shape .*expand"):
        ib.across_batch(lambda x: x.mean(), x)
    with pytest.raises(ib.InvalidArgument, match="needs a tensor"):
        ib.across_batch(lambda: x)
    with pytest.raises(ib.InvalidType, match="given a list"):
        ib.across_batch(minibatch_deviation, [1.0])
    with pytest.raises(ib.InvalidType, match="returned a float"):
        ib.across_batch(lambda x: 1.0, x)
    with pytest.raises(ib.InvalidArgument, match="no dimension"):
        ib.across_batch(minibatch_deviation, torch.tensor(1.0))
    with pytest.raises(ZeroDivisionError):
        ib.across_batch(lambda x: 1 / 0, x)
    inputs, targets = classification(6)

    def refused(forward, match, error=ib.CouplingError, **parts):
        model = Calls(forward, head=nn.Linear(6, 5), **parts).double()
        with pytest.raises(error, match=match):
            ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4).backward(
                inputs, targets
            )

    prototypes = nn.Parameter(torch.randn(8, 6))
    refused(
        lambda self, x: self.head(
            x + ib.across_batch(lambda x, p: (x @ p.T).mean(1, keepdim=True), x, self.prototypes)
        ),
        "does not come from the samples",
        prototypes=prototypes,
    )
    refused(
        lambda self, x: self.head(
            (lambda y: x + ib.across_batch(lambda x: x * y.mean(), x))(self.first(x))
        ),
        "uses a tensor of the forward around it",
        first=nn.Linear(6, 6),
    )
    refused(
        lambda self, x: self.head(
            x + ib.across_batch(minibatch_deviation, x.T.contiguous()).mean()
        ),
        "does not hold the samples",
    )
    refused(
        lambda self, x: self.head(x + self.positions(torch.arange(6))[:1]),
        "does not come from the samples",
        positions=nn.Embedding(6, 6, scale_grad_by_freq=True),
    )
