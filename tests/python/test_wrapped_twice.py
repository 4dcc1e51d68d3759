"""A wrapped module in the place of a model, or inside of one, wherever models are taken: the outer
step computes micro-batches, and what is wrapped inside computes plainly as a part of it."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import infinitybatch as ib
import pytest
import torch
from torch import nn
from wrap_support import X, Y, close, contrastive, grads

OPTIONS: dict[str, dict[str, Any]] = {
    "size": {"micro_batch_size": 4},
    "budget": {"memory_budget": "64MiB"},
    "tight": {"memory_budget": None},  # filled in
    "static_graph": {"micro_batch_size": 4, "static_graph": True},
    "batch_norm": {"micro_batch_size": 4},
    "match_native_rng": {"micro_batch_size": 4, "match_native_rng": True},
}
#: Room for a few rows of the models here above what lives before the step.
ROOM = 64 << 10


class Parent(nn.Module):
    """Calls a part twice, with gradients from both."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.before, self.part, self.behind = nn.Linear(6, 6), part, nn.Linear(5, 5)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.before(x)
        return self.behind(self.part(z)) + self.part(torch.tanh(z))


class Listed(nn.Module):
    def __init__(self, parts: list[nn.Module]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = part(x)
        return x


def part(option: str) -> nn.Module:
    torch.manual_seed(1)
    layers: list[nn.Module] = [nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 5)]
    if option == "batch_norm":
        layers.insert(1, nn.BatchNorm1d(8))
    if option == "match_native_rng":
        layers.insert(2, nn.Dropout(0.5))
    return nn.Sequential(*layers).double()


def inside(option: str) -> dict[str, Any]:
    """Options of what is wrapped inside: others than those of the step."""
    return {
        **given(option),
        **({"micro_batch_size": 3} if option not in ("budget", "tight") else {}),
    }


def given(option: str) -> dict[str, Any]:
    options = dict(OPTIONS[option])
    if option == "tight":
        options["memory_budget"] = ib.memory.stats("cpu").live + ROOM
    return options


def averaged(model: nn.Module) -> nn.Module:
    return torch.optim.swa_utils.AveragedModel(model)


def saved(model: nn.Module) -> nn.Module:
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


#: What comes of a part, `wrapped` being `ib.wrap` or the identity.
NESTINGS: dict[str, Callable[[nn.Module, Callable[[nn.Module], nn.Module]], nn.Module]] = {
    "itself": lambda part, wrapped: wrapped(part),
    "twice": lambda part, wrapped: wrapped(wrapped(part)),
    "part": lambda part, wrapped: Parent(wrapped(part)),
    "part of a wrapped one": lambda part, wrapped: wrapped(Parent(wrapped(part))),
    "sequential": lambda part, wrapped: nn.Sequential(wrapped(part), nn.Linear(5, 5).double()),
    "module list": lambda part, wrapped: Listed([wrapped(part), wrapped(nn.Tanh())]),
    "copy": lambda part, wrapped: copy.deepcopy(Parent(wrapped(part))),
    "pickled": lambda part, wrapped: pickle.loads(pickle.dumps(wrapped(part))),
    "saved": lambda part, wrapped: saved(Parent(wrapped(part))),
    "average": lambda part, wrapped: averaged(wrapped(part)),
    "data parallel": lambda part, wrapped: nn.DataParallel(wrapped(part)),
}


def by_wrap(model: nn.Module, coupled: bool, **options: Any) -> torch.Tensor:
    outputs = ib.wrap(model, **options)(X)
    loss = contrastive(outputs) if coupled else nn.functional.cross_entropy(outputs, Y)
    loss.backward()
    return loss


def by_virtual_batch(model: nn.Module, coupled: bool, **options: Any) -> torch.Tensor:
    loss = ib.losses.coupled(lambda outputs, _: contrastive(outputs))
    batch = ib.VirtualBatch(model, loss if coupled else nn.CrossEntropyLoss(), **options)
    return batch.backward(X, Y).loss


def by_loop(model: nn.Module, coupled: bool, **_: Any) -> torch.Tensor:
    """The user's own, of a model that is wrapped in part."""
    outputs = model(X)
    loss = contrastive(outputs) if coupled else nn.functional.cross_entropy(outputs, Y)
    loss.backward()
    return loss


