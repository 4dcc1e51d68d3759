"""The gradient of the whole batch, for models with whatever Python and torch.nn offer."""

import copy
import warnings

import infinitybatch as ib
import pytest
import torch
from support import (
    Calls,
    assert_exact,
    classification,
    excess_in_single,
    mlp,
    native,
    ours,
    worst_error,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def attention_mask(n: int = 7) -> torch.Tensor:
    return nn.Transformer.generate_square_subsequent_mask(n, dtype=torch.float64)


def double_sequence(n: int, length: int = 7, width: int = 8) -> torch.Tensor:
    return torch.randn(n, length, width, dtype=torch.float64)


def convnet():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64, 5),
    ).double()


def lstm():
    return Calls(
        lambda self, x: self.head(self.lstm(x)[0][:, -1]),
        lstm=nn.LSTM(8, 6, num_layers=2, batch_first=True, bidirectional=True),
        head=nn.Linear(12, 5),
    ).double()


def gru():
    return Calls(
        lambda self, x: self.head(self.gru(x)[1][-1]),
        gru=nn.GRU(8, 6, batch_first=True),
        head=nn.Linear(6, 5),
    ).double()


def multihead():
    def forward(self, x):
        y, _ = self.attention(x, x, x, need_weights=False)
        return self.head(y.mean(1))

    return Calls(
        forward, attention=nn.MultiheadAttention(8, 2, batch_first=True), head=nn.Linear(8, 5)
    ).double()


def encoder():
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    return Calls(
        lambda self, x: self.head(self.encoder(x, mask=attention_mask(), is_causal=True)[:, -1]),
        encoder=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False),
        head=nn.Linear(8, 5),
    ).double()


def tied():
    def forward(self, x):
        return self.embedding(x).mean(1) @ self.embedding.weight.T

    return Calls(forward, embedding=nn.Embedding(5, 8)).double()


def in_place():
    def forward(self, x):
        y = self.first(x)
        y.mul_(2).add_(1)
        y[:, 0] = y[:, 1] * 3
        z = torch.empty_like(y)
        z.copy_(y)
        return self.second(z.clamp_(min=-1).t().contiguous().t())

    return Calls(forward, first=nn.Linear(6, 8), second=nn.Linear(8, 5)).double()


def checkpointed(reentrant: bool):
    def forward(self, x):
        y = torch.tanh(self.first(x))
        y = checkpoint(self.middle, y, use_reentrant=reentrant)
        return self.second(y)

    return Calls(
        forward,
        first=nn.Linear(6, 8),
        middle=nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8)),
        second=nn.Linear(8, 5),
    ).double()


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return 2 * x * gradient


def custom_function():
    return Calls(
        lambda self, x: self.head(Square.apply(self.first(x))),
        first=nn.Linear(6, 8),
        head=nn.Linear(8, 5),
    ).double()


def experts():
    """Routing depends on the data: some experts see nothing of some micro-batches."""

    def forward(self, x):
        choice = self.router(x).argmax(1)
        y = torch.zeros(len(x), 5, dtype=x.dtype)
        for i, expert in enumerate(self.experts):
            rows = (choice == i).nonzero().flatten()
            if len(rows):
                y = y.index_add(0, rows, expert(x[rows]))
        return y + self.router(x).sum(1, keepdim=True)

    return Calls(
        forward, router=nn.Linear(6, 3), experts=nn.ModuleList(nn.Linear(6, 5) for _ in range(3))
    ).double()


