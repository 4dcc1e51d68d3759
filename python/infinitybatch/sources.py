"""Logical batches that are read piece by piece."""

from collections.abc import Callable
from typing import Any

from torch.utils.data import default_collate

from ._C import BatchSource
from .errors import InvalidType


def from_dataset(
    dataset: Any, collate_fn: Callable[[list[Any]], Any] = default_collate
) -> tuple[BatchSource, BatchSource]:
    """Inputs and targets of a dataset of pairs, read as micro-batches ask for them.

    Args:
        dataset: `len(dataset)` samples; `dataset[i]` is a pair (input, target) and gives the same
            values each time it is asked (denominators and restarts ask again).
        collate_fn: makes one pair (inputs, targets) of a list of samples, as a DataLoader's does.

    Returns:
        Two BatchSources over all samples.

    Example:
        batch.backward(*ib.from_dataset(dataset))
    """
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise InvalidType(
            f"a dataset needs __len__ and __getitem__, which {type(dataset).__name__} lacks; read an "
            f"iterable dataset into a list, or write a BatchSource"
        )
    last: dict[tuple[int, int], tuple[Any, Any]] = {}

    def pair(begin: int, end: int) -> tuple[Any, Any]:
        # Inputs and targets of a micro-batch are asked for one after the other: read them once.
        if (begin, end) not in last:
            last.clear()
            collated = collate_fn([dataset[i] for i in range(begin, end)])
            if not isinstance(collated, (tuple, list)) or len(collated) != 2:
                raise InvalidType(
                    f"collate_fn must give a pair (inputs, targets), not "
                    f"{type(collated).__name__}; name what is what with a collate_fn of your own"
                )
            last[begin, end] = (collated[0], collated[1])
        return last[begin, end]

    size = len(dataset)
    return (
        BatchSource(size, lambda begin, end: pair(begin, end)[0]),
        BatchSource(size, lambda begin, end: pair(begin, end)[1]),
    )
