"""Between two ops that see the whole batch one sample's graph does not fit: stretches cut for memory."""

from __future__ import annotations

import gc

import batch_norm_models
import infinitybatch as ib
import pytest
import torch
import torch.nn.functional as F
from measure import gradients, worst
from support import Calls, Log, Result, Tally, looks, native, ours, result_of, worst_error
from torch import nn

TOLERANCE = 1e-12


def block(width: int) -> nn.Module:
    layer = nn.Conv2d(width, width, 3, padding=1)
    # Signals keep their size through many layers: gradients are not lost in rounding.
    nn.init.kaiming_normal_(layer.weight)
    return nn.Sequential(layer, nn.GELU())


def plain(blocks: int, width: int = 4, norms: int = 1) -> nn.Module:
    """Equal layers, and BatchNorm so often between them that all stretches are alike."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1)]
    for _ in range(norms):
        layers += [block(width) for _ in range(blocks)]
        layers.append(nn.BatchNorm2d(width))
    layers += [block(width) for _ in range(blocks)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 5))


def at_both_ends() -> nn.Module:
    """Nothing stands in front of the first layer, nothing behind the last."""
    body = [nn.Conv2d(3, 5, 3, padding=1), *(block(5) for _ in range(9))]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(5)]
    return nn.Sequential(nn.BatchNorm2d(3), *body, *head)


def close_together() -> nn.Module:
    """Between the two layers there is next to nothing to cut."""
    body = [nn.Conv2d(3, 5, 3, padding=1), *(block(5) for _ in range(5))]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(5, 5)]
    norms = [nn.BatchNorm2d(5), nn.GELU(), nn.BatchNorm2d(5, momentum=None)]
    return nn.Sequential(*body, *norms, *(block(5) for _ in range(5)), *head)


def skips() -> nn.Module:
    """Values from in front of a cut for memory that a later segment, a later stretch, and both of
    them need; one of them is changed in place at the end."""

    def forward(self, x):
        first = x = self.stem(x)
        for index, layer in enumerate(self.front):
            x = layer(x) + (first if index == 4 else 0)
            if index == 1:
                early = x
                late = x * 2
        x = self.norm(x) * early.tanh()
        for index, layer in enumerate(self.back):
            x = layer(x) + (early if index == 3 else 0)
        x = F.relu_(self.last(x + first))
        for layer in self.tail:
            x = layer(x)
        x += late.mul_(0.5)
        return self.head((x + self.gain).mean((2, 3)))

    return Calls(
        forward,
        stem=nn.Conv2d(3, 4, 3, padding=1),
        front=nn.ModuleList(block(4) for _ in range(6)),
        norm=nn.BatchNorm2d(4),
        back=nn.ModuleList(block(4) for _ in range(6)),
        last=nn.BatchNorm2d(4),
        tail=nn.ModuleList(block(4) for _ in range(4)),
        gain=nn.Parameter(torch.randn(4, 1, 1)),
        head=nn.Linear(4, 5),
    )


def shared() -> nn.Module:
    """One weight in every segment of every stretch."""

    def forward(self, x):
        x = self.stem(x)
        for norm in self.norms:
            for _ in range(6):
                x = x + torch.tanh(self.layer(x))
            x = norm(x)
        return self.head(x.mean((2, 3)))

    return Calls(
        forward,
        stem=nn.Conv2d(3, 4, 3, padding=1),
        layer=nn.Conv2d(4, 4, 3, padding=1),
        norms=nn.ModuleList(nn.BatchNorm2d(4) for _ in range(2)),
        head=nn.Linear(4, 5),
    )


def other_ops() -> nn.Module:
    """Functions of the user's and word counts, with layers between them."""

    def forward(self, x):
        x = self.words((x[:, 0].abs() * 3).long() % 7).permute(0, 3, 1, 2)
        for layer in self.front:
            x = layer(x)
        x = x * ib.across_batch(lambda t: t.square().mean(0, keepdim=True).expand(t.shape), x)
        for layer in self.back:
            x = layer(x)
        return self.head(x.mean((2, 3)))

    return Calls(
        forward,
        words=nn.Embedding(7, 4, scale_grad_by_freq=True),
        front=nn.ModuleList(block(4) for _ in range(6)),
        back=nn.ModuleList(block(4) for _ in range(6)),
        head=nn.Linear(4, 5),
    )


def in_place() -> nn.Module:
    """Ops that write what a cut in front of them hands over, and keep a copy of it, so that many
    cuts lie in front of one."""

    def body() -> list[nn.Module]:
        return [layer for _ in range(6) for layer in (block(4)[0], nn.SiLU(inplace=True))]

    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)]
    return nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), *body(), nn.BatchNorm2d(4), *body(), *head)