STEPS = {"wrap": by_wrap, "VirtualBatch": by_virtual_batch, "loop": by_loop}
#: In a loop that is the user's own nothing is nested but what is wrapped twice.
IN_LOOPS = ("twice", "part of a wrapped one", "copy", "saved", "average")


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize(
    ("step", "nesting"), [(s, n) for s in STEPS for n in NESTINGS if s != "loop" or n in IN_LOOPS]
)
def test_gradients_are_those_of_the_whole_batch(step, nesting, option):
    make = NESTINGS[nesting]
    model = make(part(option), lambda module: ib.wrap(module, **inside(option)))
    wanted_of = make(part(option), lambda module: module)
    wanted_of.load_state_dict(model.state_dict())
    for coupled in (True, False):
        for each in (model, wanted_of):
            each.zero_grad()
        torch.manual_seed(5)
        by_loop(wanted_of, coupled)
        torch.manual_seed(5)
        STEPS[step](model, coupled, **given(option))
        close(grads(model), grads(wanted_of), tolerance=1e-11)
        close(dict(model.named_buffers()), dict(wanted_of.named_buffers()), tolerance=1e-11)


class Remembering(nn.Module):
    """Its loss, of outputs, is another module's (perceptual losses)."""

    def __init__(self, judge: nn.Module) -> None:
        super().__init__()
        self.judge = judge

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.judge(outputs), targets)


@pytest.mark.filterwarnings("ignore::infinitybatch.CoupledLossNotice")
@pytest.mark.parametrize("option", ["size", "budget", "static_graph"])
@pytest.mark.parametrize("coupled", [False, True])
def test_a_wrapped_module_in_the_loss(coupled, option):
    model, judge = part(option), nn.Linear(5, 5).double()
    wanted_of = copy.deepcopy(model)
    nn.functional.cross_entropy(judge(wanted_of(X)), Y).backward()
    wanted = grads(judge)
    judge.zero_grad()
    wrapped = ib.wrap(judge, **inside(option))
    if coupled:
        loss: Any = Remembering(wrapped)
    else:
        loss = ib.losses.separable(
            lambda z, t: nn.functional.cross_entropy(wrapped(z), t, reduction="sum"),
            lambda t: len(t),
        )
    ib.VirtualBatch(model, loss, **given(option)).backward(X, Y)
    close(grads(model), grads(wanted_of), tolerance=1e-11)
    close(grads(judge), wanted, tolerance=1e-11)


@pytest.mark.parametrize("option", OPTIONS)
def test_one_module_wrapped_by_two_that_are_both_used(option):
    model = part(option)
    native = copy.deepcopy(model)
    first, second = ib.wrap(model, **given(option)), ib.wrap(model, **inside(option))
    for _ in range(3):
        losses = []
        for one, other, of in ((first, second, model), (native, native, native)):
            of.zero_grad()
            torch.manual_seed(5)
            loss = contrastive(one(X)) + nn.functional.cross_entropy(other(X.flip(0)), Y.flip(0))
            loss.backward()
            losses.append(loss.detach())
        close(*losses)
        close(grads(model), grads(native), tolerance=1e-11)
        close(dict(model.named_buffers()), dict(native.named_buffers()), tolerance=1e-11)


def test_wrapping_again_has_the_new_options_and_the_inner_module():
    inner = part("size")
    first = ib.wrap(inner, micro_batch_size=4)
    second = ib.wrap(first, micro_batch_size=6)
    assert ib.unwrap(second) is inner and type(second).__name__ == type(inner).__name__
    contrastive(second(X)).backward()
    assert second.last_report.micro_batch_sizes == [6, 6, 1] or sum(
        second.last_report.micro_batch_sizes
    ) == len(X)
    assert max(second.last_report.micro_batch_sizes) <= 6
    assert first.last_report is None


def test_hooks_of_the_first_wrapper_are_those_of_the_second():
    inner = part("size")
    first = ib.wrap(inner, micro_batch_size=4)
    seen: list[int] = []
    handle = first.register_forward_hook(lambda _, inputs, outputs: seen.append(len(outputs)))
    second = ib.wrap(first, micro_batch_size=6)
    second(X)
    assert seen == [len(X)]
    handle.remove()
    second(X)
    assert seen == [len(X)]


def test_a_forward_that_was_set_on_the_first_wrapper_runs():
    """Mixed precision sets it: the inner module has none of it."""
    inner = part("size")
    first = ib.wrap(inner, micro_batch_size=4)
    forward = first.forward
    first.forward = lambda x: 2 * forward(x)
    second = ib.wrap(first, micro_batch_size=6)
    (2 * inner(X)).square().sum().backward()
    wanted = grads(copy.deepcopy(inner))
    wanted = {name: gradient.clone() for name, gradient in grads(inner).items()}
    inner.zero_grad()
    second(X).square().sum().backward()
    close(grads(inner), wanted)
    assert max(second.last_report.micro_batch_sizes) <= 6


def test_methods_of_the_first_wrapper_are_computed_in_micro_batches():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = part("size")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.net(x)

        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self(x))

    model = ib.wrap(ib.wrap(Two(), methods=("encode",)), micro_batch_size=4)
    model.encode(X)
    assert max(model.last_report.micro_batch_sizes) <= 4