def sets_requires_grad():
    """A model that differentiates by its own input (a physics-informed network)."""

    def forward(self, x):
        x.requires_grad_(True)
        y = self.net(x)
        (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + slope.sum(1, keepdim=True)

    return Calls(forward, net=mlp()).double()


def unused():
    model = Calls(lambda self, x: self.used(x), used=mlp(), never=nn.Linear(3, 3))
    model.used[0].bias.requires_grad_(False)
    return model.double()


SEQUENCE = {
    "lstm": lstm,
    "gru": gru,
    "multihead": multihead,
    "encoder": encoder,
}
FLAT = {
    "mlp": mlp,
    "in_place": in_place,
    "checkpoint": lambda: checkpointed(False),
    "checkpoint_reentrant": lambda: checkpointed(True),
    "custom_function": custom_function,
    "experts": experts,
    "sets_requires_grad": sets_requires_grad,
    "unused_and_frozen": unused,
}


@pytest.mark.parametrize("name", FLAT)
def test_models_of_flat_inputs(name):
    inputs, targets = classification()
    assert_exact(FLAT[name](), nn.CrossEntropyLoss(), inputs, targets)
    assert not inputs.requires_grad


@pytest.mark.parametrize("name", SEQUENCE)
def test_models_of_sequences(name):
    assert_exact(
        SEQUENCE[name](), nn.CrossEntropyLoss(), double_sequence(11), torch.randint(5, (11,))
    )


def test_convolutions():
    images = torch.randn(11, 1, 8, 8, dtype=torch.float64)
    assert_exact(convnet(), nn.CrossEntropyLoss(), images, torch.randint(5, (11,)))


def test_tied_weights():
    assert_exact(tied(), nn.CrossEntropyLoss(), torch.randint(5, (11, 4)), torch.randint(5, (11,)))


def test_sparse_embedding():
    model = Calls(
        lambda self, x: self.head(self.embedding(x).mean(1)),
        embedding=nn.Embedding(20, 6, sparse=True),
        head=nn.Linear(6, 5),
    ).double()
    inputs, targets = torch.randint(20, (11, 4)), torch.randint(5, (11,))
    assert_exact(model, nn.CrossEntropyLoss(), inputs, targets)
    found = ours(model, nn.CrossEntropyLoss(), inputs, targets, micro_batch_size=2)
    assert found.gradients["embedding.weight"].is_sparse


def test_embedding_bag():
    model = Calls(
        lambda self, x: self.head(self.bag(x)),
        bag=nn.EmbeddingBag(20, 6, mode="sum"),
        head=nn.Linear(6, 5),
    ).double()
    assert_exact(model, nn.CrossEntropyLoss(), torch.randint(20, (11, 4)), torch.randint(5, (11,)))


@pytest.mark.parametrize("spelling", ["parametrization", "hook"])
def test_spectral_norm_starts_from_the_steps_buffers(spelling):
    model = mlp()
    if spelling == "parametrization":
        nn.utils.parametrizations.spectral_norm(model[0])
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            nn.utils.spectral_norm(model[0])
        # deepcopy needs a leaf, which the hook makes anew in each forward
        model[0].weight = model[0].weight.detach()
    model.train()
    assert_exact(model, nn.CrossEntropyLoss(), *classification())


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), ib.losses.coupled(F.cross_entropy)])
@pytest.mark.parametrize("norm", [nn.utils.spectral_norm, nn.utils.weight_norm])
def test_a_norm_by_hook_on_a_fresh_layer(norm, loss):
    """Up to the first forward spectral_norm's plain attribute `weight` is an alias of a parameter
    (in a deep copy it is not)."""

    def make():
        torch.manual_seed(0)
        layers = nn.Linear(6, 8, dtype=torch.float64), nn.Linear(8, 5, dtype=torch.float64)
        return nn.Sequential(norm(layers[0]), nn.Tanh(), layers[1])

    native, model = make(), make()
    inputs, targets = classification()
    F.cross_entropy(native(inputs), targets).backward()
    ib.VirtualBatch(model, loss, micro_batch_size=3).backward(inputs, targets)
    for ours_, theirs in zip(model.parameters(), native.parameters(), strict=True):
        assert torch.allclose(ours_.grad, theirs.grad, rtol=1e-12, atol=1e-14)
    for ours_, theirs in zip(model.buffers(), native.buffers(), strict=True):
        assert torch.equal(ours_, theirs)


def test_buffers_that_are_bound_anew():
    def forward(self, x):
        self.steps = self.steps + 1
        return self.net(x)

    model = Calls(forward, net=mlp(), steps=torch.zeros((), dtype=torch.int64))
    inputs, targets = classification()
    assert_exact(model, nn.CrossEntropyLoss(), inputs, targets)
    found = ours(model, nn.CrossEntropyLoss(), inputs, targets, micro_batch_size=2)
    assert found.buffers["steps"] == 1  # not once per micro-batch


def test_buffers_that_are_written_past_the_version_counter():
    def forward(self, x):
        self.steps.data.add_(1)
        return self.net(x) * self.steps

    model = Calls(forward, net=mlp(), steps=torch.zeros((), dtype=torch.float64))
    assert_exact(model, nn.CrossEntropyLoss(), *classification())


def test_eval_mode_batch_norm_is_exact():
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5)).double()
    model(torch.randn(64, 6, dtype=torch.float64))  # statistics that are not the initial ones
    assert_exact(model.eval(), nn.CrossEntropyLoss(), *classification())