def by_modes(t: torch.Tensor) -> torch.Tensor:
    """Another result in each of the modes that forward can be in."""
    factor = 1 + 2 * torch.is_autocast_enabled("cpu") + 4 * torch.is_grad_enabled()
    return factor / 8 * (1 + t.square().mean(0, keepdim=True).expand(t.shape))


def modes() -> nn.Module:
    """Ops of the whole batch in other modes than the layers around them; nothing is cast in double
    precision."""

    def forward(self, x):
        x = self.stem(x)
        for layer in self.front:
            x = layer(x)
        with torch.autocast("cpu"):
            x = x * ib.across_batch(by_modes, x)
        with torch.autocast("cpu"):
            for layer in self.middle:
                x = layer(x)
        x = x * ib.across_batch(by_modes, x)
        for layer in self.back:
            x = layer(x)
        with torch.no_grad():
            scale = ib.across_batch(by_modes, x)
        return self.head((x * scale).mean((2, 3)))

    return Calls(
        forward,
        stem=nn.Conv2d(3, 4, 3, padding=1),
        front=nn.ModuleList(block(4) for _ in range(4)),
        middle=nn.ModuleList(block(4) for _ in range(4)),
        back=nn.ModuleList(block(4) for _ in range(4)),
        head=nn.Linear(4, 5),
    )


MODELS = {
    "plain": lambda: plain(8),
    "three layers": lambda: plain(5, norms=3),
    "at both ends": at_both_ends,
    "close together": close_together,
    "skips": skips,
    "shared": shared,
    "other ops": other_ops,
    "in place": in_place,
    "modes": modes,
}


def make(name: str, samples: int = 5) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = MODELS[name]().double()
    return model, *batch_norm_models.images(samples)


def contrast(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Each sample against all others."""
    sides = torch.cat([outputs, F.one_hot(targets, 5), outputs.exp()], 1)
    return F.cross_entropy(sides @ sides.T, torch.arange(len(sides)).flip(0))


def spread(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """No sample's share can be told from the others'."""
    return F.cross_entropy(outputs, targets) * (2 + outputs.tanh().sum())


def assert_equal(found: Result, wanted: Result) -> None:
    assert worst_error(found, wanted) <= TOLERANCE
    torch.testing.assert_close(found.loss, wanted.loss, rtol=TOLERANCE, atol=0)
    for name, buffer in wanted.buffers.items():
        torch.testing.assert_close(found.buffers[name], buffer, rtol=TOLERANCE, atol=0, msg=name)


@pytest.mark.parametrize("coupled", [False, True], ids=["separable", "coupled"])
@pytest.mark.parametrize("offload", ["never", "always"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("segments", [2, 7])
@pytest.mark.parametrize("name", MODELS)
def test_gradients_and_statistics_are_those_of_the_whole_batch(
    name: str, segments: int, size: int, offload: str, coupled: bool
) -> None:
    model, inputs, targets = make(name)
    criterion = contrast if coupled else nn.CrossEntropyLoss()
    loss = ib.losses.coupled(contrast) if coupled else criterion
    options = {"checkpoint_segments": segments, "offload": offload}
    found = ours(model, loss, inputs, targets, micro_batch_size=size, **options)
    assert found.report.strategy == "checkpoint"
    assert (found.report.offloaded_bytes > 0) == (offload == "always")
    assert_equal(found, native(model, criterion, inputs, targets))


@pytest.mark.parametrize("name", batch_norm_models.MODELS)
def test_networks_that_people_train(name: str) -> None:
    torch.manual_seed(0)
    model = batch_norm_models.make(name)
    inputs, targets = batch_norm_models.images(6)
    criterion = nn.CrossEntropyLoss()
    found = ours(model, criterion, inputs, targets, micro_batch_size=2, checkpoint_segments=3)
    assert found.report.strategy in ("checkpoint", "cut")  # some stretches hold nothing to cut
    assert_equal(found, native(model, criterion, inputs, targets))


@pytest.mark.parametrize("coupled", [False, True], ids=["separable", "coupled"])
def test_any_number_of_segments_gives_the_same_gradient(coupled: bool) -> None:
    model, inputs, targets = make("skips")
    loss = ib.losses.coupled(contrast) if coupled else nn.CrossEntropyLoss()
    plain = ours(model, loss, inputs, targets, micro_batch_size=2)
    assert plain.report.strategy == "cut"
    for segments in range(2, 8):
        options = {"checkpoint_segments": segments}
        found = ours(model, loss, inputs, targets, micro_batch_size=2, **options)
        assert found.report.strategy == "checkpoint"
        assert worst_error(found, plain) <= 1e-14, segments


def test_later_steps_and_how_often_user_code_runs() -> None:
    model, inputs, targets = make("skips")
    wanted = native(model, nn.CrossEntropyLoss(), inputs, targets)
    calls = Tally()
    model.register_forward_hook(calls)
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), micro_batch_size=2, checkpoint_segments=4)
    for step in range(3):
        model.zero_grad()
        calls.count = 0
        batch.backward(inputs, targets)
        # At first once until the layer is met, and once more to check the recording.
        assert calls.count == (3 if step else 5) + looks(step)
        assert worst(gradients(model), wanted.gradients) <= TOLERANCE, step


class Skip(nn.Module):
    """Samples stay apart through many layers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return x + 0.3 * self.layer(x)


def far_apart(blocks: int) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """A frontier of one sample is 16 KiB, its graph of either stretch 32 KiB for each block."""
    torch.manual_seed(0)
    body = [
        [Skip(block(8)) for _ in range(blocks)],
        [nn.BatchNorm2d(8)],
        [Skip(block(8)) for _ in range(blocks)],
    ]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)]
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), *sum(body, []), *head).double()
    return model, torch.randn(3, 3, 16, 16, dtype=torch.float64), torch.randint(5, (3,))


