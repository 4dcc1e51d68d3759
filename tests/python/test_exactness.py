"""The gradient of the whole batch, for models with whatever Python and torch.nn offer."""

import copy
import warnings

import infinitybatch as ib
import pytest
import torch
from exactness_models import (
    FLAT,
    SEQUENCE,
    checkpointed,
    convnet,
    double_sequence,
)
from support import (
    Calls,
    assert_exact,
    classification,
    excess_in_single,
    live_bytes,
    mlp,
    native,
    ours,
    worst_error,
)
from torch import nn
from torch.nn import functional as F
from wrap_support import close


def tied():
    def forward(self, x):
        return self.embedding(x).mean(1) @ self.embedding.weight.T

    return Calls(forward, embedding=nn.Embedding(5, 8)).double()


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


def step_of(way, model, loss, **options):
    """A step of `loss` on all outputs, or of itself where it is separable, that returns its report."""
    if way == "wrap":
        wrapped = ib.wrap(model, **options)

        def step(inputs, targets):
            loss(wrapped(**inputs), targets).backward()
            return wrapped.last_report

        return step
    criterion = ib.losses.coupled(loss) if way == "coupled" else loss
    return ib.VirtualBatch(model, criterion, **options).backward


WAYS = ["separable", "coupled", "wrap"]


def expect_native(model, way, loss, inputs, targets, steps, **options):
    """Gradients and buffers of each step; returns the last report."""
    same = copy.deepcopy(model)
    step = step_of(way, model, loss, **options)
    for _ in range(steps):
        for each in (model, same):
            each.zero_grad(set_to_none=True)
        report = step(inputs, targets)
        loss(same(**inputs), targets).backward()
        close([p.grad for p in model.parameters()], [p.grad for p in same.parameters()])
        close(list(model.buffers()), list(same.buffers()))
    assert report.peak_bytes <= options["memory_budget"]
    return report


@pytest.mark.parametrize("way", WAYS)
def test_boundary_activations_that_are_kept_in_part(way):
    layers = [nn.Conv1d(3, 8, 1)]
    for _ in range(6):
        layers += [nn.BatchNorm1d(8), nn.Tanh(), nn.Conv1d(8, 8, 1)]
    body = nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(8, 3))
    model = Calls(lambda self, x: self.body(x), body=body).double()
    inputs = {"x": torch.randn(256, 3, 64, dtype=torch.float64)}
    targets = torch.randn(256, 3, dtype=torch.float64)
    # 1 MiB in front of each layer: all kept would be 6, with their gradients.
    options = {"memory_budget": live_bytes() + 5 * 2**20, "offload": "never"}
    report = expect_native(model, way, nn.MSELoss(), inputs, targets, 4, **options)
    assert report.strategy_reason.startswith("boundary activations are kept at")


def read_by_words(self, words, mask):
    hidden = self.embedding(words)
    scores = (hidden @ hidden.transpose(1, 2)).masked_fill(mask[:, None] == 0, -1e30)
    real = mask.unsqueeze(2).to(hidden.dtype)
    return self.head(((scores.softmax(2) @ hidden) * real).sum(1) / real.sum(1))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("by", ["bytes", "tokens"])
def test_rows_that_are_packed_by_their_lengths(way, by):
    model = Calls(read_by_words, embedding=nn.Embedding(50, 64), head=nn.Linear(64, 5)).double()
    lengths = torch.tensor([40, 36, *[4 + i % 9 for i in range(46)]])[torch.randperm(48)]
    mask = (torch.arange(40) < lengths[:, None]).long()
    inputs = {"words": torch.randint(50, (48, 40)), "mask": mask}
    # The longest row takes about 100 KiB, the shortest 6 KiB.
    options = {"memory_budget": live_bytes() + (900 << 10)}
    if by == "tokens":
        options = {"memory_budget": live_bytes() + (64 << 20), "micro_batch_tokens": 80}
    targets = torch.randint(5, (48,))
    report = expect_native(
        model, way, nn.CrossEntropyLoss(), inputs, targets, 8, trim=ib.trim_padding(mask="mask"), **options
    )  # fmt: skip
    assert max(report.micro_batch_sizes) > 2 * report.micro_batch_sizes[0]
