"""Wrong loops whose cause no experiment tells, or that an audit leaves undecided."""

from typing import Any

import torch
from audit_loops import (
    DRAWS,
    MEAN,
    NAMED,
    Loop,
    N,
    accumulate,
    by_name_of_another,
    decayed,
    dropout_net,
    keyword_net,
    loss,
    net,
    of,
    own_clip,
    own_masks,
    slices,
    with_hooks,
)
from torch import nn

FOREIGN = torch.randn(N, 6, dtype=torch.float64, generator=DRAWS)


def decay_in_each_slice(model: Any, optimizer: Any, batch: Any) -> None:
    for piece in slices(batch):
        value = loss(model, piece)
        (value * (len(piece[0]) / N) + decayed(model, piece) - value).backward()
    optimizer.step()
    optimizer.zero_grad()


def detached_for_one(model: Any, optimizer: Any, batch: Any) -> None:
    outputs = []
    for i, (x, _) in enumerate(slices(batch)):
        out = model(x)
        outputs.append(out.detach() if i == 1 else out)
    MEAN(torch.cat(outputs), batch[1]).backward()
    optimizer.step()
    optimizer.zero_grad()


def twice_backward(model: Any, optimizer: Any, batch: Any) -> None:
    for i, piece in enumerate(slices(batch)):
        value = loss(model, piece) * (len(piece[0]) / N)
        if i == 2:
            value.backward(retain_graph=True)
        value.backward()
    optimizer.step()
    optimizer.zero_grad()


def frozen_for_one(model: Any, optimizer: Any, batch: Any) -> None:
    for i, piece in enumerate(slices(batch)):
        model[0].requires_grad_(i != 3)
        (loss(model, piece) * (len(piece[0]) / N)).backward()
    optimizer.step()
    optimizer.zero_grad()
    model[0].requires_grad_(True)


def sign_flipped_for_one(model: Any, optimizer: Any, batch: Any) -> None:
    for i, piece in enumerate(slices(batch)):
        (loss(model, piece) * ((-1 if i == 2 else 1) * len(piece[0]) / N)).backward()
    optimizer.step()
    optimizer.zero_grad()


def halve(p: Any) -> None:
    p.grad.mul_(0.5)


def halving_as_it_accumulates() -> nn.Module:
    model = net()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(halve)
    return model


def half_of_the_outputs(model: Any, optimizer: Any, batch: Any) -> None:
    MEAN(model(batch[0])[:8], batch[1][:8]).backward()
    optimizer.step()
    optimizer.zero_grad()


def evaluated_for_one(model: Any, optimizer: Any, batch: Any) -> None:
    for i, piece in enumerate(slices(batch)):
        model.train(i != 1)
        (loss(model, piece) * (len(piece[0]) / N)).backward()
    model.train()
    optimizer.step()
    optimizer.zero_grad()


def sharpness_aware(model: Any, optimizer: Any, batch: Any) -> None:
    loss(model, batch).backward()
    moves = [0.05 * p.grad for p in model.parameters()]
    with torch.no_grad():
        for p, move in zip(model.parameters(), moves, strict=True):
            p.add_(move)
        model.zero_grad()
    loss(model, batch).backward()
    with torch.no_grad():
        for p, move in zip(model.parameters(), moves, strict=True):
            p.sub_(move)
    optimizer.step()
    optimizer.zero_grad()


UNDECIDED: dict[str, Loop] = {
    "rows of another batch": Loop(accumulate(lambda b: slices((FOREIGN, b[1]))), "undecided"),
    "rows of another batch, the loss is given": Loop(
        accumulate(lambda b: slices((FOREIGN, b[1]))), "?", loss=loss
    ),
    "clipped by a function of its own": Loop(
        accumulate(then=of(lambda p: own_clip(p, 0.03))), "undecided"
    ),
    "decay in each slice": Loop(decay_in_each_slice, "?", loss=decayed, true_loss=decayed),
    "centred in each slice by a number": Loop(
        accumulate(before=lambda x: x - x.mean().item()),
        "undecided",
        true_loss=lambda m, b: loss(m, (b[0] - b[0].mean(), b[1])),
    ),
    "sorted in each slice": Loop(accumulate(before=lambda x: x.sort(0).values), "undecided"),
    "mixed up in each slice": Loop(
        accumulate(before=lambda x: 0.7 * x + 0.3 * x.flip(0)), "undecided"
    ),
    "labels permuted by NumPy": Loop(
        accumulate(lambda b: slices((b[0], torch.tensor(b[1].numpy()[::-1].copy())))), "undecided"
    ),
    "an input of another sample": Loop(
        by_name_of_another,
        "undecided",
        model=keyword_net,
        batch=NAMED,
        true_loss=lambda m, b: MEAN(m(b["ids"], b["scale"]), b["labels"]),
    ),
    "a penalty over each slice": Loop(
        accumulate(criterion=lambda z, y: MEAN(z, y) + z.norm()),
        "?",
        loss=lambda m, b: (lambda z: MEAN(z, b[1]) + z.norm())(m(b[0])),
        true_loss=lambda m, b: (lambda z: MEAN(z, b[1]) + z.norm())(m(b[0])),
    ),
    "half of the outputs": Loop(half_of_the_outputs, "undecided"),
    "evaluation mode for one slice": Loop(
        evaluated_for_one, "undecided", model=dropout_net, truth=own_masks
    ),
    "parameters moved in between": Loop(sharpness_aware, "undecided"),
    "a slice detached": Loop(detached_for_one, "?", loss=loss),
    "a slice twice backward": Loop(twice_backward, "?", loss=loss),
    "a part frozen for one slice": Loop(frozen_for_one, "?"),
    "a slice's sign flipped": Loop(sign_flipped_for_one, "?"),
    "hooks that clip each slice": Loop(
        accumulate(), "?", model=with_hooks(lambda g: g.clamp(-0.002, 0.002))
    ),
    "halved as it accumulates": Loop(accumulate(), "?", model=halving_as_it_accumulates),
}
