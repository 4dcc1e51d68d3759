"""Batches of a loader: seen as they are given out, joined into the whole batch, split into micro-batches."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .. import _random_state, _tree
from ..errors import BatchError, InvalidType
from .origins import Origins
from .rows import Batch, take

Join = Callable[[list[Any]], Any]

#: Batches that are remembered until the loop uses them.
_KEPT = 64

_WAY_OUT = "give join=: watch(..., join=lambda batches: my_collate(batches))"


def map_tensors(function: Callable[[Tensor], Tensor], batch: Any) -> Any:
    leaves, _, _, spec = _tree.flatten(batch)
    return _tree.unflatten([function(x) if isinstance(x, Tensor) else x for x in leaves], spec)


def keep(batch: Any) -> Any:
    """A copy that stays as it is when the loop writes into its batch."""

    def copy(tensor: Tensor) -> Tensor:
        return tensor.detach().clone().requires_grad_(tensor.requires_grad)

    return map_tensors(copy, batch)


def to_device(batch: Any, device: torch.device) -> Any:
    return map_tensors(lambda tensor: tensor.to(device), batch)


def rows_of(batch: Any) -> int | None:
    """Samples: the size of the first tensor that has a dimension. None without one."""
    leaves = _tree.flatten(batch)[0]
    return next((len(x) for x in leaves if isinstance(x, Tensor) and x.ndim), None)


def join(batches: list[Any]) -> Any:
    """The whole batch. Raises BatchError where it is not known how."""
    if len(batches) == 1:
        return batches[0]
    flat = [_tree.flatten(batch) for batch in batches]
    _, _, names, spec = flat[0]
    if any(other[3] != spec for other in flat[1:]):
        raise BatchError(f"the batches of a step differ in their structure; {_WAY_OUT}")
    sizes = [rows_of(batch) for batch in batches]
    columns = zip(*(leaves for leaves, *_ in flat), strict=True)
    return _tree.unflatten(
        [_column(name, list(c), sizes) for name, c in zip(names, columns, strict=True)], spec
    )


def _column(name: str, leaves: list[Any], sizes: list[int | None]) -> Any:
    first = leaves[0]
    if all(isinstance(leaf, Tensor) for leaf in leaves):
        shapes = [tuple(leaf.shape) for leaf in leaves]
        if all(s and s[0] == n for s, n in zip(shapes, sizes, strict=True)):
            if len({s[1:] for s in shapes}) == 1:
                return torch.cat(leaves)
            raise BatchError(
                f"batch{name} has shapes {shapes} in the micro-batches of a step, which cannot be "
                f"joined: pad them to one size, or {_WAY_OUT}"
            )
        if len(set(shapes)) == 1 and all(torch.equal(first, leaf) for leaf in leaves[1:]):
            return first
    elif all(_tree.alike(first, leaf) for leaf in leaves[1:]):
        return first
    raise BatchError(
        f"batch{name} differs between the micro-batches of a step and has no row for each sample; "
        f"{_WAY_OUT}"
    )


def split(whole: Any, sizes: list[int]) -> list[Any]:
    """Rows of `whole`, in order; what has no row for each sample goes to each piece."""
    total, begin, pieces = sum(sizes), 0, []
    for size in sizes:
        rows = slice(begin, begin + size)
        pieces.append(
            map_tensors(lambda x, r=rows: x[r] if x.ndim and len(x) == total else x, whole)
        )
        begin += size
    return pieces


@dataclass
class Given:
    """A batch as the loader gave it."""

    batch: Any
    #: The state of all random generators then.
    random: dict[str, Any]
    #: How many times the loader had come to its end before.
    epoch: int
    #: Its rows, for telling which of them the model sees.
    rows: Batch | None = None
    #: Whether a call in a step that is over is known to have seen some of them.
    used: bool = False


class Loader:
    """Iterates over a loader and notes what it gives.

    The loop may go on using its own loader: while `watching`, that very object has a class of its
    own with another `__iter__`. Where an object's class cannot be set (lists, generators), the loop
    has to go over this one.
    """

    def __init__(self, loader: Any, active: Callable[[], bool], origins: Origins) -> None:
        if not hasattr(loader, "__iter__"):
            raise InvalidType(
                f"loader must be an iterable of batches, not {type(loader).__name__}: "
                f"watch(model, optimizer, loader)"
            )
        self.loader = loader
        self.given: list[Given] = []
        self.first = 0  # the number of given[0] in the whole run
        self.epochs = 0
        self._samples = 0
        self._origins = origins
        self._active = active
        self._class: type | None = None

    def __iter__(self) -> Iterator[Any]:
        iterate = self._class.__iter__ if self._class else type(self.loader).__iter__
        return self._noted(iterate(self.loader))

    def __len__(self) -> int:
        return len(self.loader)

    def _noted(self, batches: Iterator[Any]) -> Iterator[Any]:
        trains = False
        for batch in batches:
            # What is taken under no_grad is for validation.
            if torch.is_grad_enabled():
                trains = True
                if self._active():
                    kept = keep(batch)
                    rows = take(batch, self._samples, self._origins, kept)
                    self._samples += rows.count if rows else 0
                    self.given.append(Given(kept, _random_state.capture(), self.epochs, rows))
            yield batch
        self.epochs += trains

    def watch(self) -> None:
        kind = type(self.loader)
        try:
            inner = type(
                kind.__name__,
                (kind,),
                {
                    "__iter__": lambda loader: self._noted(kind.__iter__(loader)),
                    "__module__": kind.__module__,
                    "__doc__": kind.__doc__,
                },
            )
            _set_class(self.loader, inner)
            self._class = kind
        except TypeError:
            self._class = None

    def leave(self) -> None:
        if self._class is not None:
            _set_class(self.loader, self._class)
            self._class = None

    @property
    def sees_the_own_loop(self) -> bool:
        return self._class is not None

    def drop(self, before: int) -> None:
        """Forgets the batches before this one, but for the last one and what may still be used."""
        unused = (p for p, one in enumerate(self.given) if one.rows and not one.used)
        before = min(before - 1, self.first + next(unused, len(self.given)))
        before = max(before, self.first + len(self.given) - _KEPT, self.first)
        del self.given[: before - self.first]
        self.first = before


def _set_class(loader: Any, kind: type) -> None:
    # accelerate's loaders have a property of that name, which tells of another class.
    vars(object)["__class__"].__set__(loader, kind)