@pytest.mark.parametrize("nesting", ["twice", "part of a wrapped one", "sequential"])
@pytest.mark.parametrize("option", OPTIONS)
def test_trainer_and_evaluation(option, nesting):
    make = NESTINGS[nesting]
    model = make(part(option), lambda module: ib.wrap(module, **inside(option)))
    native = make(part(option), lambda module: module)
    native.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer = ib.Trainer(model, nn.CrossEntropyLoss(), optimizer, [(X, Y)] * 3, **given(option))
    torch.manual_seed(5)
    trainer(1)
    optimizer = torch.optim.SGD(native.parameters(), 0.1)
    torch.manual_seed(5)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(native(X), Y).backward()
        optimizer.step()
    close(dict(model.named_parameters()), dict(native.named_parameters()), tolerance=1e-10)
    close(dict(model.named_buffers()), dict(native.named_buffers()), tolerance=1e-10)
    native.eval()
    with torch.no_grad():
        wanted = nn.functional.cross_entropy(native(X), Y)
    assert trainer.evaluate([(X, Y)]).loss == pytest.approx(float(wanted), rel=1e-10)


@pytest.mark.parametrize("nesting", ["twice", "part of a wrapped one", "sequential"])
@pytest.mark.parametrize("option", ["size", "budget", "static_graph", "batch_norm"])
def test_verify_and_bench(option, nesting):
    model = NESTINGS[nesting](part(option), lambda module: ib.wrap(module, **inside(option)))
    report = ib.verify(model, nn.CrossEntropyLoss(), X, Y, **given(option))
    assert report.exact, report.explain()
    if option != "static_graph":  # which has no way without tapes
        bench = ib.bench(model, nn.CrossEntropyLoss(), X, Y, rounds=1, **given(option))
        assert bench.strategies
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("option", ["size", "batch_norm"])
def test_infinity_batch(option):
    model = ib.wrap(ib.wrap(part(option), **inside(option)), **inside(option))
    native = part(option)
    loop = ib.InfinityBatch(
        model,
        torch.optim.SGD(model.parameters(), 0.1),
        nn.CrossEntropyLoss(),
        [(X, Y)],
        verbose=False,
        **given(option),
    )
    loop.criterion(loop.batch_(X), Y).backward()
    loop.step()
    loop.zero_grad()
    nn.functional.cross_entropy(native(X), Y).backward()
    torch.optim.SGD(native.parameters(), 0.1).step()
    close(dict(model.named_parameters()), dict(native.named_parameters()), tolerance=1e-10)


def test_a_checkpoint_around_a_wrapped_part():
    """Backward of the outer step runs it again, plainly as forward did."""

    class Checkpointed(Parent):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            run = torch.utils.checkpoint.checkpoint
            return self.behind(run(self.part, self.before(x), use_reentrant=False))

    model = Checkpointed(part("size"))
    native = copy.deepcopy(model)
    model.part = ib.wrap(model.part, micro_batch_size=3)
    for coupled in (False, True):
        for step in (by_wrap, by_virtual_batch):
            for size in (4, len(X)):  # of the whole batch the graph is native's, and runs outside
                for each in (model, native):
                    each.zero_grad()
                step(model, coupled, micro_batch_size=size)
                by_loop(native, coupled)
                close(grads(model), grads(native))
    model.zero_grad()
    native.zero_grad()
    by_loop(model, True)  # its own wrapper computes it again
    by_loop(native, True)
    close(grads(model), grads(native))


def test_audit_of_what_is_wrapped_twice():
    model = ib.wrap(Parent(ib.wrap(part("size"), micro_batch_size=3)), micro_batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(model: Any, batch: Any) -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()

    report = ib.audit(step, model, (X, Y), loss=nn.CrossEntropyLoss())
    assert report.ok, print(report)


@pytest.mark.parametrize("step", ["wrap", "VirtualBatch"])
def test_hooks_that_forward_registers_on_a_wrapped_part(step):
    """Once, in the first forward: micro-batches and runs that look are one native forward."""

    class Lazy(Parent):
        hooked = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.hooked:
                self.part.register_forward_hook(lambda *made: made[-1] * 0.9)
                self.hooked = True
            return super().forward(x)

    model = Lazy(part("size"))
    native = copy.deepcopy(model)
    model.part = ib.wrap(model.part, micro_batch_size=3)
    for coupled in (True, False):
        for each in (model, native):
            each.zero_grad()
        STEPS[step](model, coupled, micro_batch_size=4)
        by_loop(native, coupled)
        close(grads(model), grads(native))
    assert model.hooked and len(ib.unwrap(model.part)._forward_hooks) == 1
