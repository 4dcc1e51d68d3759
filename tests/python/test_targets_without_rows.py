"""Targets of a loss that sees all outputs: it sees them whole, and they need no row for each sample."""

import copy
from typing import Any

import infinitybatch as ib
import pytest
import torch
from measure import excess
from support import Result, ours, result_of, worst_error
from torch import nn

N, SLOTS, CLASSES = 9, 5, 4


class Detector(nn.Module):
    """Classes and boxes in a few slots of each image, and what it learns of the whole batch."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.trunk = nn.Sequential(
            nn.Linear(6, 16), nn.BatchNorm1d(16) if norm else nn.Identity(), nn.Tanh()
        )
        self.classes, self.boxes = nn.Linear(16, SLOTS * CLASSES), nn.Linear(16, SLOTS * 4)
        self.double()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        z = self.trunk(x)
        return {
            "logits": self.classes(z).unflatten(1, (SLOTS, CLASSES)),
            "boxes": self.boxes(z).unflatten(1, (SLOTS, 4)).sigmoid(),
        }


IMAGES = torch.randn(N, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def objects(seed: int = 2, n: int = N) -> list[dict[str, Any]]:
    """As DETR's: of each image its labels and boxes, of one none; and a number that is no tensor."""
    made = torch.Generator().manual_seed(seed)
    counts = [int(torch.randint(1, SLOTS + 1, (), generator=made)) for _ in range(n)]
    counts[3 % n] = 0
    return [
        {
            "labels": torch.randint(CLASSES, (count,), generator=made),
            "boxes": torch.rand(count, 4, generator=made, dtype=torch.float64),
            "image_id": 1000 + i + seed,
        }
        for i, count in enumerate(counts)
    ]


def flat(targets: list[dict[str, Any]]) -> torch.Tensor:
    """As YOLO's: [objects, 6], the image's number first, then the class and the box."""
    rows = [
        torch.cat([torch.tensor([float(i), float(label)]), box])
        for i, target in enumerate(targets)
        for label, box in zip(target["labels"], target["boxes"], strict=True)
    ]
    return torch.stack(rows).double()


def by_image(outputs: Any, targets: list[dict[str, Any]]) -> torch.Tensor:
    """Each object is matched to the slot whose box is nearest, and all are divided by their number."""
    assert len(outputs["logits"]) == len(targets)
    total, count = outputs["logits"].sum() * 0, 0
    for logits, boxes, target in zip(outputs["logits"], outputs["boxes"], targets, strict=True):
        for label, box in zip(target["labels"], target["boxes"], strict=True):
            slot = int((boxes.detach() - box).abs().sum(1).argmin())
            total = total + (boxes[slot] - box).abs().sum()
            total = total + nn.functional.cross_entropy(logits[slot], label)
            count += 1
    return total / count


