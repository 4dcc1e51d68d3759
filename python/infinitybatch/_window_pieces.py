"""Batches of a Hugging Face data collator, padded alike so that they are one logical batch."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn.functional import pad

from .errors import BatchError

Piece = dict[str, Any]


def padded_alike(
    pieces: list[Mapping[str, Any]], pad_token_id: int | None, side: str
) -> list[Piece]:
    """The pieces, each tensor as long along dimension 1 as the longest, as one collated batch is.

    Args:
        pad_token_id: what fills `input_ids`; None where nobody knows it.
        side: "right" or "left", where padding goes.

    Raises:
        BatchError: for pieces that cannot be one batch: other entries, other shapes that no token is
            known to fill, other values of what is no tensor.
    """
    names = list(pieces[0])
    for number, piece in enumerate(pieces):
        if set(piece) != set(names):
            raise BatchError(
                f"batch {number} of an optimizer step has {sorted(piece)}, and batch 0 has "
                f"{sorted(names)}: the data collator must give the same entries. {_WAY_OUT}"
            )
    columns = {
        name: _column(name, [piece[name] for piece in pieces], pad_token_id, side) for name in names
    }
    return [{name: columns[name][i] for name in names} for i in range(len(pieces))]


_WAY_OUT = (
    "Set gradient_accumulation_steps=1 and per_device_train_batch_size to the whole batch: the "
    "collator then makes one batch of it, and the memory budget is kept all the same"
)


def _column(name: str, values: list[Any], pad_token_id: int | None, side: str) -> list[Any]:
    if not all(isinstance(value, torch.Tensor) and value.dim() for value in values):
        if any(not _same(value, values[0]) for value in values[1:]):
            raise BatchError(
                f"inputs[{name!r}] has no row for each sample and differs between the batches of an "
                f"optimizer step ({values[0]!r:.40} and others). {_WAY_OUT}"
            )
        return values
    shapes = {value.shape[1:] for value in values}
    if len(shapes) == 1:
        return values
    fill = _fill(name, pad_token_id)
    if fill is None and name.endswith("input_ids"):
        raise BatchError(
            f"inputs[{name!r}] has samples of other lengths in one optimizer step, and no token pads "
            f"them: give processing_class=tokenizer, or set model.config.pad_token_id"
        )
    if fill is None or len({shape[1:] for shape in shapes}) > 1:
        shown = " and ".join(str(list(shape)) for shape in sorted(shapes)[:2])
        raise BatchError(
            f"inputs[{name!r}] has samples of shapes {shown} in one optimizer step, and what pads "
            f"them is not known. {_WAY_OUT}"
        )
    longest = max(shape[0] for shape in shapes)
    return [_longer(value, longest, fill, side) for value in values]


def _fill(name: str, pad_token_id: int | None) -> int | None:
    """What padding of this entry means nothing. Entries may have a prefix: `sentence_0_input_ids`."""
    if name.endswith("input_ids"):
        return pad_token_id
    if name.endswith("labels"):
        return -100
    return 0 if name.endswith(("attention_mask", "token_type_ids")) else None


def _longer(value: torch.Tensor, longest: int, fill: int, side: str) -> torch.Tensor:
    missing = longest - value.shape[1]
    both = (missing, 0) if side == "left" else (0, missing)
    return pad(value, (0, 0) * (value.dim() - 2) + both, value=fill)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and not isinstance(one, torch.Tensor) and one == other