def test_instance_norm_couples_nothing():
    model = nn.Sequential(
        nn.Conv1d(1, 4, 3), nn.InstanceNorm1d(4, affine=True), nn.Flatten(), nn.Linear(16, 5)
    ).double()
    inputs, targets = classification()
    assert_exact(model, nn.CrossEntropyLoss(), inputs.unsqueeze(1), targets)


def test_complex_parameters():
    def forward(self, x):
        return (x.to(torch.complex128) @ self.weight).abs()

    weight = nn.Parameter(torch.randn(6, 5, dtype=torch.complex128))
    assert_exact(Calls(forward, weight=weight), nn.CrossEntropyLoss(), *classification())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_parameters_are_as_good_as_natively(dtype):
    """Gradients are summed in fp32, so the error is that of the parameters' own rounding."""
    model = mlp().to(dtype)
    inputs, targets = classification(64)
    truth = copy.deepcopy(model).double()
    wanted = native(truth, nn.CrossEntropyLoss(), inputs, targets)
    found = ours(model, nn.CrossEntropyLoss(), inputs.to(dtype), targets, micro_batch_size=4)
    whole = native(model, nn.CrossEntropyLoss(), inputs.to(dtype), targets)
    assert all(gradient.dtype == dtype for gradient in found.gradients.values())
    assert excess_in_single(found, wanted, [whole], dtype) == {}


def test_single_precision_is_as_good_as_natively():
    model = mlp().float()
    inputs, targets = classification(64)
    truth = native(copy.deepcopy(model).double(), nn.CrossEntropyLoss(), inputs, targets)
    whole = native(model, nn.CrossEntropyLoss(), inputs.float(), targets)
    found = ours(model, nn.CrossEntropyLoss(), inputs.float(), targets, micro_batch_size=5)
    assert excess_in_single(found, truth, [whole]) == {}


def test_autocast():
    """One micro-batch under autocast is native under autocast; several agree to bfloat16."""
    model = mlp().float()
    inputs, targets = classification(24)
    inputs = inputs.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = native(model, nn.CrossEntropyLoss(), inputs, targets)
        at_once = ours(model, nn.CrossEntropyLoss(), inputs, targets, micro_batch_size=24)
        in_parts = ours(model, nn.CrossEntropyLoss(), inputs, targets, micro_batch_size=5)
    plain = native(model, nn.CrossEntropyLoss(), inputs, targets)
    assert worst_error(plain, wanted) > 1e-4  # autocast did something
    assert worst_error(at_once, wanted) < 1e-6
    assert worst_error(in_parts, wanted) < 0.02


def test_autocast_inside_a_checkpoint():
    model = checkpointed(False).float()
    inputs, targets = classification(12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        wanted = native(model, nn.CrossEntropyLoss(), inputs.float(), targets)
        found = ours(model, nn.CrossEntropyLoss(), inputs.float(), targets, micro_batch_size=12)
    assert worst_error(found, wanted) < 1e-6


def test_gradients_are_added_to_those_that_are_there():
    model = mlp()
    inputs, targets = classification()
    once = native(model, nn.CrossEntropyLoss(), inputs, targets)
    kept = {}
    for name, parameter in model.named_parameters():
        parameter.grad = torch.ones_like(parameter)
        kept[name] = parameter.grad
    ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=3).backward(inputs, targets)
    for name, parameter in model.named_parameters():
        assert parameter.grad is kept[name]  # in place, as natively
        torch.testing.assert_close(parameter.grad, 1 + once.gradients[name], rtol=1e-13, atol=0)


@pytest.mark.parametrize("set_to_none", [True, False])
def test_zero_grad(set_to_none):
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    inputs, targets = classification()
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=3)
    for _ in range(3):
        wanted = native(model, nn.CrossEntropyLoss(), inputs, targets)
        optimizer.zero_grad(set_to_none=set_to_none)
        batch.backward(inputs, targets)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(
                parameter.grad, wanted.gradients[name], rtol=1e-12, atol=1e-15
            )
        optimizer.step()


def test_hooks_see_the_full_gradient_once():
    model = mlp()
    inputs, targets = classification()
    wanted = native(model, nn.CrossEntropyLoss(), inputs, targets).gradients["0.weight"]
    seen = {"tensor": [], "after": []}
    weight = model[0].weight
    weight.register_hook(lambda gradient: seen["tensor"].append(gradient.clone()) or 2 * gradient)
    weight.register_post_accumulate_grad_hook(lambda p: seen["after"].append(p.grad.clone()))
    ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=3).backward(inputs, targets)
    (before,), (after,) = seen["tensor"], seen["after"]
    torch.testing.assert_close(before, wanted, rtol=1e-12, atol=1e-16)
    torch.testing.assert_close(after, 2 * wanted, rtol=1e-12, atol=1e-16)
    torch.testing.assert_close(weight.grad, 2 * wanted, rtol=1e-12, atol=1e-16)


