"""Which rows of a batch a tensor of the loop was made of, followed through what the loop does."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from .clipping import writes

#: Makes a tensor again of another batch's columns, all rows where the loop took some.
Remake = Callable[[dict[str, Tensor]], Tensor]

#: Where the dimension stands among the arguments of what takes a part along one, and its default.
_ALONG = {
    "split": 2,
    "split_with_sizes": 2,
    "chunk": 2,
    "tensor_split": 2,
    "unsafe_split": 2,
    "unsafe_chunk": 2,
    "unbind": 1,
    "narrow": 1,
    "select": 1,
    "index_select": 1,
}
_JOINS = ("cat", "concat", "concatenate", "stack")
_SHAPES = ("flatten", "reshape", "view", "ravel", "view_as", "reshape_as")


#: They may put rows elsewhere, by what is in them.
_REORDER = {
    *("sort", "argsort", "msort", "topk", "rot90", "gather", "take", "take_along_dim", "t"),
    *("scatter", "scatter_", "masked_select", "unique", "fliplr", "flipud", "index_put", "H"),
}


@dataclass(frozen=True)
class Origin:
    """Of one tensor."""

    #: The batch's tensor that it was made of.
    column: str
    #: The number of the sample for each of its rows, over all batches; None where it has no rows
    #: any more (a mean).
    rows: Tensor | None
    #: None where it is not known how to make it again.
    remake: Remake | None
    #: Whether it still is what the batch holds.
    same: bool = True
    #: Whether it is one sample, without a dimension for samples.
    single: bool = False
    #: Whether its rows are each made of several samples (mixup).
    mixed: bool = False


class Origins:
    """Where the tensors that are alive come from."""

    def __init__(self) -> None:
        self._of: Any = WeakTensorKeyDictionary()

    def __len__(self) -> int:
        return len(self._of)

    def of(self, value: Any) -> Origin | None:
        return self._of.get(value) if isinstance(value, Tensor) else None

    def clear(self) -> None:
        self._of = WeakTensorKeyDictionary()

    def begin(self, tensor: Tensor, column: str, rows: Tensor, single: bool = False) -> None:
        self._of[tensor] = Origin(column, rows, lambda columns: columns[column], single=single)

    def follow(self, function: Any, args: Any, kwargs: Any, result: Any) -> Any:
        """Notes where the result comes from, and returns it."""
        if not self._of:
            return result
        name = getattr(function, "__name__", "")
        if name == "__iter__" and self.of(args[0]):
            result = list(result)
            self.follow(Tensor.unbind, args, kwargs, result)
            return iter(result)
        results = _tensors(result)
        if not results or any(one.requires_grad for one in results):
            return result
        sources = [(a, o) for a in _flat((args, kwargs)) if (o := self.of(a)) is not None]
        if name == "copy_" and isinstance(result, Tensor) and self.of(args[1]) is None:
            self._of.pop(result, None)
        elif sources:
            for one, origin in zip(
                results, self._origins(name, function, args, kwargs, results, sources), strict=True
            ):
                if origin is None:
                    self._of.pop(one, None)
                else:
                    self._of[one] = origin
        return result

    def _origins(
        self, name: str, function: Any, args: Any, kwargs: Any, results: Any, sources: Any
    ) -> list[Origin | None]:
        first, source = sources[0]
        if name == "copy_":
            first, source = args[1], self.of(args[1])
        moved: list[Origin | None] | None = None
        if name in _JOINS:
            moved = self._joined(args, kwargs, results[0])
        elif first is args[0] and source.rows is not None and len(sources) == 1:
            moved = _moved(name, function, first, source, args, kwargs, results)
        if moved is not None:
            return moved
        mixed = any(o.mixed or _are_others(o, source) for _, o in sources)
        remake = self._remake(function, args, kwargs, source)
        found: list[Origin | None] = []
        for place, one in enumerate(results):
            part = remake if len(results) == 1 else _item(remake, place)
            kept = _kept_rows(name, source, first, one)
            found.append(Origin(source.column, kept, part, same=False, mixed=mixed))
        if source.single:
            return [Origin(source.column, source.rows, None, False, True, mixed) for _ in results]
        if name in ("clone", "detach", "contiguous", "to", "requires_grad_", "pin_memory", "cpu"):
            is_cast = results[0].dtype != first.dtype
            return [replace(source, same=source.same and not is_cast, remake=remake)]
        return found

    def _joined(self, args: Any, kwargs: Any, result: Tensor) -> list[Origin | None] | None:
        parts = args[0] if args else kwargs.get("tensors")
        dim = kwargs.get("dim", args[1] if len(args) > 1 else 0)
        known = [self.of(part) for part in parts]
        if dim != 0 or any(o is None or o.rows is None for o in known):
            return None
        origins = [o for o in known if o is not None]
        if len({o.column for o in origins}) > 1:
            return None
        rows = torch.cat([o.rows.reshape(-1) for o in origins if o.rows is not None])
        if len(rows) != len(result):
            return None
        same = all(o.same for o in origins)
        return [Origin(origins[0].column, rows, origins[0].remake if same else None, same)]

    def _remake(self, function: Any, args: Any, kwargs: Any, source: Origin) -> Remake | None:
        """The same operation on what the arguments are made of in another batch."""
        count = 0 if source.rows is None or source.single else len(source.rows)

        def plan(value: Any) -> Any:
            if isinstance(value, Tensor):
                origin = self.of(value)
                if origin is not None:
                    return origin.remake
                # Numbers of its own for each row cannot be had for other rows.
                is_row_wise = count > 1 and value.ndim and len(value) == count
                return None if is_row_wise else lambda columns: value
            if type(value) in (list, tuple):
                parts = [plan(one) for one in value]
                if any(part is None for part in parts):
                    return None
                kind = type(value)
                return lambda columns: kind(part(columns) for part in parts)
            return lambda columns: value

        plans = [plan(a) for a in args]
        named = {n: plan(a) for n, a in kwargs.items()}
        if any(p is None for p in (*plans, *named.values())):
            return None
        is_in_place = writes(function)

        def remake(columns: dict[str, Tensor]) -> Any:
            values = [p(columns) for p in plans]
            if is_in_place:
                values[0] = values[0].clone()
            return function(*values, **{n: p(columns) for n, p in named.items()})

        return remake


def _are_others(one: Origin, other: Origin) -> bool:
    """Whether both have rows, of other samples."""
    if one.rows is None or other.rows is None or one.single or other.single:
        return False
    return len(one.rows) == len(other.rows) and not torch.equal(one.rows, other.rows)


def _item(remake: Remake | None, place: int) -> Remake | None:
    return None if remake is None else lambda columns: remake(columns)[place]


def _kept_rows(name: str, source: Origin, first: Tensor, one: Tensor) -> Tensor | None:
    rows = source.rows
    if rows is None or source.single or not one.ndim:
        return None
    if len(one) == len(rows):
        return rows
    if name in _SHAPES and len(rows) and len(one) % len(rows) == 0 and one.numel() == first.numel():
        return rows.repeat_interleave(len(one) // len(rows))
    return None


def _moved(
    name: str, function: Any, first: Tensor, source: Origin, args: Any, kwargs: Any, results: Any
) -> list[Origin | None] | None:
    """Of operations that take or reorder rows; None for any other."""
    rows = source.rows
    assert rows is not None
    if source.single:
        adds_rows = name in ("unsqueeze", "__getitem__", *_SHAPES) and len(results) == 1
        if adds_rows and results[0].ndim == first.ndim + 1 and len(results[0]) == 1:
            return [replace(source, rows=rows.reshape(1), single=False)]
        return None
    taken: Any = None
    try:
        if name == "__getitem__":
            index = args[1][0] if isinstance(args[1], tuple) and args[1] else args[1]
            if (
                index is Ellipsis
                or index is None
                or isinstance(args[1], tuple)
                and len(args[1]) > 1
            ):
                others = args[1][1:] if isinstance(args[1], tuple) else ()
                if index is Ellipsis or index is None or any(o is None for o in others):
                    return None
                if not all(isinstance(o, slice) and o == slice(None) for o in others):
                    return _taken_and_changed(source, rows, index, others)
            taken = [rows[_here(index)]]
        elif name in _ALONG:
            place = _ALONG[name]
            dim = kwargs.get("dim", args[place] if len(args) > place else 0)
            if dim % first.ndim:
                return None
            found = function(
                rows, *map(_here, args[1:]), **{k: _here(v) for k, v in kwargs.items()}
            )
            taken = list(found) if isinstance(found, (list, tuple)) else [found]
        elif name == "flip":
            dims = kwargs.get("dims", args[1:])
            dims = dims[0] if len(dims) == 1 and isinstance(dims[0], (list, tuple)) else dims
            if not any(d % first.ndim == 0 for d in dims):
                return None
            if len(dims) > 1:
                return [Origin(source.column, rows.flip(0), None, same=False)]
            taken = [rows.flip(0)]
        elif name == "roll":
            shifts = kwargs.get("shifts", args[1] if len(args) > 1 else None)
            dims = kwargs.get("dims", args[2] if len(args) > 2 else None)
            dims = [dims] if isinstance(dims, int) else list(dims or ())
            if dims and not any(d % first.ndim == 0 for d in dims):
                return None
            if len(dims) > 1 or not dims and first.ndim > 1:
                return [None]
            taken = [rows.roll(shifts)]
        elif name == "repeat_interleave" or name == "repeat":
            if name == "repeat" and any(n != 1 for n in _sizes(args[1:])[1:]):
                return None
            repeats = _here(kwargs.get("repeats", args[1]))
            taken = [
                rows.repeat(_sizes(args[1:])[0])
                if name == "repeat"
                else rows.repeat_interleave(repeats)
            ]
        elif name in ("transpose", "swapaxes", "swapdims", "permute", "movedim", "moveaxis"):
            dims = _sizes(args[1:]) or list(kwargs.values())
            if name == "permute":
                dims = dims[0] if len(dims) == 1 and isinstance(dims[0], (list, tuple)) else dims
                moves = dims[0] % first.ndim != 0
            else:
                moves = not all(isinstance(d, int) and d % first.ndim for d in dims)
            return _lost(source, results) if moves else None
        elif name in _REORDER:
            return _lost(source, results)
    except (RuntimeError, TypeError, IndexError, ValueError):
        return [None] * len(results)
    if taken is None:
        return None
    if len(taken) != len(results):
        return [None] * len(results)
    return [
        replace(source, rows=row, single=not row.ndim) if _fits(row, one) else None
        for row, one in zip(taken, results, strict=True)
    ]


def _lost(source: Origin, results: Any) -> list[Origin | None]:
    return [Origin(source.column, None, None, same=False) for _ in results]


def _taken_and_changed(source: Origin, rows: Tensor, index: Any, others: Any) -> Any:
    """Rows taken, and a part of each: `x[4:8, :, 2]`."""
    row, whole = rows[_here(index)], source.remake
    remake: Remake | None = None
    if isinstance(index, slice) and whole is not None:
        remake = lambda columns: whole(columns)[(slice(None), *others)]  # noqa: E731
    return [Origin(source.column, row, remake, same=False, single=not row.ndim)]


def _here(index: Any) -> Any:
    """Numbers of rows are kept on the host, wherever the loop takes them."""
    return index.cpu() if isinstance(index, Tensor) else index


def _sizes(args: Any) -> list[int]:
    return list(args[0]) if len(args) == 1 and isinstance(args[0], (list, tuple)) else list(args)


def _fits(rows: Tensor, result: Tensor) -> bool:
    return not rows.ndim or (rows.ndim == 1 and result.ndim > 0 and len(result) == len(rows))


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, (list, tuple)) and value and all(isinstance(v, Tensor) for v in value):
        return list(value)
    return []


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, (list, tuple)):
        for one in value:
            yield from _flat(one)
    elif isinstance(value, dict):
        for one in value.values():
            yield from _flat(one)
    else:
        yield value