@pytest.mark.parametrize(
    ("offload", "above", "coupled"),
    [("never", 500, False), ("never", 320, False), ("auto", 250, False), ("auto", 250, True)],
    ids=["kept", "computed again", "offloaded", "offloaded, coupled"],
)
def test_a_stretch_beyond_the_device(offload: str, above: int, coupled: bool) -> None:
    """One sample's graph of either stretch takes 1.3 MiB, a multiple of the budget."""
    model, inputs, targets = far_apart(40)
    criterion = spread if coupled else nn.CrossEntropyLoss()
    wanted = native(model, criterion, inputs, targets)
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    calls = Log()
    model.register_forward_hook(lambda *_: calls.append(1))
    sums = sum(parameter.nbytes for parameter in model.parameters())
    gc.collect()
    budget = ib.memory.stats("cpu").live + sums + above * 1024
    loss = ib.losses.coupled(spread) if coupled else criterion
    batch = ib.VirtualBatch(model, loss, memory_budget=budget, offload=offload)
    for _ in range(3):  # workspace of backward is learned
        model.load_state_dict(buffers, strict=False)
        model.zero_grad()
        calls.clear()
        report = batch.backward(inputs, targets)
        assert report.strategy == "checkpoint"
        assert report.peak_bytes <= budget
        assert (report.offloaded_bytes > 0) == (offload == "auto")
        assert_equal(result_of(model, report.loss), wanted)
    assert report.restarts == 0 and len(calls) == 3
    model.zero_grad()
    assert (
        "forward to the one op that sees the whole batch and to the end;"
        in batch.plan(inputs, targets).explain()
    )


@pytest.mark.parametrize("offload", ["auto", "never"])
def test_a_budget_below_the_smallest_segment_says_so(offload: str) -> None:
    model, inputs, targets = far_apart(10)
    sums = sum(parameter.nbytes for parameter in model.parameters())
    gc.collect()
    live = ib.memory.stats("cpu").live
    budget = live + sums + 150 * 1024
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    batch = ib.VirtualBatch(model, nn.CrossEntropyLoss(), memory_budget=budget, offload=offload)
    with pytest.raises(ib.BudgetExceeded, match="smallest segment of a single sample") as raised:
        batch.backward(inputs, targets)
    assert budget < raised.value.needed <= live + sums + 300 * 1024
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(buffers[name], buffer) for name, buffer in model.named_buffers())


def test_masks_are_those_that_a_coupled_loss_saw() -> None:
    """Also where dropout stands behind a cut for memory."""
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (*block(4), nn.Dropout(0.3))]
    stem = nn.Conv2d(3, 4, 3, padding=1)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 5)]
    model = nn.Sequential(stem, *layers[:12], nn.BatchNorm2d(4), *layers[12:], *head).double()
    inputs, targets = batch_norm_models.images(6)
    found = []
    for options in ({}, {"checkpoint_segments": 3}):
        torch.manual_seed(1)
        loss = ib.losses.coupled(contrast)
        found.append(ours(model, loss, inputs, targets, micro_batch_size=2, **options))
    assert [each.report.strategy for each in found] == ["cut", "checkpoint"]
    assert_equal(found[1], found[0])