def by_object(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    image, label = targets[:, 0].long(), targets[:, 1].long()
    boxes = outputs["boxes"][image]
    apart = (boxes - targets[:, None, 2:]).abs().sum(2)
    nearest, slot = apart.min(1)
    logits = outputs["logits"][image, slot]
    return nearest.mean() + nn.functional.cross_entropy(logits, label)


def native(model: nn.Module, loss: Any, inputs: Any, targets: Any) -> Result:
    model = copy.deepcopy(model)
    value = loss(model(*inputs) if isinstance(inputs, tuple) else model(inputs), targets)
    value.backward()
    return result_of(model, value)


KINDS: dict[str, tuple[Any, Any]] = {
    "boxes": (by_object, flat(objects())),
    "shared": (by_object, flat(objects())),
    "named": (by_object, flat(objects())),
    "lists of dicts": (by_image, objects()),
    "as many boxes as images": (by_object, flat(objects())[:N]),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "size": {"micro_batch_size": 4},
    "one": {"micro_batch_size": 1},
    "budget": {"memory_budget": "64MiB"},
    "static_graph": {"micro_batch_size": 3, "static_graph": True},
}


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients(kind, option):
    norm = kind in ("boxes", "lists of dicts")
    loss, targets = KINDS[kind]
    model = Detector(norm)
    wanted = native(model, loss, IMAGES, targets)
    options = dict(OPTIONS[option])
    given = ib.shared(targets) if kind == "shared" else targets
    if kind == "named":
        options["batch_dim"] = {"targets": None}
    if norm and option == "one":
        options["micro_batch_size"] = 2
    found = ours(model, ib.losses.coupled(loss), IMAGES, given, **options)
    assert worst_error(found, wanted) <= 1e-11


@pytest.mark.filterwarnings("ignore::infinitybatch.CoupledLossNotice")
@pytest.mark.parametrize("loss", [by_object, by_image])
def test_a_criterion_of_one_s_own(loss):
    class Criterion(nn.Module):
        def forward(self, outputs: Any, targets: Any) -> torch.Tensor:
            return loss(outputs, targets)

    targets = objects() if loss is by_image else flat(objects())
    wanted = native(Detector(), loss, IMAGES, targets)
    batch = ib.VirtualBatch(model := Detector(), Criterion(), micro_batch_size=4)
    batch.backward(IMAGES, targets)
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert excess(found, wanted.gradients, least=1e-11) == {}


def test_verify_bench_and_plan():
    for loss, targets in (KINDS["boxes"], KINDS["lists of dicts"]):
        coupled = ib.losses.coupled(loss)
        report = ib.verify(Detector(), coupled, IMAGES, targets, micro_batch_size=4)
        assert report.exact, report.explain()
        assert ib.bench(
            Detector(), coupled, IMAGES, targets, micro_batch_size=4, rounds=1
        ).strategies
        plan = ib.VirtualBatch(Detector(), coupled, micro_batch_size=4).plan(IMAGES, targets)
        assert plan.batch_size == N


def test_another_number_of_objects_is_no_other_kind_of_batch():
    """What was learned of one batch holds for the next: its plan is final after a few steps."""
    batch = ib.VirtualBatch(Detector(), ib.losses.coupled(by_object), memory_budget="64MiB")
    forwards = []
    for seed in range(12):
        seen: list[int] = []
        handle = batch._model.register_forward_hook(lambda *_, seen=seen: seen.append(1))
        batch.backward(IMAGES, flat(objects(seed)))
        handle.remove()
        forwards.append(len(seen))
    assert forwards[-1] == forwards[-2] == min(forwards)


def test_callbacks_are_given_all_targets():
    seen = []
    ib.VirtualBatch(
        Detector(),
        ib.losses.coupled(by_object),
        micro_batch_size=4,
        on_micro_batch=lambda part: seen.append((part.begin, len(part.targets))),
    ).backward(IMAGES, targets := flat(objects()))
    assert seen == [(0, len(targets)), (4, len(targets)), (8, len(targets))]


@pytest.mark.parametrize("kind", ["boxes", "lists of dicts"])
@pytest.mark.parametrize("option", ["size", "budget"])
def test_training(kind, option):
    """Batches of other sizes, with other numbers of objects, as a loader gives them."""
    loss = KINDS[kind][0]
    batches = []
    for seed, n in enumerate((N, N, 5, N)):
        targets = objects(seed, n)
        batches.append((IMAGES[:n], targets if loss is by_image else flat(targets)))
    model, plain = Detector(norm=True), Detector(norm=True)
    trainer = ib.Trainer(
        model,
        ib.losses.coupled(loss),
        torch.optim.Adam(model.parameters(), 0.01),
        batches,
        **OPTIONS[option],
    )
    trainer(2)
    optimizer = torch.optim.Adam(plain.parameters(), 0.01)
    for _ in range(2):
        for images, targets in batches:
            optimizer.zero_grad()
            loss(plain(images), targets).backward()
            optimizer.step()
    assert excess(dict(model.named_parameters()), dict(plain.named_parameters()), least=1e-8) == {}
    plain.eval()
    with torch.no_grad():
        wanted = [float(loss(plain(images), targets)) for images, targets in batches[:1]]
    found = trainer.evaluate(batches[:1]).loss
    assert found == pytest.approx(wanted[0], rel=1e-8)


def test_a_loss_of_samples_needs_a_row_for_each():
    loss = ib.losses.separable(lambda z, t: z["boxes"].sum() * t.sum(), lambda t: len(t))
    batch = ib.VirtualBatch(Detector(), loss, micro_batch_size=4)
    boxes = flat(objects())
    with pytest.raises(ib.BatchError, match=f"inputs have 9 samples, targets {len(boxes)}"):
        batch.backward(IMAGES, boxes)
    with pytest.raises(ib.BatchError, match="every leaf needs the same number"):
        batch.backward(IMAGES, objects())
    with pytest.raises(ib.BatchError, match="no tensor with a batch dimension"):
        batch.backward(IMAGES, ib.shared(boxes))


@pytest.mark.parametrize("options", [{"micro_batch_size": 3}, {"memory_budget": "64MiB"}])
def test_beside_rows_that_are_sorted_by_length(options):
    """The numbers of images in targets are those of the caller's order."""
    lengths = torch.tensor([7, 2, 5, 3, 7, 1, 4, 6, 2])
    mask = torch.arange(7) < lengths[:, None]
    tokens = torch.randint(1, 11, (N, 7), generator=torch.Generator().manual_seed(4)) * mask

    class Pooled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(5)
            self.embed, self.head = nn.Embedding(11, 6), Detector()
            self.double()

        def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> Any:
            z = self.embed(tokens) * mask.unsqueeze(2)
            return self.head(z.sum(1) / mask.sum(1, keepdim=True))

    model, targets = Pooled(), flat(objects())
    wanted = native(model, by_object, (tokens, mask), targets)
    found = copy.deepcopy(model)
    trim = ib.trim_padding(mask="mask")
    ib.VirtualBatch(found, ib.losses.coupled(by_object), trim=trim, **options).backward(
        (tokens, mask), targets
    )
    got = {name: parameter.grad for name, parameter in found.named_parameters()}
    assert excess(got, wanted.gradients, least=1e-11) == {}
