"""Wrong loops that see other rows than the batch has, or combine those of a slice."""

from collections.abc import Callable
from typing import Any

import torch
from audit_loops import (
    DRAWS,
    MEAN,
    NAMED,
    Batch,
    Loop,
    N,
    X,
    Y,
    accumulate,
    by_name_of_another,
    dropout_net,
    each,
    keyword_net,
    loss,
    micro_batches,
    noise,
    slices,
    taken,
)


def without_a_graph_for_one(model: Any, optimizer: Any, batch: Any) -> None:
    for i, piece in enumerate(slices(batch)):
        with torch.set_grad_enabled(i != 1):
            value = loss(model, piece) * (len(piece[0]) / N)
        if i != 1:
            value.backward()
    optimizer.step()
    optimizer.zero_grad()


def first_in_a_buffer(x: torch.Tensor) -> torch.Tensor:
    buffer = torch.empty(len(x), 6, dtype=torch.float64)
    buffer[:] = X[: len(x)]
    return buffer


def whitened(x: torch.Tensor) -> torch.Tensor:
    return x @ torch.linalg.inv(torch.cov(x.T) + torch.eye(6).double())


def padded(*more: torch.Tensor) -> Callable[[Batch], list[Batch]]:
    """The last slice filled up to four."""
    return lambda batch: [
        *list(slices(batch))[:3],
        tuple(torch.cat([column[12:], m]) for column, m in zip(batch, more, strict=True)),
    ]


def of_sixteen(piece: Any, batch: Any) -> float:
    return len(piece[0]) / 16


def first_again(model: Any, optimizer: Any, loader: Any) -> None:
    """Uses the first batch in place of each."""
    first = None
    for batch in loader:
        first = batch if first is None else first
        (loss(model, first) / 4).backward()
    optimizer.step()
    optimizer.zero_grad()


def every_other(model: Any, optimizer: Any, loader: Any) -> None:
    for i, batch in enumerate(loader):
        if i % 2 == 0:
            (loss(model, batch) / 2).backward()
    optimizer.step()
    optimizer.zero_grad()


def without_the_last(model: Any, optimizer: Any, loader: Any) -> None:
    for batch in loader:
        for piece in slices(batch):
            if len(piece[0]) == 4:
                (loss(model, piece) / 3).backward()
        optimizer.step()
        optimizer.zero_grad()


ROWS: dict[str, Loop] = {
    "one slice four times": Loop(accumulate(taken(*[slice(0, 4)] * 4), each), "other_rows"),
    "one slice four times, the loss is given": Loop(
        accumulate(taken(*[slice(0, 4)] * 4), each), "other_rows", loss=loss
    ),
    "overlapping windows": Loop(
        accumulate(taken(*(slice(i, i + 5) for i in (0, 3, 6, 9))), each), "other_rows"
    ),
    "one slice twice": Loop(
        accumulate(taken(*(slice(i, i + 4) for i in (0, 4, 8, 8))), each), "other_rows"
    ),
    "the last slice dropped": Loop(
        accumulate(lambda b: list(slices(b))[:3], lambda p, b: 1 / 3), "other_rows"
    ),
    "drawn with replacement": Loop(
        accumulate(taken(*torch.randint(N, (16,), generator=DRAWS).split(4)), each), "other_rows"
    ),
    "labels of another slice": Loop(
        accumulate(lambda b: zip(b[0].split(4), b[1].roll(4).split(4), strict=True)), "other_rows"
    ),
    "one slice four times, with noise": Loop(
        accumulate(taken(*[slice(0, 4)] * 4), each, before=noise), "other_rows"
    ),
    "one slice four times, with dropout": Loop(
        accumulate(taken(*[slice(0, 4)] * 4), each), "other_rows", model=dropout_net
    ),
    "one slice four times, and not divided": Loop(
        accumulate(taken(*[slice(0, 4)] * 4), lambda p, b: 1.0), "other_rows no_division"
    ),
    "centred in each slice": Loop(
        accumulate(before=lambda x: x - x.mean(0)),
        "samples_combined",
        true_loss=lambda m, b: loss(m, (b[0] - b[0].mean(0), b[1])),
    ),
    "filled up with zeros": Loop(
        accumulate(padded(torch.zeros(2, 6).double(), torch.zeros(2).long()), of_sixteen),
        "other_rows",
    ),
    "filled up with the first rows": Loop(
        accumulate(padded(X[:2], Y[:2]), of_sixteen), "other_rows"
    ),
    "the first rows copied to a buffer": Loop(accumulate(before=first_in_a_buffer), "other_rows"),
    "whitened in each slice": Loop(
        accumulate(before=whitened),
        "samples_combined",
        true_loss=lambda m, b: loss(m, (whitened(b[0]), b[1])),
    ),
    "inputs of other samples, the loss is given": Loop(
        by_name_of_another,
        "other_rows",
        model=keyword_net,
        batch=NAMED,
        loss=lambda m, b: MEAN(m(b["ids"], b["scale"]), b["labels"]),
        true_loss=lambda m, b: MEAN(m(b["ids"], b["scale"]), b["labels"]),
    ),
    "a slice without a graph": Loop(without_a_graph_for_one, "other_rows"),
    "the loader's first batch again": Loop(first_again, "other_rows", loader=micro_batches()),
    "every other batch of the loader": Loop(every_other, "other_rows", loader=micro_batches()),
    "the loader's batch without its last slice": Loop(
        without_the_last, "other_rows", loader=micro_batches(N)
    ),
}
