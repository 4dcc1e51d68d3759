"""Right loops: audit gives no false alarm, and the training is the same bit for bit."""

import copy
import functools
import random
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import numpy
import pytest
import torch
from audit_support import (
    CRITERION,
    X,
    Y,
    accumulate,
    centred,
    contrastive,
    each,
    loader,
    loss,
    net,
    sgd,
    share,
    watched,
    with_dropout,
)
from support import Calls
from torch import nn

ADAM = torch.optim.AdamW


class Loop:
    """A right training loop: two epochs of `loader()`."""

    def __init__(
        self,
        make: Callable[[], nn.Module] = net,
        *,
        count: int = 3,
        amp: torch.dtype | None = None,
        scaler: bool = False,
        clip: float | None = None,
        value: float | None = None,
        half: bool = False,
        single: bool = True,
    ) -> None:
        self.make = make
        self.count = count
        self.amp = amp
        self.scaler = scaler
        self.clip = clip
        self.value = value
        self.half = half
        self.single = single

    def model(self) -> nn.Module:
        model = self.make()
        return model.float() if self.single else model

    def optimizers(self, model: nn.Module) -> list[torch.optim.Optimizer]:
        if not self.half:
            return [ADAM(model.parameters(), lr=0.01)]
        return [ADAM(model[0].parameters(), lr=0.01), sgd(model[2])]

    def __call__(self, model: Any, optimizers: Any, batches: Any) -> None:
        scaler = torch.amp.GradScaler("cpu", enabled=self.scaler)
        average = torch.optim.swa_utils.AveragedModel(model)
        schedules = [torch.optim.lr_scheduler.StepLR(o, 1) for o in optimizers]
        for _ in range(2):
            for i, (x, y) in enumerate(batches):
                with torch.autocast("cpu", self.amp, enabled=self.amp is not None):
                    value = CRITERION(model(x), y)
                scaler.scale(value / self.count).backward()
                if (i + 1) % self.count:
                    continue
                for optimizer in optimizers:
                    scaler.unscale_(optimizer)
                if self.clip:
                    nn.utils.clip_grad_norm_(model.parameters(), self.clip)
                if self.value:
                    nn.utils.clip_grad_value_(model.parameters(), self.value)
                for optimizer, schedule in zip(optimizers, schedules, strict=True):
                    scaler.step(optimizer)
                    schedule.step()
                scaler.update()
                average.update_parameters(model)
                for optimizer in optimizers:
                    optimizer.zero_grad()


def keeps_state() -> nn.Module:
    """Moves a buffer and Python state in forward, and draws by all three generators."""

    def forward(self: Any, x: Any) -> Any:
        self.calls += 1
        self.seen.append(len(x))
        self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        drawn = random.random() + numpy.random.rand() + torch.rand(())
        return self.net(x - self.mean) * drawn

    model = Calls(forward, net=net(), mean=torch.zeros(6).double())
    model.calls, model.seen = 0, []
    return model


LOOPS = {
    "plain": Loop(count=1),
    "accumulation": Loop(),
    "double": Loop(single=False),
    "dropout": Loop(with_dropout),
    "dropout, BatchNorm, no accumulation": Loop(
        lambda: net(nn.BatchNorm1d(8), nn.Dropout(0.3)), count=1
    ),
    "frozen BatchNorm": Loop(lambda: net(nn.BatchNorm1d(8).eval())),
    "bfloat16": Loop(amp=torch.bfloat16),
    "float16, GradScaler": Loop(amp=torch.float16, scaler=True),
    "GradScaler alone": Loop(scaler=True),
    "GradScaler, clipping": Loop(amp=torch.float16, scaler=True, clip=0.1),
    "dropout, bfloat16, clipping": Loop(with_dropout, amp=torch.bfloat16, clip=0.1),
    "clipping": Loop(clip=0.05),
    "clipping by value": Loop(value=0.01),
    "two optimizers": Loop(half=True),
    "two optimizers, GradScaler": Loop(half=True, scaler=True),
    "state of its own": Loop(keeps_state, count=1),
}


