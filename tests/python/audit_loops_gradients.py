"""Wrong loops that change gradients behind the sum, between slices, or step among them."""

from typing import Any

import torch
from audit_loops import (
    RATE,
    Both,
    Loop,
    N,
    accumulate,
    clip_norm,
    each_split,
    grads,
    hooked,
    loss,
    micro_batches,
    of,
    slices,
    times,
    with_scaler,
)


def second_is_scaled(model: Any, optimizer: Any, batch: Any) -> None:
    for piece in slices(batch):
        (loss(model, piece) * (len(piece[0]) / N)).backward()
    optimizer.each[0].step()
    times(0.5)(model[2])
    optimizer.each[1].step()
    optimizer.zero_grad()


def step_each(model: Any, optimizer: Any, batch: Any) -> None:
    for piece in slices(batch):
        optimizer.zero_grad()
        loss(model, piece).backward()
        optimizer.step()


def zeroed_between(model: Any, optimizer: Any, batch: Any) -> None:
    for piece in slices(batch):
        optimizer.zero_grad()
        (loss(model, piece) * (len(piece[0]) / N)).backward()
    optimizer.step()
    optimizer.zero_grad()


def clipped_before_the_last(model: Any, optimizer: Any, batch: Any) -> None:
    for i, piece in enumerate(slices(batch)):
        if i == 3:
            clip_norm(model.parameters())
        (loss(model, piece) * (len(piece[0]) / N)).backward()
    optimizer.step()
    optimizer.zero_grad()


def one_without_gradient(model: Any) -> None:
    model[2].bias.grad = None


def noisy(model: Any) -> None:
    for grad in grads(model):
        grad.add_(torch.full_like(grad, 0.01))


def all_reduced(model: Any) -> None:
    """As of two processes, of which one is all that there is."""
    for p in model.parameters():
        p.grad = p.grad.clone() / 2


def swapped(model: Any) -> None:
    model[0].weight.grad = model[0].weight.grad.flip(0)


class Halving(torch.optim.SGD):
    """A subclass whose step() changes gradients."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)
        return super().step(closure)


def halving(model: Any) -> Any:
    return Halving(model.parameters(), lr=RATE)


def second_is_emptied(model: Any, optimizer: Any, batch: Any) -> None:
    for piece in slices(batch):
        (loss(model, piece) * (len(piece[0]) / N)).backward()
    optimizer.each[0].step()
    optimizer.each[1].zero_grad()
    optimizer.each[1].step()
    optimizer.zero_grad()


def stepped_in_the_middle(model: Any, optimizer: Any, batch: Any) -> None:
    for i, piece in enumerate(slices(batch)):
        (loss(model, piece) * (len(piece[0]) / N)).backward()
        if i == 1:
            optimizer.step()
    optimizer.step()
    optimizer.zero_grad()


GRADIENTS: dict[str, Loop] = {
    "gradients halved": Loop(accumulate(then=times(0.5)), "scaled_after_sum"),
    "gradients negated": Loop(accumulate(then=times(-1.0)), "scaled_after_sum"),
    "halved after clipping": Loop(
        accumulate(then=lambda m: (of(clip_norm)(m), times(0.5)(m))),
        "changed_after_clipping",
        after=clip_norm,
    ),
    "clipped while scaled": Loop(
        with_scaler(clips_scaled=True, unscales=False), "changed_after_clipping", after=clip_norm
    ),
    "one gradient removed": Loop(accumulate(then=one_without_gradient), "changed_after_sum"),
    "all-reduced by hand": Loop(accumulate(then=all_reduced), "scaled_after_sum"),
    "noise on the gradient": Loop(accumulate(then=noisy), "changed_after_sum"),
    "rows of a gradient flipped": Loop(accumulate(then=swapped), "changed_after_sum"),
    "halved in a hook of the optimizer": Loop(
        accumulate(), "scaled_after_sum", optimizer=hooked(times(0.5))
    ),
    "halved in step()": Loop(accumulate(), "scaled_after_sum", optimizer=halving),
    "the second optimizer's halved": Loop(second_is_scaled, "scaled_after_sum", optimizer=Both),
    "emptied between slices": Loop(zeroed_between, "zeroed_between"),
    "each slice clipped": Loop(accumulate(between=of(clip_norm)), "clipped_before_sum"),
    "clipped before the last slice": Loop(clipped_before_the_last, "clipped_before_sum"),
    "stepped for each slice": Loop(step_each, "stepped_early"),
    "normalised gradients": Loop(
        accumulate(then=lambda m: [g.div_(g.norm()) for g in grads(m)]), "changed_after_sum"
    ),
    "the second optimizer's emptied": Loop(second_is_emptied, "changed_after_sum", optimizer=Both),
    "a step in the middle": Loop(stepped_in_the_middle, "stepped_early"),
    "stepped for each slice of the loader's batch": Loop(
        each_split(step_each), "stepped_early", loader=micro_batches(N)
    ),
}