def test_module_hooks_run_for_each_micro_batch():
    model = mlp()
    inputs, targets = classification(12)
    calls = []
    model[0].register_forward_hook(lambda *_: calls.append("forward"))
    model[0].register_full_backward_hook(lambda *_: calls.append("backward"))
    ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=3).backward(inputs, targets)
    assert calls == ["forward", "backward"] * 4  # what looks note is undone


def test_leaves_that_the_module_does_not_list():
    hidden = torch.randn(8, 5, dtype=torch.float64, requires_grad=True)
    net = nn.Linear(6, 8).double()

    def forward(x):
        return net(x) @ hidden

    inputs, targets = classification()
    F.cross_entropy(forward(inputs), targets).backward()
    wanted, hidden.grad = hidden.grad, None
    net.zero_grad()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return forward(x)

    ib.VirtualBatch(Model(), nn.CrossEntropyLoss(), micro_batch_size=3).backward(inputs, targets)
    torch.testing.assert_close(hidden.grad, wanted, rtol=1e-12, atol=1e-16)


def test_inputs_that_require_grad():
    model = mlp()
    inputs, targets = classification()
    inputs.requires_grad_()
    F.cross_entropy(model(inputs), targets).backward()
    wanted, inputs.grad = inputs.grad, None
    ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=3).backward(inputs, targets)
    torch.testing.assert_close(inputs.grad, wanted, rtol=1e-12, atol=1e-16)


def test_a_model_of_any_callable():
    weight = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    inputs, targets = classification()
    F.cross_entropy(inputs @ weight, targets).backward()
    wanted, weight.grad = weight.grad, None
    model = ib.make_model(lambda x: x @ weight, [weight])
    ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=4).backward(inputs, targets)
    torch.testing.assert_close(weight.grad, wanted, rtol=1e-12, atol=1e-16)


@pytest.mark.parametrize("method", ["script", "trace"])
def test_torchscript(method):
    model = mlp()
    inputs, targets = classification()
    wanted = native(model, nn.CrossEntropyLoss(), inputs, targets)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        scripted = (
            torch.jit.script(model) if method == "script" else torch.jit.trace(model, inputs[:2])
        )
    batch = ib.VirtualBatch(scripted, nn.CrossEntropyLoss(), micro_batch_size=3)
    for _ in range(3):  # the profiling executor changes the graph in its first runs
        scripted.zero_grad()
        batch.backward(inputs, targets)
        for name, parameter in scripted.named_parameters():
            torch.testing.assert_close(
                parameter.grad, wanted.gradients[name], rtol=1e-12, atol=1e-15
            )


def test_compiled_model():
    model = mlp()
    inputs, targets = classification(12)
    wanted = native(model, nn.CrossEntropyLoss(), inputs, targets)
    compiled = torch.compile(model, backend="aot_eager")
    ib.VirtualBatch(compiled, nn.CrossEntropyLoss(), micro_batch_size=4).backward(inputs, targets)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted.gradients[name], rtol=1e-12, atol=1e-15)


def test_the_optimizer_and_parameters_may_be_rebuilt_between_steps():
    model = mlp()
    inputs, targets = classification()
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=3)
    batch.backward(inputs, targets)
    model[2] = nn.Linear(8, 5).double()
    model[0].weight = nn.Parameter(torch.randn(8, 6, dtype=torch.float64))
    model.zero_grad()
    wanted = native(model, nn.CrossEntropyLoss(), inputs, targets)
    batch.backward(inputs, targets)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, wanted.gradients[name], rtol=1e-12, atol=1e-15)


def test_same_seed_and_same_plan_give_the_same_bits():
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 5))
    inputs, targets = classification(24)
    found = []
    for _ in range(2):
        torch.manual_seed(3)
        found.append(
            ours(model, nn.CrossEntropyLoss(), inputs.float(), targets, micro_batch_size=5)
        )
    assert all(
        torch.equal(found[0].gradients[n], found[1].gradients[n]) for n in found[0].gradients
    )
    assert torch.equal(found[0].loss, found[1].loss)