@pytest.mark.parametrize("given", [None, loss])
@pytest.mark.parametrize("name", LOOPS)
def test_no_false_alarm(name: str, given: Any) -> None:
    loop = LOOPS[name]
    model = loop.model()
    x = X.float() if loop.single else X
    batches = loader(12 // loop.count, 24, x)
    with ib.audit.watch(model, loader=batches, loss=given) as watch:
        loop(model, loop.optimizers(model), batches)
    assert watch.ok, print(watch)
    assert len(watch.reports) == 3 and all(report.ok for report in watch.reports)


def everything(model: nn.Module, optimizers: Any, model_state: Any = None) -> Any:
    own = {n: v for m in model.modules() for n, v in vars(m).items() if n in ("calls", "seen")}
    return copy.deepcopy(
        (
            list(model.named_parameters()),
            [p.grad for p in model.parameters()],
            list(model.named_buffers()),
            [module.training for module in model.modules()],
            [optimizer.state_dict() for optimizer in optimizers],
            own,
            torch.get_rng_state(),
            random.getstate(),
            numpy.random.get_state(),
        )
    )


def are_same(one: Any, other: Any) -> bool:
    if isinstance(one, (torch.Tensor, numpy.ndarray)):
        return one.dtype == other.dtype and bool((one == other).all())
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(are_same(one[k], other[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(are_same, one, other))
    return bool(one == other)


@pytest.mark.parametrize("given", [None, loss])
@pytest.mark.parametrize("name", LOOPS)
def test_the_training_is_the_same(name: str, given: Any) -> None:
    loop, results = LOOPS[name], []
    x = X.float() if loop.single else X
    for is_watched in (False, True):
        torch.manual_seed(3), random.seed(3), numpy.random.seed(3)
        model = loop.model()
        optimizers = loop.optimizers(model)
        # Of a wrong loop too: experiments for causes run as well.
        batches = loader(12 // loop.count, 26, x)
        if is_watched:
            with ib.audit.watch(model, loader=batches, loss=given) as watch:
                loop(model, optimizers, batches)
            assert watch.reports and type(batches) is torch.utils.data.DataLoader
        else:
            loop(model, optimizers, batches)
        results.append(everything(model, optimizers))
    assert are_same(*results)
    assert not any(p._backward_hooks for p in model.parameters())
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


@pytest.mark.parametrize("given", [None, loss])
def test_one_step_leaves_everything_as_it_was(given: Any) -> None:
    model = net(nn.BatchNorm1d(8), nn.Dropout(0.3))
    optimizer = ADAM(model.parameters())
    for x, y in loader(12):
        optimizer.zero_grad()
        loss(model, (x, y)).backward()
        optimizer.step()
    model[0].train(False)
    grads = [p.grad for p in model.parameters()]
    before = everything(model, [optimizer])

    def step(model: Any, batch: Any) -> None:
        optimizer.zero_grad()
        loss(model, batch).backward()
        optimizer.step()

    report = ib.audit(step, model, (X, Y), loss=given)
    assert report.ok, print(report)
    assert are_same(everything(model, [optimizer]), before)
    assert all(a is b for a, b in zip(grads, (p.grad for p in model.parameters()), strict=True))


def by_virtual_batch(model: Any, optimizer: Any, batches: Any, **options: Any) -> None:
    virtual = ib.VirtualBatch(model, CRITERION, **options)
    for x, y in batches:
        optimizer.zero_grad()
        virtual.backward(x, y)
        optimizer.step()


WAYS = [
    {"micro_batch_size": 5},
    {"memory_budget": "64MiB"},
    {"micro_batch_size": 5, "match_native_rng": True},
]
MODELS = {
    "plain": net,
    "BatchNorm": lambda: net(nn.BatchNorm1d(8)),
    "dropout": with_dropout,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_virtual_batch_and_wrap_are_right(name: str, way: dict[str, Any]) -> None:
    run = functools.partial(by_virtual_batch, **way)
    watch = watched(run, MODELS[name](), loader(12), loss=loss)
    assert watch.ok, print(watch)
    for given in (None, CRITERION):
        inner = MODELS[name]()
        model = ib.wrap(inner, **way)

        def run(model: Any, optimizer: Any, batches: Any) -> None:
            accumulate(model, optimizer, batches, each, count=1)

        watch = watched(run, model, loader(12), loss=given)
        assert watch.ok, print(watch)
        assert watch.report.model == type(inner).__name__


def test_dropout_with_the_whole_batch_s_numbers() -> None:
    for way, wanted in ((WAYS[2], "right"), (WAYS[0], "wrong")):
        run = functools.partial(by_virtual_batch, **way)
        options = {"loss": loss, "same_random_numbers": True}
        assert watched(run, with_dropout(), loader(12), **options).report.verdict == wanted


def test_a_contrastive_loss_and_samples_combined_in_the_whole_batch() -> None:
    def contrast(model: Any, batch: Any) -> torch.Tensor:
        return contrastive(model(batch[0]))

    def run(model: Any, optimizer: Any, batches: Any) -> None:
        for x, _ in batches:
            optimizer.zero_grad()
            contrastive(model(x)).backward()
            optimizer.step()

    assert watched(run, ib.wrap(net(), micro_batch_size=5), loader(12), loss=contrast).ok
    assert watched(run, centred(), loader(12), loss=contrast).ok


def test_lbfgs_calls_back() -> None:
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1)

    def run(model: Any, optimizer: Any, batches: Any) -> None:
        for x, y in batches:

            def closure(x: Any = x, y: Any = y) -> torch.Tensor:
                optimizer.zero_grad()
                value = CRITERION(model(x), y)
                value.backward()
                return value

            optimizer.step(closure)

    watch = watched(run, model, loader(12), optimizer=optimizer)
    assert watch.ok and len(watch.reports) == 2


def test_steps_that_a_grad_scaler_skips() -> None:
    """Their micro-batches belong to no step."""
    model = net().float()
    optimizer = sgd(model)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**16)

    def run(model: Any, optimizer: Any, batches: Any) -> None:
        for i, (x, y) in enumerate([b for _ in range(3) for b in batches]):
            value = CRITERION(model(x), y) / 3
            scaler.scale(value * (float("inf") if i in (1, 7) else 1)).backward()
            if i % 3 == 2:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()

    for given in (None, loss):
        watch = watched(run, model, loader(4, 24, X.float()), loss=given, optimizer=optimizer)
        assert watch.ok and len(watch.reports) >= 3, print(watch)


def test_sums_over_the_whole_batch_s_count() -> None:
    """reduction="sum" divided by all samples: the loss has to be given."""
    summed = nn.CrossEntropyLoss(reduction="sum")

    def run(model: Any, optimizer: Any, batches: Any) -> None:
        accumulate(model, optimizer, batches, lambda sizes, i: 1 / sum(sizes), criterion=summed)

    assert watched(run, batches=loader(samples=26), loss=loss).ok


def test_noise_that_the_loop_draws_before_its_forward() -> None:
    """As diffusion models train: `loss` draws what the loop draws since the batch was given out."""

    def noisy(model: Any, batch: Any) -> torch.Tensor:
        x = batch[0]
        noise = torch.randn_like(x)
        return (model(x + noise)[:, 0] - noise[:, 0]).square().mean()

    def run(model: Any, optimizer: Any, batches: Any) -> None:
        for i, batch in enumerate(batches):
            (noisy(model, batch) / 3).backward()
            if i % 3 == 2:
                optimizer.step()
                optimizer.zero_grad()

    report = watched(run, loss=noisy).report
    assert report.verdict == "undecided" and "right weights are not known" in str(report)
    assert [one.weight for one in report.micro_batches] == pytest.approx([1 / 3] * 3)


def test_slices_of_one_batch_of_the_loader() -> None:
    def run(model: Any, optimizer: Any, batches: Any) -> None:
        for x, y in batches:
            pieces = list(zip(x.split(5), y.split(5), strict=True))
            accumulate(model, optimizer, pieces, share)

    for given in (None, loss):
        assert watched(run, batches=loader(12), loss=given).ok
    assert not watched(
        lambda m, o, b: [
            accumulate(m, o, list(zip(x.split(5), y.split(5), strict=True)), each) for x, y in b
        ],
        batches=loader(12),
        loss=loss,
    ).ok


def test_loaders_of_many_kinds() -> None:
    pairs = [(X[i : i + 4], Y[i : i + 4]) for i in range(0, 24, 4)]
    run = functools.partial(accumulate, weight=share)
    for batches in (pairs, tuple(pairs), loader(), iter(pairs), (pair for pair in pairs)):
        watch = watched(lambda m, o, b: run(m, o, b), batches=batches, loss=loss)
        assert watch.ok and len(watch.reports) == 2
    workers = torch.utils.data.DataLoader(loader().dataset, batch_size=4, num_workers=1)
    assert watched(lambda m, o, b: run(m, o, b), batches=workers, loss=loss).ok


def test_embeddings_with_sparse_gradients_and_unused_parameters() -> None:
    def forward(self: Any, x: Any) -> Any:
        return self.net(self.table(x).double())

    model = Calls(forward, net=net(), table=nn.Embedding(9, 6, sparse=True), unused=nn.Linear(2, 2))
    tokens = torch.randint(9, (24,))
    run = functools.partial(accumulate, weight=share)
    watch = watched(lambda m, o, b: run(m, o, b), model, loader(x=tokens))
    assert watch.ok, print(watch)


def test_a_fused_optimizer_that_unscales_by_itself() -> None:
    model = net().float()
    optimizer = ADAM(model.parameters(), fused=True)
    scaler = torch.amp.GradScaler("cpu")

    def run(model: Any, optimizer: Any, batches: Any) -> None:
        for x, y in batches:
            optimizer.zero_grad()
            scaler.scale(CRITERION(model(x), y)).backward()
            scaler.step(optimizer)
            scaler.update()

    assert watched(run, model, loader(12, x=X.float()), optimizer=optimizer).ok


def test_a_critic_that_gets_gradients_in_the_generator_s_turn() -> None:
    """They are dropped by the critic's own zero_grad, the last ones by nobody."""
    critic, generator = net(), nn.Linear(6, 6).double()
    optimizers = sgd(critic), sgd(generator)

    def real(critic: Any, batch: Any) -> torch.Tensor:
        return critic(batch[0])[:, 0].mean()

    batches = loader(12)
    with ib.audit.watch(critic, optimizers[0], batches, loss=real) as watch:
        for batch in batches:
            optimizers[0].zero_grad()
            real(critic, batch).backward()
            optimizers[0].step()
            optimizers[1].zero_grad()
            (-critic(generator(batch[0]))[:, 0].mean()).backward()
            optimizers[1].step()
    assert watch.ok and len(watch.reports) == 2, print(watch)


def test_activation_checkpointing() -> None:
    from torch.utils.checkpoint import checkpoint

    for reentrant in (False, True):
        model = Calls(
            lambda self, x, r=reentrant: self.last(checkpoint(self.net, x, use_reentrant=r)),
            net=with_dropout(),
            last=nn.Linear(5, 5).double(),
        )
        batches = [
            (x.clone().requires_grad_(reentrant), y)
            for x, y in zip(X.split(13), Y.split(13), strict=True)
        ]

        def run(model: Any, optimizer: Any, batches: Any) -> None:
            accumulate(model, optimizer, batches, each, count=2)

        if reentrant:
            with pytest.raises(ib.Unsupported, match="does not reach net.*use_reentrant=False"):
                watched(run, model, batches)
        else:
            assert watched(run, model, batches).ok
