"""`trim=` of `VirtualBatch` and `wrap`: how padding is marked, so that it need not be computed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from . import _batch_dim, _checks
from .errors import InvalidArgument, InvalidType


@dataclass(frozen=True, slots=True)
class TrimPadding:
    """What `trim_padding` returns."""

    mask: tuple[str, ...] = ()
    padding: float = 0.0
    lengths: Callable[..., torch.Tensor] | None = None
    left: bool = False
    inputs: tuple[str, ...] = ()
    targets: bool = False


#: One for each sequence that is padded apart from others.
Trim = TrimPadding | Sequence[TrimPadding]


def trim_padding(
    mask: str | int | None = None,
    *,
    padding: float | bool = 0,
    lengths: str | int | Callable[..., torch.Tensor] | None = None,
    side: str = "right",
    inputs: Sequence[str | int] = (),
    targets: bool = False,
) -> TrimPadding:
    """Says how padding is marked: micro-batches are computed at the length of their longest row.

        trim=ib.trim_padding(mask="attention_mask")
        trim=[ib.trim_padding(mask="attention_mask", inputs=["input_ids"]),
              ib.trim_padding(mask="labels", padding=-100, inputs=["decoder_input_ids"])]

    A row without any position that is marked as real counts as the longest.

    Args:
        mask: the argument of shape [samples, time] that marks padding, by name or position; of one
            that is nested in another, by the last keys of its path. "targets" are the targets of
            VirtualBatch. On which side padding stands, it tells.
        padding: the value that marks padding: 0 of a mask, True of one that is True there, -100 of
            labels, the padding token of token ids.
        lengths: in place of a mask: the argument that holds the number of real positions of each
            sample, or a function of the model's arguments that returns it as a tensor.
        side: with `lengths`, where padding stands: "right" or "left".
        inputs: arguments that are trimmed beside the mask, along each dimension that is as long.
            Without any: all tensors that have the mask's size in its dimension of time, whatever
            the batch's length; what is as long by chance is left in full.
        targets: targets have that dimension, too, and a separable loss ignores padding there: they
            are trimmed, and outputs are not padded back for the loss.

    Raises:
        InvalidType, InvalidArgument: for values of another type or that contradict each other.
    """
    if (mask is None) == (lengths is None):
        raise InvalidArgument(
            'trim_padding takes a mask or lengths, one of them: trim_padding(mask="attention_mask")'
        )
    _checks.one_of("side", side, "right", "left")
    if isinstance(inputs, (str, int)):
        inputs = [inputs]
    if isinstance(padding, torch.Tensor) or not isinstance(padding, (int, float)):
        raise InvalidType(f"padding must be a number, not {type(padding).__name__}")
    of = lengths
    if lengths is not None and not callable(lengths):
        of = _Argument(_name("lengths", lengths))
    return TrimPadding(
        () if mask is None else (_name("mask", mask),),
        float(padding),
        of,  # type: ignore[arg-type]
        side == "left",
        tuple(_name("inputs", each) for each in inputs),
        _checks.truth("targets", targets),
    )


def checked(name: str, value: Any) -> tuple[TrimPadding, ...] | None:
    if value is None:
        return None
    given = (value,) if isinstance(value, TrimPadding) else value
    if not isinstance(given, (tuple, list)) or not all(isinstance(e, TrimPadding) for e in given):
        raise InvalidType(
            f'{name} must be what ib.trim_padding(mask="attention_mask") returns, or a list of '
            f"them, not {type(value).__name__}"
        )
    return tuple(given) or None


def for_forward(
    given: tuple[TrimPadding, ...] | None, forward: Callable[..., Any], wrapped: bool
) -> tuple[TrimPadding, ...] | None:
    """`given` as C++ takes it: each argument under the name by which it finds it there.

    Args:
        wrapped: inputs are the arguments of a call and its keywords.
    """
    if given is None:
        return None
    names = _batch_dim._parameters(forward).names
    return tuple(_resolved(each, names, forward, wrapped) for each in given)


@dataclass(frozen=True, slots=True)
class _Argument:
    """Lengths that an argument holds."""

    name: str

    def of(self, arguments: tuple[Any, ...], keywords: dict[str, Any], names: list[str]) -> Any:
        found = keywords.get(self.name)
        position = self.name if self.name.isdigit() else _position(names, self.name)
        if found is None and position is not None and int(position) < len(arguments):
            found = arguments[int(position)]
        if found is None:
            for each in (*arguments, *keywords.values()):
                if isinstance(each, Mapping) and self.name in each:
                    found = each[self.name]
        if not isinstance(found, torch.Tensor):
            raise InvalidArgument(
                f"trim_padding(lengths={self.name!r}) names no tensor among the arguments: "
                f"{', '.join([*map(str, range(len(arguments))), *keywords]) or 'none'}"
            )
        return found


def _resolved(
    each: TrimPadding, names: list[str], forward: Callable[..., Any], wrapped: bool
) -> TrimPadding:
    def known(name: str) -> list[str]:
        # An argument may come by its name or by its position.
        position = name if name.isdigit() else _position(names, name)
        also = [] if name.isdigit() or not wrapped else [name]
        if not wrapped:
            return [name, *([] if position in (None, name) else [position])]
        if name.isdigit() and int(name) < len(names):
            also.append(names[int(name)])
        return [*also, *([] if position is None else [f"0.{position}"])]

    of_targets = each.mask == ("targets",)
    return replace(
        each,
        mask=each.mask if of_targets else tuple(n for given in each.mask for n in known(given)),
        lengths=_lengths(each.lengths, names, wrapped),
        inputs=tuple(name for given in each.inputs for name in known(given)),
    )


def _lengths(given: Any, names: list[str], wrapped: bool) -> Any:
    if given is None:
        return None

    def lengths(inputs: Any) -> torch.Tensor:
        arguments: tuple[Any, ...]
        keywords: dict[str, Any] = {}
        if wrapped:
            arguments, keywords = inputs
        elif isinstance(inputs, Mapping):
            arguments, keywords = (), dict(inputs)
        elif type(inputs) in (tuple, list):
            arguments = tuple(inputs)
        else:
            arguments = (inputs,)
        if isinstance(given, _Argument):
            found = given.of(arguments, keywords, names)
        else:
            found = given(*arguments, **keywords)
        if not isinstance(found, torch.Tensor):
            found = torch.as_tensor(found)
        return found

    return lengths


def _position(names: list[str], name: str) -> str | None:
    return str(names.index(name)) if name in names else None


def _name(what: str, value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, (str, int)) or value == "":
        raise InvalidType(
            f"{what} of trim_padding must be the name or the position of an argument, not {value!r}"
        )
    if isinstance(value, int) and value < 0:
        raise InvalidArgument(f"{what} of trim_padding is {value}; count arguments from 0")
    return str(value)


__all__ = ["Trim", "TrimPadding", "checked", "for_forward", "trim_padding"]
